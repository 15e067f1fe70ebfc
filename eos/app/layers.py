"""Changes that lie on top of other entries, and are read in order together with them.

Owns the order: nothing is sorted before somebody reads in order, and what is sorted then is kept so, because functions
read the same row again and again. It must never know what a value is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

X = TypeVar("X")
Y = TypeVar("Y")
Value = bytes | None
"""None: the entry is deleted."""

AFTER_FIELDS: Final = b"\xff" * 9  # of any row: the fields of int keys have 8 bytes, others begin with a zero byte
_FEW: Final = 32  # so few names are sorted faster than they are kept sorted


class Span(NamedTuple):
    """Fields from `start` on, before `stop` if there is one; `back`: from the end."""

    start: bytes = b""
    stop: bytes | None = None
    back: bool = False

    def names(self, row: bytes) -> tuple[bytes, bytes]:
        """Return the first name of these fields in the row, and one after all of them."""
        return row + self.start, row + (AFTER_FIELDS if self.stop is None else self.stop)


class Bounds(NamedTuple):
    """A row's live fields are from `low` on and before `high`; with `low` at `high` or above there are none.

    They are kept in memory, and spare reading entries that are deleted or expired again and again, where a row is
    deleted from an end. Bounds that are too wide only cost time.
    """

    low: bytes = b""
    high: bytes = AFTER_FIELDS

    def set(self, field: bytes) -> Bounds:
        if self.low >= self.high:
            return Bounds(field, field + b"\0")
        if field < self.low:
            return Bounds(field, self.high)
        return self if field < self.high else Bounds(self.low, field + b"\0")

    def deleted(self, field: bytes) -> Bounds:
        if field == self.low:
            return Bounds(field + b"\0", self.high)
        return Bounds(self.low, field) if field + b"\0" == self.high else self

    def met(self, passed: bytes, name: bytes, back: bool) -> Bounds:
        """Return the bounds where no live field lies between what an iteration passed and the name."""
        if back:
            return Bounds(self.low, name) if name < self.high <= passed else self
        return Bounds(name, self.high) if passed <= self.low < name else self

    def ended(self, passed: bytes, name: bytes, back: bool) -> Bounds:
        """Return the bounds where an iteration ended at the name."""
        found = self.met(passed, name, back)
        if found.low < found.high:
            return found
        at = self.low if self.high == AFTER_FIELDS else self.high  # a list goes on with its numbers from here
        return Bounds(at, at)


class Below(Protocol):
    """Entries that changes can lie on."""

    def get(self, cell: bytes) -> Value: ...

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, Value]]:
        """Yield fields and values in the order of the span; None: the entry is deleted or expired."""


class Overlay(dict[bytes, X], Generic[X]):
    """Changes by name. What is set as in any dict may be missing where the changes are `ordered`, and is not met by an
    iteration that has begun; `put` is for all others."""

    _names: Any = None  # a SortedList, once there are many and somebody read them in order
    _version = 0

    def put(self, name: bytes, value: X) -> None:
        if name not in self:
            self._version += 1
            if self._names is not None:
                self._names.add(name)
        self[name] = value

    @property
    def ordered(self) -> bool:
        return self._names is not None

    def drop(self, name: bytes) -> None:
        """Forget the change. Raises KeyError where there is none."""
        del self[name]
        self._version += 1
        if self._names is not None:
            self._names.discard(name)

    def over(self, below: Iterator[tuple[bytes, Y]], row: bytes, span: Span) -> Iterator[tuple[bytes, X | Y]]:
        """Yield fields of the row and values in the order of the span: the changes, and what is below where there is no
        change. Changes that `put` and `drop` make meanwhile are met, if they lie ahead."""
        (low, high), back, prefix, version = span.names(row), span.back, len(row), -1
        theirs: tuple[bytes, Y] | None = None
        field, used = None, True  # nothing is read below before it is needed
        while True:
            if version != self._version:
                if field is not None:
                    low, high = (low, row + field) if back else (row + field + b"\0", high)
                version, ahead = self._version, self._between(low, high, back)
                mine = next(ahead, None)
            if used:
                theirs, used = next(below, None), False
            field = None if mine is None else mine[prefix:]
            if theirs is not None and (field is None or (theirs[0] > field if back else theirs[0] < field)):
                field, used = theirs[0], True
                yield theirs
            elif mine is not None and field is not None:
                used = theirs is not None and theirs[0] == field
                value, mine = self[mine], next(ahead, None)
                yield field, value
            else:
                return

    def _between(self, low: bytes, high: bytes, back: bool) -> Iterator[bytes]:
        if self._names is None:
            if len(self) <= _FEW:
                return iter(sorted([name for name in self if low <= name < high], reverse=back))
            self._names = sorted_list()(self)
        found: Iterator[bytes] = self._names.irange(low, high, (True, False), back)
        return found


class Layer:
    """Changes of cells on top of others, which they leave as they are."""

    def __init__(self, below: Below) -> None:
        self._below = below
        self.changed: Overlay[Value] = Overlay()
        self._bounds: dict[bytes, Bounds] = {}  # of rows that were read in order

    def get(self, cell: bytes) -> Value:
        return self.changed[cell] if cell in self.changed else self._below.get(cell)

    def put(self, cell: bytes, value: Value) -> None:
        """Change a cell that is not read in order."""
        if value is None and cell in self.changed and self._below.get(cell) is None:
            del self.changed[cell]
        else:
            self.changed[cell] = value

    def write(self, row: bytes, changes: Mapping[bytes, Value], bounds: Bounds | None) -> None:
        """Change fields of a row. `bounds`: the row's with these changes; None: the writer does not know them."""
        changed = self.changed
        put = changed.put if changed.ordered else changed.__setitem__
        for field, value in changes.items():
            cell = row + field
            if value is None and cell in changed and self._below.get(cell) is None:
                changed.drop(cell)  # it came and went: nothing is to be deleted
            else:
                put(cell, value)
        if bounds is None and (bounds := self.bounds(row)) is not None:
            for field, value in changes.items():
                bounds = bounds if value is None else bounds.set(field)
        if bounds is not None:
            self._bounds[row] = bounds

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, Value]]:
        below = self._below.scan(row, span)
        return self.changed.over(below, row, span) if self.changed else below

    def bounds(self, row: bytes) -> Bounds | None:
        """Return the row's bounds; None: nothing is known."""
        return self._bounds.get(row)


@functools.cache
def sorted_list() -> Any:
    """Return sortedcontainers' SortedList: Apps without state must not wait for its import."""
    from sortedcontainers import SortedList

    return SortedList
