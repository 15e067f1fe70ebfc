"""What the metrics count: ends and errors as the client's own library understands its answers."""

from __future__ import annotations

import pytest
from kafka.protocol.producer import EndTxnRequest, EndTxnResponse

from eos.shim.health import CountingJob
from eos.shim.pipeline import Connection, Exchange
from eos.shim.wire import api
from tests.unit.shim.messages import framed


def count_end(job: CountingJob, committed: bool, error: int, version: int = 1) -> None:
    who = {"transactional_id": "t", "producer_id": 1, "producer_epoch": 0}
    exchange = Exchange(Connection(1, "c", "b", 0), api.END_TXN, version, 7)
    request = framed(EndTxnRequest(version=version, committed=committed, **who), client_id="c")
    assert job.request(exchange, request) == request
    answer = framed(EndTxnResponse(version=version, throttle_time_ms=0, error_code=error))
    assert job.response(exchange, answer) == answer


@pytest.mark.parametrize("committed", [True, False])
def test_an_end_without_an_error_is_counted(committed: bool) -> None:
    job = CountingJob()
    count_end(job, committed, 0)
    assert job.ends == {"commit" if committed else "abort": 1}
    assert not job.errors


def test_an_abort_that_protection_tells_as_done_is_an_end_and_no_error() -> None:
    job = CountingJob()
    count_end(job, False, api.ABORTED_TAKE_THE_NEXT_IDENTITY)
    assert job.ends == {"abort": 1}
    assert not job.errors


def test_a_refused_end_is_an_error_and_no_end() -> None:
    job = CountingJob()
    count_end(job, True, 51)
    assert not job.ends
    assert job.errors == {("EndTxn", "CONCURRENT_TRANSACTIONS"): 1}
