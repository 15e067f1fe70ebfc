"""A loop of your own without a broker: what stands in place of a TransactSession.

A transaction is the session's own class (eos/session/transact.py), so what it hands out, takes back and refuses is what
it does on Kafka. What only a cluster can do is not shown: nothing is refused, no partition leaves, nobody is fenced.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast

from eos.errors import ConfigurationError, IllegalState
from eos.kafka.world import REAL
from eos.records import Fed, Feed, Record, Send
from eos.session.transact import Transaction, TransactSession
from eos.testing.offline import Ran, records_of, sent_of
from eos.worker.handling import Kept

_IDLE = 1_000  # transactions in a row that took no record or were aborted


class Session:
    """For tests of a loop that gets its session from outside::

        with eos.testing.Session([("words", "to"), ("words", "be")]) as session:
            shout(session)  # for txn in session: ...
        assert session.ran.values("loud-words") == [b"TO", b"BE"]

    `records` as `eos.testing.run` takes them; `size`: how many are in a transaction, by default all. The loop ends when
    all are committed. `ran` is what was committed; what an aborted transaction sent is not in it, and its records come
    again. With `destinations` asking `ran` for another topic is an error.
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
            raise ConfigurationError(f"size={size}: a transaction has one record at least")
        self.ran = Ran(topics=tuple(destinations))
        self.destinations = list(destinations)
        self.group, self.stop_requested = group, False
        self.transactions = self.aborts = 0
        self.taken = 0
        """Records that the open transaction took."""
        self._records, self._size = records_of(records), size
        self.topics = list(dict.fromkeys(record.topic for record in self._records))
        self._committed = 0
        self._open: Transaction | None = None
        self._kept = Kept()
        self._idle = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._abort("")

    def __iter__(self) -> Self:
        self.__exit__()
        return self

    def __next__(self) -> Transaction:
        if self._open is not None:
            self._end()
        if self.stop_requested or self._committed == len(self._records):
            raise StopIteration
        if self._idle >= _IDLE:
            raise IllegalState(
                f"{_IDLE} transactions in a row led nowhere: the loop's body takes no record, or always aborts"
            )
        first = self._records[self._committed]
        self._open = Transaction(cast(TransactSession, self), REAL.now(), math.inf, first.timestamp)
        return self._open

    def stop(self) -> None:
        """The loop ends when the open transaction has."""
        self.stop_requested = True

    @contextlib.contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """A test hears its own signals."""
        yield

    def lag(self) -> int:
        """Records that are not committed."""
        return len(self._records) - self._committed

    def pause(self, seconds: float) -> None:
        """Nobody waits in a test."""

    # ---- what a transaction needs of its session --------------------------------------------------------------

    _going_well = True
    _world = REAL

    @property
    def _positions(self) -> Self:
        return self

    @property
    def producer(self) -> Kept:
        return self._kept

    def give_back(self, count: int) -> None:
        self.taken -= count

    def _has(self, txn: Transaction) -> bool:
        if txn is not self._open:
            raise IllegalState("this transaction has ended")
        return True

    def _take(self, most: int) -> list[Record]:
        at = self._committed + self.taken
        most = most if self._size is None else min(most, self._size - self.taken)
        taken = self._records[at : at + most]
        self.taken += len(taken)
        return taken

    def _send(self, *send: Any) -> None:
        if self.destinations and send[0] not in self.destinations:
            raise ConfigurationError(f"something was sent to {send[0]}, which destinations= does not name")
        self._kept.sends.append(cast(Send, send))

    def _feed(self, feed: Feed, records: list[Record]) -> Fed:
        return self._kept.feed(feed, records)

    def _whole(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _end(self) -> bool:
        transaction = self._open
        assert transaction is not None
        transaction._give_back_ahead()
        self._idle = 0 if self.taken else self._idle + 1
        self.ran.sent += map(sent_of, self._kept.sends)
        self.ran.dead_letters += transaction.dead_letters
        self.transactions += 1
        self._committed += self.taken
        self._begin_anew()
        return True

    def _await_commit(self) -> bool:
        return True

    def _abort(self, reason: str) -> None:
        self.aborts += 1
        self._idle += 1
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._open, self._kept, self.taken = None, Kept(), 0
