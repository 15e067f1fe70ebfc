"""One open transaction, as the loop's body and the worker have it: takes records, sends, ends it before the loop does.

What it means is eos/session/loop.py's.
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
    """How far a transaction went."""

    OPEN = "records are handed out and outputs sent"
    COMMITTING = "its commit was started: nothing can be sent in it any more, however the commit ends"
    ABORTED = "it was aborted before its commit was started"
    GIVEN_UP = "as ABORTED, while the loop's body has it: until the next one begins the body's calls do nothing"


class Turns(Protocol):
    """What a transaction asks of the loop of which it is a turn: eos/session/loop.py, or a test's."""

    group: str
    now: Callable[[], float]

    @property
    def taken(self) -> int:
        """Records that the open transaction took."""

    @property
    def waited_s(self) -> float:
        """See Transaction."""

    def has(self, txn: Transaction) -> bool:
        """Whether it is open; False if it was given up under the loop's body. IllegalState: it has ended."""

    def take(self, most: int) -> list[Record]:
        """The next records, at most `most`; none once a send failed."""

    def give_back(self, count: int) -> None:
        """The last of them come again in the next transaction."""

    def send(self, *send: Any) -> None:
        """As a Send."""

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult: ...

    def end_now(self, txn: Transaction) -> bool:
        """Whether it is committed; else its records come again."""

    def abort(self, txn: Transaction, why: str) -> None: ...


class Transaction:
    """One open transaction and its input records. Valid until the loop's next turn.

    When the session had to give it up meanwhile (the group took its place, the consumer died), the body need not know:
    no more records are handed out, what is sent leads nowhere, `commit` returns False, and its records come again.
    """

    __slots__ = (
        "_ahead", "_loop", "_records", "_until",
        "began_at", "dead_letters", "first_timestamp_ms", "handling_s", "phase", "sent", "skipped",
        "waited_before",
    )  # fmt: skip

    def __init__(
        self, loop: Turns, began_at: float, until: float, first_timestamp_ms: int, waited_before: float = 0.0
    ) -> None:
        self._loop = loop
        # World.now(); behind `until` no more records are handed out.
        self.began_at, self._until = began_at, until
        self.first_timestamp_ms = first_timestamp_ms  # of the first record that waited when it began
        self.phase = Phase.OPEN
        self.handling_s: float | None = None  # once all of its records are handled; without what sends waited for room
        self.waited_before = waited_before  # `waited_s` when it began
        self._records: Iterator[Record] | None = None
        self._ahead = 0  # taken by `records`, but not handed out yet
        self.sent = self.skipped = self.dead_letters = 0

    # ---- what the loop notes -----------------------------------------------------------------------------------

    def handled(self, now: float) -> None:
        """Note that all of its records are handled."""
        self.handling_s = self.handling_until(now)

    def handling_until(self, now: float) -> float:
        """Return for how long its records were handled, without the time for which sends waited for room."""
        if self.handling_s is not None:
            return self.handling_s
        return now - self.began_at - (self.waited_s - self.waited_before)

    def starts_commit(self) -> None:
        self.phase = Phase.COMMITTING

    def aborted(self, under_its_body: bool = False) -> None:
        if self.phase is not Phase.COMMITTING:
            self.phase = Phase.GIVEN_UP if under_its_body else Phase.ABORTED

    # ---- what the loop's body does with it ---------------------------------------------------------------------

    @property
    def records(self) -> Iterator[Record]:
        """Hands the records out one by one, until `eos.transaction.interval.ms` is over or none is left.

        A record that was handed out counts as handled when the body ends: send what it leads to before that. Records
        that were not handed out (a `break`) come again in the next transaction.
        """
        if self._records is None:
            self._records = self._hand_out()
        return self._records

    def _hand_out(self) -> Iterator[Record]:
        now = self._loop.now
        while batch := self.take(64):
            self._ahead = len(batch)
            for record in batch:
                self._ahead -= 1
                yield record
                if now() >= self._until:
                    self._give_back_ahead()
                    return

    def _give_back_ahead(self) -> None:
        self._loop.give_back(self._ahead)
        self._ahead = 0

    def take(self, most: int) -> list[Record]:
        """The next records, at most `most`; an empty list when none is left, the interval is over or a send failed."""
        if not self._loop.has(self):
            return []
        self._give_back_ahead()
        if self._loop.taken and self._loop.now() >= self._until:
            return []
        return self._loop.take(most)

    def give_back(self, count: int) -> None:
        """The last `count` records taken were not handled: the next transaction hands them out again."""
        if self._loop.has(self):
            self._give_back_ahead()
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
        """Sends one record in this transaction; value, key and headers are encoded as an App's are (bytes as they are,
        str as UTF-8, None, else JSON). `timestamp_ms` 0 is now, `partition` None leaves it to the key.

        Raises TypeError or ValueError for what cannot be sent.
        """
        if not self._loop.has(self):
            return
        asked = partition is not None or timestamp_ms or headers
        if type(value) is bytes and (key is None or type(key) is bytes) and not asked:
            self._loop.send(topic, value, key, -1, 0, None)  # the usual: nothing to encode, nothing to check
        else:
            self._loop.send(*make_send("send", topic, value, key, partition, timestamp_ms, headers))
        self.sent += 1

    def dead_letter(self, record: Record, error: BaseException) -> None:
        """Sends `record`, which could not be handled, to `<its topic>.dlq` in this transaction: as it came, with
        headers that say where it was and what `error` said, as an App's `eos.dlq` does. They name the group as the App.
        """
        if not self._loop.has(self):
            return
        self._loop.send(*make_dead_letter(record, error, frames_of(error), self._loop.group))
        self.sent += 1
        self.dead_letters += 1

    @property
    def waited_s(self) -> float:
        """For how long its producer's sends have waited for room in the client's queue, in earlier transactions too."""
        return self._loop.waited_s

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        """Sends what an App's `route.feed` makes of records that were taken; `Fed.error` is the user's own."""
        if not self._loop.has(self):
            return FeedResult(0, len(records), None)
        fed = self._loop.feed(feed, records)
        self.sent += fed.sent
        return fed

    def commit(self) -> bool:
        """Ends the transaction now, waits for its commit; False if it had to be aborted and its records will be handed
        out again."""
        if not self._loop.has(self):
            return False
        return self._loop.end_now(self)

    def abort(self) -> None:
        """Gives the transaction up; its records will be handed out again."""
        if self._loop.has(self):
            self._loop.abort(self, "asked by the application")
