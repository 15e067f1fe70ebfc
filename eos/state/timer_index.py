"""Finds the due timers of one task, in order: committed ones, and those of the open transaction.

Timers are ordered by due time, then by key and name. Committed timers are read from the values' own index in order, and
only as far as they are needed. A timer that was moved or cleared stays in the heap until it is looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from eos.app.timers import NEVER
from eos.state.values import Values


class TimerIndex:
    """Finds the due timers of one task. `due_ms` returns when a timer is due, as the open transaction sees it; None if
    the timer is not set.
    """

    def __init__(self, store: bytes, values: Values, due_ms: Callable[[bytes], int | None]) -> None:
        self._store, self._values, self._due_ms = store, values, due_ms
        self.next_due = 0
        """No timer is due before this time, in milliseconds since the epoch."""
        self.least_set = NEVER
        """The least due time of the timers that were set after the last call of `due`."""
        self.committed()

    def committed(self) -> None:
        """Start to read the committed timers again after a commit of the open transaction. `next_due` stays valid."""
        self._heap: list[tuple[int, bytes]] = []
        self._committed: Iterator[tuple[bytes, int]] | None = None
        self._head: tuple[int, bytes] | None = None
        self._returned: list[tuple[int, bytes]] = []  # by the last call of `due`; some may have fired since

    def rolled_back(self) -> None:
        """Forget the changes of the open transaction, which may have moved the first timers."""
        self.committed()
        self.next_due = 0

    def note_set(self, cell: bytes, due_ms: int) -> None:
        """Record that the open transaction set this timer."""
        heapq.heappush(self._heap, (due_ms, cell))
        if due_ms < self.next_due:
            self.next_due = due_ms
        if due_ms < self.least_set:
            self.least_set = due_ms

    def due(self, until_ms: int, most: int) -> list[tuple[int, bytes]]:
        """Return the due time and cell of at most `most` timers that are due by this time, in order."""
        if until_ms < self.next_due:
            return []
        self.least_set = NEVER
        for before in self._returned:
            if self._due_ms(before[1]) == before[0]:
                heapq.heappush(self._heap, before)
        found: list[tuple[int, bytes]] = []
        while len(found) < most and (timer := self._pop_first()) is not None:
            if timer[0] > until_ms:
                heapq.heappush(self._heap, timer)
                break
            if not found or found[-1] != timer:
                found.append(timer)
        self._returned = found
        self.next_due = found[0][0] if found else self._first_due()
        return found

    def _first_due(self) -> int:
        if (timer := self._pop_first()) is None:
            return NEVER
        heapq.heappush(self._heap, timer)
        return timer[0]

    def _pop_first(self) -> tuple[int, bytes] | None:
        """Remove and return the first timer that is still set for its time."""
        while True:
            head = self._peek_committed()
            if self._heap and (head is None or self._heap[0] <= head):
                timer = heapq.heappop(self._heap)
            elif head is not None:
                timer, self._head = head, None
            else:
                return None
            if self._due_ms(timer[1]) == timer[0]:
                return timer

    def _peek_committed(self) -> tuple[int, bytes] | None:
        if self._committed is None:
            self._committed, self._head = self._values.oldest(self._store), None
        if self._head is None and (found := next(self._committed, None)) is not None:
            self._head = found[1], found[0]
        return self._head
