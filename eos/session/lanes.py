"""The producers of a session, one or two in turn, and the commit that is on its way.

Owns whose turn it is, the thread that commits, and that there is one commit at a time. It never decides what a failed
one leads to (eos/session/loop.py), nor whether a transactional.id is still ours (eos/session/claim.py).

With two, the second one's transaction is filled while the first one's offsets and commit are under way. A transaction
that did not commit takes the one behind it down: that one is given up unsent, and it is the first one's turn again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition

from eos import log
from eos.errors import CallFailed
from eos.kafka.admin.fence import end_left_open
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings, alternate_of
from eos.kafka.client.watchdog import Job, Watchdog
from eos.kafka.client.world import World
from eos.session.observe import Pulse
from eos.session.positions import TopicPartition as Partition
from eos.session.producer import OLD_TRANSACTIONS, TransactionalProducer

if TYPE_CHECKING:
    from eos.session.transaction import Transaction

_BEAT_S = 0.5
_CLOSE_ABORT_S = 5.0


@dataclass(frozen=True)
class UnderWay:
    """A transaction whose offsets and commit are on their way, and all that its end needs."""

    producer: TransactionalProducer
    transaction: Transaction
    offsets: Mapping[Partition, int]
    new_starts: Mapping[Partition, int]
    taken: int
    set_out_at: float  # World.now()
    job: Job
    """Its result is World.now() of the commit's answer."""


class Lanes:
    def __init__(self, settings: Settings, pulse: Pulse, world: World, changelogs: Collection[str] = ()) -> None:
        self._settings, self._pulse, self._world, self._changelogs = settings, pulse, world, changelogs
        self.transactional_id: str = settings["transactional.id"]
        self.producers: list[TransactionalProducer] = []
        """Whose turn it is comes first."""
        self.under_way: UnderWay | None = None
        self._committer: Watchdog | None = None

    def start(self, admin: ClusterAdmin, deadline: float, in_turn: bool) -> None:
        """Fences every predecessor, in whichever way it used the two transactional.ids."""
        self._committer = self._world.caller(f"eos-{self.transactional_id}-commit")

        def end(transactional_id: str) -> None:
            end_left_open(admin, [transactional_id], self._world)

        # There the alternate id is for replacements.
        old_brokers = admin.transaction_version() < OLD_TRANSACTIONS
        self.producers = [self._producer(self.transactional_id, alternate=old_brokers)]
        self.turn.start(deadline, end)
        if not old_brokers:
            second = self._producer(alternate_of(self.transactional_id))
            second.start(deadline, end)
            if in_turn:
                self.producers.append(second)
            else:
                second.close()

    def _producer(self, transactional_id: str, alternate: bool = False) -> TransactionalProducer:
        return TransactionalProducer(
            self._settings,
            transactional_id,
            alternate,
            pulse=self._pulse,
            world=self._world,
            changelogs=self._changelogs,
        )

    @property
    def turn(self) -> TransactionalProducer:
        assert self.producers, "the session is not started"
        return self.producers[0]

    @property
    def in_turn(self) -> bool:
        return len(self.producers) > 1

    @property
    def replacements(self) -> dict[str, int]:
        """How often producers were replaced, by reason class."""
        total: dict[str, int] = {}
        for producer in self.producers:
            for reason, count in producer.replacements.items():
                total[reason] = total.get(reason, 0) + count
        return total

    @property
    def under_way_s(self) -> float:
        """For how long a commit has been on its way; 0 without one."""
        under_way = self.under_way  # asked by another thread
        return self._world.now() - under_way.set_out_at if under_way is not None else 0.0

    # ---- the commit on its way --------------------------------------------------------------------------------

    def commit_of(self, offsets: Sequence[TopicPartition], group_metadata: Any) -> Job:
        """For `UnderWay`: of the producer whose turn it is."""
        return Job(self._send_and_commit, (self.turn, offsets, group_metadata))

    def send(self, commit: UnderWay) -> None:
        """Hands a flushed transaction to the thread that commits; the other producer's turn begins."""
        assert self.under_way is None, "one commit at a time"
        self.under_way = commit
        self._submit(commit.job)
        self.producers.reverse()

    def _submit(self, job: Job) -> None:
        assert self._committer is not None
        self._committer.submit(job)

    def _send_and_commit(self, producer: TransactionalProducer, offsets: list[TopicPartition], metadata: Any) -> float:
        """On the committer's thread, which alone uses this producer meanwhile."""
        if offsets:
            producer.send_offsets(offsets, metadata)
        self._world.step("offsets sent")
        producer.commit()
        ended = self._world.now()
        self._world.step("committed")
        return ended

    def await_commit(self, commit: UnderWay, meanwhile: Callable[[], bool]) -> BaseException | None:
        """Waits for its end; what it failed of. `meanwhile` is called again and again while it answers True."""
        self._submit(commit.job)  # who was interrupted before had it not done, or does it twice: it runs once
        while not commit.job.done.is_set():
            if not meanwhile():
                self._pulse.beat("calling", "commit")
                commit.job.done.wait(_BEAT_S)
        return commit.job.error

    def ended(self, commit: UnderWay) -> None:
        """What became of it is noted. Behind one that did not commit what was begun is given up."""
        self.under_way = None
        if commit.job.error is not None and self.turn is not commit.producer:
            self.turn.give_up("the transaction before it did not commit")
            self.producers.reverse()

    def begin_anew(self, reason: str) -> None:
        """New producers, whose inits end what was open; the other one's when its turn comes."""
        for other in self.producers[1:]:
            other.give_up(reason)
        self.turn.replace(f"failure: {reason}")

    # ---- the end ----------------------------------------------------------------------------------------------

    def await_at_close(self) -> UnderWay | None:
        """The transaction whose commit still came, within a moment."""
        commit, self.under_way = self.under_way, None
        if commit is None:
            return None
        if not commit.job.done.wait(_CLOSE_ABORT_S):
            commit.producer.abandon()  # its outcome is the coordinator's, and our successor's to learn
            return None
        if commit.job.error is None:
            return commit
        log.warning("commit at close failed", error=str(commit.job.error), **commit.producer.who())
        return None

    def close(self) -> None:
        """Aborts what is open and closes all clients."""
        for producer in self.producers:
            if producer.may_abort:
                try:
                    producer.abort(self._world.now() + _CLOSE_ABORT_S)
                except CallFailed as failure:
                    # The broker aborts it at its timeout, or our successor's init does.
                    log.warning("abort at close failed", error=str(failure), **producer.who())
            producer.close()
        if self._committer is not None:
            self._committer.close()
