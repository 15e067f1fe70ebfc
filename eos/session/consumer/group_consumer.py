"""Runs one consumer in one group: its subscription, its polls and its rebalance callbacks.

Owns the confluent-kafka Consumer. Rebalance callbacks only record facts in the assignment: an assigned partition waits
there until `start` begins to read it, and a revoked one is dropped at once. If the open transaction took records of a
revoked partition, `lost_reason` says so, and the transaction cannot commit. This module never touches the producer and
never decides how a transaction ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from eos import hotloop, log
from eos.errors import Action, CallFailed, ConfigurationError, describe_error
from eos.kafka.admin.overdue import OverdueTransactions
from eos.kafka.admin.topic_ids import TopicIds
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.client_calls import call_client, guard_callbacks
from eos.kafka.client.failures import classify
from eos.kafka.client.headers import read_damaged_headers
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import CallHung
from eos.kafka.client.world import REAL, World
from eos.observe import Pulse, add
from eos.records import Record, UnreadableHeaders
from eos.session.consumer.assignment import Assignment
from eos.session.consumer.lag import Lag, decode_statistics
from eos.session.consumer.lost_assignment import LostAssignment
from eos.session.consumer.member import Member
from eos.session.consumer.positions import Positions, names_of
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.consumer.queries import ClusterQueries
from eos.session.consumer.start_offsets import StartOffsets
from eos.session.consumer.unreadable import UnreadableInput

_CLOSE_S = 10.0
_ANSWER_S = 3.0  # how long the group's answer to a new member is awaited; most come after some 10 ms
_STATISTICS_INTERVAL_MS = 1_000  # the lag in metrics may be this old


@dataclass
class Handover:
    """Holds the knowledge that a consumer passes to its replacement in the same session."""

    member_ids: set[str] = field(default_factory=set)
    """Member ids that were this session's; librdkafka forgets its own when the consumer is closed."""
    topic_ids: dict[str, str] = field(default_factory=dict)
    """Ids of the topics, by name."""
    from_beginning: set[str] = field(default_factory=set)
    """Topics that are read from their beginning under `latest` too: they are younger than the group, or the session
    itself writes them."""
    start_offsets: dict[Partition, int] = field(default_factory=dict)
    """Offsets at which earlier consumers started under `latest`, not committed yet."""
    revoked: set[Partition] = field(default_factory=set)
    """Partitions whose revocation the participants do not know of yet."""
    rebalances: dict[str, int] = field(default_factory=dict)
    """How often the group `assigned` or `revoked` partitions, or partitions were `lost`."""


class GroupConsumer:
    """Runs one consumer in one group; the records that it fetches go into `positions`."""

    def __init__(
        self,
        settings: Settings,
        topics: Sequence[str],
        positions: Positions[Record],
        watcher: Watcher,
        *,
        with_ends: bool,
        pulse: Pulse | None = None,
        world: World = REAL,
        stopping: Callable[[], bool] = lambda: False,
        handover: Handover | None = None,
        changelogs: Collection[str] = (),
        on_unreadable: Callable[[str, int, int, str], None] = lambda topic, partition, offset, why: None,
        take_over: Callable[[Mapping[Partition, int]], Mapping[Partition, int]] = lambda _: {},
        kept: Collection[str] = (),
        needs_records: bool = True,
    ) -> None:
        """Create the consumer. `stopping` returns True once a stop was requested, which ends waits for the cluster.
        `with_ends`: report the ends of partitions to the positions. `changelogs`: see TopicIds. `on_unreadable`,
        `needs_records`: see Listener. `take_over`: see KeepsOffsets. `kept`: see StartOffsets."""
        self._settings, self._world = settings, world
        self._topics = list(topics)
        self._positions = positions
        self._handover = handover or Handover()
        self.group: str = settings["group.id"]
        self.assignment = Assignment(self._handover.revoked)
        self.lost_reason: str | None = None
        """Why the open transaction cannot commit: it took records of partitions that the group took away."""
        self._latched_error: BaseException | None = None  # raised by a callback
        self._on_unreadable = on_unreadable
        self._records_of = hotloop.records_of if needs_records else hotloop.fetched_of
        self._ended_at: dict[Partition, float] = {}  # when the consumer was last at the end of each partition
        self._must_seek = False  # the consumer may have passed records that it did not return
        configuration = guard_callbacks(settings.consumer() | {"logger": log.client_logger}, self._latch)
        configuration.setdefault("error_cb", _log_client_error)
        configuration.setdefault("statistics.interval.ms", _STATISTICS_INTERVAL_MS)
        self._user_stats = configuration.get("stats_cb")
        configuration["stats_cb"] = self._take_statistics
        if with_ends:
            configuration["enable.partition.eof"] = True
        strategy = str(configuration.get("partition.assignment.strategy", ""))
        self._incremental = not settings.classic_group or "cooperative" in strategy
        try:
            self.consumer = world.consumer(configuration)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the consumer's settings were refused: {describe_error(error)}") from error
        self._watcher = watcher
        self._overdue = OverdueTransactions(settings, self.group, settings["transactional.id"], watcher, world)
        self.topic_ids = TopicIds(settings, self._topics, self._latch, world, changelogs, self._handover.topic_ids)
        self._lag = Lag(positions, self.group, world)
        self._lost_assignment = LostAssignment(settings, self.group, watcher, world)
        self.queries = ClusterQueries(self.consumer, settings, self._topics, pulse or Pulse(world.now), world, stopping)
        self.start_offsets = StartOffsets(
            self.queries,
            settings,
            self._handover.from_beginning,
            self._handover.start_offsets,
            world,
            take_over,
            kept,
        )
        self._unreadable = UnreadableInput(positions, self.queries)
        instance_id = configuration.get("group.instance.id")
        self.member = Member(self.consumer, settings, instance_id, self._handover.member_ids, world)

        self._answer_awaited_until = 0.0  # World.now()

    # ---- life -------------------------------------------------------------------------------------------------

    def join(self) -> None:
        self._answer_awaited_until = self._world.now() + _ANSWER_S
        self.topic_ids.start(self._watcher)
        self._subscribe()

    @property
    def awaits_assignment(self) -> bool:
        """Return whether the group has not answered the last `join`, which was a moment ago.

        With group.protocol=consumer, librdkafka does not report an answer without partitions."""
        return self._world.now() < self._answer_awaited_until

    def _subscribe(self) -> None:
        self.consumer.subscribe(
            self._topics,
            on_assign=self._on_assign,
            on_revoke=functools.partial(self._on_revoke, how="revoked"),
            on_lost=functools.partial(self._on_revoke, how="lost"),
        )

    def subscribe(self, topics: Sequence[str]) -> None:
        """Read all of `topics` from now on, including new ones; no transaction may be open. The group rebalances,
        and only members that subscribed to a topic get its partitions.

        Raises CallFailed(REJOIN) if the consumer cannot subscribe and must be replaced."""
        self._topics[:] = topics
        self.topic_ids.watch(topics)
        try:
            self._subscribe()
        except KafkaException as error:
            # Only a consumer with a fatal error refuses to subscribe; the next poll would raise that error too.
            raise CallFailed("consume", Action.REJOIN, error) from error

    def close(self, leave: bool) -> None:
        """Close the consumer. A static member stays in the group for its restart unless `leave` is set."""
        self.topic_ids.stop(self._watcher)
        self._lost_assignment.stop()
        self._overdue.stop()
        guard = self._world.watchdog("eos-close")
        try:
            guard.call(self.consumer.close, timeout_s=_CLOSE_S)
        except CallHung:
            # The close of librdkafka 2.16 hung twice after many interrupts (its issue 4884). While it closed its group,
            # the revocation callback called unassign(), which never returned. The process is about to end anyway. If
            # the call holds the interpreter's lock while it waits, no thread of ours can run.
            log.warning("consumer close timed out", group=self.group, timeout_s=_CLOSE_S)
        except (KafkaException, RuntimeError) as error:
            log.debug("consumer close failed", error=describe_error(error), group=self.group)
        guard.close()
        if leave:
            self.member.leave()

    def abandon(self) -> None:
        """Close the consumer on another thread, because closing may wait for an unreachable coordinator. Its callbacks
        no longer affect the session. The handover keeps what the next consumer must know."""
        self._handover.start_offsets |= self.start_offsets.uncommitted
        self._handover.revoked |= set(self.assignment.all)
        self._positions, self.assignment = Positions(), Assignment()
        self._world.background("eos-retire", lambda: self.close(False))

    def _latch(self, error: BaseException) -> None:
        """Keep an error of a callback for the next `poll`, or for the `poll` that is running."""
        self._latched_error = self._latched_error or error

    def _take_statistics(self, text: str) -> None:
        try:
            statistics = decode_statistics(text)
            self._lag.note(statistics)
            self._lost_assignment.note(statistics.timed_out_requests)
        except Exception as error:  # noqa: BLE001 - must not pass through C frames
            self._latch(error)
        if self._user_stats is not None:
            self._user_stats(text)

    # ---- polling ----------------------------------------------------------------------------------------------

    def poll(self, most: int, timeout_s: float) -> None:
        """Fetch up to `most` records into the positions and serve the rebalance callbacks.

        Raises errors latched by a callback, InputGone, CallFailed(REJOIN) if another static member may have taken this
        one's place, and EosErrors for permanent refusals by the group or the cluster.

        If a signal handler raises inside this call, the assignment is unknown and fetched records may be lost, so this
        consumer must be replaced.
        """
        self._unreadable.check(self.assignment.reading)
        if self._must_seek:
            self.seek(self.assignment.fetch_offsets(self._positions.rebuild_next_fetch()), unless_unfetched=True)
            self._must_seek = False
        messages: list[Any] = []
        failed: KafkaError | None = None
        try:
            messages = call_client(self.consumer.consume, most, timeout_s)
        except KafkaException as error:
            failed, self._must_seek = error.args[0], True
        # Add them before anything is raised: fetched records are not delivered again to a caller that continues after
        # the error.
        records = self._records_of(messages, Record, self._note_unreadable)
        repeated = self._positions.repeated
        self._positions.add_fetched(records)
        if not repeated and self._positions.repeated:
            log.warning("repeated records dropped", group=self.group, reason="the client delivered them before")
        if self._latched_error is not None:
            latched, self._latched_error = self._latched_error, None
            raise latched
        if failed is not None:
            self._handle_error(failed)
        self._lag.update(self.assignment.reading)
        self._lost_assignment.check(self.member.refresh_id, lambda: self.assignment.all)
        if len(records) < len(messages):
            for message in messages:
                if message.error() is not None:
                    self._handle_error(message.error(), message)

    def _note_unreadable(self, message: Any, error: Exception) -> UnreadableHeaders:
        headers = read_damaged_headers(message, error)
        self._on_unreadable(message.topic(), message.partition(), message.offset(), headers.why)
        return headers

    def _handle_error(self, error: KafkaError, message: Any = None) -> None:
        """Handle an error of the consumer, or of one partition if it came as a `message`."""
        at = None if message is None else (message.topic(), message.partition())
        if at is not None and error.code() == KafkaError._PARTITION_EOF:
            self._positions.reach_end(at, message.offset())
            self._ended_at[at] = self._world.now()
            return
        action = classify("consume", error)
        if action is Action.REJOIN:
            raise CallFailed("consume", action, KafkaException(error))
        if action is Action.INPUT_GONE and at is not None:
            raise self._unreadable.explain_gone(at, error)
        if action is Action.DAMAGED and at is not None:
            self._unreadable.note_damaged(at, message.offset(), error)
        elif action is not Action.RETRY:
            raise self.queries.refusal("consume", error, "" if at is None else at[0])
        log.warning("consumer reported an error", error=describe_error(error), group=self.group)

    def find_end(self, partition: Partition) -> tuple[int, float] | None:
        """Return the end of a partition, as TransactSession.find_end does."""
        end = self._positions.find_end(partition)
        return None if end is None else (end, self._ended_at[partition])

    def seek(self, targets: Mapping[Partition, int], unless_unfetched: bool = False) -> None:
        """Fetch partitions again from these offsets. From now on `poll` returns no record that was fetched before the
        seek: librdkafka marks such records as outdated before seek() returns.

        `unless_unfetched`: skip partitions that the client has not begun to fetch. The client cannot seek in them, and
        they are still at their start.

        Raises CallFailed(REJOIN) if the consumer cannot seek and must be replaced."""
        for partition, offset in targets.items():
            try:
                self.consumer.seek(TopicPartition(*partition, offset))
            except KafkaException as error:
                unfetched = unless_unfetched and error.args[0].code() == KafkaError._STATE
                if not (unfetched and offset == self.assignment.start_of(partition)):
                    raise CallFailed("seek", Action.REJOIN, error) from error

    # ---- rebalances -------------------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self._answer_awaited_until = 0.0
            if not self.assignment.all:
                self.member.note_first_assignment()
            # Assign no partition yet. `start` assigns each partition when its start offset is known.
            (consumer.incremental_assign if self._incremental else consumer.assign)([])
            self.assignment.assign([(p.topic, p.partition) for p in partitions])
            add(self._handover.rebalances, "assigned")
            if partitions:
                self.start_offsets.restart_wait()
                self._overdue.watch()  # these partitions may be those of a dead member
            self._lost_assignment.reset()
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames; raised after the poll
            self._latch(error)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition], how: str) -> None:
        try:
            revoked = {(p.topic, p.partition) for p in partitions}
            add(self._handover.rebalances, how)
            if self._incremental:
                consumer.incremental_unassign([TopicPartition(*p) for p in revoked & self.assignment.reading])
            else:
                consumer.unassign()
            self.assignment.revoke(revoked)
            self.start_offsets.forget(revoked)
            if self._positions.forget(revoked):
                self.lost_reason = f"partitions of this transaction were {how}"
            log.info(f"partitions {how}", partitions=names_of(revoked), group=self.group)
            self._lost_assignment.reset()
        except BaseException as error:  # noqa: BLE001 - raised by the loop, as in _on_assign
            self._latch(error)

    def start(self, partitions: Collection[Partition]) -> None:
        """Read these located partitions from now on; no transaction may be open."""
        if not partitions:
            return
        starts = {p: self.assignment.restoring[p] for p in sorted(partitions)}
        if self._incremental:
            self.consumer.incremental_assign(list(starts.values()))
        else:  # assign() replaces the assignment: partitions that are read already continue where they are
            offsets = self.assignment.fetch_offsets(self._positions.rebuild_next_fetch())
            self.consumer.assign([*(TopicPartition(*p, at) for p, at in offsets.items()), *starts.values()])
        self.member.refresh_id()
        self.assignment.read(starts)
        self._positions.assign({p: max(tp.offset, 0) for p, tp in starts.items()})
        log.info("partitions assigned", partitions=names_of(starts), group=self.group)

    # ---- the open transaction ---------------------------------------------------------------------------------

    def begin_transaction(self) -> None:
        """Record that a transaction begins. It has taken no records yet."""
        self.lost_reason = None

    def raise_if_lost(self) -> None:
        """Raise CallFailed(ABORT) if the open transaction took records of partitions that were revoked since."""
        if self.lost_reason is not None:
            raise _cannot_commit(self.lost_reason)

    def group_metadata(self, offsets: Mapping[Partition, int]) -> Any:
        """Return fresh group metadata for a commit of these offsets, or None without offsets.

        Raises CallFailed: ABORT if this consumer is no longer a member or does not own all of the partitions, REJOIN if
        the group continued without it.
        """
        if not offsets:
            return None
        metadata = self.consumer.consumer_group_metadata()
        # Read the member id after the metadata, so that the id is not older. For a member without an id (generation -1)
        # the broker skips its check, so a commit of such a member must not be sent.
        member_id = self.member.refresh_id()
        if not member_id:
            raise _cannot_commit("this consumer is no longer a member of its group")
        if self.member.has_changed(member_id):
            sentence = "the group had removed this member, which joined again with its old partitions"
            raise CallFailed("consume", Action.REJOIN, RuntimeError(sentence))
        if not offsets.keys() <= self.assignment.located:
            raise _cannot_commit(
                self.lost_reason or "a partition of this transaction is no longer assigned to this member"
            )
        return metadata

    def lags(self) -> dict[Partition, int | None]:
        """Return the lag of each partition that is read: see Lag.of."""
        return self._lag.of(self.assignment.reading)


def _cannot_commit(reason: str) -> CallFailed:
    return CallFailed("send_offsets", Action.ABORT, RuntimeError(reason))


def _log_client_error(error: KafkaError) -> None:
    log.debug("client error", error=describe_error(error))
