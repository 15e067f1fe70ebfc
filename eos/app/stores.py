"""Finds the parameters of a function that are state, and calls the function with them.

Changes of state take effect once the function has returned and its outputs are made. All changes are encoded
before the first is written, so a value that cannot be stored is the function's failure, and changes nothing.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from eos.app.annotations import resolve_annotation
from eos.app.cells import encode_key
from eos.app.expiry import UnexpiredCells, ttls_of
from eos.app.layers import Layer, Span
from eos.app.state import (
    FIELDS,
    OPEN_STATE,
    Cells,
    CompiledStore,
    ListState,
    MapState,
    State,
    Store,
    TaskCells,
)
from eos.app.timers import Timers
from eos.encoding.serde import Decode, annotation_name, decoder, function_name
from eos.errors import ConfigurationError, IllegalState
from eos.records import Record

CellsOf = Callable[[Record], TaskCells]
"""Returns the cells of the record's task."""
Finish = Callable[[Record, Any], Any]
"""Makes the outputs from a function's result for a record; an exception is the function's failure."""
Call = Callable[[Cells, bytes, Record, Any, Finish], tuple[Any, Sequence[Any]]]
"""Calls a function with the states of one key. Its arguments are the cells, the part of the rows' names that comes from
the key, the record, what the function gets, and what makes the outputs. Returns the outputs, and the states with
unwritten changes."""
_Changed = tuple[Record, int, list[Any]]
"""States with the changes of a function, a record of their key, and the task's time at that record."""

_KINDS: Final = (State, MapState, ListState)
_MARKED: Final = (*_KINDS, Timers)
_MAPPINGS: Final = (dict, collections.abc.Mapping)


def find_stores(function: Callable[..., Any], frame: types.FrameType | None, batch: bool = False) -> tuple[Store, ...]:
    """Return the parameters after the first that are annotated as state or as Timers.

    Raises ConfigurationError for a parameter whose type cannot be stored.
    """
    try:
        first, *parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError):
        return ()  # the check of the first parameter reports the error
    _check_first_parameter(function_name(function), first, resolve_annotation(function, first.annotation, frame))
    found = []
    for parameter in parameters:
        if parameter.annotation is inspect.Parameter.empty:
            continue
        annotation = resolve_annotation(function, parameter.annotation, frame)
        if (store := _parse_store(function_name(function), parameter.name, annotation, batch)) is None:
            continue
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise ConfigurationError(
                f"the state {parameter.name} of {function_name(function)} must be an ordinary parameter without default"
            )
        found.append(store)
    return tuple(found)


def _check_first_parameter(function: str, first: inspect.Parameter, annotation: Any) -> None:
    if annotation in _MARKED or typing.get_origin(annotation) in _KINDS:
        raise ConfigurationError(
            f"the first parameter of {function}, {first.name}, is annotated as state, but gets the record's value",
            remedy=f"put a parameter before it: def {function}(value: str, {first.name}: ...)",
        )


def _parse_store(function: str, name: str, annotation: Any, batch: bool) -> Store | None:
    """Return the store that an annotation describes; None if it is not state."""
    if annotation is Timers:
        if batch:
            raise ConfigurationError(
                f"{function} gets many records, so it cannot set timers: use @app.process for functions with Timers"
            )
        return Store(name, Timers, ())
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    many = origin in _MAPPINGS and len(inner) == 2 and (inner[1] in _KINDS or typing.get_origin(inner[1]) in _KINDS)
    if many:
        if inner[0] is not bytes:
            raise ConfigurationError(
                f"the state {name} of {function} must be annotated dict[bytes, ...]: keys are bytes"
            )
        annotation = inner[1]
        origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _KINDS:
        example = "MapState[str, int]" if annotation is MapState else f"{annotation.__name__}[int]"
        raise ConfigurationError(f"the state {name} of {function} has no type: annotate it, for example {example}")
    if origin not in _KINDS:
        return None
    if many is not batch:
        kind = annotation_name(annotation).replace("eos.app.state.", "")
        raise ConfigurationError(
            f"{function} gets many records, but the state {name} is for one key: annotate it dict[bytes, {kind}]"
            if batch
            else f"{function} gets one record, but the state {name} is a mapping for many keys: annotate it {kind}"
        )
    if origin is MapState and inner[0] not in FIELDS:
        raise ConfigurationError(
            f"the keys of the map {name} of {function} are {annotation_name(inner[0])}, but must be one of "
            f"{', '.join(kind.__name__ for kind in FIELDS)}",
            remedy="annotate str and use str(key)",
        )
    decoder(inner[-1], f"the state {name} of {function}: ", kept=True)  # raises for a type that cannot be decoded
    return Store(name, origin, inner, many)


def with_old_names(function: str, stores: tuple[Store, ...], was: Mapping[str, str]) -> tuple[Store, ...]:
    """Return the stores with the old names that the function's `was=` gives them. Raise ConfigurationError."""
    names = [store.name for store in stores if store.is_kept]
    for name, before in was.items():
        if name not in names:
            its = f"its state is {', '.join(names)}" if names else "it has no state"
            raise ConfigurationError(f"was= of {function} names {name!r}, but {its}")
        if not (isinstance(before, str) and before.isidentifier()):
            raise ConfigurationError(f"was= of {function} has {before!r} for {name}: it must be the old name")
    named = tuple(store._replace(was=was.get(store.name)) for store in stores)
    kept = [store.stored_name for store in named]
    if twice := [name for name in kept if kept.count(name) > 1]:
        raise ConfigurationError(f"was= of {function} gives the name {twice[0]} to two of its states")
    return named


def to_plain(store: Store, values: Iterable[tuple[bytes, bytes]]) -> Any:
    """Return the state of a key as plain Python (a value, a dict or a list), given its fields and values in order."""
    decode = decoder(store.annotations[-1])
    decoded = [(field, decode(value)) for field, value in values]
    if store.kind is MapState:
        _, key_of = FIELDS[store.annotations[0]]
        return {key_of(field): value for field, value in decoded}
    found = [value for _, value in decoded]
    return found if store.kind is ListState else found[0]


def split_at_repeated_keys(records: list[Record], times: Mapping[int, int]) -> Iterator[list[Record]]:
    """Split the records of one partition before each record whose key appeared earlier at another time of the task.

    Each part then gives the same result as its records one by one. `times`: the task's time at each record, by the
    record's id; empty without a time-to-live.
    """
    if not times:
        yield records
        return
    part: list[Record] = []
    time_of: dict[bytes | None, int] = {}
    for record in records:
        now = times[id(record)]
        if time_of.setdefault(record.key, now) != now:
            yield part
            part, time_of = [], {record.key: now}
        part.append(record)
    yield part


def _caller_with_one(function: Callable[..., Any], kind: type[Any], compiled: CompiledStore) -> Call:
    """Return what `Stores.caller` returns for a single state, as most functions have: it takes no loops."""

    def call(cells: Cells, suffix: bytes, record: Record, given: Any, finish: Finish) -> tuple[Any, Sequence[Any]]:
        state = kind(compiled, cells, suffix)
        try:
            outputs = finish(record, function(given, state))
            state._encode()
        finally:
            state._close()
        return outputs, (state,)

    return call


class Stores:
    """Gives a function access to its stores; without `cells_of` the function cannot run."""

    def __init__(
        self,
        name: str,
        stores: Sequence[Store],
        cells_of: CellsOf | None,
    ) -> None:
        self._name, self.task_of = name, cells_of or self._refuse_to_run
        self.ttls = ttls_of(stores)
        self.kinds = [
            (OPEN_STATE if store.kind is State else store.kind, CompiledStore(store))
            for store in stores
            if store.is_kept
        ]

    def _refuse_to_run(self, record: Record) -> TaskCells:
        raise IllegalState(f"{self._name} has state: run it with `eos run`, `eos.run` or `eos.testing.run`")

    def locate(self, record: Record) -> tuple[TaskCells, bytes]:
        """Return the cells of the record's task, and the part of a row's name that comes from the record's key."""
        task, key = self.task_of(record), record.key
        if key is None:
            raise self.key_missing()
        return task, encode_key(key)

    def key_missing(self) -> ValueError:
        return ValueError(f"{self._name} keeps state by key, but this record has no key")

    def open(self, cells: Cells, suffix: bytes) -> list[Any]:
        """Return the states of one key; `suffix` is the part of their rows' names that comes from the key."""
        return [kind(compiled, cells, suffix) for kind, compiled in self.kinds]

    def delete(self, cells: Cells, suffix: bytes) -> None:
        """Delete all state of one key."""
        for kind, compiled in self.kinds:
            row = compiled.begin + suffix
            if kind is OPEN_STATE:
                cells.put(row, None)
            else:
                cells.write(row, {field: None for field, _ in cells.scan(row, Span())}, None)

    def with_expiry(self, below: Cells, now_ms: int) -> Cells:
        return UnexpiredCells(below, self.ttls, now_ms) if self.ttls else below

    def times_of(self, records: Iterable[Record]) -> dict[int, int]:
        """Return the task's time at each record, by the record's id; empty without a time-to-live.

        The times assume that all earlier records in `records` succeed.
        """
        times: dict[int, int] = {}
        latest: dict[int, int] = {}
        for record in records if self.ttls else ():
            now = max(self.task_of(record).at(record.timestamp), latest.get(record.partition, 0))
            times[id(record)] = latest[record.partition] = now
        return times

    def caller(self, function: Callable[..., Any]) -> Call:
        """Return a function that calls `function` with the states of one key."""
        kinds = self.kinds
        if len(kinds) == 1:
            return _caller_with_one(function, *kinds[0])

        def call(cells: Cells, suffix: bytes, record: Record, given: Any, finish: Finish) -> tuple[Any, Sequence[Any]]:
            states: list[Any] = []
            for kind, compiled in kinds:  # a comprehension would be a call for each record
                states.append(kind(compiled, cells, suffix))
            try:
                outputs = finish(record, function(given, *states))
                for one in states:
                    one._encode()
            finally:
                for one in states:
                    one._close()
            return outputs, states

        return call

    def single(self, function: Callable[..., Any], decode: Decode | None) -> Callable[[Finish, Record], Any]:
        """Return a function that calls `function` with a record's value and the state of its key.

        `decode`: decodes the value; None: `function` gets the record.
        """
        task_of, call, ttls = self.task_of, self.caller(function), self.ttls

        def run(finish: Finish, record: Record) -> Any:
            given = record if decode is None else decode(record.value)
            task, key = task_of(record), record.key
            if key is None:
                raise self.key_missing()
            cells: Cells = task
            if ttls:
                now = task.at(record.timestamp)
                cells = UnexpiredCells(task, ttls, now)
            outputs, states = call(cells, encode_key(key), record, given, finish)
            for one in states:
                one._write(cells)
            if ttls:
                task.time_ms = now
            return outputs

        return run

    def batch(self, function: Callable[..., Any]) -> Callable[[list[Record], Callable[[Any], list[Any]]], list[Any]]:
        """Return a function that calls a batch function with records and the states of their keys, one partition after
        the other.

        The same key in another partition has its own state. Either all changes of the calls count, or none.
        """

        def run(records: list[Record], finish: Callable[[Any], list[Any]]) -> list[Any]:
            outputs: list[Any] = []
            written: list[_Changed] = []
            by_partition: dict[int, list[Record]] = {}
            for record in records:
                by_partition.setdefault(record.partition, []).append(record)
            times = self.times_of(records)
            for part_records in by_partition.values():
                seen = Layer(self.task_of(part_records[0]))  # later calls see the changes of earlier ones
                for part in split_at_repeated_keys(part_records, times):
                    outputs += self._one_call(function, part, finish, seen, times, written)
            for record, now, states in written:
                self.write(states, self.task_of(record), now)
            for part_records in by_partition.values() if times else ():
                self.task_of(part_records[-1]).time_ms = times[id(part_records[-1])]
            return outputs

        return run

    def _one_call(
        self,
        function: Callable[..., Any],
        records: list[Record],
        finish: Callable[[Any], list[Any]],
        seen: Layer,
        times: Mapping[int, int],
        written: list[_Changed],
    ) -> list[Any]:
        """Call the function with records, at one time for each key, and write the changes to `seen`."""
        of_key = {record.key: record for record in records}
        suffixes = {key: self.locate(record)[1] for key, record in of_key.items()}
        nows = {key: times.get(id(record), 0) for key, record in of_key.items()}
        cells = {key: self.with_expiry(seen, now) for key, now in nows.items()}
        by_store: list[dict[bytes | None, Any]] = [
            {key: kind(compiled, cells[key], suffix) for key, suffix in suffixes.items()}
            for kind, compiled in self.kinds
        ]
        all_states = [(key, one) for by_key in by_store for key, one in by_key.items()]
        try:
            outputs = finish(function(records, *map(dict, by_store)))
            for _, one in all_states:
                one._encode()
        finally:
            for _, one in all_states:
                one._close()
        for key, one in all_states:
            if times:
                one._write(cells[key])
            written.append((of_key[key], nows[key], [one]))
        return outputs

    def concurrent(
        self, function: Callable[..., Awaitable[Any]]
    ) -> Callable[[Record, Any, Finish, Layer, int], Awaitable[tuple[Any, list[Any]]]]:
        """Return a coroutine function that calls an async function with one record and its state.

        The coroutine returns the outputs and the states with their changes, and writes no change. Its argument `seen`
        holds the cells with the changes of the key's earlier records, and `now` is the time of the record's task.
        """

        async def run(record: Record, given: Any, finish: Finish, seen: Layer, now: int) -> tuple[Any, list[Any]]:
            _, suffix = self.locate(record)
            cells = self.with_expiry(seen, now)
            states = self.open(cells, suffix)
            try:
                outputs = finish(record, await function(given, *states))
                for one in states:
                    one._encode()
            finally:
                for one in states:
                    one._close()
            return outputs, states

        return run

    def write(self, states: Iterable[Any], cells: Cells, now: int) -> None:
        """Write the changes that a function made to its states. `now` is the time of its task in ms."""
        aged = self.with_expiry(cells, now)
        for one in states:
            one._write(aged)
