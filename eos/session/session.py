"""Defines TransactSession: producer, consumer and group in one object, as an application uses it.

Owns a session's settings, its life and its visible state. eos/session/loop.py decides what a session does.
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
from eos.kafka.admin.fence import abort_open_transactions
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import FUNCTION_OPTIONS, Settings, alternate_transactional_id, to_settings
from eos.kafka.client.world import REAL, World
from eos.observe import Snapshot
from eos.records import is_pattern
from eos.session.consumer.group_consumer import GroupConsumer
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.consumer.queries import Stopped
from eos.session.loop import Loop
from eos.session.outcomes import Listener, Participant
from eos.session.parts import Parts
from eos.session.producer.producer import OLD_TRANSACTIONS, TransactionalProducer
from eos.session.transaction import Transaction
from eos.signals import ShutdownExpired, StopSignals, stop_timeout_error


class TransactSession:
    """Iterates over transactions: each turn of the loop is one transaction with a batch of records.

    ::

        with TransactSession({"group.id": "g", "transactional.id": "g-1"}, ["in"]) as session:
            for txn in session:
                for record in txn.records:
                    txn.send("out", record.value, key=record.key)

    The loop runs until it is stopped, by `stop` or by signals (`with ... as session, session.stopping_on_signals():`).
    The end of the body commits. An exception in the body aborts, and so does leaving the loop with `break` (call
    `txn.commit()` first to keep the work). A transaction that the session had to abort (a rebalance, a lost broker)
    raises nothing: its records are handed out again, in the same order. Raises subclasses of EosError (see eos.errors).

    Settings: Kafka's and `eos.*` names (docs/reference/settings.md). A mapping is completed by the environment and
    eos.toml, as the options of a command are. `group.id` and `transactional.id` must be set; `topics` may come from
    `eos.input.topics`. With `until_end` the loop ends once the whole group has handled everything that was readable at
    the start. `destinations` are the topics that the session sends to. If they are given, the block first checks that
    the cluster is suitable, as a worker does, and reports missing topics and rights before it joins the group. A
    session belongs to one thread. More, with tests that need no broker: docs/howto/own-loop.md.
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
        handled_at_once: int = 1,
        with_ends: bool = False,
        world: World = REAL,
    ) -> None:
        """Create a session. `participants`, `listener`: see eos/session/outcomes.py. With a listener, a session can be
        created before its topics are known, and `set_topics` sets them before the start. `handled_at_once`: how many
        records the application handles at once; a poll of a backlog takes whole batches of them. `with_ends`:
        `find_end` notices when a partition was read to its end."""
        self.settings = to_settings(settings)
        named = [t.strip() for t in self.settings["eos.input.topics"].split(",") if t.strip()]
        topics = list(topics) if topics is not None else named
        _check(self.settings, topics, may_be_set_later=listener is not None)
        if len(topics) > 1:
            self.settings = self.settings.with_multi_topic_assignment()
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
            handled_at_once=handled_at_once,
            with_ends=with_ends,
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
        # A block that ended without an exception is a final stop; after an exception a restart is expected soon.
        self.close(leave_group=kind is None)

    def set_topics(self, topics: Sequence[str], destinations: Sequence[str], by_pattern: Sequence[str]) -> None:
        """Set what the session reads and writes, before its start. `by_pattern` are those of the topics that only a
        pattern matched."""
        self._parts.fetcher.set_topics(topics, by_pattern)
        self.destinations = list(destinations)

    def start(self) -> None:
        """Connect, fence predecessors and subscribe. Raises Unavailable after eos.startup.timeout.ms."""
        self.pulse.watch_calling_thread()
        deadline = self._parts.world.now() + self.settings["eos.startup.timeout.ms"] / 1000
        try:
            self._parts.fetcher.connect(self.destinations, deadline)
            with self._parts.world.admin(self.settings) as admin:
                # Initialise the id before the group is joined. An older instance under the same name, which the join
                # fences, then finds a newer owner of the id and stops, instead of joining again.
                self._start_producer(admin, deadline)
                self._parts.fetcher.join(admin)
        except Stopped:
            log.info("stopped before the group was joined", group=self.group)  # the loop ends at its first turn
        except BaseException:
            self.close()
            raise
        self._parts.owner_info.note_owned("our start")
        log.info(
            "session started", group=self.group, topics=",".join(self.topics), transactional_id=self.transactional_id
        )

    def _start_producer(self, admin: ClusterAdmin, deadline: float) -> None:
        """Initialise both transactional.ids, which fences every predecessor."""
        world, producer = self._parts.world, self._parts.producer
        self._parts.committer.start()

        def end(transactional_id: str) -> None:
            abort_open_transactions(admin, [transactional_id], world)

        old_brokers = admin.transaction_version() < OLD_TRANSACTIONS
        producer.start(deadline, end, alternate=old_brokers)
        alternate = alternate_transactional_id(producer.transactional_id)
        if not old_brokers and admin.describe(alternate) is not None:
            # A predecessor that was started before the brokers were upgraded may use the alternate id.
            producer.fence(alternate, deadline, end)

    def close(self, leave_group: bool = False) -> None:
        """Abort the open transaction and close all clients. `leave_group`: a static member leaves for good."""
        self._loop.close()
        self._parts.fetcher.close(leave_group)
        self._parts.watcher.stop()
        self._parts.offsets.close()

    def stop(self) -> None:
        """End the loop after the open transaction. While it waits for records it ends at once, or at most one
        `eos.transaction.interval.ms` later. May be called anywhere: in the loop's body, a signal handler or another
        thread."""
        self.stop_requested = True

    @contextlib.contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """Stop the loop at SIGTERM and SIGINT, as a worker does: the first signal ends it after the open transaction.

        A second signal, or `eos.shutdown.timeout.ms` after the first one, gives the transaction up, and the block
        raises Temporary. The session's start and close are outside of the block. Raises IllegalState outside of the
        main thread, which alone receives signals."""
        if threading.current_thread() is not threading.main_thread():
            raise IllegalState("only the main thread receives signals: handle them there, and call `session.stop()`")
        try:
            with StopSignals(self, self.settings["eos.shutdown.timeout.ms"] / 1000):
                yield
        except ShutdownExpired as expired:
            raise stop_timeout_error(expired) from expired

    def pause(self, seconds: float) -> None:
        """Begin no transaction for this many seconds; meanwhile the group is polled as usual."""
        self._parts.pacing.pause(self._parts.world.now(), seconds)

    # ---- the loop ---------------------------------------------------------------------------------------------

    def __iter__(self) -> TransactSession:
        self._loop.enter()
        return self

    def __next__(self) -> Transaction:
        if (begun := self._loop.next_transaction()) is None:
            raise StopIteration
        return begun

    # ---- observable state --------------------------------------------------------------------------------------

    @property
    def topics(self) -> Sequence[str]:
        return self._parts.fetcher.topics

    @property
    def watcher(self) -> Watcher:
        """Runs checks of the cluster until the session is closed."""
        return self._parts.watcher

    @property
    def group_consumer(self) -> GroupConsumer:
        return self._parts.group_consumer

    @property
    def consumer(self) -> Consumer:
        return self.group_consumer.consumer

    @property
    def producer(self) -> TransactionalProducer:
        return self._parts.producer

    @property
    def assignment(self) -> frozenset[Partition]:
        """Return the partitions that are read, as of the last poll."""
        return self.group_consumer.assignment.reading

    def find_end(self, partition: Partition) -> tuple[int, float] | None:
        """Return the offset at which the partition was read to its end, and the World.now() of that.

        None: there are more records, or it is unknown.
        """
        return self.group_consumer.find_end(partition)

    @property
    def committed(self) -> Mapping[Partition, int]:
        """Return the committed next offset of each owned partition that has one."""
        return self._parts.positions.committed

    @property
    def taken(self) -> int:
        """Return the number of records that the open transaction took."""
        return self._parts.positions.taken

    def lag(self) -> int | None:
        """Return the records (and markers) between the committed and the last stable offsets, or None if unknown."""
        lags = list(self.group_consumer.lags().values())
        known = [lag for lag in lags if lag is not None]
        return sum(known) if lags and len(known) == len(lags) else None

    def snapshot(self) -> Snapshot:
        """Return this session's state in its group, for eos.health."""
        consumer, assignment = self.group_consumer, self.group_consumer.assignment
        unlocated, restoring = len(assignment.unlocated), len(assignment.restoring)
        return Snapshot(consumer.member.is_known, unlocated, restoring, consumer.lags())

    def who(self) -> Mapping[str, object]:
        """Return the fields of a log event about a transaction: transactional.id, producer id, epoch and state."""
        return self.producer.who()


def _check(settings: Settings, topics: Sequence[str], may_be_set_later: bool) -> None:
    """Raise ConfigurationError for settings or topics that a session cannot have."""
    for name in FUNCTION_OPTIONS:
        if name in settings.values:
            raise ConfigurationError(
                f"{name} is about an App's functions, and does nothing in a loop of your own",
                remedy="unset it: pass headers with `txn.send(..., headers=...)`, and wrap the loop's body in a span",
            )
    for name in ("group.id", "transactional.id"):
        if not settings.get(name):
            raise ConfigurationError(f"{name} must be set for a session")
    if not topics and not may_be_set_later:
        raise ConfigurationError("a session needs topics: TransactSession(settings, [...]) or eos.input.topics")
    if patterns := [topic for topic in topics if is_pattern(topic)]:
        # Reject a pattern, because librdkafka would add and remove its topics at times of its own.
        raise ConfigurationError(
            f"a session reads topics by their names, not by the pattern {patterns[0]!r}: patterns are for an App's "
            "functions"
        )
