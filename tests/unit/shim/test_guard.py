"""The guard checks the records and the login, not the claims of a request."""

from __future__ import annotations

import struct

import pytest
from kafka.protocol.producer import AddPartitionsToTxnRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest

from eos.shim.errors import ProtocolError
from eos.shim.guard import GuardJob, Policy
from eos.shim.pipeline import Connection, Exchange
from eos.shim.wire import api, messages
from tests.unit.shim.messages import framed, producing

CONNECTION = Connection(1, "c", "b", 0)
_BATCH = struct.Struct(">qiibIhiqqqhii")
PLAIN, TRANSACTIONAL = 0, 0x10


def batch(attributes: int, magic: int = 2, body: bytes = b"records") -> bytes:
    length = _BATCH.size - 12 + len(body)
    return _BATCH.pack(0, length, 0, magic, 0, attributes, 0, 0, 0, 1, 0, 0, 1) + body


def produce(name: str | None, topics: dict[str, list[bytes]]) -> bytes:
    return framed(producing(9, name, {topic: dict(enumerate(each)) for topic, each in topics.items()}), client_id="c")


def judged(frame: bytes) -> list[int] | None:
    """Return the error per partition, or None if the guard passes the request."""
    job, asked = GuardJob(Policy(transactional_topics=("guarded",))), Exchange(CONNECTION, api.PRODUCE, 9, 7)
    made = job.request(asked, frame)
    if asked.answer is None:
        assert made == frame
        return None
    return messages.error_codes(asked.answer, api.PRODUCE, 9)


def test_guard_rejects_non_transactional_batches() -> None:
    assert judged(produce("t", {"guarded": [batch(TRANSACTIONAL)]})) is None
    assert judged(produce("t", {"guarded": [batch(TRANSACTIONAL | 4)]})) is None  # compressed
    assert judged(produce("t", {"guarded": [batch(PLAIN)]})) == [29]
    assert judged(produce(None, {"guarded": [batch(PLAIN)]})) == [29]
    assert judged(produce("t", {"free": [batch(PLAIN)]})) is None
    assert judged(produce("t", {"free": [batch(PLAIN)], "guarded": [batch(TRANSACTIONAL)]})) is None


def test_guard_rejects_topic_with_one_non_transactional_batch() -> None:
    both = batch(TRANSACTIONAL) + batch(PLAIN)
    assert judged(produce("t", {"guarded": [batch(TRANSACTIONAL), both]})) == [29, 29]
    assert judged(produce("t", {"free": [batch(PLAIN)], "guarded": [both]})) == [6, 29]


@pytest.mark.parametrize(
    "records",
    [
        batch(TRANSACTIONAL, magic=1),
        batch(TRANSACTIONAL)[:-1],
        batch(TRANSACTIONAL) + b"more",
        b"\0" * 20,
        batch(TRANSACTIONAL)[:8] + b"\0\0\0\x01" + batch(TRANSACTIONAL)[12:],
    ],
    ids=["of another magic", "cut short", "with a rest", "no batch", "shorter than its header"],
)
def test_guard_treats_unreadable_records_as_non_transactional(records: bytes) -> None:
    assert judged(produce("t", {"guarded": [records]})) == [29]


def logged_in(job: GuardJob, mechanism: str, message: bytes) -> None:
    asked = Exchange(CONNECTION, api.SASL_HANDSHAKE, 1, 7)
    assert job.wants_request(api.SASL_HANDSHAKE, 1)
    job.request(asked, framed(SaslHandshakeRequest(version=1, mechanism=mechanism), client_id="c"))
    asked = Exchange(CONNECTION, api.SASL_AUTHENTICATE, 2, 7)
    job.request(asked, framed(SaslAuthenticateRequest(version=2, auth_bytes=message), client_id="c"))
    done = SaslAuthenticateResponse(version=2, error_code=0, error_message=None, auth_bytes=b"", session_lifetime_ms=0)
    job.response(asked, framed(done))


def may_use(job: GuardJob, name: str) -> bool:
    asked = Exchange(CONNECTION, api.PRODUCE, 9, 7)
    job.request(asked, produce(name, {"free": [batch(TRANSACTIONAL)]}))
    return asked.answer is None


POLICY = Policy(prefixes=(("billing", ("billing-",)), ("*", ("free-",))))


@pytest.mark.parametrize(
    ("mechanism", "message", "billing"),
    [
        ("PLAIN", b"\0billing\0secret", True),
        ("SCRAM-SHA-512", b"n,,n=billing,r=nonce", True),
        ("PLAIN", b"\0other\0secret", False),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer token\x01x=,n=billing,\x01\x01", False),
        ("OAUTHBEARER", b"\0billing\0secret", False),
        ("PLAIN", b"n,,n=billing,r=nonce", False),
        ("SCRAM-SHA-256", b"\0billing\0secret", False),
        ("GSSAPI", b"n,,n=billing,r=nonce", False),
    ],
)
def test_user_name_is_read_only_for_plain_and_scram(mechanism: str, message: bytes, billing: bool) -> None:
    job = GuardJob(POLICY)
    logged_in(job, mechanism, message)
    assert may_use(job, "billing-1") == billing
    assert may_use(job, "free-1") != billing


def test_login_without_handshake_has_no_user_name() -> None:
    job, asked = GuardJob(POLICY), Exchange(CONNECTION, api.SASL_AUTHENTICATE, 2, 7)
    job.request(asked, framed(SaslAuthenticateRequest(version=2, auth_bytes=b"\0billing\0s"), client_id="c"))
    assert job not in asked.notes or asked.notes[job] is None


def test_guard_rejects_batched_add_partitions_to_txn() -> None:
    batched = AddPartitionsToTxnRequest
    each = batched.AddPartitionsToTxnTransaction(
        transactional_id="billing-1", producer_id=1, producer_epoch=0, verify_only=False, topics=[]
    )
    frame = framed(batched(version=4, transactions=[each]), client_id="c")
    job, asked = GuardJob(POLICY), Exchange(CONNECTION, api.ADD_PARTITIONS_TO_TXN, 4, 7)
    assert job.wants_request(api.ADD_PARTITIONS_TO_TXN, 4)
    with pytest.raises(ProtocolError, match="only brokers"):
        job.request(asked, frame)
    assert not GuardJob(Policy(max_timeout_ms=1)).wants_request(api.ADD_PARTITIONS_TO_TXN, 4)
