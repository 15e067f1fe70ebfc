"""Kill the driver and its JVM with SIGKILL at each step of a batch; another run continues from the checkpoint.

The second run has another parallelism. The checker judges what read_committed readers find.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from eos.broker import LocalKafka
from eos.testing.history import read_topic
from tests.spark.conftest import Driver
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.reading import wait_until
from tests.support.spark_query import BY_TASKS, Query

pytestmark = pytest.mark.takes(80)

RECORDS = 3000
Drivers = Callable[..., Driver]
Queries = Callable[..., Query]


LONG = pytest.mark.long
# Who writes the second batch, during which the kill happens.
WRITING = {"tasks": BY_TASKS, "driver": {}}


@pytest.mark.deep_for("produce-driver", "commit-tasks")
@pytest.mark.parametrize(
    ("step", "writing"),
    [
        pytest.param("init", "tasks", marks=LONG),
        pytest.param("add", "tasks", marks=LONG),
        ("produce", "tasks"),
        ("produce", "driver"),
        pytest.param("mark", "driver", marks=LONG),
        ("commit", "tasks"),
        pytest.param("commit", "driver", marks=LONG),
    ],
)
def test_driver_killed_after_a_step_loses_and_duplicates_nothing(
    step: str, writing: str, kafka: LocalKafka, queries: Queries, drivers: Drivers, spark: Any
) -> None:
    query = queries(kafka.bootstrap_servers, settings=WRITING[writing]).create().load(RECORDS)
    driver = drivers(query, hold=[step, 1])
    driver.wait_for(f"at {step} 1")
    driver.kill()
    done = 2000 if step == "commit" else 1000
    # Check before the successor starts: a decided transaction is visible, an undecided one is not.
    wait_until("the first batches", lambda: len(read_topic(query.servers, query.targets)) == done)
    if step in ("produce", "mark"):
        assert query.written() == 2000
    query.shuffle_partitions = 5
    query.run(spark)
    query.verify(RECORDS)


@pytest.mark.deep_for("half produced-*", "EndTxn sent-driver")
@pytest.mark.parametrize(
    ("fault", "writing"),
    [
        ("half produced", "tasks"),
        ("half produced", "driver"),
        ("EndTxn sent", "driver"),
        ("EndTxn unanswered", "driver"),
    ],
)
def test_driver_killed_inside_a_step_loses_and_duplicates_nothing(
    fault: str, writing: str, kafka: LocalKafka, queries: Queries, drivers: Drivers, spark: Any
) -> None:
    query = queries(kafka.bootstrap_servers, sink_servers=kafka.proxied_servers, settings=WRITING[writing])
    query.create().load(RECORDS)
    ours = query.transactional_id
    with HoldingProxy.before(kafka) as proxy:
        if fault == "half produced":
            # Each batch has four partitions and the marker; the third partition of the second batch is held.
            rule = proxy.on(ApiKey.Produce, Fault.HOLD_REQUEST, nth=8, transactional_id=ours)
        else:
            kind = Fault.HOLD_REQUEST if fault == "EndTxn sent" else Fault.HOLD_RESPONSE
            rule = proxy.on(ApiKey.EndTxn, kind, nth=2, transactional_id=ours)
        driver = drivers(query)
        rule.wait(120)
        if fault == "EndTxn unanswered":
            assert rule.answer().error == 0
        driver.kill()
        successor = threading.Thread(target=query.run, args=(spark,), daemon=True)
        query.shuffle_partitions = 5
        if fault == "EndTxn sent":
            # The held request arrives while the successor works, and must not end the successor's transaction.
            successor.start()
            wait_until("a new epoch", lambda: len(proxy.seen(ApiKey.InitProducerId, ours)) > 2, 120)
            rule.release()
            # The request succeeded, was refused, or was not possible: on a slow machine the coordinator may be
            # unavailable (14 to 16).
            assert rule.answer().error in (0, 14, 15, 16, 47, 48, 51, 90)
        else:
            successor.start()
        successor.join(240)
        assert not successor.is_alive()
    assert query.written() >= 1000
    query.verify(RECORDS)


def test_checker_finds_a_marker_outside_the_transaction(
    kafka: LocalKafka, queries: Queries, drivers: Drivers, spark: Any
) -> None:
    """Commit the rows and write the marker afterwards, which the design must prevent."""
    query = queries(kafka.bootstrap_servers).create().load(RECORDS)
    driver = drivers(query, mutation="marker_outside_the_transaction", hold=["commit", 1])
    driver.wait_for("at commit 1")
    driver.kill()
    query.run(spark)
    with pytest.raises(AssertionError, match="no_duplicates"):
        query.verify(RECORDS)
