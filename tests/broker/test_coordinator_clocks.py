"""Test what a cluster does on its own clock or without some brokers: K13 (expiry) and K19 (a missing leader)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

import eos
from eos import Settings, TransactSession
from eos.broker import LocalKafka
from eos.kafka.client.cluster import ClusterAdmin
from eos.session.outcomes import Listener
from eos.session.producer.producer import TransactionalProducer
from tests.support.reading import coordinator_of, create_topic, ends_of, settled_values, stable_offset, wait_until

pytestmark = pytest.mark.takes(87)

SHORT_EXPIRY = {
    "transactional.id.expiration.ms": "4000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "300",
    "producer.id.expiration.ms": "4000",
    "producer.id.expiration.check.interval.ms": "300",
}


def test_idle_session_continues_after_its_transactional_id_expired(names: Callable[[str], str]) -> None:
    with LocalKafka(config=SHORT_EXPIRY) as kafka:
        servers, source, target = kafka.bootstrap_servers, names("in"), names("out")
        create_topic(servers, source)
        create_topic(servers, target)
        settings = Settings({"bootstrap.servers": servers, "group.id": names("g"), "transactional.id": names("tx")})
        load(servers, names("load"), source, "before")
        expired: list[bool] = []

        class UntilExpired(Listener):
            def on_idle(self) -> None:
                if not expired and admin.describe(names("tx")) is None:
                    expired.append(True)
                    load(servers, names("load"), source, "after")

        with (
            ClusterAdmin(settings) as admin,
            TransactSession(settings, [source], listener=UntilExpired()) as session,
        ):

            def copy() -> bool:
                txn = next(session)
                for record in txn.records:
                    txn.send(target, record.value)
                return txn.commit()

            while not copy():  # On a slow machine the id may expire before the first commit.
                pass
            while not copy():  # The first try gets INVALID_PRODUCER_ID_MAPPING, and its records are delivered again.
                pass
            assert expired == [True]
        assert settled_values(servers, target) == {0: [b"before", b"after"]}
        assert stable_offset(servers, names("g"), source) >= 3


def load(servers: str, transactional_id: str, topic: str, value: str) -> None:
    with eos.transaction({"bootstrap.servers": servers, "transactional.id": transactional_id}) as txn:
        txn.send(topic, value)


LONG_BROKER_SESSION = {
    # A paused node soon leaves the ISR but stays the leader of partitions that only it has.
    "replica.lag.time.max.ms": "2000",
    "broker.session.timeout.ms": "60000",
    "broker.heartbeat.interval.ms": "1000",
}


def test_partition_without_leader_gets_its_marker_later(
    names: Callable[[str], str],
) -> None:
    with LocalKafka(nodes=3, config=LONG_BROKER_SESSION) as cluster:
        servers, topic, transactional_id = cluster.bootstrap_servers, names("out"), names("tx")
        settings = Settings(
            {
                "bootstrap.servers": servers,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": 60_000,
                "eos.call.timeout.ms": 30_000,
            }
        )
        producer = TransactionalProducer(settings, transactional_id)
        producer.start(time.monotonic() + 30)
        away, here = (node for node in range(3) if node != coordinator_of(servers, transactional_id))
        only_there = NewTopic(topic, 2, replica_assignment=[[here], [away]], config={"min.insync.replicas": "1"})
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([only_there])[topic].result(30)
        wait_until("both leaders", lambda: stable_end(servers, topic, 0) == stable_end(servers, topic, 1) == 0)
        producer.begin()
        for partition in (0, 1):
            producer.send(topic, b"%d" % partition, partition=partition)
        producer.flush()
        cluster.pause(away)
        try:
            producer.commit()
            wait_until("the other partition's marker", lambda: stable_end(servers, topic, 0) == RECORD_AND_MARKER, 30)
        finally:
            cluster.resume(away)
        wait_until("this partition's marker", lambda: stable_end(servers, topic, 1) == RECORD_AND_MARKER, 60)
        producer.close()
        assert settled_values(servers, topic) == {0: [b"0"], 1: [b"1"]}


RECORD_AND_MARKER = 2


def stable_end(servers: str, topic: str, partition: int) -> int:
    """Return the last stable offset, or -1 while its leader does not answer."""
    try:
        return ends_of(servers, [TopicPartition(topic, partition)], IsolationLevel.READ_COMMITTED)[0]
    except KafkaException:
        return -1
