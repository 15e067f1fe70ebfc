"""Tests a loop of your own without a broker: `Session` replaces a TransactSession.

A transaction has the session's own class (eos/session/transaction.py), so it hands out, takes back and refuses records
as on Kafka. A cluster's effects do not appear: no output is refused, no partition is revoked, no producer is fenced.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast

from eos.engine.handling import Collector
from eos.errors import ConfigurationError, IllegalState
from eos.kafka.client.world import REAL
from eos.records import Feed, FeedResult, Record, Send
from eos.session.transaction import Transaction
from eos.testing.offline import Ran, make_records, to_sent

_MAX_IDLE = 1_000  # transactions in a row that took no record or were aborted


class Session:
    """Replaces a TransactSession in tests of a loop that gets its session as an argument::

        with eos.testing.Session([("words", "to"), ("words", "be")]) as session:
            shout(session)  # for txn in session: ...
        assert session.ran.values("loud-words") == [b"TO", b"BE"]

    `records` are given as for `eos.testing.run`. `size`: the maximum number of records in a transaction (default: all).
    The loop ends when all are committed. `ran` has the committed outputs; outputs of an aborted transaction are not in
    it, and its records are handed out again. With `destinations` a read of another topic from `ran` is an error.
    """

    def __init__(
        self,
        records: Iterable[Record | tuple[Any, ...]],
        *,
        size: int | None = None,
        destinations: Sequence[str] = (),
        group: str = "test",
    ) -> None:
        if size is not None and size < 1:
            raise ConfigurationError(f"size={size}: a transaction has at least one record")
        self._loop = _Loop(make_records(records), size, destinations, group)
        self.group, self.destinations = group, list(destinations)
        self.topics = list(dict.fromkeys(record.topic for record in self._loop.records))
        self.stop_requested = False

    @property
    def ran(self) -> Ran:
        """Return the committed outputs."""
        return self._loop.ran

    @property
    def transactions(self) -> int:
        """Return the number of committed transactions."""
        return self._loop.transactions

    @property
    def aborts(self) -> int:
        """Return the number of aborted transactions."""
        return self._loop.aborts

    @property
    def taken(self) -> int:
        """Return the number of records that the open transaction took."""
        return self._loop.taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.abort_open()

    def __iter__(self) -> Self:
        self._loop.abort_open()
        return self

    def __next__(self) -> Transaction:
        begun = self._loop.next_transaction(self.stop_requested)
        if begun is None:
            raise StopIteration
        return begun

    def stop(self) -> None:
        """End the loop after the open transaction."""
        self.stop_requested = True

    @contextlib.contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """Do nothing: a test handles its own signals."""
        yield

    def lag(self) -> int:
        """Return the number of records that are not committed."""
        return self._loop.uncommitted

    def pause(self, seconds: float) -> None:
        """Return at once: tests do not wait."""


class _Loop:
    def __init__(self, records: list[Record], size: int | None, destinations: Sequence[str], group: str) -> None:
        self.group, self.now = group, REAL.now
        self.ran = Ran(topics=tuple(destinations))
        self.transactions = self.aborts = self.taken = 0
        self.records, self._size, self._destinations = records, size, destinations
        self._committed = 0
        self._open: Transaction | None = None
        self._kept = Collector()
        self._idle = 0

    @property
    def uncommitted(self) -> int:
        """Return the number of records that are not committed."""
        return len(self.records) - self._committed

    @property
    def waited_s(self) -> float:
        return self._kept.waited_s

    def abort_open(self) -> None:
        if self._open is not None:
            self._abort()

    def next_transaction(self, stopping: bool) -> Transaction | None:
        if self._open is not None:
            self._end()
        if stopping or not self.uncommitted:
            return None
        if self._idle >= _MAX_IDLE:
            raise IllegalState(
                f"{_MAX_IDLE} transactions in a row made no progress: the loop's body takes no record, or always aborts"
            )
        self._open = Transaction(self, self.now(), math.inf, self.records[self._committed].timestamp)
        return self._open

    def is_open(self, txn: Transaction) -> bool:
        if txn is not self._open:
            raise IllegalState("this transaction has ended")
        return True

    def take(self, most: int) -> list[Record]:
        at = self._committed + self.taken
        most = most if self._size is None else min(most, self._size - self.taken)
        taken = self.records[at : at + most]
        self.taken += len(taken)
        return taken

    def give_back(self, count: int) -> None:
        self.taken -= count

    def send(self, *send: Any) -> None:
        if self._destinations and send[0] not in self._destinations:
            raise ConfigurationError(f"a record was sent to {send[0]}, which is not in destinations=")
        self._kept.sends.append(cast(Send, send))

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        return self._kept.feed(feed, records)

    def end_now(self, txn: Transaction) -> bool:
        self._end()
        return True

    def abort(self, txn: Transaction, why: str) -> None:
        self._abort()

    def _end(self) -> None:
        transaction = self._open
        assert transaction is not None
        transaction.finish_handling(self.now())
        self._idle = 0 if self.taken else self._idle + 1
        self.ran.sent += map(to_sent, self._kept.sends)
        self.ran.dead_letters += transaction.dead_letters
        self.transactions += 1
        self._committed += self.taken
        self._reset()

    def _abort(self) -> None:
        self.aborts += 1
        self._idle += 1
        self._reset()

    def _reset(self) -> None:
        self._open, self._kept, self.taken = None, Collector(), 0
