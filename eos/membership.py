"""Membership of a consumer group: the consumer, what it owns, where partitions begin, and the group's offsets.

Owns the confluent-kafka Consumer. Rebalance callbacks only record facts: an assignment waits in `_unresolved` until
`begin_new_partitions`, a revocation is forgotten at once, and `lost_sentence` says so if the open transaction took
records of it. This module never touches the producer and never decides what becomes of a transaction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from eos import hotloop, log
from eos.admin.cluster import ClusterAdmin
from eos.admin.facts import NEW_TOPIC_S
from eos.admin.overdue import OverdueWatch
from eos.admin.pending import why_unstable
from eos.admin.places import forgotten, noted
from eos.admin.topic_ids import TopicIds
from eos.app import Record
from eos.callbacks import guarded
from eos.error_table import denied
from eos.errors import (
    Action,
    Call,
    CallFailed,
    ConfigurationError,
    EosError,
    InputGone,
    Unavailable,
    classify,
    describe_error,
    no_broker,
    stop_error,
)
from eos.observe import Pulse, add
from eos.positions import Positions
from eos.positions import TopicPartition as Partition
from eos.raising import raising
from eos.settings import Settings
from eos.watchdog import CallHung
from eos.world import REAL, World

T = TypeVar("T")

_RESOLVE_TIMEOUT_S, _RESOLVE_PAUSE_S = 0.3, 0.2
_DONE_PAUSE_S = 0.25
_ASK_S = 5.0
_LOOK_S = 1.0  # of a question for which the group waits
_CLOSE_S = 10.0
_WAIT_LOG_INTERVAL_S = 10.0
_TAKEOVER_LOG_INTERVAL_S = 2.0
_STATISTICS_INTERVAL_MS = 1_000  # how old a lag may be
_STANDING_S = 30.0
_OTHERS = "another member's open transaction"


class _NotNow(Exception):
    """The cluster cannot answer at this moment; what is waited for."""


class Stopped(Exception):
    """A stop was asked for while the cluster was waited for."""


class _PartitionStatistics(msgspec.Struct):
    """What librdkafka's statistics say of a partition; -1001 where it knows nothing yet."""

    ls_offset: int = -1001  # the last stable offset; get_watermark_offsets(cached=True) answers the high watermark
    next_offset: int = -1001  # fetched next: behind markers and aborted records
    fetchq_cnt: int = 0  # records that were fetched and not handed to us yet


class _TopicStatistics(msgspec.Struct):
    partitions: dict[str, _PartitionStatistics] = {}


class _Statistics(msgspec.Struct):
    topics: dict[str, _TopicStatistics] = {}

    def partitions(self) -> Iterator[tuple[Partition, _PartitionStatistics]]:
        for name, topic in self.topics.items():
            for number, seen in topic.partitions.items():
                yield (name, int(number)), seen


_decode_statistics = msgspec.json.Decoder(_Statistics).decode


class Membership:
    """One consumer in one group; what it fetches goes into `positions`."""

    def __init__(
        self,
        settings: Settings,
        topics: Sequence[str],
        positions: Positions[Record],
        *,
        with_ends: bool,
        pulse: Pulse | None = None,
        world: World = REAL,
        stopping: Callable[[], bool] = lambda: False,
        rebalances: dict[str, int] | None = None,
        member_ids: set[str] | None = None,
        came_later: Collection[str] = (),
    ) -> None:
        """`stopping`: whether a stop was asked for, which ends what waits for the cluster. `rebalances` counts what was
        "assigned", "revoked" and "lost". `member_ids`: those that were ours, in consumers before this one too;
        librdkafka forgets its own when the session ends. `came_later`: topics that are younger than the group, read
        from their beginning, under `latest` too; more may come into it."""
        self._world = world
        self._settings = settings
        self._topics = list(topics)
        self._positions = positions
        self.group: str = settings["group.id"]
        self.owned: set[Partition] = set()
        self.new_starts: dict[Partition, int] = {}
        """Where partitions without a committed offset began under `latest`: to be committed at once."""
        self.lost_sentence: str | None = None
        """Why the open transaction cannot commit: the group took partitions away that it took records of."""
        self._came_later = came_later
        self._known_starts: dict[Partition, int] = {}
        self._unresolved: set[Partition] = set()  # assigned by the group, not begun yet
        self._next_resolve = 0.0
        self._told_waiting = 0.0
        self._waiting_since = 0.0
        self._was_member = False
        self._member_ids = set() if member_ids is None else member_ids
        self._assigned_as: str | None = None  # the member id under which we got the first of what we have
        self._latched: BaseException | None = None  # out of a callback
        own = str(settings.get("transactional.id", ""))
        self._overdue = OverdueWatch(settings, self.group, own, world) if own else None
        self._rebalanced = False
        self._topic_ids = TopicIds(settings, self._topics, self._topic_made_anew, world)
        self._pulse = pulse or Pulse(world.now)
        self._stopping = stopping
        self._rebalances = {} if rebalances is None else rebalances
        self._statistics: _Statistics | None = None  # not looked at yet
        self._lags: dict[Partition, int] = {}
        self._standing: dict[Partition, tuple[int, float]] = {}  # where nothing comes, since when or told when
        self._begun_at: dict[Partition, int] = {}  # as the consumer was told: OFFSET_BEGINNING is no offset
        self._unreadable: tuple[Partition, int] | None = None  # where the client could not read
        self._damaged: tuple[Partition, int, KafkaError] | None = None  # the same, a second time
        self._adrift = False  # the consumer may stand behind records that it did not hand out
        configuration = guarded(settings.consumer() | {"logger": log.client_logger}, self._latch)
        configuration.setdefault("error_cb", self._client_error)
        configuration.setdefault("statistics.interval.ms", _STATISTICS_INTERVAL_MS)
        self._user_stats = configuration.get("stats_cb")
        configuration["stats_cb"] = self._note_statistics
        if with_ends:
            configuration["enable.partition.eof"] = True
        strategy = str(configuration.get("partition.assignment.strategy", ""))
        self._incremental = not settings.classic_group or "cooperative" in strategy
        self._instance_id: str | None = configuration.get("group.instance.id")
        try:
            self.consumer = self._world.consumer(configuration)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the consumer's settings were refused: {describe_error(error)}") from error

    # ---- life -------------------------------------------------------------------------------------------------

    def check_topics(self, topics: Iterable[str], deadline: float) -> None:
        """Every topic named exists, or Unavailable with the name; so does an unreachable cluster."""
        check_topics(self.consumer, self._settings.bootstrap_servers, topics, deadline, self._world)

    def begin_at(self, starts: Mapping[Partition, int]) -> None:
        """Where a consumer before this one began under `latest`, not committed yet: so does this one."""
        self._known_starts = dict(starts)

    def starts(self) -> Mapping[Partition, int]:
        """For `begin_at` of the one that takes this one's place."""
        return self._known_starts | self.new_starts

    def make_way(self, admin: ClusterAdmin) -> None:
        """Takes a predecessor of our group.instance.id out of the group if it subscribed to other topics.

        A static member that comes back gets the partitions of before without a rebalance, whatever it subscribes to
        now (4.3.1, measured): those of a topic that is new to it would be nobody's, and it would be handed records of
        one that it does not read any more.
        """
        if self._instance_id is None:
            return
        try:
            there = [m for m in admin.members(self.group) if m.get("group_instance_id") == self._instance_id]
            # In mid-rebalance nothing is told, and our own subscription will count.
            known = [m["member_metadata"]["topics"] for m in there if isinstance(m.get("member_metadata"), dict)]
            if any(set(topics) != set(self._topics) for topics in known):
                admin.remove_member(self.group, self._instance_id)
        except EosError as error:
            # A group that nobody coordinates yet has no members.
            log.debug("the group's members cannot be had", error=str(error), group=self.group)

    def join(self) -> None:
        self._topic_ids.start()
        self._subscribe()

    def read_too(self, topics: Sequence[str]) -> None:
        """Reads all of `topics` from now on, new ones among them; not inside a transaction. The group rebalances, and
        only members that subscribed get a topic's partitions. CallFailed: the consumer cannot, and must be given up."""
        self._topics = list(topics)
        self._topic_ids.watch(topics)
        try:
            self._subscribe()
        except KafkaException as error:
            # Only one that met a fatal error refuses it; the next poll would meet that too.
            raise CallFailed("consume", Action.REJOIN, error) from error

    def _subscribe(self) -> None:
        self.consumer.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def close(self, leave: bool) -> None:
        """Closes the consumer. A static member stays in the group for its restart, unless it leaves for good."""
        self._topic_ids.stop()
        if self._overdue is not None:
            self._overdue.stop()
        guard = self._world.caller("eos-close")
        try:
            guard.call(self.consumer.close, timeout_s=_CLOSE_S)
        except CallHung:
            # Seen once: librdkafka ended its group while the revocation's callback gave the partitions back to it, and
            # that call waits for an answer that nobody gives any more. The process is to end all the same.
            log.warning("closing the consumer does not come to an end; it is left behind", group=self.group)
        except (KafkaException, RuntimeError) as error:
            log.debug("closing the consumer raised", error=describe_error(error))
        guard.close()
        if not leave or self._instance_id is None:
            return
        try:
            with self._world.admin(self._settings, timeout_ms=5_000) as admin:
                admin.remove_member(self.group, self._instance_id)
        except EosError as error:
            log.warning("could not leave the group: its partitions move at the session timeout", error=str(error))

    def abandon(self) -> None:
        """Closes the consumer on another thread: closing may wait for a coordinator that it cannot reach. What its
        callbacks say meanwhile concerns nobody any more."""
        self._positions = Positions()
        self._world.background("eos-retire", lambda: self.close(False))

    def _latch(self, error: BaseException) -> None:
        """Raised by the poll in which it came, or by the next one."""
        self._latched = self._latched or error

    def _topic_made_anew(self, gone: InputGone) -> None:
        self._latch(gone)

    def _client_error(self, error: KafkaError) -> None:
        log.debug("client error", error=describe_error(error))

    def _note_statistics(self, text: str) -> None:
        try:
            self._statistics = _decode_statistics(text)
        except Exception as error:  # noqa: BLE001 - must not pass through C frames
            self._latch(error)
        if self._user_stats is not None:
            self._user_stats(text)

    # ---- polling ----------------------------------------------------------------------------------------------

    def poll(self, most: int, timeout_s: float) -> None:
        """Fetches up to `most` records into the positions; serves the rebalance callbacks.

        Raises what a callback met, InputGone, CallFailed(REJOIN) when a newer static member may have taken this one's
        place, and EosErrors for what the group or the cluster refuses for good.

        Behind a signal's exception out of it, or out of a callback, nobody knows what the group gave or took, nor which
        records were destroyed on the way: this membership must be given up.
        """
        if self._damaged is not None:
            self._stop_at_damage(*self._damaged)
        if self._adrift:
            self._stand_where_expected()
        messages: list[Any] = []
        failed: KafkaError | None = None
        try:
            messages = raising(self.consumer.consume, most, timeout_s)
        except KafkaException as error:
            failed, self._adrift = error.args[0], True
        # Before anything is raised: what was fetched does not come a second time to who goes on all the same.
        records = hotloop.records_of(messages, Record)
        told = self._positions.repeated
        self._positions.fetched(records)
        if not told and self._positions.repeated:
            log.warning("the client delivered records again; they are dropped, and counted", group=self.group)
        if self._latched is not None:
            latched, self._latched = self._latched, None
            raise latched
        if failed is not None:
            self._failed(failed, None)
        if self._statistics is not None:
            # Now and not when it is asked for: what is committed later belongs to later ends.
            statistics, self._statistics = self._statistics, None
            self._lags = self._lags_by(statistics)
            self._tell_standing(statistics)
        if len(records) < len(messages):
            for message in messages:
                self._note_error(message)

    def _stand_where_expected(self) -> None:
        """Fetches every partition from behind what the positions have of it, one that gave them nothing too.

        CallFailed: the consumer cannot, and must be given up.
        """
        targets = {}
        for partition, offset in self._positions.expected().items():
            if partition in self.owned:
                start = self._begun_at[partition]
                targets[partition] = start if offset == max(start, 0) else offset
        log.debug("the consumer goes back to what was handed on", partitions=_names(targets), group=self.group)
        for partition, offset in targets.items():
            try:
                self.consumer.seek(TopicPartition(*partition, offset))
            except KafkaException as error:
                # It has not begun to fetch this one, so nothing of it can be missing.
                if error.args[0].code() != KafkaError._STATE or offset != self._begun_at[partition]:
                    raise CallFailed("consume", Action.REJOIN, error) from error
        self._adrift = False

    def _note_error(self, message: Any) -> None:
        error = message.error()
        if error is None:
            return
        if error.code() == KafkaError._PARTITION_EOF:
            self._positions.reached_end((message.topic(), message.partition()), message.offset())
        else:
            self._failed(error, message)

    def _failed(self, error: KafkaError, message: Any) -> None:
        action = classify("consume", error)
        if action is Action.INPUT_GONE and message is not None:
            raise self._input_gone(message, error)
        if action is Action.REJOIN:
            raise CallFailed("consume", action, KafkaException(error))
        if action is Action.DAMAGED and message is not None:
            at = (message.topic(), message.partition()), message.offset()
            if self._unreadable == at:
                self._damaged = *at, error
            self._unreadable = at
        elif action is not Action.RETRY:
            raise self._stop("consume", error, message.topic() if message is not None else "")
        log.warning("the consumer reports", error=describe_error(error), group=self.group)

    def _stop(self, call: Call, error: KafkaError, topic: str = "") -> EosError:
        right = denied(error, group=self.group, topic=topic or ", ".join(self._topics))
        return stop_error(CallFailed(call, classify(call, error), error, right))

    def _input_gone(self, message: Any, error: KafkaError) -> InputGone:
        topic, partition = message.topic(), message.partition()
        at = self._positions.committed.get((topic, partition))
        try:
            low, high = self._watermarks((topic, partition))
            holds = f"{low} to {high}"
        except _NotNow:
            holds = "other ones"
        return InputGone(
            f"the input is gone: {topic} [{partition}] is committed at offset {at}, but the topic now holds {holds}"
            f"; reset the group's offset on purpose to go on ({error.str()})"
        )

    def _stop_at_damage(self, partition: Partition, offset: int, error: KafkaError) -> None:
        """InputGone, once all before it is committed or on its way. Until then the client tries on, and may succeed."""
        if partition not in self.owned or self._positions.passed(partition, offset):
            self._damaged = None
        elif not self._positions.holds(partition):
            topic, number = partition
            raise InputGone(
                f"the input is damaged: {topic} [{number}] cannot be read at offset {offset}, and all before it is "
                f"committed ({error.str()})",
                remedy="make another replica its leader and start again, or give up what the batch holds: "
                f"`eos reset --from {topic}:{number}:OFFSET` with an offset behind it",
            )

    # ---- callbacks: facts only --------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            if not self.owned and not self._unresolved:
                self._assigned_as = consumer.memberid()
            # An empty assignment: the partitions begin in `begin_new_partitions`, once it is known where.
            (consumer.incremental_assign if self._incremental else consumer.assign)([])
            self._unresolved |= {(p.topic, p.partition) for p in partitions}
            add(self._rebalances, "assigned")
            self._next_resolve = 0.0
            self._rebalanced = self._rebalanced or bool(partitions)
            self._told_waiting = self._waiting_since = self._world.now()
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames; raised after the poll
            self._latch(error)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gave_up(consumer, partitions, "revoked")

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gave_up(consumer, partitions, "lost")

    def _gave_up(self, consumer: Consumer, partitions: list[TopicPartition], how: str) -> None:
        try:
            gone = {(p.topic, p.partition) for p in partitions}
            add(self._rebalances, how)
            if self._incremental:
                consumer.incremental_unassign([TopicPartition(*p) for p in gone & self.owned])
            else:
                consumer.unassign()
            self.owned -= gone
            self._unresolved -= gone
            self._begun_at = {p: offset for p, offset in self._begun_at.items() if p not in gone}
            self.new_starts = {p: offset for p, offset in self.new_starts.items() if p not in gone}
            if self._positions.forget(gone):
                self.lost_sentence = f"partitions of this transaction were {how}"
            log.info(f"partitions {how}", partitions=_names(gone), group=self.group)
        except BaseException as error:  # noqa: BLE001 - see _on_assign
            self._latch(error)

    def go_back(self, rewind: Callable[[], Mapping[Partition, int]]) -> None:
        """Fetches partitions again from the offsets that `rewind` of the positions returns; nothing fetched before
        comes out of `poll` any more (librdkafka marks it outdated before seek() returns). CallFailed: the consumer
        cannot, and must be given up."""
        for (topic, partition), offset in rewind().items():
            try:
                self.consumer.seek(TopicPartition(topic, partition, offset))
            except KafkaException as error:
                raise CallFailed("seek", Action.REJOIN, error) from error

    # ---- where partitions begin -------------------------------------------------------------------------------

    @property
    def new_partitions(self) -> bool:
        """The group assigned partitions that did not begin yet, and it is time to ask where."""
        return bool(self._unresolved) and self._world.now() >= self._next_resolve

    def begin_new_partitions(self) -> Mapping[Partition, TopicPartition]:
        """Begins what the group assigned, if its stable committed offsets can be had: not while a predecessor's open
        transaction pends on them. Partitions that we have already go on meanwhile. Not inside a transaction. Returns
        what began, with what was committed of it."""
        if not self.new_partitions:
            return {}
        if self._rebalanced and self._overdue is not None:
            self._overdue.look()  # these partitions may be a dead member's
        self._rebalanced = False
        try:
            starts = self._resolve_starts(sorted(self._unresolved))
        except _NotNow as error:
            # The group must be polled meanwhile, and a stop must be seen: a partition may have no leader for hours.
            self._next_resolve = self._world.now() + _RESOLVE_PAUSE_S
            self._tell_waiting(str(error))
            return {}
        self._assign(starts)
        self._noted_member_id()
        self._begun_at |= {p: tp.offset for p, tp in starts.items()}
        self._unresolved = set()
        self.owned |= set(starts)
        self._positions.assigned({p: max(tp.offset, 0) for p, tp in starts.items()})
        log.info("partitions assigned", partitions=_names(starts), group=self.group)
        return starts

    def _assign(self, starts: Mapping[Partition, TopicPartition]) -> None:
        (self.consumer.incremental_assign if self._incremental else self.consumer.assign)(list(starts.values()))

    def _tell_waiting(self, why: str) -> None:
        now = self._world.now()
        if now - self._told_waiting < _TAKEOVER_LOG_INTERVAL_S:
            return
        self._told_waiting = now
        log.info(f"waiting for {why}", partitions=_names(self._unresolved), group=self.group)
        if why == _OTHERS and now - self._waiting_since >= _WAIT_LOG_INTERVAL_S:
            self._waiting_since = now
            self._warn_of_waiting()

    def _warn_of_waiting(self) -> None:
        cause = why_unstable(self._settings, self.group, self._world)
        log.warning(
            "waiting for stable committed offsets",
            group=self.group,
            because=cause.because,
            command=f"`{cause.command}`",
        )

    def _resolve_starts(self, partitions: Sequence[Partition]) -> dict[Partition, TopicPartition]:
        """Where each new partition begins: its stable committed offset, else by auto.offset.reset. Raises _NotNow, and
        InputGone where there was a committed offset once."""
        starts = self.try_committed(partitions)
        if starts is None:
            raise _NotNow(_OTHERS)
        missing = [p for p, tp in starts.items() if tp.offset < 0]
        reset = str(self._settings.get("auto.offset.reset", "earliest"))
        # Before the notes, which take clients of their own: a partition may have no leader for hours.
        ends = self._ends_to_begin_at(missing) if reset == "latest" else {}
        try:
            if found := raising(noted, self._settings, self.group, missing, self._world):
                raise forgotten(self.group, found, reset)
        except Unavailable as error:
            raise _NotNow(f"the notes that tell whether the group ran before: {error}") from error
        self.new_starts |= ends
        starts |= {p: TopicPartition(*p, OFFSET_BEGINNING) for p in missing}
        return starts | {p: TopicPartition(*p, end) for p, end in ends.items()}

    def _ends_to_begin_at(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Under `latest`: the ends of those that are not new. A partition that came later than the group's first commit
        is new: its first records count too. Raises _NotNow."""
        known = dict.fromkeys(self._came_later, True)
        ends = {}
        for topic, partition in partitions:
            if topic not in known:
                known[topic] = self._has_commits(topic)
            if not known[topic]:
                start = self._known_starts.get((topic, partition))
                ends[topic, partition] = self._watermarks((topic, partition), _LOOK_S)[1] if start is None else start
        return ends

    def _has_commits(self, topic: str) -> bool:
        """Whether the group has committed offsets of it. Raises _NotNow while these are not stable."""
        committed = self.try_committed(self._partitions_of(topic))
        if committed is None:
            raise _NotNow(f"committed offsets of {topic} are not stable")
        return any(tp.offset >= 0 for tp in committed.values())

    def topics_with_commits(self, admin: ClusterAdmin) -> set[str]:
        """Those of which the group has committed offsets. Other members' open transactions are not waited for: their
        first commit of a topic, if it is one, does not make it older. Raises Stopped."""

        def ask() -> set[str]:
            try:
                return admin.committed_topics(self.group)
            except Unavailable as error:
                raise _NotNow(str(error)) from error

        return self._when_possible(ask)

    def _partitions_of(self, topic: str) -> list[Partition]:
        found = self._ask("metadata", topic, lambda: self.consumer.list_topics(topic, timeout=_ASK_S))
        return [(topic, partition) for partition in found.topics[topic].partitions]

    # ---- the group's offsets ----------------------------------------------------------------------------------

    def stable_committed(self, partitions: Sequence[Partition]) -> dict[Partition, TopicPartition]:
        """The group's committed offsets once no transaction pends on them (KIP-447); waits for them.

        CallFailed(REJOIN): another client gets them, this one's consumer does not. Seen with librdkafka 2.16 after the
        only broker came back: in 1 of 6 restarts it never asked for its group coordinator again.
        """
        told = self._world.now()
        while (found := self.try_committed(partitions, _ASK_S)) is None:
            if self._another_client_gets(partitions):
                raise CallFailed("committed", Action.REJOIN, TimeoutError("the consumer cannot reach its coordinator"))
            if self._world.now() - told > _WAIT_LOG_INTERVAL_S:
                told = self._world.now()
                self._warn_of_waiting()
            self._world.sleep(0.05)
        return found

    def _another_client_gets(self, partitions: Sequence[Partition]) -> bool:
        """Whether these offsets are stable and to be had, asked by a client of its own that joins nothing."""
        configuration = self._settings.consumer() | {"log_level": 0}
        for name in ("group.instance.id", "group.protocol", "session.timeout.ms", "heartbeat.interval.ms"):
            configuration.pop(name, None)
        asking = self._world.consumer(configuration)
        try:
            found = asking.committed([TopicPartition(*p) for p in partitions], timeout=_ASK_S)
            return all(tp.error is None for tp in found)
        except KafkaException as error:
            log.debug("another client cannot have them either", error=describe_error(error), group=self.group)
            return False
        finally:
            asking.close()

    def try_committed(
        self, partitions: Sequence[Partition], timeout_s: float = _RESOLVE_TIMEOUT_S
    ) -> dict[Partition, TopicPartition] | None:
        """Stable committed offsets, or None if they cannot be had yet."""
        if not partitions:
            return {}
        self._pulse.beat("calling", "committed")
        try:
            found = self.consumer.committed([TopicPartition(*p) for p in partitions], timeout=timeout_s)
            error = next((tp.error for tp in found if tp.error is not None), None)
            if error is None:
                return {(tp.topic, tp.partition): tp for tp in found}
        except KafkaException as raised:
            error = raised.args[0]
        action = classify("committed", error)
        if action is not Action.RETRY:
            raise self._stop("committed", error)
        log.debug("committed offsets cannot be had yet", error=describe_error(error), group=self.group)
        return None

    def metadata_to_commit(self, offsets: Mapping[Partition, int]) -> Any:
        """Fresh group metadata of a live member that owns all these partitions, if there are any. CallFailed if it is
        not: ABORT, or REJOIN when the group went on without this member."""
        if not offsets:
            return None
        metadata = self.consumer.consumer_group_metadata()
        # Asked after the metadata was taken, so it is not older. The broker skips its check for a member without an id
        # (generation -1), so we must not ask it then.
        member_id = self._noted_member_id()
        if not member_id:
            raise self._cannot_commit("this consumer is not a member of its group any more")
        # librdkafka tells of partitions that it lost when a heartbeat finds the member unknown; when it is a JoinGroup
        # that does, it joins under a new id and goes on with the partitions it had (measured with 2.16, cooperative).
        # Others may have handled them since, and the broker takes the new member's offsets.
        if member_id != self._assigned_as:
            sentence = "the group had removed this member, which joined again with the partitions of before"
            raise CallFailed("consume", Action.REJOIN, RuntimeError(sentence))
        if not self.owned.issuperset(offsets):
            raise self._cannot_commit(self.lost_sentence or "a partition of this transaction is not ours any more")
        return metadata

    def _noted_member_id(self) -> str | None:
        """Our member id, or None outside the group. It is kept: it is what tells us from a newer static member. Asked
        for once a transaction: each call waits for a thread."""
        current: str | None = self.consumer.memberid()
        if current:
            self._was_member = True
            self._member_ids.add(current)
        return current

    def _cannot_commit(self, sentence: str) -> CallFailed:
        return CallFailed("send_offsets", Action.ABORT, RuntimeError(sentence))

    def check_not_lost(self) -> None:
        """CallFailed(ABORT) if the open transaction took records of partitions that are gone since."""
        if self.lost_sentence is not None:
            raise self._cannot_commit(self.lost_sentence)

    def nobody_took_our_place(self) -> bool:
        """No other member of the group holds our group.instance.id; without one: we still have our member id, if we had
        one."""
        mine = self._noted_member_id()  # another one than at the last commit, if librdkafka joined again by itself
        if self._instance_id is None:
            return bool(mine) or not self._was_member
        with self._world.admin(self._settings) as admin:
            members = admin.members(self.group)
        ours = [m for m in members if m.get("group_instance_id") == self._instance_id]
        return all(m.get("member_id") in self._member_ids for m in ours)

    # ---- ends and lag -----------------------------------------------------------------------------------------

    def stable_ends(self) -> dict[Partition, int]:
        """Last stable offsets of all input partitions now; those without a readable offset are left out. Waits for
        partitions without a leader. Raises Stopped."""
        ends = {}
        for topic in self._topics:
            for partition in self._when_possible(functools.partial(self._partitions_of, topic)):
                low, end = self._when_possible(functools.partial(self._watermarks, partition))
                if end > low:
                    ends[partition] = end
        return ends

    def _watermarks(self, partition: Partition, timeout_s: float = _ASK_S) -> tuple[int, int]:
        """Low watermark and last stable offset of a partition (a read_committed consumer's end). Raises _NotNow."""
        at = TopicPartition(*partition)
        low, high = self._ask(
            "list_offsets", partition[0], lambda: self.consumer.get_watermark_offsets(at, timeout=timeout_s)
        )
        return low, high

    def _ask(self, name: str, topic: str, ask: Callable[[], Any]) -> Any:
        """What only the cluster can answer. _NotNow: not at this moment; EosError for what is refused for good."""
        self._pulse.beat("calling", name)
        try:
            return ask()
        except KafkaException as error:
            if classify("consume", error.args[0]) is Action.RETRY:
                raise _NotNow(describe_error(error)) from error
            raise self._stop("consume", error.args[0], topic) from error

    def _when_possible(self, question: Callable[[], T]) -> T:
        """Its answer, asked for until there is one; only while this member is not in the group, which must be polled.
        Raises Stopped."""
        told = self._world.now()
        while not self._stopping():
            try:
                return question()
            except _NotNow as error:
                if self._world.now() - told > _WAIT_LOG_INTERVAL_S:
                    told = self._world.now()
                    log.warning("waiting for the cluster", error=str(error), group=self.group)
                self._world.sleep(0.1)
        raise Stopped

    @property
    def in_group(self) -> bool:
        """The group coordinator knows us; librdkafka forgets the member id when the session ends."""
        return bool(self.consumer.memberid())

    @property
    def unresolved(self) -> int:
        """Partitions that the group assigned and that cannot begin yet."""
        return len(self._unresolved)

    def lag(self) -> int | None:
        """Sum of `lags`; None: not known yet."""
        lags = self.lags()
        known = [lag for lag in lags.values() if lag is not None]
        return sum(known) if lags and len(known) == len(lags) else None

    def lags(self) -> dict[Partition, int | None]:
        """Offsets between what is committed and the last stable offset of each owned partition, as of the consumer's
        last statistics; None: not known yet.

        Control markers take offsets too: with nothing left to fetch and nothing in hand, the lag is 0, whatever lies
        between.
        """
        return {partition: self._lags.get(partition) for partition in self.owned}

    def _lags_by(self, statistics: _Statistics) -> dict[Partition, int]:
        positions, lags = self._positions, {}
        nothing_in_hand = not len(positions) and not positions.taken
        for partition, seen in statistics.partitions():
            if seen.ls_offset < 0:
                continue
            fetched = seen.next_offset >= seen.ls_offset and not seen.fetchq_cnt
            behind = max(0, seen.ls_offset - max(positions.committed.get(partition, 0), 0))
            lags[partition] = 0 if fetched and nothing_in_hand else behind
        return lags

    def _tell_standing(self, statistics: _Statistics) -> None:
        """A warning where there is more to fetch and nothing comes: else only the lag would tell."""
        now, before, self._standing = self._world.now(), self._standing, {}
        for partition, seen in statistics.partitions():
            if partition not in self.owned or seen.fetchq_cnt or not 0 <= seen.next_offset < seen.ls_offset:
                continue
            at, since = before.get(partition, (-1, now))
            if at != seen.next_offset:
                at, since = seen.next_offset, now
            elif now - since >= _STANDING_S:
                where = {"partitions": _names([partition]), "at": at, "stable_end": seen.ls_offset}
                log.warning("a partition has more, and nothing comes of it", **where, group=self.group)
                since = now
            self._standing[partition] = at, since


class Finish:
    """Whether the whole group, other members included, is committed up to where the input ended at the start."""

    def __init__(self, membership: Membership) -> None:
        self._targets = membership.stable_ends()
        self._next_look = 0.0
        self._now = membership._world.now

    def reached(self, membership: Membership) -> bool:
        if self._now() < self._next_look:
            return False
        self._next_look = self._now() + _DONE_PAUSE_S
        # Asked, not waited for: another member's open transaction may keep its offsets unstable up to its timeout, and
        # meanwhile this one must go on polling, or it could not take that member's partitions over.
        committed = membership.try_committed(list(self._targets))
        if committed is None:
            return False
        self._targets = {p: end for p, end in self._targets.items() if committed[p].offset < end}
        return not self._targets


def _names(partitions: Iterable[Partition]) -> str:
    return ",".join(f"{topic}[{partition}]" for topic, partition in sorted(partitions))


def check_topics(client: Any, servers: str, topics: Iterable[str], deadline: float, world: World = REAL) -> None:
    """Every topic named exists, or Unavailable with the name; so does an unreachable cluster. `client`: any of
    confluent-kafka's that has `list_topics`."""
    patience = world.now() + NEW_TOPIC_S
    while (missing := _missing(client, servers, topics, max(1.0, deadline - world.now()))) and world.now() < patience:
        world.sleep(0.1)
    if missing:
        raise Unavailable(missing)


def _missing(client: Any, servers: str, topics: Iterable[str], timeout_s: float) -> str:
    """The sentence about the first topic that is not there, by the broker that is asked; "" when all are."""
    try:
        known = client.list_topics(timeout=timeout_s).topics
    except KafkaException as error:
        action = classify("consume", error.args[0])
        if action is Action.UNAUTHORISED:
            raise stop_error(CallFailed("consume", action, error)) from error
        sentence = f"{servers} cannot be reached: {describe_error(error)}"
        raise Unavailable(sentence, remedy=no_broker(servers)) from error
    for topic in topics:
        if topic not in known or known[topic].error is not None:
            detail = f" ({known[topic].error.str()})" if topic in known and known[topic].error else ""
            return f"topic {topic} does not exist at {servers}{detail}"
    return ""
