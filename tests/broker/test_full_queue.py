"""Fill a producer queue that is too small for a transaction: each record waits for room, and none is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eos.broker import LocalKafka
from tests.support.proxy import ApiKey, Fault, HoldingProxy

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipelines
pytest_plugins = ["tests.support.pipeline"]

# A transaction has up to 200 records with two outputs each, all sent within milliseconds.
SMALL = {"queue.buffering.max.messages": "50"}


@pytest.mark.deep
def test_send_waits_for_a_full_queue(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 2_000)
    pipeline.finish(settings=SMALL)
    assert "aborted" not in pipeline.workers[-1].log
    pipeline.verify()


def test_queue_that_stays_full_aborts_without_losing_records(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    ids = pipeline.transactional_ids()
    with HoldingProxy.before(kafka) as proxy:
        held = proxy.on(ApiKey.Produce, Fault.HOLD_REQUEST, nth=3, match=lambda r: r.transactional_id in ids)
        worker = pipeline.worker(servers=kafka.proxied_servers, settings=SMALL)
        held.wait(30)
        # The broker or the worker aborted the transaction: their timeouts are equal.
        worker.wait_log("producer replaced")
        held.release()
        pipeline.wait_handled(pipeline.loaded)
        worker.terminate()
        assert worker.wait() == 0, worker.final_output
    pipeline.verify()
