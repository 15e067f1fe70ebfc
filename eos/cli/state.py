"""Define `eos state show | export | begin`, which read the state of an App's functions from their changelogs.

The module owns the options and the printed text. All commands but `begin` read committed state, join no group and
change nothing, so a worker may run at the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from eos.app.cells import CLOCK_TIMERS, EVENT_TIMERS
from eos.app.definition import App
from eos.app.routes import changelog_of
from eos.app.state import Store
from eos.app.stores import to_plain
from eos.app.timers import decode_due
from eos.app.windows import from_ms, split_windowed_key
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
    until_output_closed,
)
from eos.cli.rendering import bytes_as_json, bytes_as_text
from eos.encoding.serde import DecodeError
from eos.errors import ConfigurationError, UsageError
from eos.kafka.admin.reset import GroupOffsets
from eos.kafka.client.settings import Settings
from eos.state import changelog
from eos.state.begin_empty import EmptyStates
from eos.worker.loading import load_app

_SHOWN = 20
_TIMERS = (EVENT_TIMERS, CLOCK_TIMERS)

app = typer.Typer(no_args_is_help=True, help="Show, export or change the state that functions keep by key.")
Functions = Annotated[list[str] | None, typer.Option("--function", help="Only the state of this function; repeatable.")]
Keys = Annotated[list[str] | None, typer.Option("--key", help="Only the state of this key, given as text; repeatable.")]


class Row(NamedTuple):
    """Hold the state of one key in one function, by the name of the state.

    `window`: the start of the key's window, if the function has windows. `timers`: when each timer is due. Both are
    times in ISO format.
    """

    function: str
    partition: int
    key: Any
    state: dict[str, Any]
    window: str | None = None
    timers: Mapping[str, str] = MappingProxyType({})

    def as_json(self) -> dict[str, Any]:
        more = {"window": self.window, "timers": dict(self.timers)}
        shown = {"function": self.function, "partition": self.partition, "key": bytes_as_json(self.key)}
        return shown | {"state": self.state} | {name: value for name, value in more.items() if value}


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
    """Show the committed state of the first keys, or of the given keys."""
    settings = load_settings(bootstrap_servers, set_)
    found, more = _first_rows(_functions(load_app(target), function), settings, key, limit)
    if json:
        print_json([row.as_json() for row in found])
    elif not found:
        print("no state")
    else:
        table = Table("function", "partition", "key", "state", "value")
        for row in found:
            key_text = bytes_as_text(row.key) + (f" {row.window}" if row.window else "")
            timers = {f"timer {name}": at for name, at in row.timers.items()}
            values = {name: repr(value) for name, value in row.state.items()}
            for name, value in [*sorted(values.items()), *sorted(timers.items())]:
                words = row.function, str(row.partition), key_text, name, value
                table.add_row(*map(escape, words))
        print_table(table)
    if more:
        print(
            f"only {limit} keys of each function are shown: use --limit for more, or `eos state export` for all",
            file=sys.stderr,
        )


@app.command()
def export(
    target: Target,
    function: Functions = None,
    key: Keys = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Print each key with its committed state as a line of JSON."""
    settings = load_settings(bootstrap_servers, set_)
    stateful = _functions(load_app(target), function)
    with until_output_closed():
        for name in stateful.names:
            for row in stateful.rows(name, settings, key):
                print_json(row.as_json())


@app.command()
def begin(
    target: Target,
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="A function with state.")],
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait this long for members to leave.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the changes.")] = False,
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Let a function's new states begin empty, and delete the states it no longer has. Refuses while the group has
    members, and asks for confirmation."""
    settings, loaded = load_settings(bootstrap_servers, set_), load_app(target)
    (route,) = [route for route in loaded.stateful if route.name in _functions(loaded, [function]).names]
    offsets = GroupOffsets(settings, loaded.id, route.sources)
    offsets.require_no_members(wait)
    plan = EmptyStates(settings, loaded, route, offsets)
    for name in plan.starting_empty:
        print(f"{name} of {function} will begin empty")
    for name in plan.removed:
        print(f"{name} of {function} will be deleted")
    print(f"{plan.topic}: {plan.entries} entries to delete; noted in the metadata of {plan.partitions} offsets")
    if dry_run:
        return
    confirm(f"change the state of {function}", yes)
    plan.carry_out()
    print(f"{function}: done")


class _StatefulFunctions:
    """Read the state of some functions of an App."""

    def __init__(self, app: App, names: list[str]) -> None:
        self.names = names
        self._app_id, self._routes = app.id, {route.name: route for route in app.stateful}

    def rows(self, name: str, settings: Settings, keys: list[str] | None) -> Iterator[Row]:
        """Yield the function's state, ordered by partition and key. Raises Unavailable, ConfigurationError."""
        route, wanted = self._routes[name], None if keys is None else {key.encode() for key in keys}
        stores = {store.stored_name: store for store in route.values}
        for partition, kept in changelog.read_state(settings, changelog_of(self._app_id, route)):
            for stored_key, state in kept:
                known = {store: _decode(stores[store], state[store]) for store in state if store in stores}
                timers = {field.decode(): _iso(decode_due(due)) for of in _TIMERS for field, due in state.get(of, ())}
                if not known and not timers:
                    continue  # ids of deduplication, or the open sessions of a key
                key, window = stored_key, None
                if route.timing.windows is not None:
                    key, start_ms = split_windowed_key(stored_key)
                    window, timers = _iso(start_ms), {}
                if wanted is None or key in wanted:
                    yield Row(name, partition, key, known, window, timers)


def _iso(time_ms: int) -> str:
    return from_ms(time_ms).isoformat(timespec="milliseconds")


def _decode(store: Store, fields: list[tuple[bytes, bytes]]) -> Any:
    try:
        return to_plain(store, fields)
    except DecodeError as error:
        raise ConfigurationError(
            f"the stored state {store.name} does not have the type that the App declares: {error}"
        ) from error


def _functions(app: App, wanted: list[str] | None) -> _StatefulFunctions:
    names = [route.name for route in app.stateful]
    if not names:
        raise UsageError(f"no function of {app.id} has state")
    if unknown := sorted(set(wanted or ()) - set(names)):
        raise UsageError(f"--function {unknown[0]}: not a stateful function of {app.id} ({', '.join(names)})")
    return _StatefulFunctions(app, [name for name in names if not wanted or name in wanted])


def _first_rows(
    stateful: _StatefulFunctions, settings: Settings, keys: list[str] | None, limit: int
) -> tuple[list[Row], bool]:
    """Return at most `limit` rows of each function, and whether there are more."""
    found, more = [], False
    for name in stateful.names:
        rows = stateful.rows(name, settings, keys)
        few = [row for row, _ in zip(rows, range(limit), strict=False)]
        more = more or next(rows, None) is not None
        found += few
    return found, more
