"""Error responses equal those of a broker: decoders of clients accept them, and they name the same partitions."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from kafka.protocol.consumer import FetchRequest, OffsetCommitRequest
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)

from eos.shim.faults.facts import read_facts
from eos.shim.wire import messages
from tests.unit.shim.messages import framed

ID = uuid.UUID(int=7)
CODE, CORRELATION = 51, 4711


def named(kind: Any, version: int, since: int, field: str = "name", **more: Any) -> Any:
    return kind(topic_id=ID, **more) if version >= since else kind(**{field: "orders"}, **more)


def produce(version: int) -> Any:
    topic = ProduceRequest.TopicProduceData
    data = [topic.PartitionProduceData(index=index, records=b"") for index in (0, 3)]
    topics = [named(topic, version, 13, partition_data=data)]
    return ProduceRequest(version=version, transactional_id="id", acks=-1, timeout_ms=1, topic_data=topics)


def fetch(version: int) -> Any:
    topic = FetchRequest.FetchTopic
    each = [topic.FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=1) for index in (0, 3)]
    topics = [named(topic, version, 13, "topic", partitions=each)]
    more = {"max_wait_ms": 1, "min_bytes": 1, "forgotten_topics_data": [], "isolation_level": 0}
    return FetchRequest(version=version, topics=topics, **more)


def offsets(cls: Any, prefix: str, version: int, since: int, **more: Any) -> Any:
    topic = getattr(cls, f"{prefix}RequestTopic")
    kind = getattr(topic, f"{prefix}RequestPartition")
    each = [kind(partition_index=index, committed_offset=5, committed_metadata="") for index in (0, 3)]
    topics = [named(topic, version, since, partitions=each)]
    return cls(version=version, group_id="g", member_id="m", topics=topics, **more)


def add_partitions(version: int) -> Any:
    topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    return AddPartitionsToTxnRequest(
        version=version,
        v3_and_below_transactional_id="id",
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=[topic(name="orders", partitions=[0, 3])],
    )


_WHO = {"transactional_id": "id", "producer_id": 1, "producer_epoch": 0}
REQUESTS: dict[str, tuple[Any, range]] = {
    "Produce": (produce, range(3, 14)),
    "Fetch": (fetch, range(4, 19)),
    "OffsetCommit": (lambda v: offsets(OffsetCommitRequest, "OffsetCommit", v, 10), range(2, 11)),
    "TxnOffsetCommit": (lambda v: offsets(TxnOffsetCommitRequest, "TxnOffsetCommit", v, 99, **_WHO), range(6)),
    "AddPartitionsToTxn": (add_partitions, range(4)),
    "AddOffsetsToTxn": (lambda v: AddOffsetsToTxnRequest(version=v, group_id="g", **_WHO), range(5)),
    "EndTxn": (lambda v: EndTxnRequest(version=v, committed=False, **_WHO), range(6)),
    "InitProducerId": (
        lambda v: InitProducerIdRequest(version=v, transactional_id="id", transaction_timeout_ms=1),
        range(7),
    ),
    "FindCoordinator": (
        lambda v: FindCoordinatorRequest(
            version=v, key_type=1, **({"coordinator_keys": ["id"]} if v > 3 else {"key": "id"})
        ),
        range(1, 7),
    ),
}
CASES = [(name, version) for name, (_, versions) in REQUESTS.items() for version in versions]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_error_response_names_the_partitions_of_the_request(name: str, version: int) -> None:
    request = REQUESTS[name][0](version)
    frame = framed(request, CORRELATION, client_id="test")
    made = messages.error_response(frame, request.API_KEY, version, CORRELATION, CODE)
    assert int.from_bytes(made[:4], "big") == len(made) - 4
    assert int.from_bytes(made[4:8], "big") == CORRELATION
    codes = [code for code in messages.error_codes(made, request.API_KEY, version) if code]
    per_partition = name in ("Produce", "Fetch", "OffsetCommit", "TxnOffsetCommit", "AddPartitionsToTxn")
    assert codes == [CODE] * (2 if per_partition else 1)
    answer = messages.RESPONSES[request.API_KEY].decode(made, version=version, header=True, framed=True)
    # Decoding and encoding gives the same bytes: no byte is missing or left over.
    assert framed(answer, CORRELATION) == made
    if (name, version) == ("OffsetCommit", 2):
        with pytest.raises(messages.Unanswerable):
            messages.with_throttle_time(made, request.API_KEY, version, 700)
        return
    throttled = messages.with_throttle_time(made, request.API_KEY, version, 700)
    cls = messages.RESPONSES[request.API_KEY]
    assert cls.decode(throttled, version=version, header=True, framed=True).throttle_time_ms == 700


@pytest.mark.parametrize(("name", "version"), CASES)
def test_request_facts_have_transactional_id_and_partitions(name: str, version: int) -> None:
    request = REQUESTS[name][0](version)
    found = read_facts(framed(request, CORRELATION, client_id="test"), request.API_KEY, version)
    assert found.transactional_id == (None if name in ("Fetch", "OffsetCommit") else "id")
    by_id = (name in ("Produce", "Fetch") and version >= 13) or (name == "OffsetCommit" and version >= 10)
    per_partition = name in ("Produce", "Fetch", "OffsetCommit", "TxnOffsetCommit", "AddPartitionsToTxn")
    assert found.partitions == (set() if by_id or not per_partition else {"orders-0", "orders-3"})
    assert found.outcome == ("abort" if name == "EndTxn" else None)


def test_error_response_has_one_code_per_partition() -> None:
    frame = framed(produce(9), CORRELATION, client_id="test")
    made = messages.error_response(frame, 0, 9, CORRELATION, lambda topic, partition: 29 if partition else 6)
    assert messages.error_codes(made, 0, 9) == [6, 29]


def test_request_without_error_response_is_unanswerable() -> None:
    with pytest.raises(messages.Unanswerable):
        messages.error_response(framed(produce(9), CORRELATION, client_id="test"), 0, 99, CORRELATION, CODE)
    with pytest.raises(messages.Unanswerable):
        messages.error_response(framed(produce(9), CORRELATION, client_id="test"), 68, 0, CORRELATION, CODE)
