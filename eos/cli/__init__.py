"""Run the command line. Each command has one small file; this one turns errors into a sentence and an exit code.

It prints a traceback only for an internal error (70) and for an exception from the user's own code.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from eos import log
from eos.engine.hooks import HookFailed
from eos.errors import EosError, ImportFailed, Interruption, PoisonRecord

# In the order of the help. A command is the function of the same name in its module; a group is the module's `app`.
COMMANDS = {
    "init": "Create a folder with an App, its test, its settings and a Dockerfile.",
    "broker": "Run a real Kafka in a local JVM.",
    "topic": "List, create, change, read and write topics of any cluster.",
    "dlq": "List, export, replay or drop dead letters, exactly once.",
    "state": "Show, export or change the state that functions keep by key.",
    "topology": "Print the functions, topics and state of an App as text or as Mermaid.",
    "txn": "List, describe and abort transactions of the cluster; find hanging ones.",
    "run": "Run an App: consume, transform, produce, exactly once.",
    "config": "Show every setting with its value, origin and meaning.",
    "doctor": "Check whether a cluster is ready for an App; show open and hanging transactions.",
    "reset": "Move a group's offsets while no worker runs: replay input, or skip a record.",
    "spark": "Run Apps on Spark, where one machine is not enough.",
    "shim": "Run a Kafka wire proxy in front of real brokers.",
    "verify": "Check on a live cluster that each committed input has exactly its outputs.",
    "demo": "Kill workers on real data and show that no record was lost or duplicated.",
}
GROUPS = ("broker", "topic", "dlq", "state", "txn", "spark")


def build_program(arguments: Sequence[str]) -> Any:
    """Build the program with the command that `arguments` name, or with all commands if they name none.

    Only the named command's module is imported: importing them all doubles the time until a worker joins its group.
    """
    app = typer.Typer(
        name="eos",
        help="Exactly-once consume-transform-produce over real Kafka.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_program_options)  # without a callback typer drops the name of a single command
    for name in _commands_to_load(arguments[0] if arguments else ""):
        module = importlib.import_module(f"eos.cli.{name}")
        if name in GROUPS:
            app.add_typer(module.app, name=name, help=COMMANDS[name])
        else:
            app.command(name, help=COMMANDS[name])(getattr(module, name))
    command = typer.main.get_command(app)
    _hide_flag_values(command)
    return command


def _hide_flag_values(command: Any) -> None:
    """Remove the `<bool>` that typer's help adds to flags, which take no value."""
    help_option = command.get_help_option(command.make_context("", [], resilient_parsing=True))
    for option in filter(None, (*command.params, help_option)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        _hide_flag_values(subcommand)


def _commands_to_load(first: str) -> Iterable[str]:
    if first == "--version":
        return ()
    return (first,) if first in COMMANDS else COMMANDS


def _print_versions(requested: bool) -> None:
    if not requested:
        return
    from importlib import metadata  # imported here, so that it does not slow down a worker's start

    from confluent_kafka import libversion

    from eos import hotloop

    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("eos-kafka", "confluent-kafka", "kafka-python")
    )
    stale = f" ({hotloop.STALE})" if hotloop.STALE else ""
    loop = "compiled" if hotloop.COMPILED else f"in Python{stale}"
    print(f"{versions}, librdkafka {libversion()[0]}, hot loop {loop}")
    raise typer.Exit


def _program_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, help="Show the versions of eos and its clients."
        ),
    ] = False,
) -> None:
    """Handle the options of the program itself, before typer calls the command's function."""
    gc.freeze()  # later garbage collections skip the objects that exist now, such as imported modules
    gc.enable()


USAGE, INTERNAL, TEMPORARY = 64, 70, 75
# Depending on its version, typer bundles click or uses the installed click. This is click's base error in both cases.
_ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the `eos` program, also as `python -m eos`."""
    _prepare_streams()
    sys.exit(invoke(sys.argv[1:]))


def _prepare_streams() -> None:
    """Escape characters that a terminal's encoding lacks, and discard writes to a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it stays open: no socket may get this descriptor
        elif stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def invoke(arguments: list[str]) -> int:
    """Run one command and return its exit code (the table is in eos.errors)."""
    # Objects created by imports stay alive: a collection that visits them takes a tenth of a worker's start.
    # `_program_options` turns collection on again.
    collects = gc.isenabled()
    gc.disable()
    try:
        code = build_program(arguments)(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as ended:
        return ended.exit_code
    except _ClickException as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, typer.Abort, Interruption):
        # A worker handles signals itself and exits with 0. Any other command did not finish its work.
        print("eos: interrupted", file=sys.stderr)
        return TEMPORARY
    except EosError as error:
        trace = ""
        if isinstance(error, (PoisonRecord, HookFailed, ImportFailed)) and error.__cause__ is not None:
            trace = _user_traceback(error.__cause__)
        log.debug("command failed", error=repr(error))
        _report_failure(str(error), error.exit_code, trace)
        return error.exit_code
    except Exception:  # noqa: BLE001 - an internal error ends with its traceback and exit code 70
        if log.logs_json():
            _report_failure("internal error; please report this", INTERNAL, traceback.format_exc())
        else:
            print("eos: internal error; please report this with the lines below", file=sys.stderr)
            traceback.print_exc()
        return INTERNAL
    finally:
        if collects:
            gc.enable()


def _report_failure(sentence: str, code: int, trace: str) -> None:
    """Report why the command failed: to people a traceback and a sentence, to machines one log line."""
    if log.logs_json():
        log.log_final_error("command failed", error=sentence, exit_code=code, **({"traceback": trace} if trace else {}))
        return
    print(log.printable(f"{trace}eos: {sentence}", "\n\t"), file=sys.stderr)


def _user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this package and of `import`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_FOREIGN_PATHS)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    if frames or isinstance(error, SyntaxError):  # a SyntaxError names its file and line itself
        lines += traceback.format_exception_only(error)
    return "".join(lines)


_PACKAGE = __file__.rsplit("cli", 1)[0]
_FOREIGN_PATHS = (_PACKAGE, importlib.__file__, "<frozen importlib")
