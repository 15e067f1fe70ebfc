"""Open a bare Kafka connection: requests of kafka-python's classes are sent unchanged, responses are decoded."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kafka.protocol.api_header import ResponseClassRegistry
from kafka.protocol.producer import ProduceRequest
from kafka.record.default_records import DefaultRecordBatchBuilder


class Wire:
    """Hold one TCP connection to `address` (`host:port`)."""

    def __init__(self, address: str, timeout_s: float = 15.0) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout_s)
        self._count = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def frame(self, request: Any) -> bytes:
        self._count += 1
        request.with_header(correlation_id=self._count, client_id="wire")
        return bytes(request.encode(header=True, framed=True))

    def send(self, *requests: Any) -> None:
        self.socket.sendall(b"".join(map(self.frame, requests)))

    def receive(self) -> bytes:
        """Return one whole frame; raise EOFError if the other side has closed."""
        head = self._exactly(4)
        return head + self._exactly(int.from_bytes(head, "big"))

    def ask(self, request: Any) -> Any:
        self.send(request)
        return answer(request, self.receive())

    def ended(self) -> bool:
        """Wait until the other side closes; return False if it sends something instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                raise EOFError(f"closed after {len(data)} of {count} bytes")
            data += piece
        return bytes(data)


class _Header:
    def __init__(self, api_key: int, version: int) -> None:
        self.request_api_key, self.request_api_version = api_key, version


def decoded(api_key: int, version: int, frame: bytes) -> Any:
    """Decode the response to this request."""
    response_class = ResponseClassRegistry.get_response_class(_Header(api_key, version))
    return response_class.decode(frame, version=version, header=True, framed=True)


def answer(request: Any, frame: bytes) -> Any:
    return decoded(request.API_KEY, request.API_VERSION, frame)


class RawName:
    """Hold the name of a header as arbitrary bytes."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def encode(self, _: str) -> bytes:
        return self._name


Header = tuple[bytes, bytes | None]


def produce_raw(address: str, topic: str, records: Sequence[tuple[bytes, Sequence[Header]]], timestamp: int) -> None:
    """Write values with headers to partition 0 in one batch, as no client library would."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for offset, (value, headers) in enumerate(records):
        raw = [(RawName(name), content) for name, content in headers]
        builder.append(offset, timestamp, b"k", value, raw)
    data = ProduceRequest.TopicProduceData
    batch = data.PartitionProduceData(index=0, records=bytes(builder.build()))
    request = ProduceRequest(
        version=7,
        transactional_id=None,
        acks=-1,
        timeout_ms=10_000,
        topic_data=[data(name=topic, partition_data=[batch])],
    )
    with Wire(address) as wire:
        response = wire.ask(request)
    assert response.responses[0].partition_responses[0].error_code == 0, response
