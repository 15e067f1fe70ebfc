"""Implements the executor's half of the sink: one Spark task alone writes one share of the Kafka partitions.

A small batch is one share, and the driver writes it in the same way. This module owns the order in a task: claim, then
write, then report the result. It must never begin or end a transaction, or write without a claim. It imports nothing of
`eos` and no other Kafka client: executors have kafka-python, pyarrow, numpy, crc32c and cramjam, and this package.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from kafka import errors as kafka_errors

from eos.kafka.admin.ownership import Identity
from spark_connector import wire
from spark_connector.answers import Answer, Stopped
from spark_connector.claims import ClaimReceiver
from spark_connector.packing import numbers, split, unpack
from spark_connector.partition import IN_FLIGHT, PartitionWriter
from spark_connector.placing import REFUSAL, TARGET
from spark_connector.workers import begin_task

# Rows of a partition are collected up to this size: a record batch is 1 MB, and a request costs a millisecond.
_WAITING_BYTES = 4_000_000
# Limit for the Arrow batches that waiting rows keep in memory, over all partitions of a share: above it, all rows are
# sent. A waiting row keeps its whole batch.
_KEPT_BYTES = 32_000_000
# The smallest average piece of a partition's waiting rows: smaller pieces cost more than the copy of their bytes.
_PIECE_BYTES = 20_000
# Unacknowledged record batches over all partitions of a share.
_IN_FLIGHT_BYTES = 32_000_000
# Unanswered requests over all partitions of a share. The connection's own limit is higher. A connection at that limit
# refuses Metadata requests too, so a partition whose leader moved could not find the new one until other requests were
# answered.
_IN_FLIGHT_REQUESTS = wire.MOST_IN_FLIGHT - 20
_SENTENCE_CHARACTERS = 500


class Result(NamedTuple):
    """Holds a task's report to the driver; if `answer` names an Answer, nothing of the task may be committed."""

    share: int
    partitions: int  # number of partitions that the task wrote
    rows: int  # input rows
    sequences: int  # last sequence + 1 of each partition, all acknowledged
    bytes: int
    retries: int
    seconds: float
    waited: float  # the part spent waiting for brokers
    answer: str | None
    sentence: str | None

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str) -> Result:
        return cls(*json.loads(text))


RESULT = pa.schema([("result", pa.string())])
"""A Result as JSON: Spark generates code for each column and each task, which delays a small batch."""


@dataclass(frozen=True)
class Job:
    """Holds the input of a task, pickled once per micro-batch.

    `targets`: (topic, partition, max.message.bytes). Target i belongs to share i % `shares`.
    """

    transactional_id: str
    identity: Identity
    targets: tuple[tuple[str, int, int], ...]
    shares: int
    connection: Mapping[str, Any]  # the connection's settings in Kafka's names
    claims_client: ClaimReceiver
    compression: str
    delivery_timeout_s: float


def writer(job: Job) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow that writes the rows of `packing.packer`."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task()
        result = write_rows(job, batches, lambda: wire.shared(job.connection))
        if result is not None:
            yield pa.RecordBatch.from_arrays([pa.array([result.encode()])], schema=RESULT)

    return write


def write_rows(job: Job, batches: Iterator[pa.RecordBatch], connect: Callable[[], wire.Wire]) -> Result | None:
    """Write PACKED rows, in a task or, for a small batch, in the driver. Without rows, claim nothing and return
    None."""
    started = time.monotonic()
    share: _Share | None = None
    rows = 0
    try:
        for batch in batches:
            for unpacked in unpack(batch):
                if share is None:
                    share = _Share(job, int(numbers(unpacked, TARGET)[0]) % job.shares, connect)
                share.write(unpacked)
                rows += unpacked.num_rows
            if share is not None:
                share.drive()
            del batch  # otherwise this batch would stay in memory next to Spark's next one
        if share is None:
            return None
        share.finish()
    except Exception as error:
        if share is None and not isinstance(error, Stopped):
            raise  # nothing is claimed, so Spark may run the task again
        # Return a value and do not raise. After an exception Spark would run the task again, only for a second claim.
        answer, sentence = _find_consequence(error)
        wire.discard(job.connection)
        for _ in batches:
            pass
        number = -1 if share is None else share.number
        return Result(number, 0, rows, 0, 0, 0, 0.0, 0.0, answer.name, sentence)
    seconds = time.monotonic() - started
    partitions = share.partitions.values()
    return Result(
        share.number,
        len(partitions),
        rows,
        sum(partition.next_sequence for partition in partitions),
        sum(partition.bytes for partition in partitions),
        sum(partition.retries for partition in partitions),
        seconds,
        sum(partition.waited_s for partition in partitions),
        None,
        None,
    )


def _find_consequence(error: Exception) -> tuple[Answer, str]:
    """Return the consequence of an error for the driver, and the reason."""
    if isinstance(error, Stopped):
        return error.answer, str(error)
    if isinstance(error, (wire.Unreachable, wire.Broken)):
        return Answer.RETRY, str(error)
    if isinstance(error, (kafka_errors.AuthorizationError, kafka_errors.SaslAuthenticationFailedError)):
        return Answer.UNAUTHORISED, str(error)
    # The error is unexpected: its sentence goes to the driver, and its traceback to the executor's log.
    traceback.print_exception(error)
    sentence = " ".join(f"{type(error).__name__}: {error}".split())[:_SENTENCE_CHARACTERS]
    return Answer.RESTART, f"{_who()} failed after its claim with {sentence}"


class _Share:
    """Holds the partitions that this task writes, and the rows that wait for them.

    The constructor claims the share before it knows anything else about the rows.
    """

    def __init__(self, job: Job, number: int, connect: Callable[[], wire.Wire]) -> None:
        self._job, self.number, self._connect = job, number, connect
        refused = job.claims_client.claim(job.identity, number, _who())
        if refused is not None:
            raise Stopped(Answer.RESTART, refused)
        self.partitions: dict[int, PartitionWriter] = {}
        self._in_flight: dict[int, PartitionWriter] = {}  # partitions with requests in flight, the oldest first
        self._waiting: dict[int, list[pa.RecordBatch]] = {}
        self._waiting_bytes: dict[int, int] = {}
        self._buffered_bytes = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Send the rows, or keep them until there are more for their partitions."""
        if self._buffered_bytes > _KEPT_BYTES:
            self._send_all()
        for target, held in split(rows, numbers(rows, TARGET)):
            if target % self._job.shares != self.number:
                raise Stopped(Answer.REFUSED, f"the task of share {self.number} got rows of target {target}")
            if target >= len(self._job.targets):
                raise Stopped(Answer.REFUSED, self._refusal(held))
            size = held.nbytes
            self._buffered_bytes += size
            self._waiting.setdefault(target, []).append(held)
            self._waiting_bytes[target] = self._waiting_bytes.get(target, 0) + size
            if self._waiting_bytes[target] >= _WAITING_BYTES:
                self._send(target)

    def drive(self) -> None:
        """Let the connection send and receive while no row is being encoded."""
        if self._in_flight:
            self._connect().poll()

    def finish(self) -> None:
        """Send the waiting rows, and return once everything is acknowledged."""
        self._send_all()
        for partition in self.partitions.values():
            partition.finish()

    def _send_all(self) -> None:
        for target in list(self._waiting):
            self._send(target)
        self._buffered_bytes = 0

    def _send(self, target: int) -> None:
        pieces, size = self._waiting.pop(target), self._waiting_bytes.pop(target)
        joined = size < len(pieces) * _PIECE_BYTES
        rows = pa.concat_batches(pieces) if joined else pa.Table.from_batches(pieces)
        if target not in self.partitions:
            self.partitions[target] = self._open(target)
        self._wait(_IN_FLIGHT_REQUESTS - IN_FLIGHT, _IN_FLIGHT_BYTES)
        self.partitions[target].write(rows)
        self._in_flight[target] = self.partitions[target]
        self._wait(_IN_FLIGHT_REQUESTS, _IN_FLIGHT_BYTES)

    def _wait(self, most_requests: int, most_bytes: int) -> None:
        """Wait until at most this much is in flight."""
        while self._in_flight:
            writers = self._in_flight.values()
            if (
                sum(writer.unacknowledged for writer in writers) <= most_requests
                and sum(writer.unacknowledged_bytes for writer in writers) <= most_bytes
            ):
                return
            target, first = next(iter(self._in_flight.items()))
            if first.unacknowledged:
                first.wait()
            else:
                del self._in_flight[target]

    def _open(self, target: int) -> PartitionWriter:
        job = self._job
        topic, index, max_bytes = job.targets[target]
        return PartitionWriter(
            self._connect(),
            job.transactional_id,
            job.identity,
            topic,
            index,
            compression=job.compression,
            max_bytes=max_bytes,
            delivery_timeout_s=job.delivery_timeout_s,
        )

    def _refusal(self, rows: pa.RecordBatch) -> str:
        said = rows.column(REFUSAL)[0].as_py()
        known = ", ".join(sorted({topic for topic, _, _ in self._job.targets}))
        return f"a row is for {said}, which is not a partition of {known}: list every topic of the rows in topic=[...]"


def _who() -> str:
    """Return the name of this attempt of this task, for messages."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return "the driver"
    return f"task {context.taskAttemptId()} (stage {context.stageId()}, attempt {context.attemptNumber()})"
