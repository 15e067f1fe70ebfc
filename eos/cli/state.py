"""`eos state show | export | begin`: what the functions of an App remember, read from their changelogs.

Owns the options and what is printed. All but `begin` read what is committed, join no group and change nothing; a worker
may run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from eos.app.definition import App
from eos.app.routes import changelog_of
from eos.app.state import Store
from eos.app.stores import to_plain
from eos.cli.options import (
    BootstrapServers,
    Json,
    Set,
    Target,
    Yes,
    confirm,
    load_settings,
    print_json,
    print_table,
    until_hung_up,
)
from eos.cli.written import json_of, text_of
from eos.encoding.serde import DecodeError
from eos.errors import ConfigurationError, UsageError
from eos.kafka.admin.reset import GroupOffsets
from eos.kafka.client.settings import Settings
from eos.state import changelog
from eos.state.begin_empty import EmptyStates
from eos.worker.loading import load_app

_SHOWN = 20

app = typer.Typer(no_args_is_help=True, help="State: what the functions of an App remember, by key.")
Functions = Annotated[list[str] | None, typer.Option("--function", help="Only of this function; repeatable.")]
Keys = Annotated[list[str] | None, typer.Option("--key", help="Only this key, as text; repeatable.")]


class Row(NamedTuple):
    """What a function remembers of one key: by the name of its state."""

    function: str
    partition: int
    key: Any
    state: dict[str, Any]


@app.command()
def show(
    target: Target,
    function: Functions = None,
    key: Keys = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many keys of each function.")] = _SHOWN,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """The first keys in each partition, or those that are asked for, and what is committed of them."""
    settings = load_settings(bootstrap_servers, set_)
    found, more = _some(_functions(load_app(target), function), settings, key, limit)
    if json:
        print_json([row._asdict() | {"key": json_of(row.key)} for row in found])
    elif not found:
        print("no state")
    else:
        table = Table("function", "partition", "key", "state", "value")
        for row in found:
            for name, value in sorted(row.state.items()):
                words = row.function, str(row.partition), text_of(row.key), name, repr(value)
                table.add_row(*map(escape, words))
        print_table(table)
    if more:
        print(f"and more: --limit shows more than {limit} of each function, `eos state export` all", file=sys.stderr)


@app.command()
def export(
    target: Target,
    function: Functions = None,
    key: Keys = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Each key with what is committed of it, as a line of JSON."""
    settings = load_settings(bootstrap_servers, set_)
    stateful = _functions(load_app(target), function)
    with until_hung_up():
        for name in stateful.names:
            for row in stateful.rows(name, settings, key):
                print_json(row._asdict() | {"key": json_of(row.key)})


@app.command()
def begin(
    target: Target,
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="A function with state.")],
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="For members to be gone.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Begin a function's new states empty, on purpose, and delete those that it has no more. Refuses while members
    live; asks before it acts."""
    settings, loaded = load_settings(bootstrap_servers, set_), load_app(target)
    (route,) = [route for route in loaded.stateful if route.name in _functions(loaded, [function]).names]
    offsets = GroupOffsets(settings, loaded.id, route.sources)
    offsets.require_no_members(wait)
    plan = EmptyStates(settings, loaded, route, offsets)
    for name in plan.fresh:
        print(f"{name} of {function} will begin empty")
    for name in plan.gone:
        print(f"{name} of {function} will be deleted")
    print(f"{plan.topic}: {plan.entries} entries to delete; noted beside {plan.partitions} offsets")
    if dry_run:
        return
    confirm(f"change the state of {function}", yes)
    plan.carry_out()
    print(f"{function}: done")


class _Stateful:
    """Some functions of an App."""

    def __init__(self, app: App, names: list[str]) -> None:
        self.names = names
        self._app_id, self._routes = app.id, {route.name: route for route in app.stateful}

    def rows(self, name: str, settings: Settings, keys: list[str] | None) -> Iterator[Row]:
        """By partition and key. Raises Unavailable, ConfigurationError."""
        route, wanted = self._routes[name], None if keys is None else {key.encode() for key in keys}
        stores = {store.stored_name: store for store in route.stores}
        for partition, kept in changelog.read_state(settings, changelog_of(self._app_id, route)):
            for key, state in kept:
                if wanted is None or key in wanted:
                    known = {store: cells for store, cells in state.items() if store in stores}
                    yield Row(name, partition, key, {store: _read(stores[store], known[store]) for store in known})


def _read(store: Store, cells: list[tuple[bytes, bytes]]) -> Any:
    try:
        return to_plain(store, cells)
    except DecodeError as error:
        raise ConfigurationError(
            f"the state {store.name} was kept as something else than the App says: {error}"
        ) from error


def _functions(app: App, wanted: list[str] | None) -> _Stateful:
    names = [route.name for route in app.stateful]
    if not names:
        raise UsageError(f"no function of {app.id} has state")
    if unknown := sorted(set(wanted or ()) - set(names)):
        raise UsageError(f"--function {unknown[0]}: no function with state of {app.id} ({', '.join(names)})")
    return _Stateful(app, [name for name in names if not wanted or name in wanted])


def _some(stateful: _Stateful, settings: Settings, keys: list[str] | None, limit: int) -> tuple[list[Row], bool]:
    """Return at most this many of each function, and whether there are more."""
    found, more = [], False
    for name in stateful.names:
        rows = stateful.rows(name, settings, keys)
        few = [row for row, _ in zip(rows, range(limit), strict=False)]
        more = more or next(rows, None) is not None
        found += few
    return found, more
