"""Membership of a consumer group: the consumer, what it owns, and what is fetched.

Owns the confluent-kafka Consumer. Rebalance callbacks only record facts: an assignment waits in `_unresolved` until
`find_starts` knows where it begins and `begin` is told that it may; a revocation is forgotten at once, and
`lost_sentence` says so if the open transaction took records of it. This module never touches the producer and never
decides what becomes of a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from eos import hotloop, log
from eos.errors import Action, CallFailed, ConfigurationError, describe_error
from eos.kafka.admin.overdue import OverdueTransactionWatcher
from eos.kafka.admin.topic_ids import TopicIdWatcher
from eos.kafka.client.client_calls import call_client, guard_callbacks
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.failures import classify
from eos.kafka.client.headers import read_damaged_headers
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import CallHung
from eos.kafka.client.world import REAL, World
from eos.records import Record, UnreadableHeaders
from eos.session.asking import Asking, NotNow, check_topics
from eos.session.lag import Lag, decode_statistics
from eos.session.member import Member
from eos.session.observe import Pulse, add
from eos.session.positions import Positions, names_of
from eos.session.positions import TopicPartition as Partition
from eos.session.starts import OTHERS, Starts
from eos.session.unheard import Unheard
from eos.session.unreadable import Unreadable

_RESOLVE_PAUSE_S = 0.2
_CLOSE_S = 10.0
_WAIT_LOG_INTERVAL_S = 10.0
_TAKEOVER_LOG_INTERVAL_S = 2.0
_STATISTICS_INTERVAL_MS = 1_000  # how old a lag may be


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
        from_beginning: Collection[str] = (),
        changelogs: Collection[str] = (),
        topic_ids: dict[str, str] | None = None,
        on_unreadable: Callable[[str, int, int, str], None] = lambda topic, partition, offset, why: None,
    ) -> None:
        """`stopping`: whether a stop was asked for, which ends what waits for the cluster. `rebalances` counts what was
        "assigned", "revoked" and "lost". `member_ids`: those that were ours, see Member. `from_beginning`: see Starts.
        `changelogs`, `topic_ids` (known before): see TopicIds. `on_unreadable`: see Listener.unreadable.
        """
        self._world = world
        self._settings = settings
        self._topics = list(topics)
        self._positions = positions
        self.group: str = settings["group.id"]
        self.owned: set[Partition] = set()
        """Those that are read."""
        self.gone: set[Partition] = set()
        """Went since somebody looked; also those that never began, or that came again."""
        self._found: dict[Partition, TopicPartition] = {}  # assigned, and it is known where they begin
        self.lost_sentence: str | None = None
        """Why the open transaction cannot commit: the group took partitions away that it took records of."""
        self._unresolved: set[Partition] = set()  # assigned by the group, and it is not known where they begin
        self._next_resolve = 0.0
        self._told_waiting = 0.0
        self._waiting_since = 0.0
        self._latched: BaseException | None = None  # out of a callback
        self._on_unreadable = on_unreadable
        own = str(settings.get("transactional.id", ""))
        self._overdue = OverdueTransactionWatcher(settings, self.group, own, world) if own else None
        self._rebalanced = False
        self._topic_ids = TopicIdWatcher(settings, self._topics, self._latch, world, changelogs, topic_ids)
        self._rebalances = {} if rebalances is None else rebalances
        self._lag = Lag(positions, self.group, world)
        self._unheard = Unheard(settings, self.group, world)
        self._begun_at: dict[Partition, int] = {}  # as the consumer was told: OFFSET_BEGINNING is no offset
        self._adrift = False  # the consumer may stand behind records that it did not hand out
        configuration = guard_callbacks(settings.consumer() | {"logger": log.client_logger}, self._latch)
        configuration.setdefault("error_cb", self._client_error)
        configuration.setdefault("statistics.interval.ms", _STATISTICS_INTERVAL_MS)
        self._user_stats = configuration.get("stats_cb")
        configuration["stats_cb"] = self._note_statistics
        if with_ends:
            configuration["enable.partition.eof"] = True
        strategy = str(configuration.get("partition.assignment.strategy", ""))
        self._incremental = not settings.classic_group or "cooperative" in strategy
        try:
            self.consumer = self._world.consumer(configuration)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the consumer's settings were refused: {describe_error(error)}") from error
        self.asking = Asking(self.consumer, settings, self._topics, pulse or Pulse(world.now), world, stopping)
        self.starts = Starts(self.asking, settings, from_beginning, world)
        self._unreadable = Unreadable(positions, self.asking)
        ids = set() if member_ids is None else member_ids
        self.member = Member(self.consumer, settings, configuration.get("group.instance.id"), ids, world)

    # ---- life -------------------------------------------------------------------------------------------------

    def check_topics(self, topics: Iterable[str], deadline: float) -> None:
        """Every topic named exists, or Unavailable with the name; so does an unreachable cluster."""
        check_topics(self.consumer, self._settings.bootstrap_servers, topics, deadline, self._world)

    def note_topics(self, admin: ClusterAdmin) -> None:
        """Note the ids of changelogs before anything is restored from them."""
        self._topic_ids.learn_changelog_ids(admin)

    def look_for_topics(self) -> None:
        """Raise InputGone if a topic was deleted or recreated."""
        self._topic_ids.check_now()

    def join(self) -> None:
        self._topic_ids.start()
        self._subscribe()

    def read_too(self, topics: Sequence[str]) -> None:
        """Reads all of `topics` from now on, new ones among them; not inside a transaction. The group rebalances, and
        only members that subscribed get a topic's partitions. CallFailed: the consumer cannot, and must be given up."""
        self._topics[:] = topics
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
        self._unheard.stop()
        if self._overdue is not None:
            self._overdue.stop()
        guard = self._world.watchdog("eos-close")
        try:
            guard.call(self.consumer.close, timeout_s=_CLOSE_S)
        except CallHung:
            # Seen twice with librdkafka 2.16 (its issue 4884), behind many interrupts: it ended its group while the
            # revocation's callback gave the partitions back to it, and that call waits for an answer that nobody gives
            # any more. The process is to end all the same. (Where it waits with the interpreter's lock, nothing can.)
            log.warning("closing the consumer does not come to an end; it is left behind", group=self.group)
        except (KafkaException, RuntimeError) as error:
            log.debug("closing the consumer raised", error=describe_error(error))
        guard.close()
        if leave:
            self.member.leave()

    def abandon(self) -> None:
        """Closes the consumer on another thread: closing may wait for a coordinator that it cannot reach. What its
        callbacks say meanwhile concerns nobody any more."""
        self._positions = Positions()
        self._world.background("eos-retire", lambda: self.close(False))

    def _latch(self, error: BaseException) -> None:
        """Raised by the poll in which it came, or by the next one."""
        self._latched = self._latched or error

    def _client_error(self, error: KafkaError) -> None:
        log.debug("client error", error=describe_error(error))

    def _note_statistics(self, text: str) -> None:
        try:
            statistics = decode_statistics(text)
            self._lag.note(statistics)
            self._unheard.note(statistics.late_answers)
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
        self._unreadable.check(self.owned)
        if self._adrift:
            self._stand_where_expected()
        messages: list[Any] = []
        failed: KafkaError | None = None
        try:
            messages = call_client(self.consumer.consume, most, timeout_s)
        except KafkaException as error:
            failed, self._adrift = error.args[0], True
        # Before anything is raised: what was fetched does not come a second time to who goes on all the same.
        records = hotloop.records_of(messages, Record, self._note_unreadable)
        told = self._positions.repeated
        self._positions.fetched(records)
        if not told and self._positions.repeated:
            log.warning("the client delivered records again; they are dropped, and counted", group=self.group)
        if self._latched is not None:
            latched, self._latched = self._latched, None
            raise latched
        if failed is not None:
            self._failed(failed, None)
        self._lag.look(self.owned)
        self._check_heard()
        if len(records) < len(messages):
            for message in messages:
                self._note_error(message)

    def _note_unreadable(self, message: Any, error: Exception) -> UnreadableHeaders:
        headers = read_damaged_headers(message, error)
        self._on_unreadable(message.topic(), message.partition(), message.offset(), headers.why)
        return headers

    def _check_heard(self) -> None:
        """CallFailed: the group gave this member partitions, and its consumer, which will never hear of them, must be
        given up."""
        if unheard := self._unheard.look(self.member.id, lambda: self.assigned | self._unresolved):
            sentence = f"the group gave this member {names_of(unheard)} in an answer that came too late for its client"
            raise CallFailed("consume", Action.REJOIN, RuntimeError(sentence))

    def _stand_where_expected(self) -> None:
        """Fetches every partition from behind what the positions have of it, one that gave them nothing too.

        CallFailed: the consumer cannot, and must be given up.
        """
        targets = self._expected()
        log.debug("the consumer goes back to what was handed on", partitions=names_of(targets), group=self.group)
        for partition, offset in targets.items():
            try:
                self.consumer.seek(TopicPartition(*partition, offset))
            except KafkaException as error:
                # It has not begun to fetch this one, so nothing of it can be missing.
                if error.args[0].code() != KafkaError._STATE or offset != self._begun_at[partition]:
                    raise CallFailed("consume", Action.REJOIN, error) from error
        self._adrift = False

    def _expected(self) -> dict[Partition, int]:
        """Return the offset from which each partition that is read must be fetched next."""
        targets = {}
        for partition, offset in self._positions.expected().items():
            if partition in self.owned:
                start = self._begun_at[partition]
                targets[partition] = start if offset == max(start, 0) else offset
        return targets

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
        at = (message.topic(), message.partition()) if message is not None else None
        if action is Action.REJOIN:
            raise CallFailed("consume", action, KafkaException(error))
        if action is Action.INPUT_GONE and at is not None:
            raise self._unreadable.gone(at, error)
        if action is Action.DAMAGED and at is not None:
            self._unreadable.damaged(at, message.offset(), error)
        elif action is not Action.RETRY:
            raise self.asking.refusal("consume", error, at[0] if at is not None else "")
        log.warning("the consumer reports", error=describe_error(error), group=self.group)

    # ---- callbacks: facts only --------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            if not self.assigned and not self._unresolved:
                self.member.assigned()
            # An empty assignment: the partitions begin in `begin`, once it is known where.
            (consumer.incremental_assign if self._incremental else consumer.assign)([])
            self._unresolved |= {(p.topic, p.partition) for p in partitions}
            add(self._rebalances, "assigned")
            self._next_resolve = 0.0
            self._rebalanced = self._rebalanced or bool(partitions)
            self._told_waiting = self._waiting_since = self._world.now()
            self._unheard.heard()
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
            self._found = {p: start for p, start in self._found.items() if p not in gone}
            self.gone |= gone
            self._begun_at = {p: offset for p, offset in self._begun_at.items() if p not in gone}
            self.starts.gone(gone)
            if self._positions.forget(gone):
                self.lost_sentence = f"partitions of this transaction were {how}"
            log.info(f"partitions {how}", partitions=names_of(gone), group=self.group)
            self._unheard.heard()
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
    def assigned(self) -> set[Partition]:
        """Ours by the group, and it is known where they begin: those that are read, and those that wait for us."""
        return self.owned | self._found.keys()

    @property
    def _to_resolve(self) -> bool:
        return bool(self._unresolved) and self._world.now() >= self._next_resolve

    @property
    def changed(self) -> bool:
        """The group took partitions, or it is time to ask where new ones begin, or whether they may."""
        return bool(self.gone or self._found) or self._to_resolve

    def find_starts(self) -> Mapping[Partition, TopicPartition]:
        """Where those begin that the group assigned and that did not begin yet, with what is committed of them: not
        known while a predecessor's open transaction pends on that; partitions that we have already go on meanwhile."""
        if self._to_resolve:
            self._resolve()
        return self._found

    def _resolve(self) -> None:
        if self._rebalanced and self._overdue is not None:
            self._overdue.watch()  # these partitions may be a dead member's
        self._rebalanced = False
        try:
            starts = self.starts.resolve(sorted(self._unresolved))
        except NotNow as error:
            # The group must be polled meanwhile, and a stop must be seen: a partition may have no leader for hours.
            self._next_resolve = self._world.now() + _RESOLVE_PAUSE_S
            self._tell_waiting(str(error))
            return
        self._found |= starts
        self._unresolved = set()

    def begin(self, partitions: Collection[Partition]) -> None:
        """Some of those whose starts were found are read from now on. Not inside a transaction."""
        if not partitions:
            return
        starts = {p: self._found[p] for p in sorted(partitions)}
        self._assign(starts)
        self.member.id()  # it is kept
        self._begun_at |= {p: tp.offset for p, tp in starts.items()}
        self._found = {p: start for p, start in self._found.items() if p not in starts}
        self.owned |= set(starts)
        self._positions.assigned({p: max(tp.offset, 0) for p, tp in starts.items()})
        log.info("partitions assigned", partitions=names_of(starts), group=self.group)

    def _assign(self, starts: Mapping[Partition, TopicPartition]) -> None:
        if self._incremental:
            self.consumer.incremental_assign(list(starts.values()))
        else:  # which replaces what was assigned before: that goes on where it is
            before = [TopicPartition(*partition, offset) for partition, offset in self._expected().items()]
            self.consumer.assign([*before, *starts.values()])

    def _tell_waiting(self, why: str) -> None:
        now = self._world.now()
        if now - self._told_waiting < _TAKEOVER_LOG_INTERVAL_S:
            return
        self._told_waiting = now
        log.info(f"waiting for {why}", partitions=names_of(self._unresolved), group=self.group)
        if why == OTHERS and now - self._waiting_since >= _WAIT_LOG_INTERVAL_S:
            self._waiting_since = now
            self.asking.warn_of_waiting()

    # ---- the member -------------------------------------------------------------------------------------------

    def metadata_to_commit(self, offsets: Mapping[Partition, int]) -> Any:
        """Fresh group metadata of a live member that owns all these partitions, if there are any. CallFailed if it is
        not: ABORT, or REJOIN when the group went on without this member."""
        if not offsets:
            return None
        metadata = self.consumer.consumer_group_metadata()
        # Asked after the metadata was taken, so it is not older. The broker skips its check for a member without an id
        # (generation -1), so we must not ask it then.
        member_id = self.member.id()
        if not member_id:
            raise self._cannot_commit("this consumer is not a member of its group any more")
        if self.member.has_changed(member_id):
            sentence = "the group had removed this member, which joined again with the partitions of before"
            raise CallFailed("consume", Action.REJOIN, RuntimeError(sentence))
        if not self.assigned.issuperset(offsets):
            raise self._cannot_commit(self.lost_sentence or "a partition of this transaction is not ours any more")
        return metadata

    def _cannot_commit(self, sentence: str) -> CallFailed:
        return CallFailed("send_offsets", Action.ABORT, RuntimeError(sentence))

    def begun(self) -> None:
        """Note that a transaction begins, which took no records yet."""
        self.lost_sentence = None

    def raise_if_lost(self) -> None:
        """Raise CallFailed(ABORT) if the open transaction took records of partitions that were revoked since."""
        if self.lost_sentence is not None:
            raise self._cannot_commit(self.lost_sentence)

    @property
    def unresolved(self) -> int:
        """Partitions that the group assigned and of which it is not known where they begin."""
        return len(self._unresolved)

    @property
    def waiting(self) -> int:
        """Partitions that somebody who takes part is not ready for."""
        return len(self._found)

    def lags(self) -> dict[Partition, int | None]:
        """Of each owned partition: Lag.of."""
        return self._lag.of(self.owned)
