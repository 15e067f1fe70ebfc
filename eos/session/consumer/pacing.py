"""Decides a session's pace: how many records it polls and takes, and when a transaction begins.

Owns the interval, the limits, the pause after an abort and the search for a record that the broker refuses. It does no
I/O and has no clock: its caller passes the time (World.now(), in seconds) and reports what happened.
"""

from __future__ import annotations

import math

# Limits of one poll on a backlog. The records must stay in the processor's cache, and polls must be short, because the
# producer has nothing to send during a poll. With fewer records, the overhead of each call dominates.
_CHUNK, _SMALLEST_CHUNK, _CHUNK_BYTES = 1_000, 100, 256_000
# Only transactions of at least this many records prefetch, because a smaller one ends too fast. A prefetch polls, and a
# poll also runs the group's callbacks, which should wait for the commit: a partition that is revoked before the commit
# makes the transaction abort.
_PREFETCH_FROM = 2_000
# Maximum numbers of records and bytes to prefetch during a flush or a commit: as many as arrive in 20 ms and stay in
# the processor's last cache until they are handled (32 MB took a tenth more time with 1 KB values:
# docs/engineering/measurements.md).
_PREFETCH, _PREFETCH_BYTES = 20_000, 4 << 20
# Inputs of this size are rarely the reason for a slow transaction: at 64 KB/s they are sent within a second. A cluster
# that answers late takes as long for a single record, so smaller transactions would only multiply its delay.
_FEW_BYTES = 64 << 10
# Pauses after aborts: the longest, the first, and the number of doublings.
_LONGEST_PAUSE_S, _PAUSE_S, _DOUBLINGS = 5.0, 0.05, 7


class Pacing:
    """Decides the pace of one session. `most`: maximum number of records of one transaction. `handled_at_once`: how
    many records the application handles at once; a poll of a backlog takes whole batches of them. `timeout_s`: how many
    seconds the sends of a transaction may take."""

    def __init__(self, interval_s: float, most: int, handled_at_once: int = 1, timeout_s: float = math.inf) -> None:
        self.interval_s, self._timeout_s = interval_s, timeout_s
        self._max_records, self.handled_at_once = most, handled_at_once
        self.limit = most
        """The maximum number of records of the next transaction. Shrinks during the search for a refused record, and
        after transactions whose records could not be sent in time."""
        self.aborts_in_a_row = 0
        self._recovers_from_timeout = False  # no transaction has been allowed `most` records since a timeout
        self._last_timed_out = False  # no transaction has committed since a timeout
        self._records_of_few_bytes = 1  # how many input records together have _FEW_BYTES
        self._chunk = _SMALLEST_CHUNK
        self._records_left_to_search = 0  # the refused record is among this many next records; 0: no search
        self._began_at = 0.0
        self._gathering_since = 0.0
        self._pause_until = 0.0

    # ---- how much ---------------------------------------------------------------------------------------------

    def observe_size(self, size: int) -> None:
        """Record that a poll returned a record with a value of this many bytes."""
        chunk = min(_CHUNK, max(_SMALLEST_CHUNK, _CHUNK_BYTES // max(1, size)))
        self._chunk = max(chunk - chunk % self.handled_at_once, self.handled_at_once)
        self._records_of_few_bytes = max(1, _FEW_BYTES // max(1, size))

    def most_to_gather(self, waiting: int) -> int:
        """Return how many records to poll before a transaction begins. At least one, even without room: the group's
        callbacks must run. Waiting records count, or they would pile up while a slow function takes a few at a time."""
        return max(1, min(self._max_records, _CHUNK) - waiting)

    def most_to_add(self, taken: int) -> int:
        """Return how many records to poll for the open transaction, which took `taken`."""
        return min(self._chunk, self._max_records - taken)

    def most_to_prefetch(self, taken: int, waiting: int, size: int) -> int:
        """Return how many records to fetch while a transaction that took `taken` ends. `waiting` records are fetched
        already, the last of them of `size` bytes."""
        if taken < _PREFETCH_FROM or waiting >= self._max_records:
            return 0
        return max(0, min(self._chunk, min(_PREFETCH, _PREFETCH_BYTES // max(1, size)) - waiting))

    # ---- when -------------------------------------------------------------------------------------------------

    def left_s(self, now: float) -> float:
        """Return the seconds until one interval after the last transaction began."""
        return max(0.0, self._began_at + self.interval_s - now)

    def gather_s(self, now: float) -> float:
        """Return for how many seconds a poll waits for more records before a transaction begins. After an abort, whose
        records are handed out again, it does not wait."""
        return 0.0 if self.aborts_in_a_row else self.left_s(now)

    def begin_gathering(self, now: float) -> None:
        """Record that the gathering of records for the next transaction begins now."""
        self._gathering_since = now

    def exclude(self, seconds: float) -> None:
        """Exclude the wait for a new producer from the gathering time."""
        self._gathering_since += seconds

    def begin(self, now: float) -> float:
        """Record that a transaction begins, and return the time at which it stops handing out records.

        Gathering and handing out together take one interval, so that a record does not wait for two. At least half an
        interval is left, or the transactions of a slow function would shrink to single records."""
        self._began_at = now
        return now + max(self.interval_s - (now - self._gathering_since), self.interval_s / 2)

    def pause(self, now: float, seconds: float) -> None:
        """Begin no transaction for this many seconds."""
        self._pause_until = max(self._pause_until, now + seconds)

    def pause_left_s(self, now: float) -> float:
        return max(0.0, self._pause_until - now)

    # ---- how transactions ended -------------------------------------------------------------------------------

    def committed(self, taken: int, open_s: float = 0.0, sending_s: float = 0.0) -> None:
        """Record the commit of a transaction that was open for `open_s` and sent its outputs during `sending_s` of that
        time.

        The next one may take more records if half of the timeout was enough, and takes fewer if sending took more than
        three quarters of it.
        """
        self.aborts_in_a_row, self._last_timed_out = 0, False
        self._records_left_to_search = max(0, self._records_left_to_search - taken)
        if self._records_left_to_search:
            self.limit = max(1, self._records_left_to_search // 2)
        elif open_s < self._timeout_s / 2:
            # Grow slowly after a timeout: a quota limits the average, so the next transaction may be throttled again.
            fast = self.limit < self._records_of_few_bytes or (
                open_s < self._timeout_s / 4 and not self._recovers_from_timeout
            )
            self.limit = min(self._max_records, self.limit * 2 if fast else self.limit + self.limit // 4 + 1)
            self._recovers_from_timeout = self._recovers_from_timeout and self.limit < self._max_records
        elif sending_s > self._timeout_s * 3 / 4:
            at_most = min(self.limit, taken)
            self.limit = max(1, at_most * 3 // 4, min(at_most, self._records_of_few_bytes))

    def timed_out(self, taken: int, delivered: float | None) -> bool:
        """Record a transaction that exceeded its timeout. `delivered` is the share of its outputs that arrived; None if
        its records were handled too slowly. Return whether the next transactions can take fewer records at all.

        The next one takes half of the records that would have arrived. A small one whose outputs all arrived is
        repeated once with the same records: the cluster was slow, and fewer records would not have helped.
        """
        share = 1.0 if delivered is None else min(1.0, delivered)
        limit = int(taken * share / 2)
        if not self._last_timed_out and delivered is not None and share == 1.0:
            limit = max(limit, min(taken, self._records_of_few_bytes))
        self.limit, self._recovers_from_timeout, self._last_timed_out = max(1, limit), True, True
        return taken > 1

    def aborted(self, now: float) -> None:
        """Pause after an abort: the group or the cluster needs a moment."""
        self.aborts_in_a_row += 1
        self.pause(now, min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(self.aborts_in_a_row, _DOUBLINGS)))

    def rebuilt(self) -> None:
        """Record a rebuild. It counts as an abort without a pause, because the init of the new producer took long
        enough.
        """
        self.aborts_in_a_row += 1

    def search_refused(self, taken: int) -> None:
        """Search for the record that the broker refuses among the `taken` ones, by halving and without a pause."""
        self._records_left_to_search, self.limit = taken, max(1, taken // 2)
        self._pause_until = 0.0

    def stop_search(self) -> None:
        self._records_left_to_search = 0
        self._pause_until = 0.0
