"""Keeps the positions of sources in Kafka: each has a compacted topic of one partition, whose last record counts.

A position is written in the transaction of its rows. Unlike a committed offset it never expires, however long no worker
runs. The group assigns the topic's partition to the worker that reads the source. Owns the topic and its records
(docs/reference/formats.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from eos.app.definition import App
from eos.app.routes import Route
from eos.errors import ConfigurationError, InputGone, Unavailable, UsageError
from eos.kafka.admin import facts, group_history, preflight, tail
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.plain import transaction
from eos.records import Send, format_position
from eos.sql.outbox import START, At

CONFIG: Final = {"cleanup.policy": "compact", "segment.bytes": str(4 << 20), "min.cleanable.dirty.ratio": "0.1"}
_KEY: Final = b"position"
_VERSION: Final = 1
_REQUEST_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Position:
    """Holds the last row that is in Kafka, and the identity of its database; "" stands for any database."""

    at: At = START
    database: str = ""

    def send(self, topic: str) -> Send:
        value = {"v": _VERSION, "database": self.database, "xid": str(self.at.xid), "id": self.at.id}
        return topic, json.dumps(value).encode(), _KEY, 0, 0, None

    @classmethod
    def decode(cls, topic: str, value: bytes) -> Position:
        """Return the position in a value. Raise ConfigurationError for another version or content."""
        try:
            found = json.loads(value)
            if found["v"] <= _VERSION:
                return cls(At(int(found["xid"]), int(found["id"])), str(found["database"]))
        except (ValueError, KeyError, TypeError):
            pass
        raise ConfigurationError(
            f"the topic {topic} holds a position that this version of eos cannot read (it reads versions up to "
            f"{_VERSION}): {value[:80]!r}"
        )


def restart_remedy(topic: str) -> str:
    return (
        "delete the rows that are in Kafka already from the table; then "
        f"`eos reset MODULE:APP --topic {topic} --from earliest` sends all rows that are left"
    )


def create_topics(settings: Settings, app: App, world: World = REAL) -> None:
    """Create the topics of the App's sources that are missing, and check the others.

    Raises ConfigurationError, NotAuthorised, Unavailable.
    """
    if app.sources:
        preflight.retry_while_unavailable(settings, lambda: _create_topics(settings, app.sources, world), world)


def _create_topics(settings: Settings, topics: Iterable[str], world: World) -> None:
    client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
    for topic in topics:
        there = facts.describe_topic(client, topic)
        if there.exists is False:
            brokers = len(facts.cluster_metadata(client, settings.bootstrap_servers, _REQUEST_TIMEOUT_S).brokers)
            facts.create_topics(settings, {topic: 1}, brokers, config=CONFIG, world=world)
            continue
        config = facts.describe_configs(client, [topic], world=world).get(("topic", topic), {})
        if there.partitions > 1 or config.get("cleanup.policy", "compact") != "compact":
            raise ConfigurationError(
                f"the topic {topic} has {there.partitions} partitions and cleanup.policy="
                f"{config.get('cleanup.policy')}: it cannot keep the position of a source",
                remedy="delete it before the first start: eos creates it with one partition and cleanup.policy=compact",
            )


def read_position(settings: Settings, topic: str, group: str, world: World = REAL) -> Position | None:
    """Return the last position in the topic, or None before the first transaction.

    Raises Unavailable while it is not known, InputGone if the position is lost, ConfigurationError.
    """
    client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
    span = tail.partition_offsets(client, topic, [0])[0]
    where, value = format_position(topic, 0), None
    if span.stable < span.end:
        raise Unavailable(f"{where} has an open transaction")
    if span.low < span.stable:
        with tail.TopicReader(settings, topic, {0: span.low}, uncommitted=False, world=world) as reader:
            for seen in tail.read_until(reader, {0: span.stable}):
                value = seen.record.value if seen.record.key == _KEY else value
    if value is not None:
        return Position.decode(topic, value)
    # A commit of the group that includes this partition always includes a position.
    if span.low > 0 or group_history.has_note(settings, group, (topic, 0), world):
        raise InputGone(
            f"the position of this source is gone: the topic {topic} was deleted, or its records were",
            remedy=restart_remedy(topic),
        )
    return None


def restart(settings: Settings, app: App, topics: Iterable[str]) -> None:
    """Set the positions of these sources before the first row. No worker may run meanwhile."""
    with transaction(settings.with_values(**{"transactional.id": f"{app.id}-reset"})) as txn:
        for topic in topics:
            _, value, key, partition, _, _ = Position().send(topic)
            txn.send(topic, value, key=key, partition=partition)


def sources_to_reset(app: App, topics: Iterable[str], where: str) -> list[str]:
    """Return the sources among the topics. Raise UsageError if they should start anywhere but at `earliest`."""
    found = [topic for topic in topics if topic in app.sources]
    if found and where != "earliest":
        raise UsageError(
            f"{found[0]} holds the position in table {_table(app.sources[found[0]])}: a source starts at `earliest` "
            "only, with the rows that are in the table",
            remedy="delete rows that must not be sent again, or name the other topics with --topic",
        )
    return found


def _table(route: Route) -> str:
    assert route.source is not None
    return route.source.table
