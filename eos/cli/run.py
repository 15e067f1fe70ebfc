"""`eos run MODULE:APP`: loads a user's App and runs it on a worker until it is stopped."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from eos import log, settings
from eos.app import App
from eos.cli.live import LiveLine
from eos.errors import EosError, UsageError
from eos.worker import StopSignals, Worker


def run(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="e.g. flights:app, or path/to/flights.py:app")],
    instance: Annotated[
        str | None, typer.Option(help="Suffix of the transactional.id; stable across restarts. Default: host name.")
    ] = None,
    bootstrap_servers: Annotated[str | None, typer.Option(help="HOST:PORT[,HOST:PORT...]")] = None,
    until_end: Annotated[bool, typer.Option("--until-end", help="Stop when all input readable now is done.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("-X", metavar="NAME=VALUE", help="A setting of Kafka's or eos.*; repeatable.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="human or json")] = "human",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
) -> int:
    """Run an App: consume, transform, produce, exactly once."""
    _check_choice("--log-format", log_format, ("human", "json"))
    _check_choice("--log-level", log_level, ("debug", "info", "warning", "error"))
    flags: dict[str, Any] = dict(settings.parse_flag(text) for text in set_ or [])
    if bootstrap_servers is not None:
        flags["bootstrap.servers"] = bootstrap_servers
    if instance is not None:
        flags["eos.instance"] = instance
    with LiveLine(enabled=log_format == "human" and sys.stderr.isatty()) as live:
        log.configure(log_format, log_level, live.stream)
        loaded = settings.load(flags)
        for name in ("group.id", "transactional.id"):
            if name in loaded.values:
                raise UsageError(f"{name} cannot be set for `eos run`: it is the App's id (and its instance)")
        app = load_app(target)
        _warn_of_random_host_name(loaded)
        worker = Worker(app, loaded, until_end=until_end)
        live.watch(worker)
        with StopSignals(worker.session):
            worker.run()
    return 0


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value}: must be one of {', '.join(choices)}")


class ImportFailed(UsageError):
    """The user's module raised while it was imported; what it raised is the `__cause__`."""


def load_app(target: str) -> App:
    """The App named by `module:attribute` or `path.py:attribute` (attribute defaults to `app`)."""
    name, _, attribute = target.partition(":")
    attribute = attribute or "app"
    sys.path.insert(0, os.getcwd())
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"{name} does not exist")
        sys.path.insert(0, str(path.parent.resolve()))
        name = path.stem
    if not name or name.startswith("."):
        raise UsageError(f"{target} names no module: expected e.g. flights:app, or path/to/flights.py:app")
    try:
        module = importlib.import_module(name)
    except EosError:
        raise  # its sentence says it all: a wrong App
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name} (looked in {os.getcwd()} and the Python path)") from error
        raise UsageError(f"{name} needs the module {error.name}, which is not installed") from error
    except Exception as error:
        raise ImportFailed(f"{name} could not be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, App):
        what = "is missing" if found is None else f"is a {type(found).__name__}, not an App"
        raise UsageError(f"{attribute} in {name} {what}")
    return found


def _warn_of_random_host_name(loaded: settings.Settings) -> None:
    in_container = Path("/.dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ
    if in_container and not loaded["eos.instance"]:
        log.warning(
            "host names of containers are random: a restarted one cannot end what this one leaves open; set "
            "--instance to something stable (a StatefulSet's pod name, EOS_INSTANCE in compose)"
        )
