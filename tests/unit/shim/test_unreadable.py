"""Undecodable bytes: counting and fault jobs pass them, and the guard closes the connection."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.metadata import MetadataResponse
from kafka.protocol.producer import EndTxnRequest, EndTxnResponse
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from eos.shim.errors import ProtocolError
from eos.shim.faults import FaultJob, Plan
from eos.shim.faults.plan import Phase, Rule
from eos.shim.guard import GuardJob, Policy
from eos.shim.health import CountingJob
from eos.shim.pipeline import Connection, Exchange, Job
from eos.shim.wire import api, messages
from tests.unit.shim.messages import framed, producing, requests

POLICY = Policy(("*",), ("*",), ("*",), 1, (("*", ("p",)),))
KEYS = sorted(
    {
        api.PRODUCE,
        api.FETCH,
        api.METADATA,
        api.OFFSET_COMMIT,
        api.FIND_COORDINATOR,
        api.SASL_HANDSHAKE,
        api.INIT_PRODUCER_ID,
        api.ADD_PARTITIONS_TO_TXN,
        api.ADD_OFFSETS_TO_TXN,
        api.END_TXN,
        api.TXN_OFFSET_COMMIT,
        api.SASL_AUTHENTICATE,
    }
)
_SASL = {api.SASL_HANDSHAKE: SaslHandshakeRequest, api.SASL_AUTHENTICATE: SaslAuthenticateRequest}
CLASSES = {key: _SASL.get(key) or messages.REQUESTS[key] for key in KEYS}


def faulty() -> Job:
    named = [Rule(api=api.api_name(key), action="throttle", phase=Phase.AFTER_APPLY, nth=9) for key in KEYS]
    plan = Plan([*named, Rule(api="EndTxn", action="reset", transactional_id="t")])
    return FaultJob(plan.on("broker"))


def exchange(key: int, version: int) -> Exchange:
    return Exchange(Connection(1, "c", "b", 0), key, version, 7)


def unnamed_end() -> bytes:
    """Brokers accept any bytes as a transactional.id."""
    request = EndTxnRequest(version=1, transactional_id="xyz", producer_id=1, producer_epoch=0, committed=True)
    return framed(request, client_id="c").replace(b"xyz", b"\xff\xfe\xfd")


@pytest.mark.parametrize("make", [CountingJob, faulty])
def test_counting_and_faults_forward_unreadable_end_txn(make: Any) -> None:
    job, asked = make(), exchange(api.END_TXN, 1)
    assert job.wants_request(api.END_TXN, 1)
    assert job.request(asked, unnamed_end()) == unnamed_end()
    answer = framed(EndTxnResponse(version=1, throttle_time_ms=0, error_code=0))
    assert job.response(asked, answer) == answer


def test_unreadable_end_txn_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    job = CountingJob()
    for _ in range(2):
        asked = exchange(api.END_TXN, 1)
        job.request(asked, unnamed_end())
        job.response(asked, framed(EndTxnResponse(version=1, throttle_time_ms=0, error_code=0)))
    assert not job.ends
    assert [record.message.split(" api=")[0] for record in caplog.records] == ["response not counted"]


def test_guard_closes_connection_of_unreadable_end_txn() -> None:
    job, asked = GuardJob(POLICY), exchange(api.END_TXN, 1)
    with pytest.raises(ProtocolError):
        job.request(asked, unnamed_end())


def test_guard_ignores_metadata_that_is_too_new() -> None:
    job, newest = GuardJob(POLICY), MetadataResponse.max_version
    assert job.wants_response(api.METADATA, newest)
    assert not job.wants_response(api.METADATA, newest + 1)


@st.composite
def damaged(draw: st.DrawFn, key: int) -> tuple[int, bytes]:
    """Draw a request in any version with changed bytes, a lost end, or noise after its head."""
    cls = CLASSES[key]
    version = draw(st.integers(0, cls.max_version + 1))
    head = struct.pack(">hhi", key, version, 7)
    if version > cls.max_version or draw(st.booleans()):
        body = head + draw(st.binary(max_size=80))
        return version, len(body).to_bytes(4, "big") + body
    made = bytearray(draw(requests(cls, version)))
    made = made[: draw(st.integers(12, len(made)))]
    for _ in range(draw(st.integers(0, 3))):
        # Change a byte, most often one of a length: to null, zero, or far too large.
        made[draw(st.integers(4, len(made) - 1))] = draw(st.sampled_from((0xFF, 0, 0x80)) | st.integers(0, 255))
    return version, bytes(made)


@pytest.mark.parametrize("key", KEYS)
def test_jobs_raise_only_protocol_errors_for_random_bytes(key: int) -> None:
    examined = 0

    @given(damaged(key), st.binary(max_size=60))
    def check(sent: tuple[int, bytes], noise: bytes) -> None:
        nonlocal examined
        version, request = sent
        answer = (len(noise) + 4).to_bytes(4, "big") + (7).to_bytes(4, "big") + noise
        for job in (CountingJob(), faulty(), GuardJob(POLICY)):
            asked = exchange(key, version)
            try:
                if job.wants_request(key, version):
                    examined += 1
                    made = job.request(asked, request)
                    assert made in (request, b"")
                    assert bool(made) != (asked.answer is not None)
                if job.wants_response(key, version):
                    job.response(asked, answer)
            except ProtocolError:
                assert isinstance(job, GuardJob)

    check()
    assert examined


def test_guard_checks_a_produce_topic_without_a_name() -> None:
    asked = exchange(api.PRODUCE, 9)
    assert GuardJob(POLICY).request(asked, framed(producing(9, None, {"": {0: b""}}), client_id="c")) == b""
    assert asked.answer is not None
