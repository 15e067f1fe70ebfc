"""The command line: one small file per command; this one turns errors into a sentence and an exit code.

No traceback for anything but an internal error (70) and the user's own exception.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

import typer

from eos import log
from eos.cli import broker, config, demo, doctor, reset, run, shim, spark, txn, verify
from eos.errors import EosError, PoisonRecord
from eos.hooks import HookFailed

app = typer.Typer(
    name="eos",
    help="Exactly-once consume-transform-produce over real Kafka.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(broker.app, name="broker", help="A real Kafka in a local JVM.")
app.add_typer(txn.app, name="txn", help="Transactions of the cluster: list, describe, find hanging ones, abort.")
app.command("run", help="Run an App: consume, transform, produce, exactly once.")(run.run)
app.command("config", help="Every setting: its value, where it comes from, what it means.")(config.config)
app.command("doctor", help="Is the cluster fit for an App? Open and hanging transactions too.")(doctor.doctor)
app.command("reset", help="Move a group's offsets while no worker lives: replay, or step past a record.")(reset.reset)
app.add_typer(spark.app, name="spark", help="Apps on Spark, where one machine is not enough.")
app.command("shim", help="A Kafka-wire proxy in front of real brokers.")(shim.shim)
app.command("verify", help="Does each committed input have exactly its outputs? Reads a live cluster.")(verify.verify)
app.command("demo", help="Kill workers on real data and prove that nothing was lost or doubled.")(demo.demo)

USAGE, INTERNAL, TEMPORARY = 64, 70, 75
# typer brings click inside itself or uses the installed one, by version: either way this is its base error.
_ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """The `eos` program; also `python -m eos`."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Runs one command; returns its exit code (the table is in eos.errors)."""
    try:
        code = app(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as ended:
        return ended.exit_code
    except _ClickException as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        # Outside a worker, which ends on a signal with 0: whatever was under way was not done.
        print("eos: interrupted", file=sys.stderr)
        return TEMPORARY
    except EosError as error:
        if isinstance(error, (PoisonRecord, HookFailed, run.ImportFailed)) and error.__cause__ is not None:
            _show_users_traceback(error.__cause__)
        log.debug("ended by", error=repr(error))
        print(f"eos: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:  # noqa: BLE001 - an internal error: its traceback and exit code 70
        print("eos: internal error; please report this with the lines below", file=sys.stderr)
        traceback.print_exc()
        return INTERNAL


def _show_users_traceback(error: BaseException) -> None:
    """The user's own frames only: ours above them, and those of `import`, tell nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_NOT_THEIRS)]
    if theirs:
        print("Traceback (most recent call last):", file=sys.stderr)
        print("".join(traceback.format_list(theirs)), end="", file=sys.stderr)
    if theirs or isinstance(error, SyntaxError):  # a SyntaxError brings its place itself
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)


_PACKAGE = __file__.rsplit("cli", 1)[0]
_NOT_THEIRS = (_PACKAGE, importlib.__file__, "<frozen importlib")
