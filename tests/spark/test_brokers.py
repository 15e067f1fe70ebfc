"""Kill the most important of three brokers during a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eos.broker import LocalKafka
from tests.support.reading import coordinator_of, leader_of
from tests.support.spark_query import Query

pytestmark = pytest.mark.takes(34)

RECORDS = 3000
Queries = Callable[..., Query]


@pytest.mark.deep_for("coordinator-mark")
@pytest.mark.parametrize(
    ("who", "step"),
    [
        ("leader", "add"),
        pytest.param("coordinator", "add", marks=pytest.mark.long),
        ("coordinator", "mark"),
        pytest.param("leader", "produce", marks=pytest.mark.long),
    ],
)
def test_broker_killed_during_a_batch_loses_no_record(
    who: str, step: str, cluster: LocalKafka, queries: Queries, spark: Any
) -> None:
    query = queries(cluster.bootstrap_servers).create(replicas=3).load(RECORDS)
    steps: list[str] = []
    killed: list[int] = []

    def on_step(name: str) -> None:
        steps.append(name)
        if name == step and steps.count(name) == 2:
            if who == "leader":
                killed.append(leader_of(query.servers, query.targets[0]))
            else:
                killed.append(coordinator_of(query.servers, query.transactional_id))
            cluster.kill(killed[0])

    try:
        query.run(spark, on_step)
    finally:
        for node in killed:
            cluster.start(node)
            cluster.wait_in_sync()
    assert killed
    query.verify(RECORDS)


@pytest.mark.deep
def test_too_few_in_sync_replicas_are_reported(cluster: LocalKafka, queries: Queries, spark: Any) -> None:
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
