"""Orders the cells of a timed store by time, for values that are kept in memory.

Most new entries are later than all others: the ids of deduplication, for example, are written at the time of their
task, which never falls. Such entries are appended. Only the others are sorted in.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from eos.app.layers import sorted_list

Entry = tuple[int, bytes]
"""A time in ms, and a cell."""


class TimeOrder:
    """Holds entries in order. Change it only with `add_all` and `remove`."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._appended = deque(sorted(entries))
        self._removed: set[Entry] = set()  # entries that are still in `_appended`
        self._sorted_in: Any = sorted_list()()

    def __iter__(self) -> Iterator[Entry]:
        kept = (entry for entry in self._appended if entry not in self._removed) if self._removed else self._appended
        return heapq.merge(kept, self._sorted_in) if self._sorted_in else iter(kept)

    def add_all(self, entries: list[Entry]) -> None:
        """Add new entries."""
        appended = self._appended
        for entry in sorted(entries):
            if not appended or entry > appended[-1]:
                appended.append(entry)
            elif entry in self._removed:
                self._removed.remove(entry)
            else:
                self._sorted_in.add(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry, which must exist."""
        if self._appended and self._appended[0] == entry:
            self._appended.popleft()
        elif entry in self._sorted_in:
            self._sorted_in.remove(entry)
        else:
            self._removed.add(entry)
            if 2 * len(self._removed) > len(self._appended):
                self._appended, self._removed = deque(x for x in self._appended if x not in self._removed), set()
