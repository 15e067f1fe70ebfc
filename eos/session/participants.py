"""Who takes part in a session's transactions, and who is told how they ended.

The session alone decides when a transaction begins and how it ends (eos/session/loop.py); both follow. A
`Participant` has something that counts only if the transaction commits: lineage's numbers, the state of functions. A
`Listener` wants to know: a worker is one, and so is an application that overrides what it needs. Neither may touch a
transaction's clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from eos.errors import CallFailed, PoisonRecord
from eos.records import Committed, Record, format_position
from eos.session.positions import TopicPartition as Partition

if TYPE_CHECKING:
    from eos.session.transaction import Transaction


class Outcome(Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    """Its records come again, to whoever owns their partitions then."""
    UNKNOWN = "unknown"
    """Its commit was asked for, and the answer never came: each partition goes on at what is committed."""


class Participant(Protocol):
    """Follows one transaction after the other. All of it is called on the session's thread."""

    @property
    def topics(self) -> Collection[str]:
        """Topics that it alone writes: an error about one of them is never an input record's."""

    def forget(self, gone: Collection[Partition]) -> None:
        """These are not ours any more; no transaction is open. Said also of those that come back at once, and of those
        that never began."""

    def restore(
        self, starts: Mapping[Partition, Committed], uncommitted: Collection[Partition]
    ) -> Collection[Partition]:
        """Take these partitions over: they are ours from now on and begin here; no transaction is open. Returns those
        that can begin. The others are asked for again in a moment: in between the group is polled, and what can begin
        is worked on. `uncommitted`: those that the group has committed no offset of."""

    def writes(self) -> Collection[Partition]:
        """Return the input partitions for which the open transaction has something to write. Their offsets are
        committed in it, unmoved ones too, so that the group refuses a transaction of a member that lost them."""

    def last_sends(self, send: Callable[..., None], partitions: Collection[Partition]) -> None:
        """Send what belongs to the transaction beside its outputs, by `send(topic, value, key, partition,
        timestamp_ms)`: it is about to be flushed. `partitions` are those whose offsets it commits; nothing may be
        written for any other one, because another member may own it."""

    def beside(self, partition: Partition) -> Mapping[str, object]:
        """For the JSON that is committed beside this partition's offset; everything of the transaction was sent."""

    def committed(self) -> None:
        """The transaction is committed."""

    def undone(self) -> None:
        """Note that the transaction was aborted, or that its outcome is unknown: its records come again, or their
        partitions are restored."""


class Listener:
    """Told by a session on its own thread; what is not overridden does nothing."""

    def idle(self) -> None:
        """Called about every 100 ms while there is nothing to do."""

    def new_topics(self) -> Sequence[str]:
        """Asked while no transaction is open: names to read from now on as well."""
        return ()

    def ended(self, transaction: Transaction, outcome: Outcome) -> None:
        """Called once for each transaction, in order, before the next one begins. `TransactSession.committed` has its
        offsets if it was committed."""

    def unreadable(self, topic: str, partition: int, offset: int, why: str) -> None:
        """The record at this offset was fetched, and its headers cannot be read (records.UnreadableHeaders). It is
        handed out as all others are, to a loop that may do without them."""

    def refused(self, record: Record, failure: CallFailed) -> None:
        """An output of this record was refused for good, by the client or the cluster. Its transaction is aborted, and
        its records come again unless this raises, as it does where it is not overridden."""
        where = format_position(record.topic, record.partition, record.offset)
        sentence = f"an output of {where} was refused: {failure}"
        raise PoisonRecord(sentence, record.topic, record.partition, record.offset) from failure
