"""Brokers go away in the middle of a run: a worker waits for them, goes on, and the outcome is exact.

One broker alone is stopped in order (SIGTERM). A lone 4.3.1 node that ends a transaction while it comes back can take
its partitions for deleted and write no marker: the last stable offset stays where it is (known limits).
So transactions of these tests are not ended in that moment: they stay open over the restart, or 3.9.2 runs. Of three
brokers one is killed: the one that coordinates the transaction.
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

if TYPE_CHECKING:  # pytest imports it as a plugin, so that its asserts explain themselves
    from tests.support.pipeline import Pipeline, Pipelines
pytest_plugins = ["tests.support.pipeline"]

RECORDS = 3_000
PATIENCE_S = 90.0
# Longer than any broker is away here: what a shorter one leads to has a test of its own.
LONG_SESSION = {"session.timeout.ms": "45000"}
LONG_TRANSACTION = {"transaction.timeout.ms": "60000"}
SESSION_MS = 6_000


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """A single node that this module may stop and start."""
    yield from local_kafka(request)


@pytest.fixture
def alone392(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    yield from local_kafka(request, version="3.9.2")


def wait_for_markers(pipeline: Pipeline) -> None:
    """Until no transaction of the worker is being ended: open, or ended with all its markers."""
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
    worker.go_on()
    alone.start(0)
    assert worker.wait(PATIENCE_S) == 0, worker.last_words
    pipeline.verify()


@pytest.mark.deep
def test_session_expired_during_an_outage_is_not_a_newer_instance(alone: LocalKafka, pipelines: Pipelines) -> None:
    """While nobody polls the consumer, as in a commit that waits, its session times out; librdkafka forgets the member
    id at once and goes on heartbeating with the instance id alone, which the broker that came back refuses."""
    pipeline = pipelines.on(alone, RECORDS)
    settings = {"session.timeout.ms": str(SESSION_MS)} | LONG_TRANSACTION
    worker = pipeline.worker(until_end=True, settings=settings, holds=[("committed", 3)])
    worker.wait_at("committed", 3)
    wait_for_markers(pipeline)
    alone.stop(0)
    away = time.monotonic()
    wait_until("the session is over", lambda: time.monotonic() > away + 1 + SESSION_MS / 1000)
    alone.start(0)
    back = time.monotonic()
    wait_until("some heartbeats", lambda: time.monotonic() > back + 2.5)
    worker.go_on()
    assert worker.wait(PATIENCE_S) == 0, worker.last_words
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
    worker.go_on()
    try:
        assert worker.wait(PATIENCE_S) == 0, worker.last_words
    finally:
        cluster.start(victim)
        cluster.wait_in_sync()
    pipeline.verify()


@pytest.mark.long  # four minutes on a busy machine
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
    assert worker.wait() == 0, worker.last_words
    pipeline.verify()
