"""Brokers that die in the middle of a batch: three nodes, and one of them is the one that matters just then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from eos.broker.questions import TRANSACTION, coordinator
from spark_connector.marker import TOPIC
from tests.support.reading import wait_until
from tests.support.spark_query import Query

RECORDS = 3000
Queries = Callable[..., Query]


def leader(servers: str, topic: str, partition: int = 0) -> int:
    admin = AdminClient({"bootstrap.servers": servers})
    return int(admin.list_topics(topic, timeout=10).topics[topic].partitions[partition].leader)


def victim(who: str, query: Query) -> int:
    if who == "leader":
        return leader(query.servers, query.targets[0])
    if who == "marker's leader":
        return leader(query.servers, TOPIC, 0)
    first = query.servers.split(",")[0]
    return wait_until("a coordinator", lambda: (coordinator(first, query.transactional_id, TRANSACTION),))[0] or 0


@pytest.mark.parametrize(
    ("who", "step"),
    [
        ("leader", "add"),
        pytest.param("coordinator", "add", marks=pytest.mark.long),
        ("coordinator", "mark"),
        pytest.param("leader", "produce", marks=pytest.mark.long),
    ],
)
def test_a_broker_killed_in_mid_batch_costs_time_and_no_record(
    who: str, step: str, cluster: LocalKafka, queries: Queries, spark: Any
) -> None:
    query = queries(cluster.bootstrap_servers).create(replicas=3).load(RECORDS)
    steps: list[str] = []
    killed: list[int] = []

    def on_step(name: str) -> None:
        steps.append(name)
        if name == step and steps.count(name) == 2:
            killed.append(victim(who, query))
            cluster.kill(killed[0])

    try:
        query.run(spark, on_step)
    finally:
        for node in killed:
            cluster.start(node)
            cluster.wait_in_sync()
    assert killed
    query.verify(RECORDS)


def test_a_topic_that_has_too_few_replicas_in_sync_says_so(cluster: LocalKafka, queries: Queries, spark: Any) -> None:
    from pyspark.errors import StreamingQueryException

    query = queries(cluster.bootstrap_servers).create(replicas=3, **{"min.insync.replicas": "3"}).load(RECORDS)
    cluster.kill(2)
    try:
        with pytest.raises(StreamingQueryException, match=r"fewer than min\.insync\.replicas=3 replicas in sync"):
            query.run(spark)
    finally:
        cluster.start(2)
        cluster.wait_in_sync()
    query.run(spark)
    query.verify(RECORDS)
