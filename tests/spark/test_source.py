"""Read with `read_committed`: what Spark's real Kafka source returns with our settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from eos.broker import LocalKafka
from eos.errors import ConfigurationError
from spark_connector import read_committed
from spark_connector.java_settings import find_unused, java_consumer
from tests.support.reading import create_topic

pytestmark = pytest.mark.timeout(400)


def half_committed(kafka: LocalKafka, topic: str) -> Producer:
    """Create two partitions with committed and aborted records, one of which ends with an open transaction."""
    create_topic(kafka.bootstrap_servers, topic, 2)
    settings = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "transactional.id": topic,
        # The last transaction stays open while Spark reads, however long that takes.
        "transaction.timeout.ms": 600_000,
    }
    producer = Producer(settings)
    producer.init_transactions(30)
    for turn in range(6):
        producer.begin_transaction()
        for number in range(50):
            kind = "aborted" if turn % 2 else "committed"
            producer.produce(topic, f"{kind} {turn} {number}", b"k", partition=number % 2, headers=[("h", b"1")])
        producer.flush(30)
        producer.abort_transaction(30) if turn % 2 else producer.commit_transaction(30)
    leave_open(producer, topic)
    return producer


def leave_open(producer: Producer, topic: str) -> None:
    """Add one record in a transaction that stays open, after the control records of the previous one.

    A commit returns before its control records are written, but the coordinator accepts no partition into the next
    transaction before that.
    """
    producer.begin_transaction()
    producer.produce(topic, "open", partition=0)
    assert producer.flush(30) == 0


COMMITTED = sorted(f"committed {turn} {number}" for turn in (0, 2, 4) for number in range(50))


def test_batch_ends_at_the_last_stable_offset(spark: Any, kafka: LocalKafka, names: Callable[[str], str]) -> None:
    topic = names("in")
    producer = half_committed(kafka, topic)
    rows = read_committed(spark, topic, bootstrap_servers=kafka.bootstrap_servers, streaming=False).collect()
    assert sorted(bytes(row.value).decode() for row in rows) == COMMITTED
    assert {(bytes(row.key), row.topic) for row in rows} == {(b"k", topic)}
    assert all([(h.key, bytes(h.value)) for h in row.headers] == [("h", b"1")] for row in rows)
    producer.abort_transaction(30)


def test_micro_batches_follow_the_last_stable_offset(
    spark: Any, kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path
) -> None:
    topic = names("in")
    producer = half_committed(kafka, topic)
    seen: list[str] = []

    def run() -> None:
        stream = read_committed(spark, topic, bootstrap_servers=kafka.bootstrap_servers, max_records=70)
        writer = stream.writeStream.trigger(availableNow=True).option("checkpointLocation", str(tmp_path))
        writer = writer.foreachBatch(lambda df, _: seen.extend(bytes(row.value).decode() for row in df.collect()))
        query = writer.start()
        assert query.awaitTermination(180), "no end in 180 s"
        assert len(query.recentProgress) > 1 or len(seen) > len(COMMITTED)

    run()
    assert sorted(seen) == COMMITTED
    producer.commit_transaction(30)
    leave_open(producer, topic)
    run()
    assert sorted(seen) == sorted([*COMMITTED, "open"])
    producer.abort_transaction(30)


def test_options_that_break_the_guarantee_are_refused(spark: Any) -> None:
    def refused(match: str, **arguments: Any) -> None:
        with pytest.raises(ConfigurationError, match=match):
            read_committed(spark, "t", bootstrap_servers="127.0.0.1:1", **arguments)

    refused("isolation.level=read_uncommitted would", options={"kafka.isolation.level": "read_uncommitted"})
    refused("failOnDataLoss=false would", options={"failondataloss": "false"})
    refused("is the argument topics=", options={"subscribe": "other"})
    refused("only one", streaming=False, max_records=5)
    with pytest.raises(ConfigurationError, match="at least one topic"):
        read_committed(spark, [], bootstrap_servers="127.0.0.1:1")


def test_security_settings_are_translated_for_java_or_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-- ca --")
    settings = {
        "bootstrap.servers": "a:1",
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": str(tmp_path / "ca.pem"),
        "ssl.endpoint.identification.algorithm": "none",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": 'me "and" you',
        "sasl.password": "back\\slash",
        "fetch.min.bytes": 5,
        "linger.ms": 5,
    }
    assert java_consumer(settings) == {
        "bootstrap.servers": "a:1",
        "security.protocol": "SASL_SSL",
        "ssl.truststore.certificates": "-- ca --",
        "ssl.truststore.type": "PEM",
        "ssl.endpoint.identification.algorithm": "",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="me \\"and\\" you" password="back\\\\slash";',
        "fetch.min.bytes": "5",
    }
    assert find_unused(settings) == ["linger.ms"]
    with pytest.raises(ConfigurationError, match=r"ssl\.keystore\.location cannot be translated"):
        find_unused({"ssl.keystore.location": "x"})
    with pytest.raises(ConfigurationError, match=r"sasl\.password go with"):
        java_consumer({"sasl.username": "me", "sasl.mechanism": "OAUTHBEARER"})
