"""State of a function's own, by the key of its record: what a function holds in its hands while it runs.

A parameter behind the first one that is annotated `State[T]`, `MapState[K, V]` or `ListState[T]` is a store
(eos/app/stores.py). What the function leaves there counts only if it returns; where it is kept is eos/state's, behind
`Cells`. It must never do I/O.

A value is in a cell (eos/app/cells.py); in a map the field that is a part of its name is the map's own key as bytes,
of which the order is the order of those keys.
"""

from __future__ import annotations

import contextlib
import pickle
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar, overload

from eos.app.cells import begin_of, named
from eos.app.layers import AFTER_FIELDS, Below, Bounds, Overlay, Span, Value
from eos.encoding.serde import DecodeError, annotation_name, codec, encode, remedy_of
from eos.errors import ConfigurationError, IllegalState

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K", str, bytes, int)
V = TypeVar("V")
Offer = tuple[Any, bytes | None]
"""A default that was given, and what tells whether it was changed since."""

# Values that nobody can change in place.
_FIXED: Final = frozenset({int, str, bytes, float, bool, types.NoneType})
LONGEST_FIELD: Final = 400


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


_UNREAD, _ABSENT = _Mark("UNREAD"), _Mark("ABSENT")
_NOWHERE: Final = (_ABSENT, None)  # a value that is not there, and its bytes


class Cells(Below, Protocol):
    """Values of one task (a function and a partition), as the open transaction sees them."""

    def put(self, cell: bytes, value: Value) -> None:
        """Change a cell that is not read in order."""

    def write(self, row: bytes, changes: Mapping[bytes, Value], bounds: Bounds | None) -> None:
        """Change fields of a row. `bounds`: the row's with these changes; None: the writer does not know them."""

    def bounds(self, row: bytes) -> Bounds | None:
        """Return the row's bounds; None: nothing is known."""


class TaskCells(Cells, Protocol):
    """All of them."""

    time_ms: int
    """The latest timestamp of the task's records so far, in milliseconds since the epoch."""

    def at(self, timestamp_ms: int) -> int:
        """What that is with one more record, of which the timestamp may be unknown (-1)."""


class Store(NamedTuple):
    """A parameter that is state: of a `kind`, and `annotations` are what it holds."""

    name: str
    kind: type[State[Any]] | type[MapState[Any, Any]] | type[ListState[Any]]
    annotations: tuple[Any, ...]
    many: bool = False
    """A mapping from keys to it, for a batch function."""
    ttl_ms: int | None = None
    """How long a value is there after its last write."""
    was: str | None = None
    """The name that it was first kept under, if that is another one."""

    @property
    def kept_as(self) -> str:
        """Its name in the changelog."""
        return self.was or self.name

    @property
    def shape(self) -> str:
        """What decides how its cells are named, whatever its values are."""
        return f"MapState[{self.annotations[0].__name__}]" if self.kind is MapState else self.kind.__name__


class CompiledStore:
    """Hold what all states of one parameter share, worked out once per function."""

    __slots__ = ("begin", "decode", "encode", "field", "renews", "store", "sure", "unfield", "unordered")

    def __init__(self, store: Store) -> None:
        self.store = store
        self.decode, self.encode, self.sure, self.unordered = codec(store.annotations[-1])
        self.begin = begin_of(store.kept_as)
        self.renews = store.ttl_ms is not None  # setting an equal value is a change, because it lives longer
        self.field, self.unfield = FIELDS[store.annotations[0] if store.kind is MapState else int]


class _Held:
    """Hold what all kinds have in common: the cells, from construction until the function has returned.

    Each record gets objects of its own, so an object that the function kept raises IllegalState for ever after.
    """

    __slots__ = ("_cells", "_compiled", "_row")

    _cells: Cells | None

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        """`rest`: the part of the row's name that the key gives."""
        self._compiled, self._cells, self._row = compiled, cells, compiled.begin + rest

    def _leave(self) -> None:
        self._cells = None

    def _encode(self) -> None:
        """Encode what the function left. Raises TypeError for a value that cannot be kept."""
        raise NotImplementedError

    def _write(self, cells: Cells) -> None:
        """Write there what `_encode` found to be another value than before."""
        raise NotImplementedError

    def _open(self) -> Cells:
        if self._cells is None:
            raise IllegalState(
                f"the state {self._compiled.store.name} was used after its function had returned",
                remedy="use a state only while its function runs on the record, and do not keep it",
            )
        return self._cells

    def _read(self, kept: bytes) -> tuple[Any, bytes]:
        """Decode a value. Return it with the bytes that it encodes to if it is not changed: a set has another order."""
        compiled = self._compiled
        try:
            value = compiled.decode(kept)
        except DecodeError as error:
            kind = annotation_name(compiled.store.annotations[-1])
            raise ConfigurationError(
                f"the state {compiled.store.name} of the key {named(self._row)[1]!r} is no {kind} ({error}): its type "
                "was another one when it was kept"
            ) from error
        return value, compiled.encode(value) if compiled.unordered else kept

    def _encoded(self, value: Any, before: object) -> bytes | None:
        """Return the value's bytes, None where there is none.

        Raises TypeError for a value that could not be read again, unless it is what was there before: it would end the
        worker at the next record of its key.
        """
        if value is _ABSENT:
            return None
        compiled = self._compiled
        try:
            after = compiled.encode(value)
            if after != before and type(value) is not compiled.sure:
                compiled.decode(after)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            remedy = remedy_of(value, kept=True)
            told = f"the state {compiled.store.name} cannot be {reprlib.repr(value)}: {error}"
            raise TypeError(f"{told}: {remedy}" if remedy else told) from error
        return after

    def _settable(self, value: object) -> None:
        if value is None:
            name = self._compiled.store.name
            raise TypeError(f"the state {name} cannot be None: {self._deleting} says that there is none")

    _deleting: ClassVar[str]


class State(_Held, Generic[T]):
    """The value of one key. `get()` gives it, None or the default where there is none; `set(value)`, `delete()`.

    A value that was changed in place is set, also a default: `seen.get([]).append(x)` is enough. Values are JSON, bytes
    and str are kept as they are. Do not keep the object: it raises IllegalState once its function has returned.
    """

    __slots__ = ("_after", "_before", "_offered", "_value")

    _deleting = "delete()"

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        self._compiled, self._cells, self._row = compiled, cells, compiled.begin + rest
        self._value: Any = _UNREAD
        self._before: Any = _UNREAD  # its bytes
        self._offered: list[Offer] | None = None

    @overload
    def get(self) -> T | None: ...

    @overload
    def get(self, default: D) -> T | D: ...

    def get(self, default: Any = None) -> Any:
        cells = self._cells or self._open()
        value = self._value
        if value is _UNREAD:
            kept = cells.get(self._row)
            self._value, self._before = (_ABSENT, None) if kept is None else self._read(kept)
            value = self._value
        if self._offered:
            value = self._value = _changed_one(self._compiled.store, self._offered, value)
        if value is not _ABSENT:
            return value
        if type(default) not in _FIXED:
            self._offered = self._offered or []
            _offer(self._offered, default)
        return default

    def set(self, value: T) -> None:
        if self._cells is None or value is None:
            self._open()
            self._settable(value)
        self._value, self._offered = value, None
        if self._compiled.renews:
            self._before = _UNREAD

    def delete(self) -> None:
        """There is no value for this key any more."""
        self._open()
        self._value, self._offered = _ABSENT, None

    def _encode(self) -> None:
        value = self._value
        if self._offered:
            value = _changed_one(self._compiled.store, self._offered, value)
        self._after: Any = _UNREAD if value is _UNREAD else self._encoded(value, self._before)

    def _write(self, cells: Cells) -> None:
        if self._after != self._before:
            cells.put(self._row, self._after)


class MapState(_Held, MutableMapping[K, V]):
    """A map per key, used as a dict is; its own keys are str, bytes or int, and it is read in their order.

    `range(start, stop)` reads a part of it. A value that was changed in place is set, one that `get` was given as its
    default too. Do not keep the object: it raises IllegalState once its function has returned.
    """

    __slots__ = ("_bounds", "_changed", "_offered", "_own", "_seen")

    _deleting = "`del` of its key"

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        self._compiled, self._cells, self._row = compiled, cells, compiled.begin + rest
        # field -> the value and its bytes below, or _NOWHERE
        self._seen: dict[bytes, tuple[Any, bytes | None]] = {}
        self._own: Overlay[Any] = Overlay()  # field -> what the function set, or _ABSENT
        self._offered: dict[bytes, list[Offer]] = {}
        self._bounds: Bounds | None = None  # once it was read in order

    def _below(self, field: bytes) -> tuple[Any, bytes | None]:
        if field not in self._seen:
            kept = self._open().get(self._row + field)
            self._seen[field] = _NOWHERE if kept is None else self._read(kept)
        return self._seen[field]

    def _value(self, field: bytes) -> Any:
        """Or _ABSENT."""
        if self._cells is None:
            self._open()
        if self._offered and field in self._offered:
            self._take_changed_default(field)
        return self._own[field] if field in self._own else (self._seen.get(field) or self._below(field))[0]

    def _set(self, field: bytes, value: Any) -> None:
        if self._bounds is None:
            self._own[field] = value
        else:
            self._own.put(field, value)
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
        field = self._compiled.field(key)
        value = self._value(field)
        if value is not _ABSENT:
            return value
        if type(default) not in _FIXED:
            _offer(self._offered.setdefault(field, []), default)
        return default

    def __setitem__(self, key: K, value: V) -> None:
        if self._cells is None or value is None:
            self._open()
            self._settable(value)
        field = self._compiled.field(key)
        if self._offered:
            self._offered.pop(field, None)
        self._set(field, value)

    def __delitem__(self, key: K) -> None:
        field = self._compiled.field(key)
        if self._value(field) is _ABSENT:
            raise KeyError(key)
        self._offered.pop(field, None)
        if self._below(field) is _NOWHERE:
            self._own.drop(field)
        else:
            self._own.put(field, _ABSENT)
        if self._bounds is not None:
            self._bounds = self._bounds.deleted(field)

    def range(self, start: K | None = None, stop: K | None = None, *, reverse: bool = False) -> Iterator[tuple[K, V]]:
        """Keys from `start` on and before `stop`, with their values, in order; all of them without either. What is set
        or deleted while it runs may or may not be met."""
        field_of = self._compiled.field
        return self._entries(
            b"" if start is None else field_of(start), None if stop is None else field_of(stop), reverse
        )

    def _entries(self, start: bytes, stop: bytes | None, back: bool) -> Iterator[tuple[K, Any]]:
        cells, own, seen, unfield = self._open(), self._own, self._seen, self._compiled.unfield
        if self._offered:
            self._take_changed_defaults()
        if self._bounds is None:
            self._bounds = self._read_bounds(cells)
        bounds = self._bounds
        start, stop = max(start, bounds.low), min(stop or AFTER_FIELDS, bounds.high)
        if start >= stop:
            return
        passed = stop if back else start
        span = Span(start, stop, back)
        for field, kept in own.over(cells.scan(self._row, span), span):
            if field in own:
                value = own[field]
            elif field in seen:
                value = seen[field][0]
            elif kept is None:
                value = _ABSENT
            else:
                value, before = self._read(kept)
                if type(value) not in _FIXED:
                    seen[field] = value, before
            after, bounds = field + b"\0", self._bounds
            if bounds.high <= passed if back else passed <= bounds.low:
                self._bounds = bounds.met(passed, after if (value is _ABSENT) is not back else field, back)
            passed = field if back else after
            if value is not _ABSENT:
                yield unfield(field), value
                self._open()  # before the cells are read: after the function they may be another transaction's
        self._bounds = self._bounds.ended(passed, start if back else stop, back)

    def _read_bounds(self, cells: Cells) -> Bounds:
        bounds = cells.bounds(self._row) or Bounds()
        for field, value in self._own.items():
            bounds = bounds if value is _ABSENT else bounds.set(field)
        return bounds

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.range())

    def __len__(self) -> int:
        """Reads all of it."""
        return sum(1 for _ in self.range())

    def clear(self) -> None:
        for key in self:
            del self[key]

    def _take_changed_defaults(self) -> None:
        for field in list(self._offered):
            self._take_changed_default(field)

    def _take_changed_default(self, field: bytes) -> None:
        """Set the default of this field that was changed in place, if one was."""
        offered, before = self._offered[field], self._own.get(field, _ABSENT)
        if (value := _changed_one(self._compiled.store, offered, before)) is not before:
            self._set(field, value)
        if not offered:
            del self._offered[field]

    def _encode(self) -> None:
        if self._offered:
            self._take_changed_defaults()
        own, seen, renews = self._own, self._seen, self._compiled.renews
        changed: dict[bytes, bytes | None] = {}
        for field, value in own.items():
            before = seen[field][1] if field in seen else _UNREAD
            after = self._encoded(value, before)
            if after != before or (renews and after is not None):
                changed[field] = after
        for field, (value, kept) in seen.items():
            if type(value) not in _FIXED and field not in own and (after := self._encoded(value, kept)) != kept:
                changed[field] = after
        self._changed = changed

    def _write(self, cells: Cells) -> None:
        if self._changed or self._bounds is not None:
            cells.write(self._row, self._changed, self._bounds)


class ListState(_Held, Generic[T]):
    """A list per key: `append`, `extend`, `popleft`, `clear`, and to be iterated over. An append writes its own value
    only, however long the list is. A value that was changed in place is set. Do not keep the object: it raises
    IllegalState once its function has returned.
    """

    __slots__ = ("_map",)

    def __init__(self, compiled: CompiledStore, cells: Cells, rest: bytes) -> None:
        super().__init__(compiled, cells, rest)
        self._map = _Numbered(compiled, cells, rest)

    def append(self, value: T) -> None:
        self._map.append(value)

    def extend(self, values: Iterable[T]) -> None:
        for value in values:
            self.append(value)

    def popleft(self) -> T:
        """Takes the first one out; IndexError where there is none."""
        for number, first in self._map.range():
            del self._map[number]
            value: T = first
            return value
        raise IndexError(f"the state {self._compiled.store.name} is empty")

    def clear(self) -> None:
        self._map.clear()

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._map.range())

    def __len__(self) -> int:
        """Reads all of it."""
        return len(self._map)

    def __bool__(self) -> bool:
        return next(iter(self), _ABSENT) is not _ABSENT

    def _leave(self) -> None:
        self._map._leave()

    def _encode(self) -> None:
        self._map._encode()

    def _write(self, cells: Cells) -> None:
        self._map._write(cells)


class _Numbered(MapState[int, Any]):
    __slots__ = ()
    _deleting = "popleft() or clear()"

    def append(self, value: Any) -> None:
        """Set the value after the last one."""
        cells = self._open()
        self._settable(value)
        if self._bounds is None:
            self._bounds = self._read_bounds(cells)
        if self._bounds.high == AFTER_FIELDS:
            next(self._entries(b"", None, back=True), None)
        high = self._bounds.high  # the last number, with a zero byte; a number that is free again; nothing
        field = self._compiled.field(self._compiled.unfield(high[:8]) + len(high) - 8 if high else 0)
        self._seen.setdefault(field, _NOWHERE)
        self._set(field, value)


# ---- a map's own keys ------------------------------------------------------------------------------------------------


def _checked(key: Any, kind: type) -> Any:
    if type(key) is not kind:
        raise TypeError(f"{key!r} is no {kind.__name__}, which the map's keys are")
    return key


def _short(field: bytes) -> bytes:
    if len(field) - 1 > LONGEST_FIELD:
        raise ValueError(f"a map's key has {LONGEST_FIELD} bytes at the most, and this one {len(field) - 1}")
    return field


def _int_field(key: int) -> bytes:
    if not -(1 << 63) <= _checked(key, int) < 1 << 63:
        raise ValueError(f"a map's key has 64 bits, and {key} does not fit")
    return int(key + (1 << 63)).to_bytes(8, "big")


FIELDS: Final[Mapping[type, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]]] = {
    # None is empty: that is no field.
    str: (lambda key: _short(b"\0" + _checked(key, str).encode()), lambda field: field[1:].decode()),
    bytes: (lambda key: _short(b"\0" + _checked(key, bytes)), lambda field: field[1:]),
    int: (_int_field, lambda field: int.from_bytes(field, "big") - (1 << 63)),
}
"""Type of a map's key -> to bytes whose order is the keys' order, and back."""


def _offer(offered: list[Offer], default: Any) -> None:
    """It may be changed in place from now on."""
    if all(given is not default for given, _ in offered):
        offered.append((default, _told_apart(default)))


def _changed_one(store: Store, offered: list[Offer], value: Any) -> Any:
    """The value; where there was none a default that was changed in place is one, and no offer any more."""
    changed = [offer for offer in offered if _told_apart(offer[0]) != offer[1]]
    if not changed:
        return value
    if value is not _ABSENT or len(changed) > 1:
        raise TypeError(f"two defaults of the state {store.name} were changed, and only one can be its value")
    offered[:] = [offer for offer in offered if offer is not changed[0]]
    return changed[0][0]


def _told_apart(default: Any) -> bytes | None:
    """Other bytes once it was changed in place; None where nobody can tell. A default may be anything: what cannot be
    kept is refused once it was changed (a cache or a place of its own counts too), and not before."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
        return encode(default)
    try:
        return pickle.dumps(default)
    except Exception:  # noqa: BLE001 - whatever its own methods raise: a lock, an open file, a local class
        return None
