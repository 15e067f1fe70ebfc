"""What a session leaves behind for those who watch it: plain numbers, a histogram, and what its thread does right now.

Owns the words and shapes only. Whatever is written here is written by the session's own thread, per transaction or per
call and never per record; any thread may read it. It must never do I/O, take a lock or raise: watching a worker must
not be able to hold it up. eos/health turns it into probes, metrics and a page.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

# What the session's thread can be doing. "calling" is a call that only the cluster can answer.
Doing = Literal["starting", "polling", "handling", "calling", "stopping", "stopped"]


class Pulse:
    """What the thread does, since when, and when it last moved; times are by `clock`.

    A thread that polls, hands out records or calls again moves; one that does not move for longer than its limits
    allow is stuck. One tuple, so that a reader never sees half of a beat.
    """

    __slots__ = ("_clock", "_now", "_thread")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        now = clock()
        self._now: tuple[Doing, str, float, float] = ("starting", "", now, now)
        self._thread = threading.get_ident()

    def adopt(self) -> None:
        """It is the calling thread's from now on; what other threads do for it (a commit) is not its own move."""
        self._thread = threading.get_ident()

    def beat(self, doing: Doing, what: str = "") -> None:
        """The thread moved: it does `doing` from now on (or still); `what` names the call."""
        if threading.get_ident() != self._thread:
            return
        now = self._clock()
        before, called, since, _ = self._now
        self._now = (doing, what, since if doing == before and what == called else now, now)

    @property
    def now(self) -> tuple[Doing, str, float, float]:
        """(doing, the call's name or "", since, last moved)."""
        return self._now


class Histogram:
    """Counts per upper bound (inclusive, as Prometheus reads `le`), the last one without a bound; seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


def add(counts: dict[str, int], cause: str) -> None:
    """One more of `cause`."""
    counts[cause] = counts.get(cause, 0) + 1


COMMIT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
END_TO_END_BOUNDS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
