"""Loads a user's App by the name of its module or file, and refuses settings that the App's id determines."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from eos import log
from eos.app.definition import App
from eos.errors import EosError, ImportFailed, UsageError, raise_if_interrupted, safe_str
from eos.kafka.client.settings import Settings


def load_app(target: str) -> App:
    """Return the App named by `module:attribute` or `path.py:attribute`; the attribute defaults to `app`."""
    given, _, attribute = target.partition(":")
    name, attribute = given, attribute or "app"
    sys.path.insert(0, os.getcwd())
    path = None
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
        raise  # the message explains what is wrong with the App
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name} (looked in {os.getcwd()} and the Python path)") from error
        raise UsageError(f"{name} needs the module {error.name}, which is not installed") from error
    except BaseException as error:
        raise_if_interrupted(error)
        raise ImportFailed(f"{name} could not be imported: {type(error).__name__}: {safe_str(error)}") from error
    finally:
        log.reenable_loggers()
    found = getattr(module, attribute, None)
    if not isinstance(found, App):
        path, taken = path or Path(f"{name.replace('.', '/')}.py"), getattr(module, "__file__", None)
        if path.is_file() and (taken is None or not os.path.samefile(path, taken)):
            where = taken or "built into Python"
            raise UsageError(
                f"{path} is not loaded, because another module is named {name} ({where})", remedy="rename it"
            )
        what = "is missing" if found is None else f"is a {type(found).__name__}, not an App"
        there = [each for each, value in vars(module).items() if isinstance(value, App)]
        hint = f"; say {' or '.join(f'{given}:{each}' for each in there)}" if there else " and it has no App"
        raise UsageError(f"{attribute} in {name} {what}{hint}")
    return found


def refuse_ids(given: Settings, command: str, what: str = "the App's id (and its instance)") -> None:
    """Raise UsageError if group.id or transactional.id is set, since both follow from the App."""
    for name in ("group.id", "transactional.id"):
        if name in given.values:
            raise UsageError(f"{name} cannot be set for `{command}`: it is {what}")
