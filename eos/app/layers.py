"""Keeps layers of changes on top of other entries, and reads both together in order.

Owns the order: names are sorted on the first read in order, and stay sorted from then on, because functions read the
same row again and again. It must never interpret a value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from eos.app.cells import row_length

X = TypeVar("X")
Y = TypeVar("Y")
Value = bytes | None
"""None: the entry is deleted."""

# This bound is greater than any field: the fields of int keys have 8 bytes, and all others begin with a zero byte.
AFTER_FIELDS: Final = b"\xff" * 9
_SORT_EACH_TIME: Final = 32  # up to this many names are sorted at each scan, which is faster than keeping them sorted


class Span(NamedTuple):
    """Describes a range of fields from `start` (included) to `stop` (excluded, None: no end).

    `back`: in reverse order."""

    start: bytes = b""
    stop: bytes | None = None
    back: bool = False

    def names(self, row: bytes) -> tuple[bytes, bytes]:
        """Return the first name of these fields in the row, and a name after all of them."""
        return row + self.start, row + (AFTER_FIELDS if self.stop is None else self.stop)


class Bounds(NamedTuple):
    """Holds the range of a row's live fields, from `low` (included) to `high` (excluded); empty if `low` >= `high`.

    Bounds are kept in memory. If entries are deleted from one end of a row, a scan within the bounds does not read the
    deleted entries again and again. Bounds that are too wide only cost time.
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

    def without_gap(self, passed: bytes, name: bytes, back: bool) -> Bounds:
        """Return the bounds after an iteration found no live field between the name `passed` and `name`."""
        if back:
            return Bounds(self.low, name) if name < self.high <= passed else self
        return Bounds(name, self.high) if passed <= self.low < name else self

    def at_end(self, passed: bytes, name: bytes, back: bool) -> Bounds:
        """Return the bounds after an iteration ended at `name`."""
        found = self.without_gap(passed, name, back)
        if found.low < found.high:
            return found
        # The next item of a list gets a number after this field.
        at = self.low if self.high == AFTER_FIELDS else self.high
        return Bounds(at, at)


class LowerCells(Protocol):
    """Describes the entries below a layer of changes."""

    def get(self, cell: bytes, /) -> Value: ...

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, Value]]:
        """Yield fields and values in the order of the span; None: the entry is deleted or expired."""


class Overlay(dict[bytes, X], Generic[X]):
    """Holds the changed fields of one row. Change it only with `put` and `drop`, because it may be sorted already."""

    _names: Any = None  # a SortedList, once there are many fields and the row was read in order
    _drop_count = 0

    def put(self, field: bytes, value: X) -> None:
        if self._names is not None and field not in self:
            self._names.add(field)
        self[field] = value

    def drop(self, field: bytes) -> None:
        """Remove the field. Raise KeyError if it does not exist."""
        del self[field]
        self._drop_count += 1
        if self._names is not None:
            self._names.remove(field)

    def fields(self, span: Span) -> Iterator[bytes]:
        """Return the fields in the order of the span; the iterator is valid until the next change."""
        low, high, back = span
        high = AFTER_FIELDS if high is None else high
        if self._names is None:
            if len(self) <= _SORT_EACH_TIME:
                return iter(sorted([field for field in self if low <= field < high], reverse=back))
            self._names = sorted_list()(self)
        found: Iterator[bytes] = self._names.irange(low, high, (True, False), back)
        return found

    def merged_with(self, below: Iterator[tuple[bytes, Y]], span: Span) -> Iterator[tuple[bytes, X | Y]]:
        """Yield the fields and values of this layer and of the layer `below` it, in the order of the span.

        If both layers have a field, the value is this layer's.

        A change made during the iteration appears if its field comes later in the order.
        """
        low, high, back = span
        theirs: tuple[bytes, Y] | None = None
        field, used, version = None, True, -1  # the layer below is read only when its next field is needed
        while True:
            now = len(self) + 2 * self._drop_count  # grows with each new and each dropped field
            if version != now:
                if field is not None:
                    low, high = (low, field) if back else (field + b"\0", high)
                version, ahead = now, self.fields(Span(low, high, back))
                mine = next(ahead, None)
            if used:
                theirs, used = next(below, None), False
            if theirs is not None and (mine is None or (theirs[0] > mine if back else theirs[0] < mine)):
                field, used = theirs[0], True
                yield theirs
            elif mine is not None:
                field, used = mine, theirs is not None and theirs[0] == mine
                mine = next(ahead, None)
                yield field, self[field]
            else:
                return


class Layer:
    """Keeps changes of cells on top of other cells, which stay unchanged."""

    def __init__(self, below: LowerCells) -> None:
        self._lower_cells, self._get_lower = below, below.get
        self.changed: dict[bytes, Value] = {}
        # The entries of `changed` by row and field; None until a row has been read in order.
        self._rows: dict[bytes, Overlay[Value]] | None = None
        self._bounds: dict[bytes, Bounds] = {}  # the bounds of rows that were read in order

    def get(self, cell: bytes) -> Value:
        changed = self.changed
        return changed[cell] if cell in changed else self._get_lower(cell)

    def put(self, cell: bytes, value: Value) -> None:
        """Set or delete a cell. Only for rows that are never read in order; `write` changes the others."""
        if value is None and self._is_new(cell):
            del self.changed[cell]
        else:
            self.changed[cell] = value

    def _is_new(self, cell: bytes) -> bool:
        """Return whether the cell exists only in these changes, so that a delete needs no entry."""
        return cell in self.changed and self._get_lower(cell) is None

    def write(self, row: bytes, changes: Mapping[bytes, Value], bounds: Bounds | None) -> None:
        """Change fields of a row. `bounds`: the row's bounds with these changes; None: they are unknown."""
        if self._rows is None:
            own = None
        elif (own := self._rows.get(row)) is None:
            own = self._rows[row] = Overlay()
        for field, value in changes.items():
            cell = row + field
            if value is None and self._is_new(cell):
                del self.changed[cell]
                if own is not None:
                    own.drop(field)
                continue
            self.changed[cell] = value
            if own is not None:
                own.put(field, value)
        if bounds is None and (bounds := self.bounds(row)) is not None:
            for field, value in changes.items():
                bounds = bounds if value is None else bounds.set(field)
        if bounds is not None:
            self._bounds[row] = bounds

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, Value]]:
        if self._rows is None:
            self._rows = by_row(self.changed.items())
        own, below = self._rows.get(row), self._lower_cells.scan(row, span)
        return own.merged_with(below, span) if own else below

    def bounds(self, row: bytes) -> Bounds | None:
        """Return the row's bounds; None if they are unknown."""
        return self._bounds.get(row)


def by_row(cells: Iterable[tuple[bytes, X]]) -> dict[bytes, Overlay[X]]:
    """Group cells into rows."""
    rows: dict[bytes, Overlay[X]] = {}
    for cell, value in cells:
        end = row_length(cell)
        rows.setdefault(cell[:end], Overlay()).put(cell[end:], value)
    return rows


@functools.cache
def sorted_list() -> Any:
    """Return sortedcontainers' SortedList, imported late so that Apps without state start without it."""
    from sortedcontainers import SortedList

    return SortedList
