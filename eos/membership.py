"""Membership of a consumer group: the consumer, what it owns, where partitions begin, and the group's offsets.

Owns the confluent-kafka Consumer. Rebalance callbacks only record facts: an assignment waits in `_unresolved` until
`begin_new_partitions`, a revocation is forgotten at once, and `lost_sentence` says so if the open transaction took
records of it. This module never touches the producer and never decides what becomes of a transaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from eos import log
from eos.admin.cluster import ClusterAdmin
from eos.app import Record
from eos.errors import (
    Action,
    CallFailed,
    ConfigurationError,
    EosError,
    InputGone,
    Unavailable,
    classify,
    describe_error,
    stop_error,
)
from eos.positions import Positions
from eos.positions import TopicPartition as Partition
from eos.settings import Settings

_RESOLVE_TIMEOUT_S, _RESOLVE_PAUSE_S = 0.3, 0.2
_DONE_PAUSE_S = 0.25
_WAIT_LOG_INTERVAL_S = 10.0
_TAKEOVER_LOG_INTERVAL_S = 2.0


class Membership:
    """One consumer in one group; what it fetches goes into `positions`."""

    def __init__(
        self, settings: Settings, topics: Sequence[str], positions: Positions[Record], with_ends: bool
    ) -> None:
        self._settings = settings
        self._topics = list(topics)
        self._positions = positions
        self.group: str = settings["group.id"]
        self.owned: set[Partition] = set()
        self.new_starts: dict[Partition, int] = {}
        """Where partitions without a committed offset began under `latest`: to be committed at once."""
        self.lost_sentence: str | None = None
        """Why the open transaction cannot commit: the group took partitions away that it took records of."""
        self._unresolved: set[Partition] = set()  # assigned by the group, not begun yet
        self._next_resolve = 0.0
        self._told_waiting = 0.0
        self._member_id: str | None = None
        self._latched: BaseException | None = None  # out of a callback
        configuration = settings.consumer() | {"logger": log.client_logger}
        configuration.setdefault("error_cb", self._client_error)
        if with_ends:
            configuration["enable.partition.eof"] = True
        strategy = str(configuration.get("partition.assignment.strategy", ""))
        self._incremental = not settings.classic_group or "cooperative" in strategy
        self._instance_id: str | None = configuration.get("group.instance.id")
        try:
            self.consumer = Consumer(configuration)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the consumer's settings were refused: {describe_error(error)}") from error

    # ---- life -------------------------------------------------------------------------------------------------

    def check_topics(self, topics: Iterable[str], deadline: float) -> None:
        """Every topic named exists, or Unavailable with the name; so does an unreachable cluster."""
        servers = self._settings.bootstrap_servers
        try:
            known = self.consumer.list_topics(timeout=max(1.0, deadline - time.monotonic())).topics
        except KafkaException as error:
            action = classify("consume", error.args[0])
            if action is Action.UNAUTHORISED:
                raise stop_error(CallFailed("consume", action, error)) from error
            raise Unavailable(f"{servers} cannot be reached: {describe_error(error)}") from error
        for topic in topics:
            if topic not in known or known[topic].error is not None:
                detail = f" ({known[topic].error.str()})" if topic in known and known[topic].error else ""
                raise Unavailable(f"topic {topic} does not exist at {servers}{detail}")

    def join(self) -> None:
        self.consumer.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def close(self, leave: bool) -> None:
        """Closes the consumer. A static member stays in the group for its restart, unless it leaves for good."""
        try:
            self.consumer.close()
        except (KafkaException, RuntimeError) as error:
            log.debug("closing the consumer raised", error=describe_error(error))
        if not leave or self._instance_id is None:
            return
        try:
            with ClusterAdmin(self._settings, timeout_ms=5_000) as admin:
                admin.remove_member(self.group, self._instance_id)
        except EosError as error:
            log.warning("could not leave the group: its partitions move at the session timeout", error=str(error))

    def _client_error(self, error: KafkaError) -> None:
        log.debug("client error", error=describe_error(error))

    # ---- polling ----------------------------------------------------------------------------------------------

    def poll(self, most: int, timeout_s: float) -> None:
        """Fetches up to `most` records into the positions; serves the rebalance callbacks.

        Raises what a callback met, InputGone, CallFailed(FENCED) when a newer static member took this one's place,
        and EosErrors for what the group or the cluster refuses for good.
        """
        messages: list[Any] = []
        failed: KafkaError | None = None
        try:
            messages = self.consumer.consume(most, timeout_s)
        except KafkaException as error:
            failed = error.args[0]
        # librdkafka forgets it when the session ends; it is what tells us from a newer static member.
        self._member_id = self.consumer.memberid() or self._member_id
        if self._latched is not None:
            latched, self._latched = self._latched, None
            raise latched
        if failed is not None:
            self._failed(failed, None)
        if [m for m in messages if m.error() is not None]:  # twice as fast as any() of a generator
            messages = [m for m in messages if self._is_record(m)]
        self._positions.fetched(
            [
                Record(m.topic(), m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), m.headers() or ())
                for m in messages
            ]
        )

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            self._positions.reached_end((message.topic(), message.partition()), message.offset())
        else:
            self._failed(error, message)
        return False

    def _failed(self, error: KafkaError, message: Any) -> None:
        action = classify("consume", error)
        if action is Action.INPUT_GONE and message is not None:
            raise self._input_gone(message, error)
        if action is Action.FENCED:
            raise CallFailed("consume", action, KafkaException(error))
        if action is not Action.RETRY:
            raise stop_error(CallFailed("consume", action, error))
        log.warning("the consumer reports", error=describe_error(error), group=self.group)

    def _input_gone(self, message: Any, error: KafkaError) -> InputGone:
        topic, partition = message.topic(), message.partition()
        at = self._positions.committed.get((topic, partition))
        low, high = self._watermarks((topic, partition))
        return InputGone(
            f"the input is gone: {topic} [{partition}] is committed at offset {at}, but the topic now holds {low} to "
            f"{high}; reset the group's offset on purpose to go on ({error.str()})"
        )

    # ---- callbacks: facts only --------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            # An empty assignment: the partitions begin in `begin_new_partitions`, once it is known where.
            (consumer.incremental_assign if self._incremental else consumer.assign)([])
            self._unresolved |= {(p.topic, p.partition) for p in partitions}
            self._next_resolve = 0.0
            self._told_waiting = time.monotonic()
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames; raised after the poll
            self._latched = self._latched or error

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gave_up(consumer, partitions, "revoked")

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gave_up(consumer, partitions, "lost")

    def _gave_up(self, consumer: Consumer, partitions: list[TopicPartition], how: str) -> None:
        try:
            gone = {(p.topic, p.partition) for p in partitions}
            if self._incremental:
                consumer.incremental_unassign([TopicPartition(*p) for p in gone & self.owned])
            else:
                consumer.unassign()
            self.owned -= gone
            self._unresolved -= gone
            self.new_starts = {p: offset for p, offset in self.new_starts.items() if p not in gone}
            if self._positions.forget(gone):
                self.lost_sentence = f"partitions of this transaction were {how}"
            log.info(f"partitions {how}", partitions=_names(gone), group=self.group)
        except BaseException as error:  # noqa: BLE001 - see _on_assign
            self._latched = self._latched or error

    # ---- where partitions begin -------------------------------------------------------------------------------

    def begin_new_partitions(self) -> None:
        """Begins what the group assigned, if its stable committed offsets can be had: not while a predecessor's open
        transaction pends on them. Partitions that we have already go on meanwhile. Not inside a transaction."""
        if not self._unresolved or time.monotonic() < self._next_resolve:
            return
        starts = self._resolve_starts(sorted(self._unresolved))
        if starts is None:
            self._next_resolve = time.monotonic() + _RESOLVE_PAUSE_S
            self._tell_waiting()
            return
        (self.consumer.incremental_assign if self._incremental else self.consumer.assign)(list(starts.values()))
        self._unresolved = set()
        self.owned |= set(starts)
        self._positions.assigned({p: max(tp.offset, 0) for p, tp in starts.items()})
        log.info("partitions assigned", partitions=_names(starts), group=self.group)

    def _tell_waiting(self) -> None:
        now = time.monotonic()
        if now - self._told_waiting >= _TAKEOVER_LOG_INTERVAL_S:
            self._told_waiting = now
            waiting = _names(self._unresolved)
            log.info("waiting for another member's open transaction", partitions=waiting, group=self.group)

    def _resolve_starts(self, partitions: Sequence[Partition]) -> dict[Partition, TopicPartition] | None:
        """Where each new partition begins: its stable committed offset, else by auto.offset.reset (loop rule 16)."""
        starts = self.try_committed(partitions)
        if starts is None:
            return None
        missing = [p for p, tp in starts.items() if tp.offset < 0]
        latest = str(self._settings.get("auto.offset.reset", "earliest")) == "latest"
        known = self._topics_with_commits({topic for topic, _ in missing}) if latest and missing else set()
        for topic, partition in missing:
            # A partition that came later than the group's first commit is new: its first records count too.
            if not latest or topic in known:
                starts[topic, partition] = TopicPartition(topic, partition, OFFSET_BEGINNING)
            else:
                _, end = self._watermarks((topic, partition))
                starts[topic, partition] = TopicPartition(topic, partition, end)
                self.new_starts[topic, partition] = end
        return starts

    def _topics_with_commits(self, topics: set[str]) -> set[str]:
        return {
            topic
            for topic in topics
            if any(tp.offset >= 0 for tp in self.stable_committed(self._partitions_of(topic)).values())
        }

    def _partitions_of(self, topic: str) -> list[Partition]:
        metadata = self.consumer.list_topics(topic, timeout=10.0).topics[topic]
        return [(topic, partition) for partition in metadata.partitions]

    # ---- the group's offsets ----------------------------------------------------------------------------------

    def stable_committed(self, partitions: Sequence[Partition]) -> dict[Partition, TopicPartition]:
        """The group's committed offsets once no transaction pends on them (KIP-447); waits for them."""
        told = time.monotonic()
        while (found := self.try_committed(partitions, 5.0)) is None:
            if time.monotonic() - told > _WAIT_LOG_INTERVAL_S:
                told = time.monotonic()
                log.warning("waiting for stable committed offsets", group=self.group)
            time.sleep(0.05)
        return found

    def try_committed(
        self, partitions: Sequence[Partition], timeout_s: float = _RESOLVE_TIMEOUT_S
    ) -> dict[Partition, TopicPartition] | None:
        """Stable committed offsets, or None if they cannot be had yet."""
        if not partitions:
            return {}
        try:
            found = self.consumer.committed([TopicPartition(*p) for p in partitions], timeout=timeout_s)
            error = next((tp.error for tp in found if tp.error is not None), None)
            if error is None:
                return {(tp.topic, tp.partition): tp for tp in found}
        except KafkaException as raised:
            error = raised.args[0]
        action = classify("committed", error)
        if action is not Action.RETRY:
            raise stop_error(CallFailed("committed", action, error))
        log.debug("committed offsets cannot be had yet", error=describe_error(error), group=self.group)
        return None

    def metadata_to_commit(self, offsets: Mapping[Partition, int]) -> Any:
        """Fresh group metadata of a live member that owns all these partitions; CallFailed(ABORT) if it is not."""
        metadata = self.consumer.consumer_group_metadata()
        # The broker skips its check for a member without an id (generation -1), so we must not ask it then. Asked
        # after the metadata was taken: a member that lost its id gets no new one before its callbacks ran.
        if not self.consumer.memberid():
            raise self._cannot_commit("this consumer is not a member of its group any more")
        if not self.owned.issuperset(offsets):
            raise self._cannot_commit("a partition of this transaction is not ours any more")
        return metadata

    def _cannot_commit(self, sentence: str) -> CallFailed:
        return CallFailed("send_offsets", Action.ABORT, RuntimeError(sentence))

    def check_not_lost(self) -> None:
        """CallFailed(ABORT) if the open transaction took records of partitions that are gone since."""
        if self.lost_sentence is not None:
            raise self._cannot_commit(self.lost_sentence)

    def nobody_took_our_place(self) -> bool:
        """No other member of the group holds our group.instance.id; without one: we still have our member id."""
        if self._instance_id is None:
            return bool(self.consumer.memberid())
        with ClusterAdmin(self._settings) as admin:
            members = admin.members(self.group)
        ours = [m for m in members if m.get("group_instance_id") == self._instance_id]
        return all(m.get("member_id") == self._member_id for m in ours)

    # ---- ends and lag -----------------------------------------------------------------------------------------

    def stable_ends(self) -> dict[Partition, int]:
        """Last stable offsets of all input partitions now; those without a readable offset are left out."""
        ends = {}
        for partition in (p for topic in self._topics for p in self._partitions_of(topic)):
            low, end = self._watermarks(partition)
            if end > low:
                ends[partition] = end
        return ends

    def _watermarks(self, partition: Partition) -> tuple[int, int]:
        """Low watermark and last stable offset of a partition (a read_committed consumer's end)."""
        while True:
            try:
                low, high = self.consumer.get_watermark_offsets(TopicPartition(*partition), timeout=5.0)
                return low, high
            except KafkaException as error:
                action = classify("consume", error.args[0])
                if action is not Action.RETRY:
                    raise stop_error(CallFailed("consume", action, error)) from error
                time.sleep(0.1)

    def lag(self) -> int | None:
        """Offsets between what is committed and the last stable offsets of the owned partitions, as last fetched.

        Control markers take offsets too, so a caught-up group can show a few (loop rule 14). None: not known yet.
        """
        total = 0
        for partition in self.owned:
            try:
                _, end = self.consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
            except KafkaException:
                return None
            if end < 0:
                return None
            total += max(0, end - max(self._positions.committed.get(partition, 0), 0))
        return total if self.owned else None


class Finish:
    """Whether the whole group, other members included, is committed up to where the input ended at the start."""

    def __init__(self, membership: Membership) -> None:
        self._targets = membership.stable_ends()
        self._next_look = 0.0

    def reached(self, membership: Membership) -> bool:
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _DONE_PAUSE_S
        # Asked, not waited for: another member's open transaction may keep its offsets unstable up to its timeout, and
        # meanwhile this one must go on polling, or it could not take that member's partitions over.
        committed = membership.try_committed(list(self._targets))
        if committed is None:
            return False
        self._targets = {p: end for p, end in self._targets.items() if committed[p].offset < end}
        return not self._targets


def _names(partitions: Iterable[Partition]) -> str:
    return ",".join(f"{topic}[{partition}]" for topic, partition in sorted(partitions))
