"""Holds the values of one task, and the changes of the open transaction to them.

A task is a function and a partition of its source.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from eos.app.cells import CLOCK_TIMERS, EVENT_TIMERS, HEADER, TIME, store_prefix
from eos.app.expiry import TIME_BYTES, write_time
from eos.app.layers import Bounds, Layer
from eos.app.timers import decode_due, encode_due
from eos.state.timer_index import TimerIndex
from eos.state.values import InMemory, Value, Values, own_entries

# A transaction deletes at most this many expired entries, or twice as many as it changed if that is more. This bounds
# the transaction and keeps up with expiry.
_MAX_EXPIRED = 1_000
_MAX_BOUNDS = 4_096  # per task, about 1 MB
_CLOCK_TIMERS = store_prefix(CLOCK_TIMERS)


# A plain tuple, because one is made for each key that a transaction changed.
ChangelogEntry = tuple[bytes, Value, int]
"""A changelog entry to write: the cell, its value, and its timestamp in ms; 0: the time of producing."""


class Task(Layer):
    """Holds the state of one task, with the changes of the open transaction as a layer on top.

    `ttls`: milliseconds by the name of a store. `clock`: returns the current time in seconds. The task's time never
    runs ahead of it: a record with a future timestamp must not expire recent entries. `has_timers`: the task's function
    sets timers, so the task keeps its time. `follows`: the records of the task do not move its time
    (eos/worker/watermarks.py).
    """

    timers: TimerIndex
    """The timers of event time."""
    clock_timers: TimerIndex

    def __init__(
        self,
        values: Values | None = None,
        ttls: Mapping[bytes, int] | None = None,
        clock: Callable[[], float] | None = None,
        header: bytes | None = None,
        has_timers: bool = False,
        follows: bool = False,
    ) -> None:
        self.values: Values = InMemory() if values is None else values
        """The committed values."""
        super().__init__(self.values)
        self._committed_bounds: OrderedDict[bytes, Bounds] = OrderedDict()
        self._ttls, self._clock = ttls or {}, clock
        self._clock_ms = 0  # the clock's value when it was last read
        # the header to write; None if it is written already
        self._header = None if header == self.values.get(HEADER) else header
        # The time, and the number of timers if there are any.
        time_ms, _, count = (self.values.get(TIME) or b"0").partition(b" ")
        self.time_ms = self._committed_ms = int(time_ms)
        self.timer_count = self._committed_count = int(count or 0)
        self.aborted = False
        """True if the changelog may have aborted records after the values' position."""
        self._known_end = self.values.position
        self._own_entries = own_entries(self.values)
        self.has_timers, self._follows = has_timers, follows
        if has_timers:
            self.timers = TimerIndex(EVENT_TIMERS.encode(), self.values, self.due_ms)
            self.clock_timers = TimerIndex(CLOCK_TIMERS.encode(), self.values, self.due_ms)

    @property
    def size(self) -> int:
        """Return how many values of functions are committed. Any thread may call this."""
        return len(self.values) - self._own_entries

    @property
    def has_changes(self) -> bool:
        """Return whether the open transaction handled records here that changed anything."""
        return bool(self.changed) or self.time_ms > self._committed_ms

    def bounds(self, row: bytes) -> Bounds | None:
        return self._bounds.get(row) or self._committed_bounds.get(row)

    def at(self, timestamp_ms: int) -> int:
        if self._follows:
            return self.time_ms
        if not 0 <= timestamp_ms <= self._clock_ms and self._clock is not None:
            self._clock_ms = int(self._clock() * 1000)
            timestamp_ms = min(timestamp_ms, self._clock_ms) if timestamp_ms >= 0 else self._clock_ms
        return timestamp_ms if timestamp_ms > self.time_ms else self.time_ms

    def clock_ms(self) -> int:
        return int((time.time if self._clock is None else self._clock)() * 1000)

    def clocks(self) -> tuple[tuple[TimerIndex, int], ...]:
        """Return the timers of event time and of the wall clock, each with the present time."""
        return (self.timers, self.time_ms), (self.clock_timers, self.clock_ms())

    def due_ms(self, cell: bytes) -> int | None:
        value = self.get(cell)
        return None if value is None else decode_due(value)

    def set_timer(self, cell: bytes, due_ms: int | None) -> None:
        is_set = self.get(cell) is not None
        if due_ms is not None:
            self.timer_count -= is_set  # `add_timer` counts it again
            self.add_timer(cell, due_ms)
        elif is_set:
            self.clear_timer(cell)

    def add_timer(self, cell: bytes, due_ms: int) -> None:
        self.timer_count += 1
        self.changed[cell] = encode_due(due_ms)
        timers = self.clock_timers if cell.startswith(_CLOCK_TIMERS) else self.timers
        timers.note_set(cell, due_ms)

    def clear_timer(self, cell: bytes) -> None:
        self.timer_count -= 1
        self.put(cell, None)

    def expire(self) -> None:
        """Add the last changes of the open transaction: the task's time, and deletes of the oldest expired entries."""
        if self._header is not None:
            self.put(HEADER, self._header)
        moved = self.time_ms > self._committed_ms or self.timer_count != self._committed_count
        if (self._ttls or self.has_timers) and moved:
            self.put(TIME, b"%d %d" % (self.time_ms, self.timer_count) if self.has_timers else b"%d" % self.time_ms)
        limit = max(_MAX_EXPIRED, 2 * len(self.changed))
        for store, ttl_ms in self._ttls.items():
            for cell, written_ms in itertools.islice(self.values.oldest(store), limit):
                if written_ms + ttl_ms > self.time_ms:
                    break
                if cell not in self.changed:
                    self.changed[cell] = None
        self._rows = None  # the cached rows do not contain these deletions

    def changelog_entries(self) -> Iterator[ChangelogEntry]:
        has_ttl = tuple(store_prefix(store.decode()) for store in self._ttls)
        for cell, value in self.changed.items():
            if not has_ttl or not cell.startswith(has_ttl):
                yield cell, value, 0
            elif value is None:
                yield cell, None, self.time_ms
            else:
                yield cell, value[TIME_BYTES:], write_time(value)

    @property
    def end(self) -> int:
        """Return the end of the changelog once the open transaction is committed.

        It counts one record for each changed cell, and the transaction marker. Aborted records before it count once
        `skip_to` is called, so the end is never too high.
        """
        return self._known_end + (len(self.changed) + 1 if self.changed else 0)

    def skip_to(self, stable: int) -> None:
        """Count the changelog before this offset as known once the open transaction is committed.

        The commit shows that only this task had written there.
        """
        self._known_end, self.aborted = max(self._known_end, stable), False

    def committed(self, as_of: float) -> None:
        """Apply the committed transaction's changes; its offsets were sent after `as_of` (seconds since the epoch)."""
        if self.changed:
            self.values.apply(self.changed, self.end, as_of)
            if self._header is not None or self.time_ms > self._committed_ms:
                self._header, self._own_entries = None, own_entries(self.values)
        self._committed_ms, self._committed_count = self.time_ms, self.timer_count
        for row, bounds in self._bounds.items():
            self._committed_bounds[row] = bounds
            self._committed_bounds.move_to_end(row)
        while len(self._committed_bounds) > _MAX_BOUNDS:
            self._committed_bounds.popitem(last=False)
        self._reset_layer()
        if self.has_timers:
            self.timers.committed()
            self.clock_timers.committed()

    def roll_back(self) -> None:
        self.aborted = self.aborted or bool(self.changed)
        self._reset_layer()
        if self.has_timers:
            self.timers.rolled_back()
            self.clock_timers.rolled_back()

    def _reset_layer(self) -> None:
        self.changed, self._rows, self._bounds = {}, None, {}
        self.time_ms, self.timer_count = self._committed_ms, self._committed_count
        self._known_end = self.values.position
