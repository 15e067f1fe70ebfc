"""Defines an open transaction, as the loop's body and the worker use it: take records, send, and end it early.

eos/session/loop.py decides the effect of these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol

from eos.encoding.dead_letters import make_dead_letter
from eos.encoding.frames import frames_of
from eos.encoding.sends import make_send
from eos.records import Feed, FeedResult, Headers, Record


class Phase(Enum):
    """Lists the phases of a transaction."""

    OPEN = "records are handed out and outputs sent"
    COMMITTING = "its commit was started: nothing more can be sent in it, whatever the outcome of the commit"
    ABORTED = "it was aborted before its commit was started"
    GIVEN_UP = "aborted while the loop's body still uses it: the body's calls do nothing until the next one begins"


class Turns(Protocol):
    """Defines the loop that a transaction belongs to: eos/session/loop.py, or the loop of a test."""

    group: str
    now: Callable[[], float]

    @property
    def taken(self) -> int:
        """Return the number of records that the open transaction took."""

    @property
    def waited_s(self) -> float:
        """Return the same as Transaction.waited_s."""

    def is_open(self, txn: Transaction) -> bool:
        """Return True if the transaction is open, False if it was given up during the loop's body. Raises IllegalState
        if it has ended.
        """

    def take(self, most: int) -> list[Record]:
        """Return at most `most` next records; none after a send failed."""

    def give_back(self, count: int) -> None:
        """Hand out the last `count` records again in the next transaction."""

    def send(self, *send: Any) -> None:
        """Send one record, given as a Send."""

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult: ...

    def end_now(self, txn: Transaction) -> bool:
        """Commit the transaction; return False if it was aborted and its records are handed out again."""

    def abort(self, txn: Transaction, why: str) -> None: ...


class Transaction:
    """Represents one open transaction and its input records. Valid until the loop's next turn.

    If the session has to give it up meanwhile (another instance took its place, the consumer died), the loop's body
    need not check for it: `records` and `take` hand out no more records, sends are ignored, `commit` returns False, and
    the records are handed out again.
    """

    __slots__ = (
        "_hand_out_until",
        "_loop",
        "_not_handed_out",
        "_records",
        "began_at",
        "dead_letters",
        "duplicates",
        "first_timestamp_ms",
        "handling_s",
        "late",
        "phase",
        "sent",
        "skipped",
        "waited_before",
    )  # fmt: skip

    def __init__(
        self, loop: Turns, began_at: float, until: float, first_timestamp_ms: int, waited_before: float = 0.0
    ) -> None:
        self._loop = loop
        # Both are times of World.now(). No more records are handed out after `until`.
        self.began_at, self._hand_out_until = began_at, until
        # Timestamp of the first record that was waiting when the transaction began.
        self.first_timestamp_ms = first_timestamp_ms
        self.phase = Phase.OPEN
        self.handling_s: float | None = None  # set once all records of the transaction are handled; see handling_until
        self.waited_before = waited_before  # `waited_s` when the transaction began
        self._records: Iterator[Record] | None = None
        self._not_handed_out = 0  # number of records taken by `records` but not handed out yet
        self.sent = self.skipped = self.dead_letters = self.late = self.duplicates = 0

    # ---- used by the loop --------------------------------------------------------------------------------------

    def finish_handling(self, now: float) -> None:
        """Give back records that were not handed out; note that all others are handled."""
        self._give_back_not_handed_out()
        self.handling_s = self.handling_until(now)

    def handling_until(self, now: float) -> float:
        """Return the seconds that the transaction's records took, without the seconds that sends waited for room."""
        if self.handling_s is not None:
            return self.handling_s
        return now - self.began_at - (self.waited_s - self.waited_before)

    def start_commit(self) -> None:
        self.phase = Phase.COMMITTING

    def mark_aborted(self, during_body: bool = False) -> None:
        """Mark the transaction as aborted, unless its commit was started. `during_body`: the loop's body still uses
        it."""
        if self.phase is not Phase.COMMITTING:
            self.phase = Phase.GIVEN_UP if during_body else Phase.ABORTED

    def count(self, sent: int = 0, skipped: int = 0, dead_letters: int = 0, late: int = 0, duplicates: int = 0) -> None:
        """Add to the transaction's counts. `Counters` gets them if the transaction commits."""
        self.sent += sent
        self.skipped += skipped
        self.dead_letters += dead_letters
        self.late += late
        self.duplicates += duplicates

    # ---- used by the loop's body -------------------------------------------------------------------------------

    @property
    def records(self) -> Iterator[Record]:
        """Hand out records one by one, until `eos.transaction.interval.ms` is over or none is left.

        A record that was handed out counts as handled when the body ends: send its outputs before that. Records that
        were not handed out (after a `break`) are part of the next transaction.
        """
        if self._records is None:
            self._records = self._hand_out()
        return self._records

    def _hand_out(self) -> Iterator[Record]:
        now = self._loop.now
        while batch := self.take(64):
            self._not_handed_out = len(batch)
            for record in batch:
                self._not_handed_out -= 1
                yield record
                if now() >= self._hand_out_until:
                    self._give_back_not_handed_out()
                    return

    def _give_back_not_handed_out(self) -> None:
        self._loop.give_back(self._not_handed_out)
        self._not_handed_out = 0

    def take(self, most: int) -> list[Record]:
        """Return at most `most` next records; none if no record is left, the interval is over or a send failed."""
        if not self._loop.is_open(self):
            return []
        self._give_back_not_handed_out()
        if self._loop.taken and self._loop.now() >= self._hand_out_until:
            return []
        return self._loop.take(most)

    def give_back(self, count: int) -> None:
        """Hand out the last `count` taken records again in the next transaction, because they were not handled."""
        if self._loop.is_open(self):
            self._give_back_not_handed_out()
            self._loop.give_back(count)

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: object = None,
        partition: int | None = None,
        timestamp_ms: int = 0,
        headers: Headers = (),
    ) -> None:
        """Send one record in this transaction. Value, key and headers are encoded as an App's are: bytes unchanged,
        str as UTF-8, None, everything else as JSON. `timestamp_ms` 0 means now; `partition` None leaves it to the key.

        Raises TypeError or ValueError for a record that cannot be sent.
        """
        if not self._loop.is_open(self):
            return
        has_more = partition is not None or timestamp_ms or headers
        if type(value) is bytes and (key is None or type(key) is bytes) and not has_more:
            self._loop.send(topic, value, key, -1, 0, None)  # the usual case: nothing to encode, nothing to check
        else:
            self._loop.send(*make_send("send", topic, value, key, partition, timestamp_ms, headers))
        self.sent += 1

    def dead_letter(self, record: Record, error: BaseException) -> None:
        """Send `record`, which could not be handled, unchanged to `<its topic>.dlq` in this transaction.

        Headers say where it came from and name the error, as an App's `eos.dlq` does. The group takes the App's place
        in them."""
        if not self._loop.is_open(self):
            return
        self._loop.send(*make_dead_letter(record, error, frames_of(error), self._loop.group))
        self.count(sent=1, dead_letters=1)

    @property
    def is_over(self) -> bool:
        """Return whether the transaction's interval is over."""
        return self._loop.now() >= self._hand_out_until

    @property
    def waited_s(self) -> float:
        """Return the seconds that the producer's sends have waited for room in the client's queue, in earlier
        transactions too.
        """
        return self._loop.waited_s

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        """Send the outputs that an App's `feed` produces from the records; `Fed.error` is the user's own error."""
        if not self._loop.is_open(self):
            return FeedResult(0, len(records), None)
        fed = self._loop.feed(feed, records)
        self.sent += fed.sent
        return fed

    def commit(self) -> bool:
        """End the transaction now and wait for its commit. Return False if it was aborted and its records are handed
        out again."""
        if not self._loop.is_open(self):
            return False
        return self._loop.end_now(self)

    def abort(self) -> None:
        """Abort the transaction; its records are handed out again."""
        if self._loop.is_open(self):
            self._loop.abort(self, "requested by the application")
