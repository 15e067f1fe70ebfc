"""Runs an App on a real broker and tells what it led to: the same result as `eos.testing.run`, by the real worker.

Owns what isolates one run on a broker that many tests share: a group of its own that begins behind what is there, and
outputs counted from where their topics ended before. It must never decide what a record leads to.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from eos.app.definition import App
from eos.errors import ConfigurationError, Unavailable
from eos.kafka.settings import Settings
from eos.plain import transaction
from eos.records import Record
from eos.testing.offline import Ran, Sent, records_of
from eos.worker.worker import Worker

_NOT_YET = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART)
_TIMEOUT_S = 30.0
Place = tuple[str, int]


def run_on(
    bootstrap: str, app: App, records: Iterable[Record | tuple[Any, ...]], settings: Mapping[str, Any] | None = None
) -> Ran:
    """Writes the records, runs the App on them until they are handled, and reads what became visible.

    `records` as for `eos.testing.run`; a Record's partition and timestamp are kept, its offset is the broker's.
    Topics that are missing are created, with one partition unless a record needs more. `Ran.sent` is in order per
    topic and partition. Raises what a worker raises (PoisonRecord, ...), and Unavailable.
    """
    app.check()
    given = records_of(records)
    app = copy.copy(app)
    app.id = f"{app.id}-{uuid.uuid4().hex[:8]}"
    # What else on this broker matches is another test's.
    app.take_in(record.topic for record in given)
    app.patterns = {}
    if not app.topics:
        raise ConfigurationError("no function gets any of these records: no pattern matches the topic of one")
    loaded = Settings({"eos.instance": "test", **(settings or {}), "bootstrap.servers": bootstrap})
    admin = AdminClient(loaded.connection())
    _create(admin, app, given)
    inputs, outputs = _places(admin, app.topics), _places(admin, sorted(app.destinations))
    _begin_behind(admin, app.id, _ends(admin, inputs))
    before = _ends(admin, outputs)
    _load(loaded, app.id, given)
    _ends(admin, inputs)  # what the worker takes for the end is what is readable when it starts
    worker = Worker(app, loaded, until_end=True)
    worker.run()
    counters = worker.session.counters
    sent = _read(admin, loaded, app.id, before)
    return Ran(sent, counters.skipped, counters.dead_letters, counters.retries)


def _create(admin: AdminClient, app: App, records: Sequence[Record]) -> None:
    wanted = dict.fromkeys((*app.topics, *app.destinations), 1)
    for record in records:
        wanted[record.topic] = max(wanted[record.topic], record.partition + 1)
    known = admin.list_topics(timeout=_TIMEOUT_S).topics
    missing = [NewTopic(topic, partitions, 1) for topic, partitions in wanted.items() if topic not in known]
    for future in (admin.create_topics(missing) if missing else {}).values():
        future.result(_TIMEOUT_S)
    deadline = time.monotonic() + _TIMEOUT_S
    while not all(_has_leaders(admin, topic) for topic in wanted):
        if time.monotonic() > deadline:
            raise Unavailable(f"the topics {sorted(wanted)} had no leaders within {_TIMEOUT_S:g} s")
        time.sleep(0.05)


def _has_leaders(admin: AdminClient, topic: str) -> bool:
    found = admin.list_topics(topic, timeout=_TIMEOUT_S).topics[topic]
    return found.error is None and bool(found.partitions) and all(p.leader >= 0 for p in found.partitions.values())


def _places(admin: AdminClient, topics: Sequence[str]) -> list[Place]:
    known = admin.list_topics(timeout=_TIMEOUT_S).topics
    return [(topic, partition) for topic in topics for partition in sorted(known[topic].partitions)]


def _ends(admin: AdminClient, places: Sequence[Place]) -> dict[Place, int]:
    """Where the partitions end, once no transaction is open on them: a commit is answered before it is visible."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            stable, written = (_list(admin, places, level) for level in (1, 0))
        except KafkaException as error:
            # Metadata may name a new partition's leader before that broker knows of it.
            if error.args[0].code() not in _NOT_YET or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
            continue
        if stable == written:
            return stable
        if time.monotonic() > deadline:
            raise Unavailable(f"an open transaction holds {sorted(p for p in places if stable[p] < written[p])}")
        time.sleep(0.02)


def _list(admin: AdminClient, places: Sequence[Place], level: int) -> dict[Place, int]:
    if not places:
        return {}
    asked = {TopicPartition(*place): OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
    isolation = IsolationLevel.READ_COMMITTED if level else IsolationLevel.READ_UNCOMMITTED
    answers = admin.list_offsets(asked, isolation_level=isolation, request_timeout=_TIMEOUT_S)
    return {(at.topic, at.partition): answer.result(_TIMEOUT_S).offset for at, answer in answers.items()}


def _begin_behind(admin: AdminClient, group: str, ends: Mapping[Place, int]) -> None:
    offsets = [TopicPartition(*place, end) for place, end in ends.items()]
    (done,) = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, offsets)]).values()
    done.result(_TIMEOUT_S)


def _load(settings: Settings, group: str, records: Sequence[Record]) -> None:
    with transaction(settings.with_values(**{"transactional.id": f"{group}-load"})) as txn:
        for record in records:
            txn.send(
                record.topic,
                record.value,
                key=record.key,
                partition=record.partition,
                timestamp_ms=max(record.timestamp, 0),
                headers=record.headers,
            )


def _read(admin: AdminClient, settings: Settings, group: str, before: Mapping[Place, int]) -> list[Sent]:
    ends = _ends(admin, list(before))
    unread = {place for place, end in ends.items() if end > before[place]}
    found: list[Message] = []
    consumer = Consumer(
        settings.connection()
        | {"group.id": f"{group}-read", "isolation.level": "read_committed", "enable.auto.commit": False}
        | {"enable.partition.eof": True}
    )
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        consumer.assign([TopicPartition(*place, before[place]) for place in unread])
        while unread:
            if time.monotonic() > deadline:
                raise Unavailable(f"{sorted(unread)} were not read within {_TIMEOUT_S:g} s")
            for message in consumer.consume(1_000, 0.2):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    unread.discard((str(message.topic()), int(message.partition() or 0)))
    finally:
        consumer.close()
    return [_sent(m) for m in sorted(found, key=lambda m: (m.topic(), m.partition(), m.offset()))]


def _sent(message: Any) -> Sent:
    return Sent(
        message.topic(),
        message.value(),
        message.key(),
        message.partition(),
        message.timestamp()[1],
        message.headers() or [],
    )
