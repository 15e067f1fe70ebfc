"""Holds the values of a running session that observers may read: numbers, histograms, and its thread's activity.

The session's own thread writes these, per transaction or per call and never per record; any thread may read them.
Nothing here does I/O, takes a lock or raises, because watching a worker must not be able to delay it. eos/health turns
the values into probes, metrics and a page.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Activities of the session's thread. "calling" is a call that only the cluster can answer.
Doing = Literal["starting", "polling", "handling", "calling", "stopping", "stopped"]


class Pulse:
    """Holds the thread's activity, when it began, and when the thread last moved; times are by `clock`.

    A thread moves when it polls, hands out records or repeats a call. A thread that does not move for longer than its
    limits allow is stuck. The value is one tuple, so that a reader never sees half of an update.
    """

    __slots__ = ("_clock", "_now", "_thread")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        now = clock()
        self._now: tuple[Doing, str, float, float] = ("starting", "", now, now)
        self._thread = threading.get_ident()

    def watch_calling_thread(self) -> None:
        """Watch the calling thread from now on. Beats of other threads, such as a commit's, do not count."""
        self._thread = threading.get_ident()

    def beat(self, doing: Doing, what: str = "") -> None:
        """Record progress of the thread, which is now (or still) doing `doing`; `what` names the call."""
        if threading.get_ident() != self._thread:
            return
        now = self._clock()
        before, called, since, _ = self._now
        self._now = (doing, what, since if doing == before and what == called else now, now)

    @property
    def now(self) -> tuple[Doing, str, float, float]:
        """Return the activity, the name of the call or "", the time of its start, and the time of the last move."""
        return self._now


class Histogram:
    """Holds one count per upper bound in seconds (inclusive, as Prometheus reads `le`), and one for values above the
    last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


def add(counts: dict[str, int], cause: str) -> None:
    """Count one more of `cause`."""
    counts[cause] = counts.get(cause, 0) + 1


COMMIT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
END_TO_END_BOUNDS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


@dataclass
class Counters:
    """Counts the totals of a session since its start."""

    records_in: int = 0
    records_out: int = 0
    skipped: int = 0
    dead_letters: int = 0
    late: int = 0
    """Records whose windows were closed."""
    duplicates: int = 0
    """Records whose id the function had handled already."""
    retries: int = 0
    repeated: int = 0
    """Input records that the client delivered a second time; they are dropped."""
    transactions: int = 0
    aborts: int = 0
    rebuilds: int = 0
    replacements: Mapping[str, int] = field(default_factory=dict)
    aborts_by_cause: dict[str, int] = field(default_factory=dict)
    """`application`, `rebalance`, `refused` (a record), or the call that failed (eos.errors.Call)."""
    rebuilds_by_cause: dict[str, int] = field(default_factory=dict)
    """`timeout`, `group`, or the call whose outcome was unknown."""
    rebalances: Mapping[str, int] = field(default_factory=dict)
    """How often the group `assigned` or `revoked` partitions, or partitions were `lost`."""
    commit_seconds: Histogram = field(default_factory=lambda: Histogram(COMMIT_BOUNDS_S))
    """Time from sending the offsets until the commit is answered."""
    end_to_end_seconds: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BOUNDS_S))
    """Once per transaction: the age of its first input record, by the record's timestamp, when it was committed."""

    def count_commit(self, taken: int, sent: int, skipped: int, dead_letters: int, commit_s: float) -> None:
        self.transactions += 1
        self.records_in += taken
        self.records_out += sent
        self.skipped += skipped
        self.dead_letters += dead_letters
        self.commit_seconds.observe(commit_s)

    def count_time(self, late: int, duplicates: int) -> None:
        self.late += late
        self.duplicates += duplicates

    def count_abort(self, cause: str) -> None:
        self.aborts += 1
        add(self.aborts_by_cause, cause)

    def count_rebuild(self, cause: str) -> None:
        self.rebuilds += 1
        add(self.rebuilds_by_cause, cause)

    def count_retry(self) -> None:
        self.retries += 1

    def note_repeated(self, total: int) -> None:
        self.repeated = total


@dataclass(frozen=True)
class Snapshot:
    """Describes a session as a member of its group. Only the session's own thread may create one."""

    is_member: bool
    """Whether the group coordinator knows the member."""
    unlocated: int
    """Assigned partitions whose start offset is unknown."""
    restoring: int
    """Assigned partitions whose state is being restored."""
    lags: Mapping[tuple[str, int], int | None]
    """Lag of each partition that is read; None if unknown."""
