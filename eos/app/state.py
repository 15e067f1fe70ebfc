"""Defines the state of a function by the key of its record: the objects that the function uses while it runs.

A parameter after the first that is annotated `State[T]`, `MapState[K, V]` or `ListState[T]` is a store
(eos/app/stores.py). Changes to it count only if the function returns. eos/state keeps them, behind the interface
`Cells`. This module must never do I/O.

A value is in a cell (eos/app/cells.py). In a map the cell's field is the map's key as bytes, which sort as the keys do.
"""

from __future__ import annotations

import contextlib
import pickle
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar, overload

from eos import hotloop
from eos.app.cells import parse_cell, store_prefix
from eos.app.layers import AFTER_FIELDS, Bounds, LowerCells, Overlay, Span, Value
from eos.app.timers import TimerQueue, Timers
from eos.encoding.serde import Decode, DecodeError, annotation_name, codec, encode, suggest_encoding
from eos.errors import ConfigurationError, IllegalState

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K", str, bytes, int)
V = TypeVar("V")
Default = tuple[Any, bytes | None]
"""A mutable default that `get` returned, and bytes that show whether it was changed since."""

# Types whose values cannot be changed in place.
_IMMUTABLE: Final = frozenset({int, str, bytes, float, bool, types.NoneType})
MAX_KEY_BYTES: Final = 400


class _Sentinel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


_UNREAD, _ABSENT = _Sentinel("UNREAD"), _Sentinel("ABSENT")
_NO_VALUE: Final = (_ABSENT, None)  # an absent value, and its bytes


class Cells(LowerCells, Protocol):
    """Gives access to the values of one task (a function and a partition), as the open transaction sees them."""

    def put(self, cell: bytes, value: Value) -> None:
        """Set or delete a cell. Only for rows that are never read in order; `write` changes the others."""

    def write(self, row: bytes, changes: Mapping[bytes, Value], bounds: Bounds | None) -> None:
        """Change fields of a row. `bounds`: the row's bounds with these changes; None: they are unknown."""

    def bounds(self, row: bytes) -> Bounds | None:
        """Return the row's bounds; None if they are unknown."""


class TaskCells(Cells, Protocol):
    """Gives access to all cells of a task, with the task's time."""

    time_ms: int
    """The latest timestamp of the task's records so far, in milliseconds since the epoch."""

    @property
    def timers(self) -> TimerQueue:
        """Return the timers of event time, if its function uses time."""

    @property
    def clock_timers(self) -> TimerQueue:
        """Return the timers of the wall clock, if its function uses time."""

    def clock_ms(self) -> int: ...

    def due_ms(self, cell: bytes) -> int | None: ...

    def set_timer(self, cell: bytes, due_ms: int | None) -> None: ...

    def add_timer(self, cell: bytes, due_ms: int) -> None:
        """Set a timer that is not set."""

    def clear_timer(self, cell: bytes) -> None:
        """Clear a timer that is set."""

    def at(self, timestamp_ms: int) -> int:
        """Return what the task's time will be after one more record, whose timestamp may be unknown (-1)."""


class Store(NamedTuple):
    """Describes a parameter that is state of this `kind`; `annotations` are the types that it holds."""

    name: str
    kind: type[Any]
    """State, MapState or ListState; or Timers, which is no store of its own."""
    annotations: tuple[Any, ...]
    many: bool = False
    """True if a batch function gets a mapping from keys to the state."""
    ttl_ms: int | None = None
    """How long a value lives after its last write."""
    was: str | None = None
    """The name under which the state was first stored, if it had another name then."""

    @property
    def is_kept(self) -> bool:
        """Return whether the function keeps values in the store; False for Timers."""
        return self.kind is not Timers

    @property
    def stored_name(self) -> str:
        """Return the store's name in the changelog."""
        return self.was or self.name

    @property
    def shape(self) -> str:
        """Return the kind of state as text. The kind decides the names of the cells, independently of the values."""
        return f"MapState[{self.annotations[0].__name__}]" if self.kind is MapState else self.kind.__name__


class CompiledStore:
    """Holds what all states of one parameter share, compiled once per function."""

    __slots__ = (
        "bare",
        "begin",
        "decode",
        "decode_key",
        "encode",
        "exact_type",
        "field",
        "renews",
        "store",
        "unordered",
    )

    def __init__(self, store: Store) -> None:
        self.store = store
        self.decode, self.encode, self.exact_type, self.unordered = codec(store.annotations[-1])
        # The decoder without the errors that `decode` explains; None if `decode` must be called.
        self.bare: Decode | None = None if self.unordered else getattr(self.decode, "bare", None)
        self.begin = store_prefix(store.stored_name)
        # With a time-to-live, setting an equal value is a change too, because it extends the value's life.
        self.renews = store.ttl_ms is not None
        self.field, self.decode_key = FIELDS[store.annotations[0] if store.kind is MapState else int]


class _KeyedState:
    """Is the base of all kinds of state: it holds the cells from construction until the function has returned.

    Each record gets its own objects, so an object that the function kept raises IllegalState from then on.
    """

    __slots__ = ("_cells", "_compiled", "_row")

    _cells: Cells | None

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        """Create the state of one key; `rest` is the part of the row's name that comes from the key."""
        self._compiled, self._cells, self._row = compiled, cells, compiled.begin + rest

    def _close(self) -> None:
        self._cells = None

    @property
    def _is_stored(self) -> bool:
        """Return True if the function has read a stored value of this key."""
        return False

    def _encode(self) -> None:
        """Encode the values that the function left. Raise TypeError for a value that cannot be stored."""
        raise NotImplementedError

    def _write(self, cells: Cells) -> None:
        """Write the values that `_encode` found to be changed."""
        raise NotImplementedError

    def _open(self) -> Cells:
        if self._cells is None:
            raise IllegalState(
                f"the state {self._compiled.store.name} was used after its function had returned",
                remedy="use a state only while its function handles the record, and do not keep it",
            )
        return self._cells

    def _read(self, kept: bytes) -> tuple[Any, bytes]:
        """Decode a value, and return it with the bytes that it encodes to while unchanged.

        These bytes differ from `kept` for a set, whose order varies.
        """
        compiled = self._compiled
        try:
            value = compiled.decode(kept)
        except DecodeError as error:
            kind = annotation_name(compiled.store.annotations[-1])
            raise ConfigurationError(
                f"the state {compiled.store.name} of the key {parse_cell(self._row)[1]!r} is not of type {kind} "
                f"({error}): it was stored with another type"
            ) from error
        return value, compiled.encode(value) if compiled.unordered else kept

    def _encode_value(self, value: Any, before: object) -> bytes | None:
        """Return the value's bytes; None if it is absent.

        Raises TypeError for a changed value that could not be decoded again, because the next record of its key would
        end the worker.
        """
        if value is _ABSENT:
            return None
        compiled = self._compiled
        try:
            after = compiled.encode(value)
            if after != before and type(value) is not compiled.exact_type:
                compiled.decode(after)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            remedy = suggest_encoding(value, kept=True)
            message = f"the state {compiled.store.name} cannot be {reprlib.repr(value)}: {error}"
            raise TypeError(f"{message}: {remedy}" if remedy else message) from error
        return after

    def _check_value(self, value: object) -> None:
        if value is None:
            name = self._compiled.store.name
            raise TypeError(f"the state {name} cannot be None: use {self._delete_call} to delete it")

    _delete_call: ClassVar[str]


class State(_KeyedState, Generic[T]):
    """Keeps a single value per key: read it with `get()`, change it with `set(value)` and `delete()`.

    `get()` returns None, or the given default, if the key has no value. A value that is changed in place is stored too,
    even a default: `seen.get([]).append(x)` is enough. Values are stored as JSON; bytes and str are stored as they are.
    Do not keep the object: it raises IllegalState once its function has returned.
    """

    __slots__ = ("_bytes_after", "_bytes_before", "_defaults", "_value")

    _delete_call = "delete()"

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        self._compiled, self._cells, self._row = compiled, cells, compiled.begin + rest
        self._value: Any = _UNREAD
        self._bytes_before: Any = _UNREAD  # the value's bytes
        self._defaults: list[Default] | None = None

    @overload
    def get(self) -> T | None: ...

    @overload
    def get(self, default: D) -> T | D: ...

    def get(self, default: Any = None) -> Any:
        """Return the value of this key, or `default` if it has none; a default changed in place becomes the value."""
        cells = self._cells or self._open()
        value = self._value
        if value is _UNREAD:
            kept = cells.get(self._row)
            self._value, self._bytes_before = (_ABSENT, None) if kept is None else self._read(kept)
            value = self._value
        if self._defaults:
            value = self._value = _take_changed(self._compiled.store, self._defaults, value)
        if value is not _ABSENT:
            return value
        if type(default) not in _IMMUTABLE:
            self._defaults = self._defaults or []
            _remember_default(self._defaults, default)
        return default

    def set(self, value: T) -> None:
        """Set the value of this key. Raise TypeError for None; `delete()` removes a value."""
        if self._cells is None or value is None:
            self._open()
            self._check_value(value)
        self._value, self._defaults = value, None
        if self._compiled.renews:
            self._bytes_before = _UNREAD

    def delete(self) -> None:
        """Delete the value of this key."""
        self._open()
        self._value, self._defaults = _ABSENT, None

    @property
    def _is_stored(self) -> bool:
        return type(self._bytes_before) is bytes

    def _encode(self) -> None:
        value = self._value
        if self._defaults:
            value = _take_changed(self._compiled.store, self._defaults, value)
        self._bytes_after: Any = _UNREAD if value is _UNREAD else self._encode_value(value, self._bytes_before)

    def _write(self, cells: Cells) -> None:
        if self._bytes_after != self._bytes_before:
            cells.put(self._row, self._bytes_after)


OPEN_STATE: Final = hotloop.fast_state(State, CompiledStore, _UNREAD, _ABSENT, _IMMUTABLE)
"""The type of the objects that functions get as State."""


class MapState(_KeyedState, MutableMapping[K, V]):
    """Keeps a map per key, used like a dict; its own keys are str, bytes or int, and it is read in their order.

    `range(start, stop)` reads a part of it. A value that is changed in place is stored too, even one that was passed to
    `get` as its default. Do not keep the object: it raises IllegalState once its function has returned.
    """

    __slots__ = ("_bounds", "_changed", "_defaults", "_own_values", "_read_values")

    _delete_call = "`del` of its key"

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        self._compiled, self._cells, self._row = compiled, cells, compiled.begin + rest
        # field -> its value and bytes in the cells, or _NOWHERE
        self._read_values: dict[bytes, tuple[Any, bytes | None]] = {}
        self._own_values: Overlay[Any] = Overlay()  # field -> the value that the function set, or _ABSENT
        self._defaults: dict[bytes, list[Default]] = {}
        self._bounds: Bounds | None = None  # known after the map has been read in order

    def _below(self, field: bytes) -> tuple[Any, bytes | None]:
        if field not in self._read_values:
            kept = self._open().get(self._row + field)
            self._read_values[field] = _NO_VALUE if kept is None else self._read(kept)
        return self._read_values[field]

    def _value(self, field: bytes) -> Any:
        """Return the field's value, or _ABSENT."""
        if self._cells is None:
            self._open()
        if self._defaults and field in self._defaults:
            self._take_changed_default(field)
        if field in self._own_values:
            return self._own_values[field]
        return (self._read_values.get(field) or self._below(field))[0]

    def _set(self, field: bytes, value: Any) -> None:
        if self._bounds is None:
            self._own_values[field] = value
        else:
            self._own_values.put(field, value)
            self._bounds = self._bounds.set(field)

    def __getitem__(self, key: K) -> V:
        value = self._value(self._compiled.field(key))
        if value is _ABSENT:
            raise KeyError(key)
        found: V = value
        return found

    def __contains__(self, key: object) -> bool:
        return self._value(self._compiled.field(key)) is not _ABSENT

    def get(self, key: K, default: Any = None) -> Any:
        """Return the value at `key`, or `default` if there is none; a default changed in place becomes the value."""
        field = self._compiled.field(key)
        value = self._value(field)
        if value is not _ABSENT:
            return value
        if type(default) not in _IMMUTABLE:
            _remember_default(self._defaults.setdefault(field, []), default)
        return default

    def __setitem__(self, key: K, value: V) -> None:
        if self._cells is None or value is None:
            self._open()
            self._check_value(value)
        field = self._compiled.field(key)
        if self._defaults:
            self._defaults.pop(field, None)
        self._set(field, value)

    def __delitem__(self, key: K) -> None:
        field = self._compiled.field(key)
        if self._value(field) is _ABSENT:
            raise KeyError(key)
        self._defaults.pop(field, None)
        if self._below(field) is _NO_VALUE:
            self._own_values.drop(field)
        else:
            self._own_values.put(field, _ABSENT)
        if self._bounds is not None:
            self._bounds = self._bounds.deleted(field)

    def range(self, start: K | None = None, stop: K | None = None, *, reverse: bool = False) -> Iterator[tuple[K, V]]:
        """Iterate over the keys from `start` (included) to `stop` (excluded) with their values, in order.

        Without `start` or `stop` the range has no limit on that side. Entries that are set or deleted during the
        iteration may or may not appear.
        """
        field_of = self._compiled.field
        return self._entries(
            b"" if start is None else field_of(start), None if stop is None else field_of(stop), reverse
        )

    def _entries(self, start: bytes, stop: bytes | None, back: bool) -> Iterator[tuple[K, Any]]:
        cells, own, seen, unfield = self._open(), self._own_values, self._read_values, self._compiled.decode_key
        if self._defaults:
            self._take_changed_defaults()
        if self._bounds is None:
            self._bounds = self._read_bounds(cells)
        bounds = self._bounds
        start, stop = max(start, bounds.low), min(stop or AFTER_FIELDS, bounds.high)
        if start >= stop:
            return
        passed = stop if back else start
        span = Span(start, stop, back)
        for field, kept in own.merged_with(cells.scan(self._row, span), span):
            if field in own:
                value = own[field]
            elif field in seen:
                value = seen[field][0]
            elif kept is None:
                value = _ABSENT
            else:
                value, before = self._read(kept)
                if type(value) not in _IMMUTABLE:
                    seen[field] = value, before
            after, bounds = field + b"\0", self._bounds
            if bounds.high <= passed if back else passed <= bounds.low:
                self._bounds = bounds.without_gap(passed, after if (value is _ABSENT) is not back else field, back)
            passed = field if back else after
            if value is not _ABSENT:
                yield unfield(field), value
                # Check now that this state is still open, and not when the cells are read. Once the function has
                # returned, the cells may belong to another transaction.
                self._open()
        self._bounds = self._bounds.at_end(passed, start if back else stop, back)

    def _read_bounds(self, cells: Cells) -> Bounds:
        bounds = cells.bounds(self._row) or Bounds()
        for field, value in self._own_values.items():
            bounds = bounds if value is _ABSENT else bounds.set(field)
        return bounds

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.range())

    def __len__(self) -> int:
        """Return the number of entries; this reads the whole map."""
        return sum(1 for _ in self.range())

    def clear(self) -> None:
        """Remove all entries of this key's map."""
        for key in self:
            del self[key]

    def _take_changed_defaults(self) -> None:
        for field in list(self._defaults):
            self._take_changed_default(field)

    def _take_changed_default(self, field: bytes) -> None:
        """Set the field to the default that `get` returned, if the function has changed that default in place."""
        defaults, before = self._defaults[field], self._own_values.get(field, _ABSENT)
        if (value := _take_changed(self._compiled.store, defaults, before)) is not before:
            self._set(field, value)
        if not defaults:
            del self._defaults[field]

    def _encode(self) -> None:
        if self._defaults:
            self._take_changed_defaults()
        own, seen, renews = self._own_values, self._read_values, self._compiled.renews
        changed: dict[bytes, bytes | None] = {}
        for field, value in own.items():
            before = seen[field][1] if field in seen else _UNREAD
            after = self._encode_value(value, before)
            if after != before or (renews and after is not None):
                changed[field] = after
        for field, (value, kept) in seen.items():
            if (
                type(value) not in _IMMUTABLE
                and field not in own
                and (after := self._encode_value(value, kept)) != kept
            ):
                changed[field] = after
        self._changed = changed

    def _write(self, cells: Cells) -> None:
        if self._changed or self._bounds is not None:
            cells.write(self._row, self._changed, self._bounds)


class ListState(_KeyedState, Generic[T]):
    """Keeps a list per key, with `append`, `extend`, `popleft`, `clear` and iteration.

    An append writes only its own value, however long the list is. A value that is changed in place is stored too. Do
    not keep the object: it raises IllegalState once its function has returned.
    """

    __slots__ = ("_map",)

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        super().__init__(compiled, cells, rest)
        self._map = _Numbered(compiled, cells, rest)

    def append(self, value: T) -> None:
        """Add a value at the end. Raise TypeError for None."""
        self._map.append(value)

    def extend(self, values: Iterable[T]) -> None:
        """Add the values at the end, in order."""
        for value in values:
            self.append(value)

    def popleft(self) -> T:
        """Remove and return the first value. Raise IndexError if the list is empty."""
        for number, first in self._map.range():
            del self._map[number]
            value: T = first
            return value
        raise IndexError(f"the state {self._compiled.store.name} is empty")

    def clear(self) -> None:
        """Remove all values of this key."""
        self._map.clear()

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._map.range())

    def __len__(self) -> int:
        """Return the number of values; this reads the whole list."""
        return len(self._map)

    def __bool__(self) -> bool:
        return next(iter(self), _ABSENT) is not _ABSENT

    def _close(self) -> None:
        self._map._close()

    def _encode(self) -> None:
        self._map._encode()

    def _write(self, cells: Cells) -> None:
        self._map._write(cells)


class _Numbered(MapState[int, Any]):
    __slots__ = ()
    _delete_call = "popleft() or clear()"

    def append(self, value: Any) -> None:
        """Set the value after the last one."""
        cells = self._open()
        self._check_value(value)
        if self._bounds is None:
            self._bounds = self._read_bounds(cells)
        if self._bounds.high == AFTER_FIELDS:
            next(self._entries(b"", None, back=True), None)
        high = self._bounds.high  # last number + zero byte, or first free number; b"": empty list
        field = self._compiled.field(self._compiled.decode_key(high[:8]) + len(high) - 8 if high else 0)
        self._read_values.setdefault(field, _NO_VALUE)
        self._set(field, value)


# ---- a map's own keys ------------------------------------------------------------------------------------------------


def _check_type(key: Any, kind: type) -> Any:
    if type(key) is not kind:
        raise TypeError(f"{key!r} is not of type {kind.__name__}, as the map's keys are")
    return key


def _check_length(field: bytes) -> bytes:
    if len(field) - 1 > MAX_KEY_BYTES:
        raise ValueError(f"a map's key has at most {MAX_KEY_BYTES} bytes, but this one has {len(field) - 1}")
    return field


def _int_field(key: int) -> bytes:
    if not -(1 << 63) <= _check_type(key, int) < 1 << 63:
        raise ValueError(f"a map's int key has 64 bits, and {key} does not fit")
    return int(key + (1 << 63)).to_bytes(8, "big")


FIELDS: Final[Mapping[type, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]]] = {
    # A str or bytes key gets a zero byte in front. Otherwise the field of an empty key would be empty bytes, which mean
    # that a cell has no field.
    str: (lambda key: _check_length(b"\0" + _check_type(key, str).encode()), lambda field: field[1:].decode()),
    bytes: (lambda key: _check_length(b"\0" + _check_type(key, bytes)), lambda field: field[1:]),
    int: (_int_field, lambda field: int.from_bytes(field, "big") - (1 << 63)),
}
"""Converts a map's key to bytes that sort as the keys do, and back, by the type of the key."""


def _remember_default(defaults: list[Default], default: Any) -> None:
    """Remember a default that the function may change in place from now on."""
    if all(given is not default for given, _ in defaults):
        defaults.append((default, _fingerprint(default)))


def _take_changed(store: Store, defaults: list[Default], value: Any) -> Any:
    """Return the value. If there is none, return the default that was changed in place, and forget that default."""
    changed = [offer for offer in defaults if _fingerprint(offer[0]) != offer[1]]
    if not changed:
        return value
    if value is not _ABSENT or len(changed) > 1:
        raise TypeError(f"two defaults of the state {store.name} were changed, but only one can become its value")
    defaults[:] = [offer for offer in defaults if offer is not changed[0]]
    return changed[0][0]


def _fingerprint(default: Any) -> bytes | None:
    """Return bytes that differ once the default was changed in place; None if a change cannot be detected.

    A default may be any object. A default that cannot be stored, for example a cache, is refused only once it was
    changed.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
        return encode(default)
    try:
        return pickle.dumps(default)
    except Exception:  # noqa: BLE001 - its methods may raise anything: a lock, an open file, a local class
        return None
