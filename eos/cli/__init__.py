"""The command line: one small file per command; this one turns errors into a sentence and an exit code.

No traceback for anything but an internal error (70) and the user's own exception.
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
from eos.errors import EosError, ImportFailed, Interruption, PoisonRecord
from eos.worker.hooks import HookFailed

# In the order of the help. A command is the function of its name in its module, a group the module's `app`.
COMMANDS = {
    "init": "A new folder with an App, its test, its settings and a Dockerfile.",
    "broker": "A real Kafka in a local JVM.",
    "topic": "Topics of any cluster: list, create, change, read and write them.",
    "dlq": "Dead letters: what lies there and why, and bring them back exactly once.",
    "state": "What the functions of an App remember, by key.",
    "topology": "Functions, topics and state of an App, as text or as Mermaid.",
    "txn": "Transactions of the cluster: list, describe, find hanging ones, abort.",
    "run": "Run an App: consume, transform, produce, exactly once.",
    "config": "Every setting: its value, where it comes from, what it means.",
    "doctor": "Is the cluster fit for an App? Open and hanging transactions too.",
    "reset": "Move a group's offsets while no worker lives: replay, or step past a record.",
    "spark": "Apps on Spark, where one machine is not enough.",
    "shim": "A Kafka-wire proxy in front of real brokers.",
    "verify": "Does each committed input have exactly its outputs? Reads a live cluster.",
    "demo": "Kill workers on real data and prove that nothing was lost or doubled.",
}
GROUPS = ("broker", "topic", "dlq", "state", "txn", "spark")


def program(arguments: Sequence[str]) -> Any:
    """The command that `arguments` begin with; none for the versions, all for the help and for what is not a command.

    Importing all takes as long again as everything else that a worker does until it is in its group.
    """
    app = typer.Typer(
        name="eos",
        help="Exactly-once consume-transform-produce over real Kafka.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_before)  # with one command alone typer would drop its name
    for name in _wanted(arguments[0] if arguments else ""):
        module = importlib.import_module(f"eos.cli.{name}")
        if name in GROUPS:
            app.add_typer(module.app, name=name, help=COMMANDS[name])
        else:
            app.command(name, help=COMMANDS[name])(getattr(module, name))
    command = typer.main.get_command(app)
    _flags_without_value(command)
    return command


def _flags_without_value(command: Any) -> None:
    """In the help a flag is its name alone; typer writes `<bool>` behind it, as if it took one."""
    help_option = command.get_help_option(command.make_context("", [], resilient_parsing=True))
    for option in filter(None, (*command.params, help_option)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for below in getattr(command, "commands", {}).values():
        _flags_without_value(below)


def _wanted(first: str) -> Iterable[str]:
    if first == "--version":
        return ()
    return (first,) if first in COMMANDS else COMMANDS


def _tell_versions(asked: bool) -> None:
    if not asked:
        return
    from importlib import metadata  # not on a worker's way to its group

    from confluent_kafka import libversion

    from eos import hotloop

    told = ", ".join(f"{name} {metadata.version(name)}" for name in ("eos-kafka", "confluent-kafka", "kafka-python"))
    stale = f" ({hotloop.STALE})" if hotloop.STALE else ""
    loop = "compiled" if hotloop.COMPILED else f"in Python{stale}"
    print(f"{told}, librdkafka {libversion()[0]}, hot loop {loop}")
    raise typer.Exit


def _before(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_versions, is_eager=True, help="The versions of eos and its clients."),
    ] = False,
) -> None:
    """Options of the program itself; the command's function comes next."""
    gc.freeze()  # the imports, for the collections to come
    gc.enable()


USAGE, INTERNAL, TEMPORARY = 64, 70, 75
# typer brings click inside itself or uses the installed one, by version: either way this is its base error.
_ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """The `eos` program; also `python -m eos`."""
    _prepare_streams()
    sys.exit(invoke(sys.argv[1:]))


def _prepare_streams() -> None:
    """What a terminal's encoding does not have is escaped; a stream that is closed swallows what is written to it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it also keeps sockets off the descriptor
        elif stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def invoke(arguments: list[str]) -> int:
    """Runs one command; returns its exit code (the table is in eos.errors)."""
    # Until `_before`: what imports make stays, and looking through it again and again is a tenth of a worker's start.
    collects = gc.isenabled()
    gc.disable()
    try:
        code = program(arguments)(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as ended:
        return ended.exit_code
    except _ClickException as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, typer.Abort, Interruption):
        # Outside a worker, which ends on a signal with 0: whatever was under way was not done.
        print("eos: interrupted", file=sys.stderr)
        return TEMPORARY
    except EosError as error:
        theirs = ""
        if isinstance(error, (PoisonRecord, HookFailed, ImportFailed)) and error.__cause__ is not None:
            theirs = _users_traceback(error.__cause__)
        log.debug("ended by", error=repr(error))
        _tell_end(str(error), error.exit_code, theirs)
        return error.exit_code
    except Exception:  # noqa: BLE001 - an internal error: its traceback and exit code 70
        if log.logs_json():
            _tell_end("internal error; please report this", INTERNAL, traceback.format_exc())
        else:
            print("eos: internal error; please report this with the lines below", file=sys.stderr)
            traceback.print_exc()
        return INTERNAL
    finally:
        if collects:
            gc.enable()


def _tell_end(sentence: str, code: int, trace: str) -> None:
    """The last words: for people the traceback and below it the sentence, for machines one line as all others."""
    if log.logs_json():
        log.log_final_error("ended", error=sentence, exit_code=code, **({"traceback": trace} if trace else {}))
        return
    print(log.printable(f"{trace}eos: {sentence}", "\n\t"), file=sys.stderr)


def _users_traceback(error: BaseException) -> str:
    """The user's own frames only: ours above them, and those of `import`, tell nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_NOT_THEIRS)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)] if theirs else []
    if theirs or isinstance(error, SyntaxError):  # a SyntaxError brings its place itself
        lines += traceback.format_exception_only(error)
    return "".join(lines)


_PACKAGE = __file__.rsplit("cli", 1)[0]
_NOT_THEIRS = (_PACKAGE, importlib.__file__, "<frozen importlib")
