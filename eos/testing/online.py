"""Runs an App on a real broker with the real worker, and returns the same kind of result as `eos.testing.run`.

Owns the isolation of one run on a broker that many tests share: its own group, and topics that the run creates and
removes. It must never write to an existing topic, nor decide the outputs of a record.
"""

from __future__ import annotations

import contextlib
import copy
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from eos.app.definition import App
from eos.app.routes import Route, changelog_of
from eos.app.stores import to_plain
from eos.errors import ConfigurationError, Unavailable, describe_error
from eos.kafka.admin import facts, tail
from eos.kafka.client.settings import Settings
from eos.plain import transaction
from eos.records import Record
from eos.state import changelog
from eos.testing.offline import Ran, Sent, make_records, output_topics
from eos.worker.worker import Worker

_TIMEOUT_S = 30.0
Partition = tuple[str, int]


def run_on(
    bootstrap: str, app: App, records: Iterable[Record | tuple[Any, ...]], settings: Mapping[str, Any] | None = None
) -> Ran:
    """Run the App on the records on a real broker, and return the visible results.

    It creates the App's topics, writes the records, runs the App until they are handled, reads the outputs, and removes
    the topics. `records` are given as for `eos.testing.run`; a Record keeps its partition and timestamp, and the broker
    assigns its offset. Topics have one partition unless a record needs more. `Ran.sent` is in order per topic and
    partition. Raises the errors of a worker (PoisonRecord, ...), ConfigurationError if one of the topics exists, and
    Unavailable.
    """
    app.check()
    given = make_records(records)
    app = copy.copy(app)
    app.id = f"{app.id}-{uuid.uuid4().hex[:8]}"
    # Other matching topics on this broker belong to other tests.
    app.add_topics(record.topic for record in given)
    app.patterns = {}
    if not app.topics:
        raise ConfigurationError("no function reads any of these records: no pattern matches their topics")
    places = f"{app.id}-places"
    defaults = {"eos.instance": "test", "eos.state.dir": "", "eos.places.topic": places}
    fixed = {"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest"}
    loaded = Settings({**defaults, **(settings or {}), **fixed})
    wanted = dict.fromkeys((*app.topics, *app.destinations), 1)
    for record in given:
        wanted[record.topic] = max(wanted[record.topic], record.partition + 1)
    with _temporary_topics(loaded, wanted, app.chained, [*app.changelogs, places]) as client:
        _load(loaded, app.id, given)
        # Wait, because the worker treats the readable end at its start as the end of the input.
        _wait_for_ends(client, loaded, app.topics)
        worker = Worker(app, loaded, until_end=True)
        worker.run()
        sent = _read(loaded, _wait_for_ends(client, loaded, sorted(app.destinations)))
        _wait_for_ends(client, loaded, sorted(app.changelogs))
        states = {route.name: _read_state(loaded, app, route) for route in app.stateful}
    counters = worker.session.counters
    counts = counters.skipped, counters.dead_letters, counters.retries, counters.late, counters.duplicates
    return Ran(sent, *counts, output_topics(app), states)


@contextlib.contextmanager
def _temporary_topics(
    settings: Settings, wanted: Mapping[str, int], between: Collection[str], by_worker: Collection[str]
) -> Iterator[Any]:
    """Create the wanted topics, and remove them at the end, with those that the worker creates."""
    client = facts.connect(settings, _TIMEOUT_S)
    brokers = len(facts.cluster_metadata(client, settings.bootstrap_servers, _TIMEOUT_S).brokers)
    created = facts.create_topics(settings, wanted, brokers, between=between)
    try:
        if there := sorted(wanted.keys() - created):
            raise ConfigurationError(
                f"the topic {there[0]} exists at {settings.bootstrap_servers}: a test would write its records into it",
                remedy="run the test on its own broker (without --eos-kafka pytest starts one), or delete the topic "
                "if a killed test left it",
            )
        yield client
    finally:
        _remove(client, [*created, *by_worker])


def _remove(client: Any, topics: Sequence[str]) -> None:
    """Delete the existing topics, and wait until they are gone, because the next test may create them again."""
    for topic, done in client.delete_topics(topics, request_timeout=_TIMEOUT_S).items():
        try:
            done.result(_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise Unavailable(f"topic {topic} cannot be deleted: {describe_error(error)}") from error
    deadline = time.monotonic() + _TIMEOUT_S
    while left := [topic for topic in topics if facts.describe_topic(client, topic).exists]:
        if time.monotonic() > deadline:
            raise Unavailable(f"topic {left[0]} was deleted but still exists after {_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _wait_for_ends(client: Any, settings: Settings, topics: Sequence[str]) -> dict[Partition, int]:
    """Return the ends of the partitions once each has a leader and no open transaction.

    The broker answers a commit before it is visible.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        spans: dict[Partition, tail.OffsetRange] = {}
        try:
            for topic in topics:
                held = tail.topic_offsets_with(client, settings, topic)
                spans |= {(topic, partition): span for partition, span in held.items()}
            late = f"a transaction is open on {sorted(p for p, s in spans.items() if s.stable < s.end)}"
        except Unavailable as error:
            # A broker's metadata may be outdated, or name a leader that does not know the new partition yet.
            late = str(error)
        else:
            if all(span.stable == span.end for span in spans.values()):
                return {place: span.end for place, span in spans.items()}
        if time.monotonic() > deadline:
            raise Unavailable(late)
        time.sleep(0.02)


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


def _read(settings: Settings, ends: Mapping[Partition, int]) -> list[Sent]:
    found: list[Record] = []
    for topic in dict.fromkeys(topic for topic, _ in ends):
        stops = {p: end for (t, p), end in ends.items() if t == topic and end > 0}
        with tail.TopicReader(settings, topic, dict.fromkeys(stops, 0), uncommitted=False) as reader:
            found += sorted((s.record for s in tail.read_until(reader, stops)), key=lambda r: (r.partition, r.offset))
    return [Sent(r.topic, r.value, r.key, r.partition, r.timestamp, list(r.headers)) for r in found]


def _read_state(settings: Settings, app: App, route: Route) -> dict[str, dict[bytes, Any]]:
    """Return the committed state of a function: by the name of the state and by key."""
    stores = {store.stored_name: store for store in route.values}
    found: dict[str, dict[bytes, Any]] = {store.name: {} for store in route.values}
    for _, rows in changelog.read_state(settings, changelog_of(app.id, route)):
        for key, state in rows:
            for kept_as, cells in state.items():
                if kept_as not in stores:
                    continue  # timers, open sessions or ids
                found[stores[kept_as].name][key] = to_plain(stores[kept_as], cells)
    return found
