"""Reports how transactions end: to their participants and their listener, from this one place.

A `Participant` keeps something that counts only if the transaction commits: the numbers of lineage, the state of
functions. A `Listener` wants to know how transactions end: a worker is one, and so is an application that overrides the
methods it needs. Neither may touch a transaction's clients. This module never decides how a transaction ends
(eos/session/loop.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from eos.errors import CallFailed, PoisonRecord
from eos.kafka.client.watchdog import Job
from eos.kafka.client.world import World
from eos.observe import Counters
from eos.records import Record, SendAll, format_position
from eos.session.consumer.fetcher import Follower
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.transaction import Phase, Transaction


class Outcome(Enum):
    """Lists the ways in which a transaction can end."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    """Its records are handed out again, to the present owners of their partitions."""
    UNKNOWN = "unknown"
    """Its commit was not answered. Each partition continues at the group's committed offset."""


@dataclass(frozen=True)
class Commit:
    """Holds a commit that was started, with everything needed to finish it."""

    transaction: Transaction
    offsets: Mapping[Partition, int]
    taken: int
    started_at: float  # World.now()
    job: Job
    """Its result is the World.now() of the commit's success."""
    defers_offsets: bool = False
    """Whether a later transaction commits these offsets to the group, because followers keep all of them."""

    @property
    def open_s(self) -> float:
        """Return for how many seconds the committed transaction was open."""
        return float(self.job.result) - self.transaction.began_at

    @property
    def sending_s(self) -> float:
        """Return how many of those seconds were spent sending its outputs."""
        return self.open_s - (self.transaction.handling_s or 0.0)


class Participant(Follower, Protocol):
    """Takes part in one transaction after the other. The session calls all methods on its own thread."""

    def changed_partitions(self) -> Collection[Partition]:
        """Return the input partitions for which this participant has records to write in the open transaction. The
        transaction commits their offsets even if these are unchanged. So the group refuses the transaction if this
        member has lost one of the partitions."""

    def before_flush(self, send: SendAll, offsets: Mapping[Partition, int]) -> None:
        """Send this participant's own records of the transaction. `offsets` are those that the transaction commits. A
        participant must write nothing for other partitions, because another member may own them. Raises CallFailed."""

    def offset_metadata(self, partition: Partition) -> Mapping[str, object]:
        """Return fields for the JSON that is committed with this partition's offset, after the last send."""

    def committed(self) -> None:
        """Record that the transaction was committed."""

    def aborted(self) -> None:
        """Record that the transaction was aborted, or that its outcome is unknown. Its records will be handed out
        again, or their partitions restored."""


class Listener:
    """Receives a session's notifications, on the session's thread. The methods do nothing unless overridden."""

    @property
    def needs_records(self) -> bool:
        """Return whether transactions must hand out Records, and not only objects with the attributes of a Record,
        which are fetched faster. Read once, when the session is created."""
        return True

    def on_idle(self) -> None:
        """Do periodic work: called about every 100 ms while there is nothing else to do."""

    def has_work(self) -> bool:
        """Return whether a transaction should begin although no record waits."""
        return False

    def may_finish(self) -> bool:
        """Return whether a session with `until_end` may end its loop. Called when everything is handled."""
        return True

    def find_new_topics(self) -> Sequence[str]:
        """Return topics to read from now on as well. Called while no transaction is open."""
        return ()

    def on_end(self, transaction: Transaction, outcome: Outcome) -> None:
        """Receive the outcome of a transaction: called once for each, in order, before the next one begins.
        `TransactSession.committed` has its offsets if it was committed."""

    def on_unreadable(self, topic: str, partition: int, offset: int, why: str) -> None:
        """Handle a fetched record whose headers cannot be decoded (records.UnreadableHeaders). The session hands it
        out like all others, for applications that ignore headers."""

    def on_refused(self, record: Record, failure: CallFailed) -> None:
        """Handle an input record with an output that the client or the cluster refused permanently. Its transaction is
        aborted, and its records are handed out again unless this method raises, as it does by default."""
        where = format_position(record.topic, record.partition, record.offset)
        sentence = f"an output of {where} was refused: {failure}"
        raise PoisonRecord(sentence, record.topic, record.partition, record.offset) from failure

    def on_refused_without_record(self, failure: CallFailed) -> None:
        """Handle the refusal of an output in a transaction that took no input record; which output it was is unknown.
        The transaction is aborted, and the loop goes on unless this method raises, as it does by default."""
        raise PoisonRecord(f"an output without an input was refused: {failure}", "", -1, -1) from failure


class Outcomes:
    """Notifies a session's parts, participants and listener of the outcome of each transaction, and counts it."""

    def __init__(
        self, participants: Sequence[Participant], listener: Listener, counters: Counters, world: World
    ) -> None:
        self.counters = counters
        self._participants, self._listener, self._world = participants, listener, world
        self._subscribers: list[Callable[[Commit], None]] = []
        self._unreported: Transaction | None = None  # the transaction whose outcome is not reported yet

    def subscribe(self, committed: Callable[[Commit], None]) -> None:
        """Call `committed` with each successful commit, before the participants are notified. An interrupted call is
        repeated."""
        self._subscribers.append(committed)

    def begun(self, transaction: Transaction) -> None:
        self._unreported = transaction

    def committed(self, commit: Commit) -> None:
        """Notify everyone that this commit succeeded, and count it."""
        for committed in self._subscribers:
            committed(commit)
        if self.ended(Outcome.COMMITTED):
            self._count(commit)

    def ended(self, outcome: Outcome) -> bool:
        """Report the outcome of the last transaction. Return False if it was reported before. A transaction whose
        commit was not started is aborted, whatever `outcome` says."""
        transaction, self._unreported = self._unreported, None
        if transaction is None:
            return False
        outcome = outcome if transaction.phase is Phase.COMMITTING else Outcome.ABORTED
        for participant in self._participants:
            (participant.committed if outcome is Outcome.COMMITTED else participant.aborted)()
        self._listener.on_end(transaction, outcome)
        return True

    def _count(self, commit: Commit) -> None:
        transaction, counters = commit.transaction, self.counters
        ended_at: float = commit.job.result
        commit_s = ended_at - commit.started_at
        counters.count_commit(commit.taken, transaction.sent, transaction.skipped, transaction.dead_letters, commit_s)
        counters.count_time(transaction.late, transaction.duplicates)
        if commit.taken and transaction.first_timestamp_ms > 0:
            ended_ms = (self._world.unix() - self._world.now() + ended_at) * 1000
            # Clocks differ: a record from the future has no negative age.
            counters.end_to_end_seconds.observe(max(0.0, (ended_ms - transaction.first_timestamp_ms) / 1000))
