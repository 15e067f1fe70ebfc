"""Moves a group's committed offsets while the group has no members: replay, or step past a record.

Owns the meaning of `--from` and the conditions under which offsets may be moved. It refuses while members live (the
broker refuses too) and while a transaction pends on the offsets: its end would overwrite what was set. It never moves
offsets that were not named. The metadata of an offset moves with it; only the caller may change it.
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
from eos.kafka.admin.facts import connect, describe_topic, metadata
from eos.kafka.client.cluster import Partition
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import place_of

_ASK_S, _LOOK_S = 10.0, 0.5
_PLACE = re.compile(r"([A-Za-z0-9._-]+)(?::(\d+):(\d+)|\[(\d+)\]@(\d+))")


@dataclass(frozen=True)
class Target:
    """Says where to go on, for people in `name`: `earliest`, `latest`, the first record at or after `timestamp_ms`,
    `offsets` verbatim, or STAY, at the committed offset."""

    name: str
    timestamp_ms: int | None = None
    offsets: Mapping[Partition, int] | None = None


STAY = Target("stay")


@dataclass(frozen=True)
class Move:
    """Holds one partition's committed offset before (None: none) and after, the offsets that can be read there now, and
    the metadata that is committed with the offset."""

    partition: Partition
    before: int | None
    after: int
    low: int
    end: int
    metadata: str = ""


def parse_target(texts: Sequence[str]) -> Target:
    """`--from earliest | latest | 2013-07-04T12:00[:00][+02:00] | TOPIC[PARTITION]@OFFSET`, the last one repeatable;
    TOPIC:PARTITION:OFFSET says the same."""
    if len(texts) == 1 and (single := _single(texts[0])) is not None:  # a time has colons too
        return single
    expected = "earliest, latest, a time such as 2013-07-04T12:00:00, or any number of TOPIC[PARTITION]@OFFSET"
    return Target("offset", offsets=_places("--from", texts, expected))


def parse_skip(texts: Sequence[str]) -> Target:
    """`--skip TOPIC[PARTITION]@OFFSET`, repeatable: behind these records."""
    places = _places("--skip", texts, "TOPIC[PARTITION]@OFFSET, as the exit with 65 says it")
    return Target("skip", offsets={partition: offset + 1 for partition, offset in places.items()})


def _places(option: str, texts: Sequence[str], expected: str) -> dict[Partition, int]:
    found = [_PLACE.fullmatch(text) for text in texts]
    wrong = [text for text, match in zip(texts, found, strict=True) if match is None]
    if not texts or wrong:
        raise UsageError(f"{option} {wrong[0] if wrong else 'is missing'}: expected {expected}")
    parts = [list(filter(None, match.groups())) for match in found if match]
    places = {(topic, int(partition)): int(offset) for topic, partition, offset in parts}
    if len(places) < len(texts):
        raise UsageError(f"{option} names a partition twice")
    return places


def _single(text: str) -> Target | None:
    if text in ("earliest", "latest"):
        return Target(text)
    try:
        moment = datetime.datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):  # years that no clock has
        return None
    return Target(moment.isoformat(), timestamp_ms=round(moment.timestamp() * 1000))


class GroupOffsets:
    """One group's offsets on `topics`, for `plan` and then `commit`."""

    def __init__(
        self, settings: Settings, group: str, topics: Iterable[str], timeout_s: float = 5.0, world: World = REAL
    ) -> None:
        self._world = world
        self.group, self._topics = group, sorted(topics)
        self._client, self._settings = connect(settings, timeout_s, world), settings

    def require_nobody(self, wait_s: float = 0.0) -> None:
        """Unavailable, naming the members, when the group still has some after `wait_s`."""
        deadline = self._world.now() + wait_s
        while names := self._members():
            if self._world.now() >= deadline:
                count = f"{len(names)} member{'s' if len(names) != 1 else ''}"
                raise Unavailable(
                    f"group {self.group} has {count} ({', '.join(names)}): stop them first; one that was killed, or "
                    "that a record stopped, counts until its session.timeout.ms is over (--wait 30)"
                )
            self._world.sleep(_LOOK_S)

    def _members(self) -> list[str]:
        try:
            found = self._client.describe_consumer_groups([self.group], request_timeout=_ASK_S)[self.group].result()
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return []  # 4.x: a group that never was
            raise _translated(error, self.group) from error
        if found.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD):
            return []
        return sorted(f"{m.group_instance_id or m.member_id} on {m.host.lstrip('/')}" for m in found.members)

    def plan(self, target: Target) -> list[Move]:
        """Return what `commit` would do. Raises UsageError for a partition that is not of the group's topics,
        ConfigurationError for an offset that cannot be read, Unavailable while a transaction pends on the offsets."""
        partitions = self._partitions()
        before = self._committed(partitions)
        low = self._ends(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        end = self._ends(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        after = before if target == STAY else self._after(target, partitions, low, end)
        for partition, offset in after.items():
            if not low[partition] <= offset <= end[partition]:
                held = f"holds offsets {low[partition]} to {end[partition]}"
                raise ConfigurationError(f"{partition[0]}[{partition[1]}] {held}: it cannot go on at {offset}")
        with self._world.admin(self._settings) as admin:
            kept = admin.metadata_by_partition(self.group)
        return [Move(p, before.get(p), offset, low[p], end[p], kept.get(p, "")) for p, offset in sorted(after.items())]

    def _after(
        self, target: Target, partitions: list[Partition], low: dict[Partition, int], end: dict[Partition, int]
    ) -> dict[Partition, int]:
        if target.offsets is not None:
            for topic, number in target.offsets:
                if (topic, number) not in low:
                    raise UsageError(f"{place_of(topic, number)}: no such partition among {', '.join(self._topics)}")
            return dict(target.offsets)
        if target.timestamp_ms is not None:
            spec = OffsetSpec.for_timestamp(target.timestamp_ms)
            # -1: nothing that young is in the partition, so the next record is the first.
            return {p: o if o >= 0 else end[p] for p, o in self._ends(partitions, spec).items()}
        return low if target.name == "earliest" else end

    def _partitions(self) -> list[Partition]:
        known = metadata(self._client, self._settings.bootstrap_servers, _ASK_S).topics
        found: list[Partition] = []
        for topic in self._topics:
            if topic not in known or known[topic].error is not None:
                if describe_topic(self._client, topic).exists is None:
                    raise not_authorised(f"topic {topic}", "READ")
                raise Unavailable(f"topic {topic} does not exist")
            found += [(topic, number) for number in sorted(known[topic].partitions)]
        return found

    def _committed(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Stable offsets: with a transaction pending on one, its end would undo what is set now. Asked for by name: an
        answer about all offsets leaves a partition out that has nothing but a pending one."""
        asked = [ConsumerGroupTopicPartitions(self.group, [TopicPartition(*p) for p in partitions])]
        try:
            answers = self._client.list_consumer_group_offsets(asked, require_stable=True, request_timeout=_ASK_S)
            found = answers[self.group].result().topic_partitions
        except KafkaException as error:
            raise _translated(error, self.group) from error
        for tp in found:
            if tp.error is not None:
                raise _translated(KafkaException(tp.error), self.group, tp.topic)
        return {(tp.topic, tp.partition): tp.offset for tp in found if tp.offset >= 0}

    def _ends(self, partitions: Sequence[Partition], spec: Any) -> dict[Partition, int]:
        """For `latest` the last stable offsets: what a worker can have read."""
        asked = {TopicPartition(*p): spec for p in partitions}
        answers = self._client.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_ASK_S
        )
        ends: dict[Partition, int] = {}
        for tp, future in answers.items():
            try:
                ends[tp.topic, tp.partition] = future.result().offset
            except KafkaException as error:
                raise _translated(error, self.group, tp.topic) from error
        return ends

    def commit(self, moves: Sequence[Move]) -> None:
        """Write the plan. Raises Unavailable when a member joined since: the broker refuses it."""
        wanted = [TopicPartition(*m.partition, m.after, m.metadata) for m in moves]
        request = [ConsumerGroupTopicPartitions(self.group, wanted)]
        try:
            answers = self._client.alter_consumer_group_offsets(request, request_timeout=_ASK_S)
            answered = answers[self.group].result().topic_partitions
        except KafkaException as error:
            raise _translated(error, self.group) from error
        for tp in answered:
            if tp.error is not None:
                raise _translated(KafkaException(tp.error), self.group, tp.topic)


def require_one_each(settings: Settings, moves: Iterable[Move], world: World = REAL) -> None:
    """For --skip: ConfigurationError where another record than the one named would be stepped over, or none. Markers
    and aborted records take offsets too, so the records are looked at."""
    for move in moves:
        (topic, number), record = move.partition, move.after - 1
        at = max(move.low, move.before or 0)
        named = place_of(topic, number, record)
        if at > record:
            raise ConfigurationError(f"{named} is behind the group, which goes on at {at}: there is nothing to skip")
        with tail.TopicReader(settings, topic, {number: at}, uncommitted=False, world=world) as reader:
            first = next((seen.record.offset for seen in tail.read_until(reader, {number: record + 1})), None)
        if first is None:
            raise ConfigurationError(f"there is no record at {named}: a transaction's end, or an aborted record")
        if first != record:
            raise ConfigurationError(
                f"{place_of(topic, number, first)} comes before {named} and is not handled yet: --skip "
                f"steps over the record that it names alone; `--from '{place_of(topic, number, move.after)}'` over all"
            )


def _translated(error: KafkaException, group: str, topic: str = "") -> Exception:
    code = error.args[0].code()
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return not_authorised(f"group {group}", "READ")
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return not_authorised(f"topic {topic}" if topic else f"a topic of group {group}", "READ")
    if code == KafkaError.UNSTABLE_OFFSET_COMMIT:
        return Unavailable(
            f"a transaction pends on the offsets of group {group}: wait for its timeout, or see "
            "`eos txn list --state Ongoing` and `eos txn find-hanging`"
        )
    if code in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP, KafkaError.REBALANCE_IN_PROGRESS):
        return Unavailable(f"group {group} has members: stop them first")
    return Unavailable(f"the offsets of group {group} cannot be moved: {describe_error(error)}")
