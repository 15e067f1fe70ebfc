"""Keeps the committed values of a task, in memory or in a folder (eos/state/folders.py).

The values cover the changelog before `position`, so a restart reads only the records after it. Nothing here needs an
engine: Spark's executors and tests without a broker have none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Protocol

from eos.app.cells import HEADER, TIME, row_length, store_of
from eos.app.expiry import TIME_BYTES, split_write_time
from eos.app.layers import Overlay, Span, by_row
from eos.app.layers import Value as Value

_EMPTY: Final[Overlay[bytes]] = Overlay()


class Values(Protocol):
    """Gives access to the committed values of one task.

    If a store has a time-to-live, each of its values begins with the time of its write (eos/app/expiry.py).
    """

    position: int
    as_of: float
    """A time, in seconds since the epoch, at which the changelog had no records of this task after `position`.

    The tombstones of later deletes stay in the changelog for `delete.retention.ms`.
    """

    @property
    def size_bytes(self) -> int:
        """Return the size on disk in bytes."""

    def __len__(self) -> int: ...

    def get(self, cell: bytes) -> bytes | None: ...

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        """Yield the fields of a row and their values, in order.

        The iterator is valid until the next `apply`.
        """

    def oldest(self, store: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the cells of a store with a time-to-live and the time of each write in ms, the oldest first.

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

    def __init__(self, values: Mapping[bytes, bytes] | None = None, expiring: Collection[bytes] = ()) -> None:
        self._values = dict(values or {})
        # In the order of their writes. This is the order of their times, except shortly after a time-to-live is added.
        self._write_order: dict[bytes, OrderedDict[bytes, None]] = {store: OrderedDict() for store in expiring}
        self._scanned: set[bytes] = set()  # stores whose values are in `_rows` too
        self._rows: dict[bytes, Overlay[bytes]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, cell: bytes) -> bytes | None:
        return self._values.get(cell)

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
        return ((cell, split_write_time(self._values[cell])[0]) for cell in self._write_order[store])

    def apply(self, changes: Mapping[bytes, Value], position: int, as_of: float) -> None:
        if self._scanned:
            self._update_rows(changes)
        for cell, value in changes.items():
            if value is None:
                self._values.pop(cell, None)
            else:
                self._values[cell] = value
        if self._write_order:
            self._note_write_order(changes)
        self.position, self.as_of = position, as_of

    def _note_write_order(self, changes: Mapping[bytes, Value]) -> None:
        for cell, value in sorted(changes.items(), key=lambda change: (change[1] or b"")[:TIME_BYTES]):
            if (written := self._write_order.get(store_of(cell))) is not None:
                written.pop(cell, None)
                if value is not None:
                    written[cell] = None

    def clear(self) -> None:
        self._values, self._scanned, self._rows, self.position = {}, set(), {}, 0
        self._write_order = {store: OrderedDict() for store in self._write_order}

    def sync(self) -> None: ...

    def close(self) -> None: ...
