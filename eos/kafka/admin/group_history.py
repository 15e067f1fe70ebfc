"""Notes, in a topic, the partitions for which a group has committed offsets, because brokers delete those offsets.

A group without members loses its committed offsets after offsets.retention.minutes, and then looks like a group that
never ran: by auto.offset.reset it would handle everything again, or skip records written in the meantime. So a session
writes a note to a compacted topic for each partition for which its group has committed an offset. If a partition has a
note and no committed offset, the session refuses to start.

A note is written after the commit and outside of its transaction: a failure costs a warning, never a record. If the
process is killed in between, the next session writes the note, long before the offset expires. Owns the topic and its
records (docs/reference/formats.md). It never decides where a partition begins.
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
from eos.kafka.admin.transactions import log_partition_of
from eos.kafka.client.cluster import Partition
from eos.kafka.client.failures import explain_denied
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import Job, Watchdog
from eos.kafka.client.world import REAL, World
from eos.records import format_position

PARTITIONS = 8
CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(4 << 20), "min.cleanable.dirty.ratio": "0.1"}

_VERSION = 1
_REQUEST_TIMEOUT_S, _CLOSE_TIMEOUT_S = 5.0, 10.0
_RETRY_INTERVAL_S = 60.0  # pause after a failed write
# Pause after a write. A group commits the first offsets of many partitions in many transactions, and each write takes
# three clients and their connections.
_WRITE_INTERVAL_S = 10.0


class GroupHistory:
    """Writes notes for the partitions that one session commits, on its own thread."""

    def __init__(self, settings: Settings, group: str, world: World = REAL) -> None:
        self._settings, self._group, self._world = settings, group, world
        self._is_enabled: bool = bool(settings["eos.places.topic"])
        self._noted: frozenset[Partition] = frozenset()
        self._unnoted: frozenset[Partition] = frozenset()
        self._job: Job | None = None
        self._next_write = self._next_retry = 0.0
        self._thread: Watchdog | None = None

    def add_committed(self, partitions: Iterable[Partition]) -> None:
        """Write notes for partitions whose offsets have been committed, soon or by a later call. Return at once."""
        self._unnoted = self._unnoted.union(partitions) - self._noted
        under_way = self._job is not None and not self._job.done.is_set()
        if self._unnoted and not under_way and self._world.now() >= self._next_write:
            self._start_write()

    def _start_write(self) -> None:
        if self._is_enabled and self._world.now() >= self._next_retry:
            self._thread = self._thread or self._world.watchdog("eos-places")
            self._job = self._thread.start(self._note, self._unnoted)

    def close(self) -> None:
        """Wait up to 20 s until the remaining notes are written."""
        if self._job is None or self._thread is None:
            return
        if ended := self._job.done.wait(_CLOSE_TIMEOUT_S):
            self._unnoted -= self._noted
            if self._unnoted:  # partitions added since the last write began
                self._start_write()
            ended = self._job.done.wait(_CLOSE_TIMEOUT_S)
        if not ended:
            log.warning("group history close timed out", group=self._group)
        self._thread.close()

    def _note(self, partitions: frozenset[Partition]) -> None:
        try:
            write_notes(self._settings, self._group, partitions, self._world)
            self._noted |= partitions
            self._next_write = self._world.now() + _WRITE_INTERVAL_S
        except Exception as error:  # noqa: BLE001 - a failed note must not stop a worker
            self._next_retry = self._world.now() + _RETRY_INTERVAL_S
            if isinstance(error, NotAuthorised):
                self._is_enabled = False
                error.remedy = ", or ".join(filter(None, (error.remedy, "set eos.places.topic to nothing")))
            log.warning(
                "group history not written: after offsets.retention.minutes without members, a start will not know "
                "that the group ran before",
                error=str(error) if isinstance(error, EosError) else f"{type(error).__name__}: {error}",
                group=self._group,
            )


def write_notes(settings: Settings, group: str, partitions: Collection[Partition], world: World = REAL) -> None:
    """Write a note for each of these partitions of the group. Create the topic if it is missing.

    Raises Unavailable and NotAuthorised."""
    topic: str = settings["eos.places.topic"]
    with world.admin(settings) as admin:
        ids = admin.topic_ids({name for name, _ in partitions})
    client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
    count = facts.describe_topic(client, topic).partitions
    if not count:
        brokers = len(facts.cluster_metadata(client, settings.bootstrap_servers, _REQUEST_TIMEOUT_S).brokers)
        facts.create_topics(settings, {topic: PARTITIONS}, brokers, config=CONFIG, world=world)
        count = facts.describe_topic(client, topic).partitions or PARTITIONS  # some brokers learn of a new topic later
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failed.append(error)

    producer = world.producer(
        settings.admin()
        | {
            "acks": "all",
            "message.timeout.ms": round(_CLOSE_TIMEOUT_S * 1000),
            "linger.ms": 0,
            "logger": log.client_logger,
        }
    )
    for name, number in sorted(partitions):
        value = {"v": _VERSION, "id": ids.get(name, "")}
        record = json.dumps(value).encode(), json.dumps([group, name, number]).encode()
        producer.produce(topic, *record, log_partition_of(group, count), delivered)
    if producer.flush(_CLOSE_TIMEOUT_S):
        failed.append(KafkaError(KafkaError._TIMED_OUT))
    if failed:
        if explain_denied(failed[0], topic=topic):
            raise not_authorised(f"topic {topic}", "WRITE")
        raise Unavailable(f"writing to topic {topic} failed: {describe_error(failed[0])}")


def read_notes(
    settings: Settings, group: str, partitions: Collection[Partition], world: World = REAL
) -> dict[Partition, int]:
    """Return those of these partitions for which the group has a note, with the note's time in Unix milliseconds.

    Ignores notes of a topic that has been recreated since then. The result is empty without the right to read the
    notes. Raises Unavailable if the cluster does not answer."""
    topic: str = settings["eos.places.topic"]
    if not topic or not partitions:
        return {}
    try:
        found = {p: note for p, note in _read_topic(settings, topic, group, world).items() if p in set(partitions)}
    except NotAuthorised as error:
        log.info("group history not readable", error=str(error), group=group)
        return {}
    if not found:
        return {}
    with world.admin(settings) as admin:
        ids = admin.topic_ids({name for name, _ in found})
    return {p: when for p, (topic_id, when) in found.items() if topic_id == ids.get(p[0], "")}


def has_note(settings: Settings, group: str, partition: Partition, world: World = REAL) -> bool:
    """Return whether the group ever committed an offset of this partition, also in a topic that was deleted since.

    Raises Unavailable if the cluster does not answer."""
    topic: str = settings["eos.places.topic"]
    try:
        noted = _read_topic(settings, topic, group, world) if topic else {}
    except NotAuthorised as error:
        log.info("group history not readable", error=str(error), group=group)
        return False
    return partition in noted


def _read_topic(settings: Settings, topic: str, group: str, world: World) -> dict[Partition, tuple[str, int]]:
    """Return the group's notes as topic id and time of writing."""
    client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
    described = facts.describe_topic(client, topic)
    if described.exists is None:
        raise not_authorised(f"topic {topic}", "READ")
    if not described.exists:
        return {}
    number = log_partition_of(group, described.partitions)
    held = tail.partition_offsets(client, topic, [number])
    notes: dict[Partition, tuple[str, int]] = {}
    with tail.TopicReader(settings, topic, {number: held[number].low}, False, world) as reader:
        for seen in tail.read_until(reader, {number: held[number].stable}):
            note_group, partition = _parse_key(seen.record.key)
            if note_group == group:
                notes[partition] = _parse_topic_id(seen.record.value), seen.record.timestamp
    return notes


def _parse_key(key: bytes | None) -> tuple[str, Partition]:
    try:
        group, topic, number = json.loads(key or b"")
        return str(group), (str(topic), int(number))
    except (ValueError, TypeError):
        return "", ("", -1)  # written by another program


def _parse_topic_id(value: bytes | None) -> str:
    """Return the topic id of a note, or "-" for a tombstone or a record that is not a note."""
    try:
        found: Mapping[str, Any] = json.loads(value or b"")
        return str(found["id"]) if found["v"] <= _VERSION else "-"
    except (ValueError, TypeError, KeyError):
        return "-"


def offsets_expired(group: str, found: Mapping[Partition, int], reset: str) -> InputGone:
    """Return the error for a group with notes but without committed offsets.

    `reset`: auto.offset.reset, `earliest` or `latest`."""
    (topic, number), when = min(found.items())
    since = time.strftime("%Y-%m-%d", time.localtime(when / 1000))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    effect = "handle all records again" if reset == "earliest" else "skip the records written in the meantime"
    return InputGone(
        f"group {group} has handled {format_position(topic, number)}{more} before (noted on {since}), but has no "
        "committed offset now: the brokers delete the offsets of a group without members after "
        "offsets.retention.minutes, or somebody deleted them. "
        f"Starting at auto.offset.reset={reset} would {effect}",
        remedy="choose where it starts: `eos reset MODULE:APP --from ...`, or `eos reset --group "
        f"{group} --topic {topic} --from ...`",
    )
