"""Options that several commands share, and the settings that come of them.

rich is imported where something is printed: while a worker that was killed starts again its outputs wait.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from eos import log
from eos.errors import UsageError
from eos.kafka.client import settings
from eos.kafka.client.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table

BootstrapServers = Annotated[str | None, typer.Option("--bootstrap-servers", help="HOST:PORT[,HOST:PORT...]")]
Set = Annotated[
    list[str] | None, typer.Option("-X", metavar="NAME=VALUE", help="A setting of Kafka's or eos.*; repeatable.")
]
Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="e.g. flights:app, or path/to/flights.py:app")]
UntilEnd = Annotated[bool, typer.Option("--until-end", help="Stop when all input readable now is done.")]
Json = Annotated[bool, typer.Option("--json", help="For machines: JSON on stdout.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
LogFormat = Annotated[str, typer.Option(help="human or json")]
SENT_BY_HAND = "eos-topic-send-"  # transactional.ids of `eos topic send` begin so
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error")]


def check_log(log_format: str, log_level: str) -> None:
    check_choice("--log-format", log_format, ("human", "json"))
    check_choice("--log-level", log_level, ("debug", "info", "warning", "error"))


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value}: must be one of {', '.join(choices)}")


def named_value(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option} {text}: expected NAME=VALUE")
    return name, value


def flags_of(bootstrap_servers: str | None, set_: Sequence[str] | None, instance: str | None = None) -> dict[str, Any]:
    named = {"bootstrap.servers": bootstrap_servers, "eos.instance": instance}
    flags: dict[str, Any] = dict(settings.parse_flag(text) for text in set_ or [])
    return flags | {name: value for name, value in named.items() if value is not None}


def load_settings(bootstrap_servers: str | None, set_: Sequence[str] | None) -> Settings:
    return settings.load(flags_of(bootstrap_servers, set_))


def confirm(what: str, yes: bool) -> None:
    """Asks before something is done that cannot be undone. UsageError where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"this would {what}: say --yes where nobody can be asked")
    typer.confirm(f"This will {what}. Go on?", abort=True, err=True)  # stdout is for what was done


def print_table(table: Table) -> None:
    """On stdout; into a pipe nothing is cut off, for who reads it there has no window. Cells may be anybody's words."""
    from rich.console import Console

    for column in table.columns:
        column._cells[:] = [log.printable(cell, "\n") if isinstance(cell, str) else cell for cell in column._cells]
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table)


@contextmanager
def until_hung_up() -> Iterator[None]:
    """Its block ends without a word where whoever reads our output has seen enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # At the end of the process Python would write what is left once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode())
