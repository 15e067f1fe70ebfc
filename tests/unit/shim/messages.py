"""Protocol messages for the shim's tests, made by kafka-python from Kafka's own schemas: any API, any version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from kafka.protocol.admin import DescribeClusterResponse
from kafka.protocol.consumer import FetchResponse
from kafka.protocol.metadata import FindCoordinatorResponse, MetadataResponse
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from eos.shim.wire import api

# A larger number of examples, for a long search.
FUZZ_EXAMPLES = int(os.environ.get("EOS_FUZZ_EXAMPLES", "0"))

RESPONSES: dict[int, Any] = {
    api.PRODUCE: ProduceResponse,
    api.FETCH: FetchResponse,
    api.METADATA: MetadataResponse,
    api.FIND_COORDINATOR: FindCoordinatorResponse,
    api.DESCRIBE_CLUSTER: DescribeClusterResponse,
}

_HOSTS = st.sampled_from(["127.0.0.1", "kafka", "my-kafka", "broker-1.some.zone.example", "h" * 130])
_TEXT = st.text(max_size=12)
_INTS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}


def values(field: Any, version: int) -> st.SearchStrategy[Any]:
    """Draw any value of a field of kafka-python's schema."""
    if field.name == "host":
        return _HOSTS
    if field.name == "port":
        return st.integers(0, 65535)
    kind = field.type_str
    if field.is_array():
        element = instances(field, version) if field.is_struct_array() else values(field.array_of, version)
        return st.lists(element, max_size=3)
    if field.is_struct():
        return instances(field, version)
    if kind in _INTS:
        return st.integers(-(2 ** _INTS[kind]), 2 ** _INTS[kind] - 1)
    simple: dict[str, st.SearchStrategy[Any]] = {
        "string": _TEXT,
        "bool": st.booleans(),
        "uuid": st.uuids(),
        "records": st.binary(max_size=200),
        "bytes": st.binary(max_size=20),
        "bitfield": st.sets(st.integers(0, 30)),
    }
    return st.none() | simple[kind] if field.nullable_for_version_q(version) else simple[kind]


@st.composite
def instances(draw: st.DrawFn, field: Any, version: int) -> Any:
    data_class = field.data_class
    drawn = {}
    for inner in field.fields.values() if isinstance(field.fields, dict) else field.fields:
        if not inner.for_version_q(version):
            continue
        if inner.tagged_field_q(version) and not draw(st.booleans()):
            continue
        drawn[inner.name] = draw(values(inner, version))
    return data_class(version=version, **drawn)


def framed(message: Any, correlation_id: int = 7, **header: Any) -> bytes:
    """Return a message of kafka-python as wire bytes."""
    message.with_header(correlation_id=correlation_id, **header)
    return bytes(message.encode(header=True, framed=True))


def producing(version: int, transactional_id: str | None, data: Mapping[str, Mapping[int, bytes | None]]) -> Any:
    """Return a Produce request; `data` has the batches by topic and partition."""
    topic = ProduceRequest.TopicProduceData
    topics = []
    for name, partitions in data.items():
        made = [topic.PartitionProduceData(version=version, index=i, records=r) for i, r in partitions.items()]
        topics.append(topic(version=version, name=name, partition_data=made))
    who = {"version": version, "transactional_id": transactional_id}
    return ProduceRequest(**who, acks=-1, timeout_ms=1, topic_data=topics)


@st.composite
def frames(draw: st.DrawFn, cls: Any, version: int) -> bytes:
    """Return a whole response frame as wire bytes."""
    return framed(draw(instances(_Top(cls), version)), draw(st.integers(0, 2**31 - 1)))


@st.composite
def requests(draw: st.DrawFn, cls: Any, version: int) -> bytes:
    """Return a whole request frame of a client as wire bytes."""
    message = draw(instances(_Top(cls), version))
    return framed(message, draw(st.integers(0, 2**31 - 1)), client_id=draw(st.none() | _TEXT))


class _Top:
    """Return a field that stands for a message class."""

    def __init__(self, cls: Any) -> None:
        self.fields, self.data_class = cls._struct.fields, cls


def decoded(cls: Any, version: int, frame: bytes) -> dict[str, Any]:
    return dict(cls.decode(frame, version=version, header=True, framed=True).to_dict(json=False))


def with_unknown_tag(frame: bytes, at: int = -1) -> bytes:
    """Return the frame with an unknown tagged field in place of the empty tag section at `at`."""
    at %= len(frame)
    assert frame[at] == 0
    body = frame[4:at] + b"\x01\x63\x03abc" + frame[at + 1 :]
    return len(body).to_bytes(4, "big") + body
