"""The metrics: transaction ends and errors are counted as the client's library decodes its responses."""

from __future__ import annotations

import pytest
from kafka.protocol.producer import EndTxnRequest, EndTxnResponse

from eos.shim.health import CountingJob
from eos.shim.pipeline import Connection, Exchange
from eos.shim.wire import api
from tests.unit.shim.messages import framed


@pytest.mark.parametrize(
    ("committed", "error", "ends", "errors"),
    [
        pytest.param(True, 0, {"commit": 1}, {}, id="a commit"),
        pytest.param(False, 0, {"abort": 1}, {}, id="an abort"),
        pytest.param(False, api.ABORTED_UNKNOWN_PRODUCER_ID, {"abort": 1}, {}, id="an abort reported by protection"),
        pytest.param(True, 51, {}, {("EndTxn", "CONCURRENT_TRANSACTIONS"): 1}, id="a refused commit"),
    ],
)
def test_end_txn_counts_as_end_or_as_error(
    committed: bool, error: int, ends: dict[str, int], errors: dict[tuple[str, str], int]
) -> None:
    job, exchange = CountingJob(), Exchange(Connection(1, "c", "b", 0), api.END_TXN, 1, 7)
    who = {"transactional_id": "t", "producer_id": 1, "producer_epoch": 0}
    request = framed(EndTxnRequest(version=1, committed=committed, **who), client_id="c")
    assert job.request(exchange, request) == request
    answer = framed(EndTxnResponse(version=1, throttle_time_ms=0, error_code=error))
    assert job.response(exchange, answer) == answer
    assert (job.ends, job.errors) == (ends, errors)
