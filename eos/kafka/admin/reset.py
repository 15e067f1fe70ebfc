"""Moves a group's committed offsets while the group has no members, to replay or to skip records.

Owns the meaning of `--from` and the conditions under which offsets may be moved. It refuses while the group has members
(the broker refuses too) and while an open transaction contains offsets of the group: its commit would overwrite the new
ones. It never moves offsets that were not named. The metadata of an offset moves with it; only the caller may change
it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec

from eos.errors import ConfigurationError, Unavailable, UsageError, describe_error, not_authorised
from eos.kafka.admin import tail
from eos.kafka.admin.facts import cluster_metadata, connect, describe_topic
from eos.kafka.client.cluster import Partition
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import format_position

_REQUEST_TIMEOUT_S, _POLL_INTERVAL_S = 10.0, 0.5
_OFFSET_PATTERN = re.compile(r"([A-Za-z0-9._-]+)(?::(\d+):(\d+)|\[(\d+)\]@(\d+))")


@dataclass(frozen=True)
class Target:
    """Describes the new offsets: `earliest`, `latest`, the first ones from `timestamp_ms` on, `offsets`, or UNCHANGED.

    `name` is for display."""

    name: str
    timestamp_ms: int | None = None
    offsets: Mapping[Partition, int] | None = None


UNCHANGED = Target("unchanged")


@dataclass(frozen=True)
class Move:
    """Holds one partition's committed offset before (None: none) and after the move.

    `low` and `end` bound the offsets that can be read now. `metadata` is committed with the offset."""

    partition: Partition
    before: int | None
    after: int
    low: int
    end: int
    metadata: str = ""


def parse_target(texts: Sequence[str]) -> Target:
    """Parse `--from earliest | latest | 2013-07-04T12:00[:00][+02:00] | TOPIC[PARTITION]@OFFSET`, the last repeatable.

    TOPIC:PARTITION:OFFSET means the same as TOPIC[PARTITION]@OFFSET."""
    if len(texts) == 1 and (single := _parse_single(texts[0])) is not None:  # a time has colons too
        return single
    expected = "earliest, latest, a time such as 2013-07-04T12:00:00, or any number of TOPIC[PARTITION]@OFFSET"
    return Target("offset", offsets=_parse_offsets("--from", texts, expected))


def parse_skip(texts: Sequence[str]) -> Target:
    """Parse `--skip TOPIC[PARTITION]@OFFSET`, repeatable: the target is the offset after each record."""
    skipped = _parse_offsets("--skip", texts, "TOPIC[PARTITION]@OFFSET, as in the message of exit code 65")
    return Target("skip", offsets={partition: offset + 1 for partition, offset in skipped.items()})


def _parse_offsets(option: str, texts: Sequence[str], expected: str) -> dict[Partition, int]:
    found = [_OFFSET_PATTERN.fullmatch(text) for text in texts]
    wrong = [text for text, match in zip(texts, found, strict=True) if match is None]
    if not texts or wrong:
        raise UsageError(f"{option} {wrong[0] if wrong else 'is missing'}: expected {expected}")
    parts = [list(filter(None, match.groups())) for match in found if match]
    offsets = {(topic, int(partition)): int(offset) for topic, partition, offset in parts}
    if len(offsets) < len(texts):
        raise UsageError(f"{option} names a partition twice")
    return offsets


def _parse_single(text: str) -> Target | None:
    if text in ("earliest", "latest"):
        return Target(text)
    try:
        moment = datetime.datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):  # OverflowError: a year outside of the platform's range
        return None
    return Target(moment.isoformat(), timestamp_ms=round(moment.timestamp() * 1000))


class GroupOffsets:
    """Plans and commits new offsets for one group on `topics`."""

    def __init__(
        self, settings: Settings, group: str, topics: Iterable[str], timeout_s: float = 5.0, world: World = REAL
    ) -> None:
        self._world = world
        self.group, self._topics = group, sorted(topics)
        self._client, self._settings = connect(settings, timeout_s, world), settings

    def require_no_members(self, wait_s: float = 0.0) -> None:
        """Raise Unavailable, naming the members, if the group still has any after `wait_s` seconds."""
        deadline = self._world.now() + wait_s
        while names := self._members():
            if self._world.now() >= deadline:
                count = f"{len(names)} member{'s' if len(names) != 1 else ''}"
                raise Unavailable(
                    f"group {self.group} has {count} ({', '.join(names)}): stop them first; a member that was killed "
                    "or stopped by a failed record remains one until its session.timeout.ms has passed (use --wait 30)"
                )
            self._world.sleep(_POLL_INTERVAL_S)

    def _members(self) -> list[str]:
        try:
            found = self._client.describe_consumer_groups([self.group], request_timeout=_REQUEST_TIMEOUT_S)[
                self.group
            ].result()
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return []  # 4.x: the group never existed
            raise _translate_error(error, self.group) from error
        if found.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD):
            return []
        return sorted(f"{m.group_instance_id or m.member_id} on {m.host.lstrip('/')}" for m in found.members)

    def plan(self, target: Target) -> list[Move]:
        """Return the moves for `commit`.

        Raises UsageError for a partition outside of the group's topics, ConfigurationError for an offset that cannot be
        read, and Unavailable while an open transaction contains offsets of the group."""
        partitions = self._partitions()
        before = self._committed(partitions)
        low = self._ends(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        end = self._ends(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        after = before if target == UNCHANGED else self._after(target, partitions, low, end)
        for partition, offset in after.items():
            if not low[partition] <= offset <= end[partition]:
                held = f"holds offsets {low[partition]} to {end[partition]}"
                raise ConfigurationError(f"{partition[0]}[{partition[1]}] {held}: the group cannot start at {offset}")
        with self._world.admin(self._settings) as admin:
            kept = admin.metadata_by_partition(self.group)
        return [Move(p, before.get(p), offset, low[p], end[p], kept.get(p, "")) for p, offset in sorted(after.items())]

    def _after(
        self, target: Target, partitions: list[Partition], low: dict[Partition, int], end: dict[Partition, int]
    ) -> dict[Partition, int]:
        if target.offsets is not None:
            for topic, number in target.offsets:
                if (topic, number) not in low:
                    raise UsageError(
                        f"{format_position(topic, number)}: no such partition among {', '.join(self._topics)}"
                    )
            return dict(target.offsets)
        if target.timestamp_ms is not None:
            spec = OffsetSpec.for_timestamp(target.timestamp_ms)
            # -1 means that all records of the partition are older, so the partition continues at its end.
            return {p: o if o >= 0 else end[p] for p, o in self._ends(partitions, spec).items()}
        return low if target.name == "earliest" else end

    def _partitions(self) -> list[Partition]:
        known = cluster_metadata(self._client, self._settings.bootstrap_servers, _REQUEST_TIMEOUT_S).topics
        found: list[Partition] = []
        for topic in self._topics:
            if topic not in known or known[topic].error is not None:
                if describe_topic(self._client, topic).exists is None:
                    raise not_authorised(f"topic {topic}", "READ")
                raise Unavailable(f"topic {topic} does not exist")
            found += [(topic, number) for number in sorted(known[topic].partitions)]
        return found

    def _committed(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Return the group's stable offsets; raise Unavailable while an open transaction contains one.

        The request names the partitions, because an answer about all partitions omits those that only have a pending
        offset.
        """
        asked = [ConsumerGroupTopicPartitions(self.group, [TopicPartition(*p) for p in partitions])]
        try:
            answers = self._client.list_consumer_group_offsets(
                asked, require_stable=True, request_timeout=_REQUEST_TIMEOUT_S
            )
            found = answers[self.group].result().topic_partitions
        except KafkaException as error:
            raise _translate_error(error, self.group) from error
        for tp in found:
            if tp.error is not None:
                raise _translate_error(KafkaException(tp.error), self.group, tp.topic)
        return {(tp.topic, tp.partition): tp.offset for tp in found if tp.offset >= 0}

    def _ends(self, partitions: Sequence[Partition], spec: Any) -> dict[Partition, int]:
        """Return the offset of `spec` for each partition; for `latest`, the last stable offset, which is the end of the
        input for workers."""
        asked = {TopicPartition(*p): spec for p in partitions}
        answers = self._client.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_REQUEST_TIMEOUT_S
        )
        ends: dict[Partition, int] = {}
        for tp, future in answers.items():
            try:
                ends[tp.topic, tp.partition] = future.result().offset
            except KafkaException as error:
                raise _translate_error(error, self.group, tp.topic) from error
        return ends

    def commit(self, moves: Sequence[Move]) -> None:
        """Commit the new offsets. Raise Unavailable if a member has joined, because the broker refuses then."""
        wanted = [TopicPartition(*m.partition, m.after, m.metadata) for m in moves]
        request = [ConsumerGroupTopicPartitions(self.group, wanted)]
        try:
            answers = self._client.alter_consumer_group_offsets(request, request_timeout=_REQUEST_TIMEOUT_S)
            answered = answers[self.group].result().topic_partitions
        except KafkaException as error:
            raise _translate_error(error, self.group) from error
        for tp in answered:
            if tp.error is not None:
                raise _translate_error(KafkaException(tp.error), self.group, tp.topic)


def require_exact_skips(settings: Settings, moves: Iterable[Move], world: World = REAL) -> None:
    """Raise ConfigurationError unless `--skip` would skip exactly the named records.

    Reads the records, because markers and aborted records use offsets too."""
    for move in moves:
        (topic, number), record = move.partition, move.after - 1
        at = max(move.low, move.before or 0)
        named = format_position(topic, number, record)
        if at > record:
            raise ConfigurationError(f"{named} is before the group's offset, {at}: there is nothing to skip")
        with tail.TopicReader(settings, topic, {number: at}, uncommitted=False, world=world) as reader:
            first = next((seen.record.offset for seen in tail.read_until(reader, {number: record + 1})), None)
        if first is None:
            raise ConfigurationError(f"there is no record at {named}: it is a transaction marker or an aborted record")
        if first != record:
            raise ConfigurationError(
                f"{format_position(topic, number, first)} comes before {named} and is not handled yet: --skip skips "
                f"only the named record; `--from '{format_position(topic, number, move.after)}'` skips all up to it"
            )


def _translate_error(error: KafkaException, group: str, topic: str = "") -> Exception:
    code = error.args[0].code()
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return not_authorised(f"group {group}", "READ")
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return not_authorised(f"topic {topic}" if topic else f"a topic of group {group}", "READ")
    if code == KafkaError.UNSTABLE_OFFSET_COMMIT:
        return Unavailable(
            f"an open transaction contains offsets of group {group}: wait for its timeout, or see "
            "`eos txn list --state Ongoing` and `eos txn find-hanging`"
        )
    if code in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP, KafkaError.REBALANCE_IN_PROGRESS):
        return Unavailable(f"group {group} has members: stop them first")
    return Unavailable(f"the offsets of group {group} cannot be moved: {describe_error(error)}")
