"""Which partitions a group has committed a place of, told by what the brokers do not forget.

A group without members loses its committed offsets after a while (offsets.retention.minutes), and then looks like one
that never ran: by auto.offset.reset it would handle everything again, or pass over what was written meanwhile. So a
session notes each partition that its group has committed in a compacted topic, and where a place is missing and a note
is there nobody begins unasked.

A note comes behind the commit that it tells of and is no part of its transaction: what cannot be noted costs a warning,
never a record. One that is missing (killed in between) is written by the next session, long before the place is
forgotten. Owns the topic and its records (docs/reference/formats.md). It never decides where a partition begins.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, Message

from eos import log
from eos.errors import EosError, InputGone, NotAuthorised, Unavailable, describe_error, not_authorised
from eos.kafka.admin import facts, tail
from eos.kafka.admin.transactions import partition_of
from eos.kafka.client.cluster import Partition
from eos.kafka.client.failures import denied
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import Job, Watchdog
from eos.kafka.client.world import REAL, World
from eos.records import place_of

PARTITIONS = 8
CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(4 << 20), "min.cleanable.dirty.ratio": "0.1"}

_VERSION = 1
_ASK_S, _CLOSE_S = 5.0, 10.0
_AGAIN_S = 60.0  # behind a note that failed


class Places:
    """Notes what one session commits; on a thread of its own."""

    def __init__(self, settings: Settings, group: str, world: World = REAL) -> None:
        self._settings, self._group, self._world = settings, group, world
        self._wanted: bool = bool(settings["eos.places.topic"])
        self._noted: frozenset[Partition] = frozenset()
        self._left: frozenset[Partition] = frozenset()
        self._job: Job | None = None
        self._not_before = 0.0
        self._thread: Watchdog | None = None

    def committed(self, partitions: Iterable[Partition]) -> None:
        """A place of these is committed. Returns at once."""
        self._left = self._left.union(partitions) - self._noted
        under_way = self._job is not None and not self._job.done.is_set()
        if self._left and self._wanted and not under_way and self._world.now() >= self._not_before:
            self._thread = self._thread or self._world.caller("eos-places")
            self._job = self._thread.start(self._note, self._left)

    def close(self) -> None:
        """Waits until what is left is noted, for a moment."""
        if self._job is None or self._thread is None:
            return
        if ended := self._job.done.wait(_CLOSE_S):
            self.committed(())  # what came while the thread was busy
            ended = self._job.done.wait(_CLOSE_S)
        if not ended:
            log.warning("the group's places could not be noted in time", group=self._group)
        self._thread.close()

    def _note(self, partitions: frozenset[Partition]) -> None:
        try:
            write(self._settings, self._group, partitions, self._world)
            self._noted |= partitions
        except Exception as error:  # noqa: BLE001 - a note is worth a warning, and never a worker
            self._not_before = self._world.now() + _AGAIN_S
            if isinstance(error, NotAuthorised):
                self._wanted = False
                error.remedy = ", or ".join(filter(None, (error.remedy, "set eos.places.topic to nothing")))
            log.warning(
                "the group's places are not noted: a start after offsets.retention.minutes without members will not "
                "know that it ran before",
                error=str(error) if isinstance(error, EosError) else f"{type(error).__name__}: {error}",
                group=self._group,
            )


def write(settings: Settings, group: str, partitions: Collection[Partition], world: World = REAL) -> None:
    """Notes that the group has committed places of these; makes the topic where it is not there. Raises Unavailable,
    NotAuthorised."""
    topic: str = settings["eos.places.topic"]
    with world.admin(settings) as admin:
        ids = admin.topic_ids({name for name, _ in partitions})
    client = facts.connect(settings, _ASK_S, world)
    count = facts.describe_topic(client, topic).partitions
    if not count:
        brokers = len(facts.metadata(client, settings.bootstrap_servers, _ASK_S).brokers)
        facts.create_topics(settings, {topic: PARTITIONS}, brokers, config=CONFIG, world=world)
        count = facts.describe_topic(client, topic).partitions or PARTITIONS  # a broker may not know of it yet
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failed.append(error)

    producer = world.producer(
        settings.admin()
        | {"acks": "all", "message.timeout.ms": round(_CLOSE_S * 1000), "linger.ms": 0, "logger": log.client_logger}
    )
    for name, number in sorted(partitions):
        value = {"v": _VERSION, "id": ids.get(name, "")}
        record = json.dumps(value).encode(), json.dumps([group, name, number]).encode()
        producer.produce(topic, *record, partition_of(group, count), delivered)
    if producer.flush(_CLOSE_S):
        failed.append(KafkaError(KafkaError._TIMED_OUT))
    if failed:
        if denied(failed[0], topic=topic):
            raise not_authorised(f"topic {topic}", "WRITE")
        raise Unavailable(f"topic {topic} could not be written: {describe_error(failed[0])}")


def noted(
    settings: Settings, group: str, partitions: Collection[Partition], world: World = REAL
) -> dict[Partition, int]:
    """Those of these partitions of which the group has committed a place, each with when that was noted (Unix ms). A
    topic that was made anew since is another one. Raises Unavailable while that cannot be told; who may not read the
    topic is told nothing."""
    topic: str = settings["eos.places.topic"]
    if not topic or not partitions:
        return {}
    try:
        found = {p: note for p, note in _read(settings, topic, group, world).items() if p in set(partitions)}
    except NotAuthorised as error:
        log.info("whether the group ran before may not be seen", error=str(error), group=group)
        return {}
    if not found:
        return {}
    with world.admin(settings) as admin:
        ids = admin.topic_ids({name for name, _ in found})
    return {p: when for p, (topic_id, when) in found.items() if topic_id == ids.get(p[0], "")}


def _read(settings: Settings, topic: str, group: str, world: World) -> dict[Partition, tuple[str, int]]:
    """The group's notes: the topic's id, and when it was written."""
    client = facts.connect(settings, _ASK_S, world)
    described = facts.describe_topic(client, topic)
    if described.exists is None:
        raise not_authorised(f"topic {topic}", "READ")
    if not described.exists:
        return {}
    number = partition_of(group, described.partitions)
    held = tail.held(client, topic, [number])
    notes: dict[Partition, tuple[str, int]] = {}
    with tail.TopicReader(settings, topic, {number: held[number].low}, False, world) as reader:
        for seen in tail.read_until(reader, {number: held[number].stable}):
            whose, partition = _key(seen.record.key)
            if whose == group:
                notes[partition] = _topic_id(seen.record.value), seen.record.timestamp
    return notes


def _key(key: bytes | None) -> tuple[str, Partition]:
    try:
        group, topic, number = json.loads(key or b"")
        return str(group), (str(topic), int(number))
    except (ValueError, TypeError):
        return "", ("", -1)  # a stranger's


def _topic_id(value: bytes | None) -> str:
    """'-', which no topic has, for a note that was taken back (a tombstone) or is not ours."""
    try:
        found: Mapping[str, Any] = json.loads(value or b"")
        return str(found["id"]) if found["v"] <= _VERSION else "-"
    except (ValueError, TypeError, KeyError):
        return "-"


def forgotten(group: str, found: Mapping[Partition, int], reset: str) -> InputGone:
    """What a start says that finds notes and no places; `reset` is what was to be the answer, earliest or latest."""
    (topic, number), when = min(found.items())
    since = time.strftime("%Y-%m-%d", time.localtime(when / 1000))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    again = "handle all again that the topic holds" if reset == "earliest" else "pass over what was written meanwhile"
    return InputGone(
        f"group {group} has handled {place_of(topic, number)}{more} before (noted on {since}), and its place is gone: "
        "the brokers forget the offsets of a group without members after offsets.retention.minutes, or they were "
        f"deleted; to begin by auto.offset.reset={reset} would {again}",
        remedy="say where it goes on: `eos reset MODULE:APP --from ...`, or `eos reset --group "
        f"{group} --topic {topic} --from ...`",
    )
