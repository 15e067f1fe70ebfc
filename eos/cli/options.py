"""Define the options that several commands share, and build settings from them.

rich is imported only where it is used, so that a killed worker restarts quickly.
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
    list[str] | None, typer.Option("-X", metavar="NAME=VALUE", help="A Kafka or eos setting (eos.*); repeatable.")
]
Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="e.g. flights:app, or path/to/flights.py:app")]
UntilEnd = Annotated[
    bool, typer.Option("--until-end", help="Stop when all input that is readable now has been handled.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
LogFormat = Annotated[str, typer.Option(help="human or json")]
SEND_ID_PREFIX = "eos-topic-send-"  # prefix of the transactional.ids that `eos topic send` uses
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error")]


def check_log_options(log_format: str, log_level: str) -> None:
    check_choice("--log-format", log_format, ("human", "json"))
    check_choice("--log-level", log_level, ("debug", "info", "warning", "error"))


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value}: must be one of {', '.join(choices)}")


def parse_named_value(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option} {text}: expected NAME=VALUE")
    return name, value


def collect_flags(
    bootstrap_servers: str | None, set_: Sequence[str] | None, instance: str | None = None
) -> dict[str, Any]:
    named = {"bootstrap.servers": bootstrap_servers, "eos.instance": instance}
    flags: dict[str, Any] = dict(settings.parse_flag(text) for text in set_ or [])
    return flags | {name: value for name, value in named.items() if value is not None}


def load_settings(bootstrap_servers: str | None, set_: Sequence[str] | None) -> Settings:
    return settings.load(collect_flags(bootstrap_servers, set_))


def confirm(action: str, yes: bool) -> None:
    """Ask before an action that cannot be undone. Raises UsageError if there is no terminal to ask on."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"this would {action}; stdin is not a terminal, so confirm with --yes")
    typer.confirm(f"This will {action}. Continue?", abort=True, err=True)  # stdout is for results


def print_table(table: Table) -> None:
    """Print a table on stdout, with control characters in its cells escaped. Into a pipe no cell is cut off."""
    from rich.console import Console

    for column in table.columns:
        column._cells[:] = [log.printable(cell, "\n") if isinstance(cell, str) else cell for cell in column._cells]
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table)


@contextmanager
def until_output_closed() -> Iterator[None]:
    """End the block silently when the reader of stdout closes it, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again at exit, which would fail too. So stdout becomes the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode())
