"""A session's pace: how many records are polled and taken, and when a transaction begins.

Owns the interval, the limits, the pause behind an abort and the search for a record that the broker refuses. It does no
I/O and has no clock: it is told the time (World.now(), in seconds) and what happened.
"""

from __future__ import annotations

import math

# Of one poll on a backlog: what stays in a processor's cache until it is handled, and while it runs the producer has
# nothing to send. Fewer records cost a call for each few of them.
_CHUNK, _SMALLEST_CHUNK, _CHUNK_BYTES = 1_000, 100, 256_000
# A transaction that took fewer records has no wait that is worth using; and the group's callbacks, which a poll serves,
# had better come behind its commit: a partition that goes before makes it abort.
_AHEAD_BEHIND = 2_000
# Fetched while a flush or a commit is waited for, at most: what 20 ms of waiting fetch, and what the processor's last
# cache keeps until it is handled (32 MB took a tenth more of its time with values of 1 KB:
# docs/engineering/measurements.md).
_AHEAD, _AHEAD_BYTES = 20_000, 4 << 20
# Inputs of this many bytes are hardly why a transaction took long: at 64 KB/s they are sent within a second. A
# cluster that answers late takes as long for one record, and smaller transactions only multiply its delay.
_FEW_BYTES = 64 << 10
_LONGEST_PAUSE_S, _PAUSE_S, _DOUBLINGS = 5.0, 0.05, 7  # behind an abort


class Pacing:
    """`most`: records of one transaction. `together`: how many the application handles at once; a poll of a backlog
    takes whole batches of them. `timeout_s`: how long the sends of a transaction may take."""

    def __init__(self, interval_s: float, most: int, together: int = 1, timeout_s: float = math.inf) -> None:
        self.interval_s, self._most, self.together, self._timeout_s = interval_s, most, together, timeout_s
        self.limit = most
        """Records that the next transaction takes at most; shrinks while one that the broker refuses is being found,
        and where more of them cannot be sent in time."""
        self.aborts_in_a_row = 0
        self._timed_out = False  # a transaction, and since then none took the most
        self._last_timed_out = False  # since then none committed
        self._few = 1  # inputs of _FEW_BYTES
        self._chunk = _SMALLEST_CHUNK
        self._suspects = 0  # the next so many records have the refused one among them
        self._began_at = 0.0
        self._gathering_since = 0.0  # before it nothing waited for the next transaction
        self._pause_until = 0.0

    # ---- how much ---------------------------------------------------------------------------------------------

    def saw(self, size: int) -> None:
        """A poll brought a record with a value of so many bytes."""
        chunk = min(_CHUNK, max(_SMALLEST_CHUNK, _CHUNK_BYTES // max(1, size)))
        self._chunk = max(chunk - chunk % self.together, self.together)
        self._few = max(1, _FEW_BYTES // max(1, size))

    def first(self, waiting: int) -> int:
        """How many to poll before a transaction begins. At least one, even when there is no room: the group's callbacks
        must be served."""
        return min(max(1, self._most - waiting), _CHUNK)

    def more(self, taken: int) -> int:
        """How many to poll for the open transaction, which took so many."""
        return min(self._chunk, self._most - taken)

    def ahead(self, taken: int, waiting: int, size: int) -> int:
        """How many to fetch while the end of a transaction that took `taken` is waited for: the next records of a
        backlog. So many wait for the next transaction already, the last of them of `size` bytes."""
        if taken < _AHEAD_BEHIND or waiting >= self._most:
            return 0
        return max(0, min(self._chunk, min(_AHEAD, _AHEAD_BYTES // max(1, size)) - waiting))

    # ---- when -------------------------------------------------------------------------------------------------

    def left_s(self, now: float) -> float:
        """Until one interval since the last transaction's begin is over."""
        return max(0.0, self._began_at + self.interval_s - now)

    def gather_s(self, now: float) -> float:
        """How long a poll waits for more before a transaction begins. Behind an abort, whose records come again, it
        does not."""
        return 0.0 if self.aborts_in_a_row else self.left_s(now)

    def gathers(self, now: float) -> None:
        """What is polled from now on waits for the next transaction."""
        self._gathering_since = now

    def delayed(self, seconds: float) -> None:
        """The next transaction waited for a new producer, which is no gathering."""
        self._gathering_since += seconds

    def began(self, now: float) -> float:
        """A transaction begins; returns until when it hands records out. Gathering and handing out together take one
        interval, so that a record does not wait for two; half an interval is left, or a slow function's transactions
        would shrink to single records."""
        self._began_at = now
        return now + max(self.interval_s - (now - self._gathering_since), self.interval_s / 2)

    def pause(self, now: float, seconds: float) -> None:
        """No transaction begins before so many seconds are over."""
        self._pause_until = max(self._pause_until, now + seconds)

    def pause_left_s(self, now: float) -> float:
        return max(0.0, self._pause_until - now)

    # ---- how transactions ended -------------------------------------------------------------------------------

    def committed(self, taken: int, open_s: float = 0.0, sending_s: float = 0.0) -> None:
        """Note a transaction that was open for `open_s`, of which its outputs were sent for `sending_s`.

        The next one may take more records where half of the time was enough, and takes fewer where sending took more
        than three quarters of it.
        """
        self.aborts_in_a_row, self._last_timed_out = 0, False
        self._suspects = max(0, self._suspects - taken)
        if self._suspects:
            self.limit = max(1, self._suspects // 2)
        elif open_s < self._timeout_s / 2:
            # After a time-out slowly: a quota is about an average, so that what one could send the next may not.
            fast = self.limit < self._few or (open_s < self._timeout_s / 4 and not self._timed_out)
            self.limit = min(self._most, self.limit * 2 if fast else self.limit + self.limit // 4 + 1)
            self._timed_out = self._timed_out and self.limit < self._most
        elif sending_s > self._timeout_s * 3 / 4:
            at_most = min(self.limit, taken)
            self.limit = max(1, at_most * 3 // 4, min(at_most, self._few))

    def timed_out(self, taken: int, delivered: float | None) -> bool:
        """Note a transaction that took longer than it may. `delivered` is the share of its outputs that arrived; None:
        its records were handled too slowly. Return whether the next ones can take fewer records at all.

        The next one takes half of what would have gone through. A small one all of whose outputs arrived is repeated
        once with the same records: the cluster was slow, whatever it took.
        """
        share = 1.0 if delivered is None else min(1.0, delivered)
        limit = int(taken * share / 2)
        if not self._last_timed_out and delivered is not None and share == 1.0:
            limit = max(limit, min(taken, self._few))
        self.limit, self._timed_out, self._last_timed_out = max(1, limit), True, True
        return taken > 1

    def aborted(self, now: float) -> None:
        """The group or the cluster needs a moment; without a pause this would spin through aborts."""
        self.aborts_in_a_row += 1
        self.pause(now, min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(self.aborts_in_a_row, _DOUBLINGS)))

    def rebuilt(self) -> None:
        """As good as an abort; its pause was the new producer."""
        self.aborts_in_a_row += 1

    def refused_among(self, taken: int) -> None:
        """A record among those taken is refused for good, nobody knows which: halves find it, at once."""
        self._suspects, self.limit = taken, max(1, taken // 2)
        self._pause_until = 0.0

    def refused_found(self) -> None:
        self._suspects = 0
        self._pause_until = 0.0
