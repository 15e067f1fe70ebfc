"""The Produce request that copies its records once: byte for byte equal to kafka-python's encoding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.producer.produce import ProduceRequest

from spark_connector.partition import Produce
from spark_connector.recordbatch import Batch

FIRST_WITH_TRANSACTIONS, NEWEST_BY_NAME = 3, 11
VERSIONS = range(FIRST_WITH_TRANSACTIONS, NEWEST_BY_NAME + 1)


def theirs(topic: str, partition: int, records: bytes) -> ProduceRequest:
    data = ProduceRequest.TopicProduceData
    return ProduceRequest(
        transactional_id="sink-1",
        acks=-1,
        timeout_ms=10_000,
        topic_data=[data(name=topic, partition_data=[data.PartitionProduceData(index=partition, records=records)])],
        max_version=NEWEST_BY_NAME,
    )


def encoded(request: ProduceRequest, version: int, framed: bool) -> bytes:
    request.API_VERSION = version
    request.with_header(correlation_id=77, client_id="a client")
    return bytes(request.encode(header=True, framed=framed))


# Sizes at which the varint of the length takes one more byte.
@pytest.mark.parametrize("size", [1, 126, 127, 128, 16_382, 16_383, 16_384, 2_097_151])
@pytest.mark.parametrize("version", VERSIONS)
def test_request_equals_the_encoding_of_kafka_python(version: int, size: int) -> None:
    records = b"0123456789" * (size // 10) + b"x" * (size % 10)
    batch = Batch((records[:61], memoryview(records)[61:]), 0, 1)
    ours = encoded(Produce("sink-1", "flights", 3, batch), version, framed=True)
    assert ours == encoded(theirs("flights", 3, records), version, framed=True)


@given(st.text(min_size=1, max_size=9), st.integers(0, 2**31 - 1), st.lists(st.binary(max_size=200), max_size=5))
@settings(max_examples=100, deadline=None)
def test_request_with_random_content_equals_the_encoding_of_kafka_python(
    topic: str, partition: int, pieces: list[bytes]
) -> None:
    batch = Batch(tuple(pieces), 0, 1)
    for version in VERSIONS:
        for framed in (True, False):
            ours = encoded(Produce("sink-1", topic, partition, batch), version, framed)
            assert ours == encoded(theirs(topic, partition, b"".join(pieces)), version, framed)


def test_request_can_be_encoded_twice() -> None:
    """A request that was waiting for its connection is encoded when it is sent."""
    request = Produce("sink-1", "flights", 3, Batch((b"records",), 0, 1))
    assert encoded(request, 11, framed=True) == encoded(request, 11, framed=True)
    assert encoded(request, 3, framed=True) == encoded(theirs("flights", 3, b"records"), 3, framed=True)
