"""Run Spark's Kafka source and our sink through a shim in front of three real brokers, on both versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from eos.broker import LocalKafka
from spark_connector import read_committed
from tests.shim.shims import running
from tests.shim.tcp_connections import only_through
from tests.support.spark_query import Query

pytestmark = [pytest.mark.takes(54), pytest.mark.deep_for("3.9.2")]

RECORDS = 3000


@pytest.mark.parametrize("version", ["4.4.0", "3.9.2"])
@pytest.mark.timeout(600)
def test_source_and_sink_through_a_shim_are_exactly_once(
    version: str, queries: Callable[..., Query], spark: Any
) -> None:
    with LocalKafka(nodes=3, version=version) as kafka, running(kafka.bootstrap_servers, brokers=3) as shim:
        query = queries(shim.bootstrap_servers, targets=2)
        with only_through(shim, kafka):
            query.create(replicas=3).load(RECORDS).run(spark)
            rows = read_committed(spark, query.targets, bootstrap_servers=query.servers, streaming=False).collect()
        assert len(rows) == RECORDS
        assert not shim.named("connection closed"), shim.named("connection closed")
        dataclasses.replace(query, servers=kafka.bootstrap_servers).verify(RECORDS)
