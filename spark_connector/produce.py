"""A Produce request that copies its records once.

Owns how the bytes of a request with one record batch are put together. kafka-python's own way copies the records three
times, and with records of 1 KB that is a tenth of what a writing task takes. It must never say anything else than
kafka-python's own encoding of the same request.
"""

from __future__ import annotations

import struct
from typing import Any

from kafka.protocol.producer.produce import ProduceRequest
from kafka.protocol.schemas.fields.codecs import UnsignedVarInt32

from spark_connector.recordbatch import Batch

_ACKS_TIMEOUT_MS = 10_000
_MAX_VERSION = 11
_FRAME = struct.Struct(">i")
# A request's last four bytes when its records have none: an int32, or since version 9 a varint of 1 and three empty
# lists of tagged fields (the partition's, the topic's, the request's).
_BEHIND = 4
_TAGS = bytes(3)


class Produce(ProduceRequest, init=False):  # type: ignore[call-arg, misc]
    """One batch for one partition, acks=all, in a transaction. A log that prints it shows no records."""

    def __init__(self, transactional_id: str, topic: str, partition: int, batch: Batch) -> None:
        data = ProduceRequest.TopicProduceData
        records = data.PartitionProduceData(index=partition, records=b"")
        super().__init__(
            transactional_id=transactional_id,
            acks=-1,
            timeout_ms=_ACKS_TIMEOUT_MS,
            topic_data=[data(name=topic, partition_data=[records])],
            max_version=_MAX_VERSION,
        )
        self.batch = batch

    def encode(self, version: int | None = None, header: bool = False, framed: bool = False) -> Any:
        without = bytearray(super().encode(version=version, header=header, framed=framed))
        size = self.batch.size
        if self.flexible_version_q(self.API_VERSION):
            length, tail = UnsignedVarInt32.encode(size + 1), _TAGS
        else:
            length, tail = _FRAME.pack(size), b""
        front = memoryview(without)[:-_BEHIND]
        if framed:
            itself = _FRAME.size  # is not counted
            _FRAME.pack_into(without, 0, len(front) - itself + len(length) + size + len(tail))
        return b"".join((front, length, *self.batch.pieces, tail))
