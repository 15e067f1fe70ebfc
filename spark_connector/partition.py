"""Writes record batches to one partition under a given (producer id, epoch): idempotent, acks=all, in order.

Owns the sequence numbers and the resends, by Kafka's own rules. At most five requests are in flight. An unacknowledged
batch is sent again byte for byte, the lowest sequence first, to the current leader of the partition. It must never
encode a batch a second time, and never treat the response to one batch as the response to another.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from kafka import errors as kafka_errors
from kafka.protocol.producer.produce import ProduceRequest
from kafka.protocol.schemas.fields.codecs import UnsignedVarInt32

from eos.codes import error_name
from eos.kafka.admin.ownership import Identity
from spark_connector.answers import Answer, Stopped, judge
from spark_connector.recordbatch import Batch, RecordRefused, encode
from spark_connector.wire import Unreachable, Wire

IN_FLIGHT = 5  # the broker remembers the last five batches of a producer per partition
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 1.0
_WAIT_S = 60.0  # longer than kafka-python's own timeout of a request


@dataclass
class _Sent:
    batch: Batch
    future: Any


class PartitionWriter:
    """Writes to one partition.

    `compression`: none, gzip, snappy, lz4 or zstd. `max_bytes`: the topic's max.message.bytes. `delivery_timeout_s`:
    for how many seconds one batch may stay unacknowledged.
    """

    def __init__(
        self,
        wire: Wire,
        transactional_id: str,
        identity: Identity,
        topic: str,
        partition: int,
        *,
        compression: str = "none",
        max_bytes: int = 1_000_000,
        delivery_timeout_s: float = 120.0,
    ) -> None:
        self._wire, self._transactional_id, self._identity = wire, transactional_id, identity
        self.topic, self.partition = topic, partition
        self._compression, self._max_bytes = compression, max_bytes
        self._delivery_timeout_s = delivery_timeout_s
        self._sent: deque[_Sent] = deque()
        self.next_sequence = 0
        self.acknowledged = 0
        self.bytes = 0
        self.retries = 0
        self.waited_s = 0.0

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Send these rows (columns as in `recordbatch.encode`); return before they are acknowledged.

        Raises Stopped, Unreachable.
        """
        try:
            for batch in encode(
                rows,
                self._identity,
                self.next_sequence,
                compression=self._compression,
                max_bytes=self._max_bytes,
                now_ms=int(time.time() * 1000),
            ):
                self._offer(batch)
        except RecordRefused as error:
            raise Stopped(Answer.REFUSED, f"{self.topic}-{self.partition}: {error}") from error

    @property
    def unacknowledged(self) -> int:
        """Return the number of record batches that are not acknowledged."""
        return len(self._sent)

    @property
    def unacknowledged_bytes(self) -> int:
        """Return the bytes of the record batches kept for a resend."""
        return sum(sent.batch.size for sent in self._sent)

    def wait(self) -> None:
        """Wait until the oldest batch in flight is acknowledged. Raise as `write`."""
        self._take_answers(wait=True)

    def finish(self) -> None:
        """Wait until everything is acknowledged."""
        while self._sent:
            self._take_answers(wait=True)
        if self.acknowledged != self.next_sequence:
            raise Stopped(
                Answer.RESTART,
                f"{self.topic}-{self.partition}: of {self.next_sequence} records {self.acknowledged} are acknowledged",
            )

    def _offer(self, batch: Batch) -> None:
        assert batch.base_sequence == self.next_sequence, "sequences without a gap"
        while len(self._sent) >= IN_FLIGHT:
            self._take_answers(wait=True)
        self._sent.append(_Sent(batch, self._start(batch)))
        self.next_sequence += batch.records
        self.bytes += batch.size
        self._wire.poll()  # send the batch now, because nothing else drives the loop while rows are encoded
        self._take_answers(wait=False)

    def _start(self, batch: Batch) -> Any:
        leader = self._wire.leader(self.topic, self.partition)
        while self._wire.is_paused(leader):
            self._wire.poll(0.01)
        request = Produce(self._transactional_id, self.topic, self.partition, batch)
        return self._wire.start(request, leader)

    def _take_answers(self, wait: bool) -> None:
        """Handle the responses that have arrived, oldest first; with `wait`, wait for the oldest one."""
        if wait:
            started = time.monotonic()
            self._wire.wait(self._sent[0].future, _WAIT_S)
            self.waited_s += time.monotonic() - started
        while self._sent and self._sent[0].future.is_done:
            reason = self._reason(self._sent[0].future)
            if reason is not None:
                self._send_again(reason)
                return
            self.acknowledged += self._sent.popleft().batch.records

    def _reason(self, future: Any) -> str | None:
        """Return why the batch must be sent again, or None if it is in Kafka. Raise Stopped for every other answer."""
        if future.exception is not None:
            if isinstance(future.exception, kafka_errors.AuthorizationError):
                raise Stopped(Answer.UNAUTHORISED, f"{self.topic}-{self.partition}: {future.exception}")
            return f"{type(future.exception).__name__}: {future.exception}"
        (topic,) = future.value.responses
        (answer,) = topic.partition_responses
        verdict = judge(answer.error_code)
        if verdict is Answer.DONE:
            return None
        said = error_name(answer.error_code) + (f" ({answer.error_message})" if answer.error_message else "")
        if verdict is Answer.RETRY:
            return said
        raise Stopped(verdict, f"{self.topic}-{self.partition}: Produce was answered with {said}")

    def _send_again(self, reason: str) -> None:
        """Resend until the oldest unacknowledged batch is acknowledged.

        The broker refused the later batches for their sequence numbers, or has not acknowledged them either. All are
        sent again in order; the broker recognises batches that it already has.
        """
        deadline = time.monotonic() + self._delivery_timeout_s
        backoff = _BACKOFF_S
        while True:
            self._drain()
            if time.monotonic() + backoff > deadline:
                raise Unreachable(
                    f"{self.topic}-{self.partition} took no record within {self._delivery_timeout_s:.0f} s ({reason})"
                )
            self._wire.sleep(backoff)
            backoff = min(backoff * 2, _BACKOFF_MAX_S)
            self._wire.refresh_leader(self.topic, self.partition)
            self.retries += 1
            for sent in self._sent:
                sent.future = self._start(sent.batch)
            self._wire.wait(self._sent[0].future, _WAIT_S)
            again = self._reason(self._sent[0].future)
            if again is None:
                return
            reason = again

    def _drain(self) -> None:
        """Wait until no request is in flight, so that an earlier copy cannot overtake the next one."""
        for sent in self._sent:
            self._wire.wait(sent.future, _WAIT_S)


_ACKS_TIMEOUT_MS = 10_000
_MAX_VERSION = 11
_FRAME = struct.Struct(">i")
# The last four bytes of a request without records: an int32, or since version 9 a varint of 1 and three empty lists of
# tagged fields (of the partition, the topic and the request).
_END_BYTES = 4
_TAGS = bytes(3)


class Produce(ProduceRequest, init=False):  # type: ignore[call-arg, misc]
    """Encodes a Produce request with one batch for one partition, acks=all, in a transaction. Its log line has no
    records."""

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
        front = memoryview(without)[:-_END_BYTES]
        if framed:
            itself = _FRAME.size  # the frame length does not count itself
            _FRAME.pack_into(without, 0, len(front) - itself + len(length) + size + len(tail))
        return b"".join((front, length, *self.batch.pieces, tail))
