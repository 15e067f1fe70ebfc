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

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from eos.app.definition import App
from eos.errors import ConfigurationError, Unavailable
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.plain import transaction
from eos.records import Record
from eos.testing.offline import Ran, Sent, records_of, written_by
from eos.worker.worker import Worker

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
    loaded = Settings({"eos.instance": "test", "eos.state.dir": "", **(settings or {}), "bootstrap.servers": bootstrap})
    client = facts.connect(loaded, _TIMEOUT_S)
    wanted = dict.fromkeys((*app.topics, *app.destinations), 1)
    for record in given:
        wanted[record.topic] = max(wanted[record.topic], record.partition + 1)
    missing = {topic: count for topic, count in wanted.items() if not facts.describe_topic(client, topic).exists}
    if missing:  # where all are there no right to CREATE is needed
        facts.create_topics(loaded, missing, brokers=1, between=app.chained)
    _begin_behind(client, app.id, _ends(client, loaded, app.topics))
    before = _ends(client, loaded, sorted(app.destinations))
    _load(loaded, app.id, given)
    _ends(client, loaded, app.topics)  # what the worker takes for the end is what is readable when it starts
    worker = Worker(app, loaded, until_end=True)
    worker.run()
    counters = worker.session.counters
    sent = _read(loaded, before, _ends(client, loaded, sorted(app.destinations)))
    return Ran(sent, counters.skipped, counters.dead_letters, counters.retries, written_by(app))


def _ends(client: Any, settings: Settings, topics: Sequence[str]) -> dict[Place, int]:
    """Where the partitions end, once each has a leader and no open transaction: a commit is answered before it is
    visible."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        spans: dict[Place, tail.Span] = {}
        try:
            for topic in topics:
                held = tail.spans_by(client, settings, topic)
                spans |= {(topic, partition): span for partition, span in held.items()}
            late = f"an open transaction holds {sorted(p for p, s in spans.items() if s.stable < s.end)}"
        except Unavailable as error:
            # A broker's metadata may be behind, or name a new partition's leader before that one knows of it.
            late = str(error)
        else:
            if all(span.stable == span.end for span in spans.values()):
                return {place: span.end for place, span in spans.items()}
        if time.monotonic() > deadline:
            raise Unavailable(late)
        time.sleep(0.02)


def _begin_behind(client: Any, group: str, ends: Mapping[Place, int]) -> None:
    offsets = [TopicPartition(*place, end) for place, end in ends.items()]
    (done,) = client.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, offsets)]).values()
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


def _read(settings: Settings, before: Mapping[Place, int], ends: Mapping[Place, int]) -> list[Sent]:
    found: list[Record] = []
    for topic in dict.fromkeys(topic for topic, _ in ends):
        stops = {p: end for (t, p), end in ends.items() if t == topic and end > before[t, p]}
        with tail.TopicReader(settings, topic, {p: before[topic, p] for p in stops}, uncommitted=False) as reader:
            found += sorted((s.record for s in tail.read_until(reader, stops)), key=lambda r: (r.partition, r.offset))
    return [Sent(r.topic, r.value, r.key, r.partition, r.timestamp, list(r.headers)) for r in found]
