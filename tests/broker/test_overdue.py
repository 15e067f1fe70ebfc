"""End the transaction of a dead member right after its timeout; a member that was only paused continues.

The broker looks for expired transactions only every five minutes, so any earlier end is ours.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from eos.broker import LocalKafka
from eos.kafka.admin.overdue import abort_if_overdue
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from tests.support.brokers import local_kafka
from tests.support.raw import RawProducer
from tests.support.reading import create_topic, visible_values, wait_until

pytestmark = [pytest.mark.takes(69), pytest.mark.deep_for("3.9.2")]

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipelines
pytest_plugins = ["tests.support.pipeline"]

Names = Callable[[str], str]
NO_EXPIRY_CHECK = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 300_000}
TIMEOUT_MS = 3_000


@pytest.fixture(scope="module", params=["4.4.0", "3.9.2"])
def kafka(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    yield from local_kafka(request, version=request.param, config=NO_EXPIRY_CHECK)


def open_transaction(kafka: LocalKafka, topic: str, name: str) -> RawProducer:
    """Start a transaction and leave it open, because closing the producer would abort it."""
    create_topic(kafka.bootstrap_servers, topic)
    limits = {"transaction_timeout_ms": TIMEOUT_MS, "message_timeout_ms": TIMEOUT_MS}
    producer = RawProducer(kafka.bootstrap_servers, name, **limits)
    producer.begin()
    producer.send(topic, "of the dead")
    return producer


def test_only_an_overdue_transaction_is_ended(kafka: LocalKafka, names: Names) -> None:
    name, began = names("id"), time.monotonic()
    with ClusterAdmin(
        Settings({"bootstrap.servers": kafka.bootstrap_servers})
    ) as admin:  # created first, because that takes a while
        producer = open_transaction(kafka, names("t"), name)
        (before,) = admin.describe_transactions([name])
        assert not abort_if_overdue(admin, before, time.monotonic)
        assert admin.describe_transactions([name]) == [before]
        wait_until("it is overdue and ended", lambda: abort_if_overdue(admin, before, time.monotonic), 30)
        assert time.monotonic() - began >= TIMEOUT_MS / 1000
        wait_until("its markers", lambda: admin.describe_transactions([name])[0].state == "CompleteAbort")
        (after,) = admin.describe_transactions([name])
        assert (after.producer_id, after.epoch) == (before.producer_id, before.epoch + 1)
        assert visible_values(kafka.bootstrap_servers, names("t")) == {0: []}
    with pytest.raises(Exception, match="FENCED"):
        producer.commit()


def test_abort_request_changes_no_transaction_that_has_moved_on(kafka: LocalKafka, names: Names) -> None:
    """Send the request after the transaction changed: its coordinator, owner or successor may act after our check."""
    name, topic = names("id"), names("t")
    first = open_transaction(kafka, topic, name)
    with ClusterAdmin(Settings({"bootstrap.servers": kafka.bootstrap_servers})) as admin:
        (seen,) = admin.describe_transactions([name])
        states: list[str] = []

        def refused() -> None:
            (before,) = admin.describe_transactions([name])
            states.append(before.state)
            for epoch in range(seen.epoch, before.epoch + 2):
                answer = admin.abort_if_ongoing(dataclasses.replace(seen, epoch=epoch))
                assert answer in ("ProducerFenced", "InvalidProducerEpoch"), answer
            assert admin.describe_transactions([name]) == [before]

        def settled(state: str) -> bool:
            return admin.describe_transactions([name])[0].state == state

        first.commit()
        wait_until("the commit", lambda: settled("CompleteCommit"))
        refused()
        first.begin()
        first.send(topic, "x")
        first.abort()
        wait_until("the abort", lambda: settled("CompleteAbort"))
        refused()
        RawProducer(kafka.bootstrap_servers, name, transaction_timeout_ms=TIMEOUT_MS, message_timeout_ms=TIMEOUT_MS)
        refused()
    assert states == ["CompleteCommit", "CompleteAbort", "Empty"]


def test_member_ends_the_overdue_transaction_of_a_dead_member(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 3_000)
    settings = {"session.timeout.ms": "3000", "heartbeat.interval.ms": "500"}
    paused = pipeline.worker("a", work_ms=1, settings=settings, holds=[("offsets sent", 3)])
    paused.wait_at("offsets sent", 3)
    with ClusterAdmin(Settings({"bootstrap.servers": kafka.bootstrap_servers})) as admin:

        def transactions_of_the_paused(state: str) -> dict[str, int]:
            found = admin.transactions(states=[state])
            return {t.transactional_id: t.epoch for t in found if t.transactional_id.startswith(f"{pipeline.app}-a")}

        paused.pause()
        was_open = transactions_of_the_paused("Ongoing")
        assert was_open
        began = time.monotonic()
        survivor = pipeline.worker("b", settings=settings)
        wait_until("the survivor ends it", lambda: not transactions_of_the_paused("Ongoing"), 60)
        print(f"ended {time.monotonic() - began:.1f} s after the pause")
        survivor.wait_log("overdue transaction of another member aborted", count=len(was_open))
        wait_until("its markers", lambda: was_open.keys() <= transactions_of_the_paused("CompleteAbort").keys())
        now = transactions_of_the_paused("CompleteAbort")
        assert {name: now[name] for name in was_open} == {name: epoch + 1 for name, epoch in was_open.items()}
    pipeline.wait_handled(pipeline.loaded, 60)
    paused.resume()
    paused.release()
    paused.wait_log("owner=the broker aborted our transaction at its timeout", 60)
    pipeline.load_transaction(300)
    pipeline.wait_handled(pipeline.loaded, 60)
    for worker in (paused, survivor):
        assert worker.running, worker.final_output
        worker.terminate()
    for worker in (paused, survivor):
        assert worker.wait() == 0, worker.final_output
    pipeline.verify()
