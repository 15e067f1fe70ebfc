"""Where the committed values of a task are: in memory, or in a folder (eos/state/folders.py).

Either stands for all of the changelog before `position`, so what is to be read at a start is what lies behind. Nothing
here needs an engine: Spark's executors and tests without a broker have none.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from eos.app.ageing import TIME_BYTES, apart
from eos.app.cells import HEADER, TIME, row_length, store_of
from eos.app.state import Span

Value = bytes | None
"""None: there is none, and the changelog has a tombstone."""


class Values(Protocol):
    """Where a store has a time-to-live, its values begin with the time of their write (eos/app/ageing.py)."""

    position: int
    as_of: float
    """A moment at which nothing of this task had been written to the changelog after `position`, in seconds since the
    epoch: what was deleted later still has its tombstone there for `delete.retention.ms`."""

    @property
    def size_bytes(self) -> int:
        """On disk."""

    def __len__(self) -> int: ...

    def get(self, cell: bytes) -> bytes | None: ...

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        """The fields of a row and their values, in order; not beyond the next `apply`."""

    def oldest(self, store: bytes) -> Iterator[tuple[bytes, int]]:
        """The cells of a store with a time-to-live and when each was written, the oldest first; as `scan`."""

    def apply(self, changes: Mapping[bytes, Value], position: int, as_of: float) -> None: ...

    def clear(self) -> None: ...

    def sync(self) -> None:
        """Write all of it to the disk, if it can be."""

    def close(self) -> None: ...


def own_entries(values: Values) -> int:
    """Return how many of the values are the task's own and no function's."""
    return sum(values.get(cell) is not None for cell in (TIME, HEADER))


class InMemory:
    position, as_of = 0, 0.0
    size_bytes = 0

    def __init__(self, values: Mapping[bytes, bytes] | None = None, ageing: Collection[bytes] = ()) -> None:
        self._values = dict(values or {})
        # In the order of their writes, which is that of their times, or nearly where a time-to-live is new.
        self._written: dict[bytes, dict[bytes, None]] = {store: {} for store in ageing}
        self._fields: dict[bytes, list[bytes]] | None = None  # of each row, in order, once one was scanned

    def __len__(self) -> int:
        return len(self._values)

    def get(self, cell: bytes) -> bytes | None:
        return self._values.get(cell)

    def items(self) -> Collection[tuple[bytes, bytes]]:
        return self._values.items()

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        if self._fields is None:
            self._fields = {}
            for cell in sorted(self._values):
                end = row_length(cell)
                self._fields.setdefault(cell[:end], []).append(cell[end:])
        fields = self._fields.get(row, [])
        stop = len(fields) if span.stop is None else bisect.bisect_left(fields, span.stop)
        few = fields[bisect.bisect_left(fields, span.start) : stop]
        return ((field, self._values[row + field]) for field in (reversed(few) if span.back else few))

    def _note_fields(self, rows: dict[bytes, list[bytes]], changes: Mapping[bytes, Value]) -> None:
        for cell, value in changes.items():
            if (value is None) is not (cell in self._values):
                continue  # it was there and is, or was not and is not
            end = row_length(cell)
            fields = rows.setdefault(cell[:end], [])
            at = bisect.bisect_left(fields, cell[end:])
            if value is not None:
                fields.insert(at, cell[end:])
            elif len(fields) > 1:
                del fields[at]
            else:
                del rows[cell[:end]]

    def oldest(self, store: bytes) -> Iterator[tuple[bytes, int]]:
        return ((cell, apart(self._values[cell])[0]) for cell in self._written[store])

    def apply(self, changes: Mapping[bytes, Value], position: int, as_of: float) -> None:
        if self._fields is not None:
            self._note_fields(self._fields, changes)
        for cell, value in changes.items():
            if value is None:
                self._values.pop(cell, None)
            else:
                self._values[cell] = value
        if self._written:
            self._note_written(changes)
        self.position, self.as_of = position, as_of

    def _note_written(self, changes: Mapping[bytes, Value]) -> None:
        for cell, value in sorted(changes.items(), key=lambda change: (change[1] or b"")[:TIME_BYTES]):
            if (written := self._written.get(store_of(cell))) is not None:
                written.pop(cell, None)
                if value is not None:
                    written[cell] = None

    def clear(self) -> None:
        self._values, self._fields, self.position = {}, None, 0
        self._written = {store: {} for store in self._written}

    def sync(self) -> None: ...

    def close(self) -> None: ...
