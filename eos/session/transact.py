"""TransactSession: producer, consumer and group under one type, as an application has it: its settings, its life, and
what is to be seen of it. What it does is eos/session/loop.py's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer

from eos import log
from eos.errors import ConfigurationError, IllegalState
from eos.kafka.admin import preflight
from eos.kafka.admin.fence import abort_left_open
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import FUNCTION_OPTIONS, Settings, alternate_transactional_id, to_settings
from eos.kafka.client.world import REAL, World
from eos.records import is_pattern
from eos.session.asking import Stopped
from eos.session.loop import Loop
from eos.session.membership import Membership
from eos.session.participants import Listener, Participant
from eos.session.parts import Parts
from eos.session.positions import TopicPartition as Partition
from eos.session.producer import OLD_TRANSACTIONS, TransactionalProducer
from eos.session.stopping import ShutdownExpired, StopSignals, took_too_long
from eos.session.transaction import Transaction


class TransactSession:
    """Iterate over it: each turn is one transaction with a batch of records.

    ::

        with TransactSession({"group.id": "g", "transactional.id": "g-1"}, ["in"]) as session:
            for txn in session:
                for record in txn.records:
                    txn.send("out", record.value, key=record.key)

    It goes on until it is stopped: by `stop`, or by signals (`with ... as session, session.stopping_on_signals():`).
    The body's end commits. An exception out of the body aborts; leaving the loop by `break` aborts too (call
    `txn.commit()` first to keep the work). A transaction that had to be aborted (a rebalance, a lost broker, ...) is
    not reported: its records are handed out again, in the same order. Raises EosError's subclasses (see eos.errors).

    Settings: Kafka's and `eos.*` names (docs/reference/settings.md); a mapping is completed by the environment and
    eos.toml, as the flags of a command are. `group.id` and `transactional.id` must be set, `topics` may come from
    `eos.input.topics`. With `until_end` the loop ends when the whole group has handled what was readable at the start.
    `destinations` are the topics that it sends to: with them the block begins as a worker does, by a look whether the
    cluster is fit, and what is missing is told before the group is joined. One session belongs to one thread. More,
    with tests that need no broker: docs/howto/own-loop.md.
    """

    def __init__(
        self,
        settings: Settings | Mapping[str, Any],
        topics: Sequence[str] | None = None,
        *,
        until_end: bool = False,
        destinations: Sequence[str] = (),
        participants: Sequence[Participant] = (),
        listener: Listener | None = None,
        together: int = 1,
        world: World = REAL,
    ) -> None:
        """`participants`, `listener`: eos/session/participants.py. With a listener a session can be made before its
        topics are known: `read` says them before the start. `together`: how many records the application handles at
        once; a poll of a backlog takes whole batches of them."""
        self.settings = to_settings(settings)
        named = [t.strip() for t in self.settings["eos.input.topics"].split(",") if t.strip()]
        topics = list(topics) if topics is not None else named
        _check(self.settings, topics, topics_follow=listener is not None)
        if len(topics) > 1:
            self.settings = self.settings.for_several_topics()
        self.group: str = self.settings["group.id"]
        self.transactional_id: str = self.settings["transactional.id"]
        self.destinations = list(destinations)
        self.until_end = until_end
        self.stop_requested = False
        self._parts = parts = Parts(
            self.settings,
            topics,
            participants,
            listener or Listener(),
            until_end=until_end,
            together=together,
            stopping=lambda: self.stop_requested,
            world=world,
        )
        self._loop = Loop(parts)
        self.counters, self.pulse = parts.counters, parts.pulse

    # ---- life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> TransactSession:
        if self.destinations:
            need = preflight.requirements_of(self.settings, self.topics, self.destinations)
            preflight.require_fit_cluster(self.settings, need, self._parts.world)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A block that ended well is a final stop; after an exception a restart is expected soon.
        self.close(leave_group=kind is None)

    @property
    def topics(self) -> Sequence[str]:
        return self._parts.intake.topics

    @property
    def membership(self) -> Membership:
        return self._parts.membership

    @property
    def consumer(self) -> Consumer:
        return self.membership.consumer

    @property
    def producer(self) -> TransactionalProducer:
        return self._parts.producer

    @property
    def assignment(self) -> frozenset[Partition]:
        """Partitions owned as of the last poll."""
        return frozenset(self.membership.owned)

    @property
    def committed(self) -> Mapping[Partition, int]:
        """Next offset of each owned partition, as far as it is committed."""
        return self._parts.positions.committed

    @property
    def taken(self) -> int:
        """Records that the open transaction took."""
        return self._parts.positions.taken

    def lag(self) -> int | None:
        """Records (and markers) between what is committed and the last stable offsets; None: not known yet."""
        lags = list(self.membership.lags().values())
        known = [lag for lag in lags if lag is not None]
        return sum(known) if lags and len(known) == len(lags) else None

    def who(self) -> Mapping[str, object]:
        """For a line about a transaction: transactional.id, producer id, epoch and state."""
        return self.producer.who()

    def read(self, topics: Sequence[str], destinations: Sequence[str], by_pattern: Sequence[str]) -> None:
        """Before the start: what it reads and writes; `by_pattern` are those of the topics that nobody named."""
        self._parts.intake.topics, self._parts.intake.by_pattern = list(topics), set(by_pattern)
        self.destinations = list(destinations)

    def start(self) -> None:
        """Connects, fences predecessors and subscribes. Raises Unavailable within eos.startup.timeout.ms."""
        self.pulse.adopt()
        deadline = self._parts.world.now() + self.settings["eos.startup.timeout.ms"] / 1000
        try:
            self._parts.intake.connect(self.destinations, deadline)
            with self._parts.world.admin(self.settings) as admin:
                self._start_producer(admin, deadline)
                self._parts.intake.join(admin)
        except Stopped:
            log.info("stopped before the group was joined", group=self.group)  # the loop ends at its first turn
        except BaseException:
            self.close()
            raise
        self._parts.successor.ours("our start")
        self.producer.identity(0.5)  # comes with the first statistics; the log should name it from the start
        log.info("session started", group=self.group, topics=",".join(self.topics), **self.producer.who())

    def _start_producer(self, admin: ClusterAdmin, deadline: float) -> None:
        """Initialise both transactional.ids, which fences every predecessor."""
        world, producer = self._parts.world, self._parts.producer
        self._parts.committer.start()

        def end(transactional_id: str) -> None:
            abort_left_open(admin, [transactional_id], world)

        old_brokers = admin.transaction_version() < OLD_TRANSACTIONS
        producer.start(deadline, end, alternate=old_brokers)
        if not old_brokers:
            # A predecessor has it that was started before the brokers were upgraded.
            producer.fence(alternate_transactional_id(producer.transactional_id), deadline, end)

    def close(self, leave_group: bool = False) -> None:
        """Aborts what is open and closes all clients. `leave_group`: a static member leaves for good."""
        self._loop.close()
        self._parts.intake.close(leave_group)
        self._parts.offsets.close()

    def stop(self) -> None:
        """The loop ends when the open transaction has, and while it waits for records: at once, or at most one
        `eos.transaction.interval.ms` later. From anywhere: the loop's body, a signal's handler, another thread."""
        self.stop_requested = True

    @contextlib.contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """In the block SIGTERM and SIGINT stop the loop, as they stop a worker's: at the first one the open transaction
        ends; a second one, or `eos.shutdown.timeout.ms` after the first, gives it up, and the block raises Temporary.
        The session's start and close lie outside of it.
        Raises IllegalState outside of the main thread, where no signal comes."""
        if threading.current_thread() is not threading.main_thread():
            raise IllegalState("signals come to the main thread alone: hear them there, and call `session.stop()`")
        try:
            with StopSignals(self):
                yield
        except ShutdownExpired as expired:
            raise took_too_long(expired) from expired

    def pause(self, seconds: float) -> None:
        """No transaction begins before so many seconds are over; meanwhile the group is polled as usual."""
        self._parts.pacing.pause(self._parts.world.now(), seconds)

    # ---- the loop ---------------------------------------------------------------------------------------------

    def __iter__(self) -> TransactSession:
        self._loop.enter()
        return self

    def __next__(self) -> Transaction:
        if (begun := self._loop.following()) is None:
            raise StopIteration
        return begun


def _check(settings: Settings, topics: Sequence[str], topics_follow: bool) -> None:
    """Raises ConfigurationError. `topics_follow`: they need not be known yet."""
    for name in FUNCTION_OPTIONS:
        if name in settings.values:
            raise ConfigurationError(
                f"{name} is about an App's functions, and does nothing in a loop of your own",
                remedy="unset it; `txn.send(..., headers=...)` passes headers on, a span goes around the body",
            )
    for name in ("group.id", "transactional.id"):
        if not settings.get(name):
            raise ConfigurationError(f"{name} must be set for a session")
    if not topics and not topics_follow:
        raise ConfigurationError("a session needs topics: TransactSession(settings, [...]) or eos.input.topics")
    if patterns := [topic for topic in topics if is_pattern(topic)]:
        # librdkafka would take topics in, and out, at moments of its own.
        raise ConfigurationError(
            f"a session reads topics by their names, not by the pattern {patterns[0]!r}: patterns are for an App's "
            "functions"
        )
