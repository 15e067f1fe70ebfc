"""Keeps the committed values of a task, in memory or in a folder (eos/state/folders.py).

The values cover the changelog before `position`, so a restart reads only the records after it. Nothing here needs an
engine: Spark's executors and tests without a broker have none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, Protocol

from eos.app.cells import HEADER, TIME, row_length, store_of, store_prefix
from eos.app.expiry import write_time
from eos.app.layers import Overlay, Span, by_row
from eos.app.layers import Value as Value
from eos.state.time_order import Entry, TimeOrder

_EMPTY: Final[Overlay[bytes]] = Overlay()


class Values(Protocol):
    """Gives access to the committed values of one task.

    Each value of a timed store begins with a time: the time of its write if the store has a time-to-live
    (eos/app/expiry.py), or the due time of a timer (eos/app/timers.py).
    """

    position: int
    as_of: float
    """A time, in seconds since the epoch. At this time the changelog had no records of this task after `position`.

    The tombstones of later deletes stay in the changelog for `delete.retention.ms`.
    """

    @property
    def size_bytes(self) -> int:
        """Return the size on disk in bytes."""

    def __len__(self) -> int: ...

    def get(self, cell: bytes, /) -> bytes | None: ...

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        """Yield the fields of a row and their values, in order.

        The iterator is valid until the next `apply`.
        """

    def oldest(self, store: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the cells of a timed store with the time in ms that each value begins with, the earliest first.

        The iterator is valid until the next `apply`.
        """

    def apply(self, changes: Mapping[bytes, Value], position: int, as_of: float) -> None: ...

    def clear(self) -> None: ...

    def sync(self) -> None:
        """Write everything to the disk if possible."""

    def close(self) -> None: ...


def own_entries(values: Values) -> int:
    """Return how many of the values belong to the task itself and not to a function."""
    return sum(values.get(cell) is not None for cell in (TIME, HEADER))


class InMemory:
    position, as_of = 0, 0.0
    size_bytes = 0
    get: Callable[[bytes], bytes | None]

    def __init__(self, values: Mapping[bytes, bytes] | None = None, timed: Collection[bytes] = ()) -> None:
        self._values = dict(values or {})
        self.get = self._values.get  # calls the dict directly, without a method of this class in between
        self._timed = frozenset(timed)
        self._by_time = self._sort_by_time()
        self._scanned: set[bytes] = set()  # stores whose values are in `_rows` too
        self._rows: dict[bytes, Overlay[bytes]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Collection[tuple[bytes, bytes]]:
        return self._values.items()

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        if (store := store_of(row)) not in self._scanned:
            self._scanned.add(store)
            self._rows |= by_row(found for found in self._values.items() if store_of(found[0]) == store)
        fields = self._rows.get(row, _EMPTY)
        return ((field, fields[field]) for field in fields.fields(span))

    def _update_rows(self, changes: Mapping[bytes, Value]) -> None:
        for cell, value in changes.items():
            if store_of(cell) not in self._scanned:
                continue
            end = row_length(cell)
            fields = self._rows.get(cell[:end]) or Overlay()
            if value is not None:
                self._rows[cell[:end]] = fields
                fields.put(cell[end:], value)
            elif cell[end:] in fields:
                fields.drop(cell[end:])
                if not fields:
                    del self._rows[cell[:end]]

    def oldest(self, store: bytes) -> Iterator[tuple[bytes, int]]:
        return ((cell, time_ms) for time_ms, cell in self._by_time[store])

    def apply(self, changes: Mapping[bytes, Value], position: int, as_of: float) -> None:
        if self._scanned:
            self._update_rows(changes)
        if self._timed:
            self._update_times(changes)
        for cell, value in changes.items():
            if value is None:
                self._values.pop(cell, None)
            else:
                self._values[cell] = value
        self.position, self.as_of = position, as_of

    def _sort_by_time(self) -> dict[bytes, TimeOrder]:
        """Return the times and cells of each timed store, in order."""
        found: dict[bytes, list[Entry]] = {store: [] for store in self._timed}
        for cell, value in self._values.items() if found else ():
            if (of_store := found.get(store_of(cell))) is not None:
                of_store.append((write_time(value), cell))
        return {store: TimeOrder(times) for store, times in found.items()}

    def _update_times(self, changes: Mapping[bytes, Value]) -> None:
        for store, by_time in self._by_time.items():
            prefix, added = store_prefix(store.decode()), []
            for cell, value in changes.items():
                if not cell.startswith(prefix):
                    continue
                if (before := self._values.get(cell)) is not None:
                    by_time.remove((write_time(before), cell))
                if value is not None:
                    added.append((write_time(value), cell))
            by_time.add_all(added)

    def clear(self) -> None:
        self._values.clear()
        self._scanned, self._rows, self.position = set(), {}, 0
        self._by_time = self._sort_by_time()

    def sync(self) -> None: ...

    def close(self) -> None: ...
