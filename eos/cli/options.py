"""Options that several commands share, and the settings that come of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from eos.errors import UsageError
from eos.kafka import settings
from eos.kafka.settings import Settings
from eos.log import printable

BootstrapServers = Annotated[str | None, typer.Option("--bootstrap-servers", help="HOST:PORT[,HOST:PORT...]")]
Set = Annotated[
    list[str] | None, typer.Option("-X", metavar="NAME=VALUE", help="A setting of Kafka's or eos.*; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="For machines: JSON on stdout.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def flags_of(bootstrap_servers: str | None, set_: Sequence[str] | None) -> dict[str, Any]:
    flags: dict[str, Any] = dict(settings.parse_flag(text) for text in set_ or [])
    if bootstrap_servers is not None:
        flags["bootstrap.servers"] = bootstrap_servers
    return flags


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
    for column in table.columns:
        column._cells[:] = [printable(cell, "\n") if isinstance(cell, str) else cell for cell in column._cells]
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table)


def print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode())
