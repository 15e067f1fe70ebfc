"""Stop and kill brokers during a run: a worker waits for them and continues, and its outputs are exact.

A single broker is stopped with SIGTERM. A single 4.3.1 node that ends a transaction while it starts again can consider
its partitions deleted and write no marker; the last stable offset then never moves (known limits). These tests avoid
that moment: their transactions stay open across the restart, or they run on 3.9.2. Of three brokers, the tests kill the
one that coordinates the transaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from eos.broker import LocalKafka
from tests.support.brokers import local_kafka
from tests.support.reading import coordinator_of, wait_until

pytestmark = pytest.mark.takes(313)

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipeline, Pipelines
pytest_plugins = ["tests.support.pipeline"]

RECORDS = 3_000
PATIENCE_S = 90.0
# Longer than any outage in these tests. A separate test covers a shorter session timeout.
LONG_SESSION = {"session.timeout.ms": "45000"}
LONG_TRANSACTION = {"transaction.timeout.ms": "60000"}
SESSION_MS = 6_000


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Start a single node that this module may stop and start."""
    yield from local_kafka(request)


@pytest.fixture
def alone392(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    yield from local_kafka(request, version="3.9.2")


def wait_for_markers(pipeline: Pipeline) -> None:
    """Wait until no transaction of the worker is in a Prepare state, so that every ended one has its markers."""
    wait_until(
        "the markers of ended transactions",
        lambda: not any(found.state.startswith("Prepare") for found in pipeline.describe()),
    )


@pytest.mark.deep_for("past-its-timeout")
@pytest.mark.parametrize(
    ("timeout_ms", "broker"), [(60_000, "alone"), (3_000, "alone392")], ids=["within-its-timeout", "past-its-timeout"]
)
def test_commit_waits_for_a_restarting_broker_and_is_exact(
    timeout_ms: int, broker: str, request: pytest.FixtureRequest, pipelines: Pipelines
) -> None:
    alone: LocalKafka = request.getfixturevalue(broker)
    pipeline = pipelines.on(alone, RECORDS)
    settings = LONG_SESSION | {"transaction.timeout.ms": str(timeout_ms)}
    worker = pipeline.worker(until_end=True, settings=settings, holds=[("offsets sent", 3)])
    worker.wait_at("offsets sent", 3)
    pipeline.wait_state("Ongoing", timeout_s=2.5)
    wait_for_markers(pipeline)
    alone.stop(0)
    worker.release()
    alone.start(0)
    assert worker.wait(PATIENCE_S) == 0, worker.final_output
    pipeline.verify()


@pytest.mark.deep
def test_session_expired_during_an_outage_is_not_a_newer_instance(alone: LocalKafka, pipelines: Pipelines) -> None:
    """Let the session of a consumer expire while no broker runs.

    A consumer that is not polled, as during a waiting commit, loses its session. librdkafka forgets the member id
    immediately and continues its heartbeats with the instance id alone, which the restarted broker refuses.
    """
    pipeline = pipelines.on(alone, RECORDS)
    settings = {"session.timeout.ms": str(SESSION_MS)} | LONG_TRANSACTION
    worker = pipeline.worker(until_end=True, settings=settings, holds=[("committed", 3)])
    worker.wait_at("committed", 3)
    wait_for_markers(pipeline)
    alone.stop(0)
    away = time.monotonic()
    wait_until("the session has expired", lambda: time.monotonic() > away + 1 + SESSION_MS / 1000)
    alone.start(0)
    back = time.monotonic()
    wait_until("some heartbeats", lambda: time.monotonic() > back + 2.5)
    worker.release()
    assert worker.wait(PATIENCE_S) == 0, worker.final_output
    pipeline.verify()


@pytest.mark.deep_for("offsets sent")
@pytest.mark.parametrize("step", [pytest.param("flush", marks=pytest.mark.long), "flushed", "offsets sent"])
def test_killed_coordinator_loses_and_duplicates_nothing(step: str, cluster: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(cluster, RECORDS, replicas=3)
    settings = LONG_SESSION | {"transaction.timeout.ms": "20000"}
    worker = pipeline.worker(until_end=True, holds=[(step, 3)], settings=settings)
    worker.wait_at(step, 3)
    pipeline.wait_state("Ongoing", timeout_s=5)
    victim = coordinator_of(pipeline.servers, pipeline.transactional_ids()[0])
    cluster.kill(victim)
    worker.release()
    try:
        assert worker.wait(PATIENCE_S) == 0, worker.final_output
    finally:
        cluster.start(victim)
        cluster.wait_in_sync()
    pipeline.verify()


@pytest.mark.long  # takes four minutes on a busy machine
def test_killing_three_brokers_in_turn_loses_and_duplicates_nothing(cluster: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(cluster, 1_000, replicas=3)
    worker = pipeline.worker(work_ms=1, settings=LONG_SESSION)
    for node in range(3):
        pipeline.load_transaction(1_000)
        pipeline.wait_handled(pipeline.loaded - 900, PATIENCE_S)
        cluster.kill(node)
        pipeline.wait_handled(pipeline.loaded, PATIENCE_S)
        cluster.start(node)
        cluster.wait_in_sync()
    assert worker.running
    worker.terminate()
    assert worker.wait() == 0, worker.final_output
    pipeline.verify()
