"""The executor's half of the sink: one Spark task writes the rows of one Kafka partition.

Owns the order of things in a task: claim, then write, then say what was written. It must never begin a transaction, end
one, or write without a claim, and it imports nothing of `eos` and no other Kafka client: executors have kafka-python,
pyarrow, numpy, crc32c and cramjam, and this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_connector import wire
from spark_connector.answers import Answer, Stopped
from spark_connector.claims import ClaimOffice
from spark_connector.partition import PartitionWriter
from spark_connector.recordbatch import Identity

TARGET, REFUSAL = "__eos_target", "__eos_refusal"
RESULT_SCHEMA = (
    "target int, rows long, sequences long, bytes long, retries int, seconds double, waited double, answer string, "
    "sentence string"
)


class Result(NamedTuple):
    """What a task tells the driver. `answer` is None, or an Answer's name: then nothing of it may be committed."""

    target: int
    rows: int  # that came in
    sequences: int  # last sequence + 1, all acknowledged
    bytes: int
    retries: int
    seconds: float
    waited: float  # of these, for answers
    answer: str | None
    sentence: str | None


@dataclass(frozen=True)
class Job:
    """All that a task needs; pickled once per micro-batch. `targets`: (topic, partition, max.message.bytes)."""

    transactional_id: str
    identity: Identity
    targets: tuple[tuple[str, int, int], ...]
    connection: Mapping[str, Any]  # Kafka's names
    office: ClaimOffice
    compression: str
    delivery_timeout_s: float


def writer(job: Job) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for mapInArrow."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        result = _write(job, batches)
        if result is not None:
            yield pa.RecordBatch.from_pylist([result._asdict()], schema=_ARROW_SCHEMA)

    return write


_ARROW_SCHEMA = pa.schema(
    [
        ("target", pa.int32()),
        ("rows", pa.int64()),
        ("sequences", pa.int64()),
        ("bytes", pa.int64()),
        ("retries", pa.int32()),
        ("seconds", pa.float64()),
        ("waited", pa.float64()),
        ("answer", pa.string()),
        ("sentence", pa.string()),
    ]
)


def _write(job: Job, batches: Iterator[pa.RecordBatch]) -> Result | None:
    """None for a task without rows: it claims nothing."""
    started = time.monotonic()
    target, rows = -1, 0
    partition: PartitionWriter | None = None
    try:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            lowest, highest = pc.min_max(batch.column(TARGET)).as_py().values()
            if partition is None:
                target = lowest
                partition = _open(job, target, batch)
            if (lowest, highest) != (target, target):
                raise Stopped(Answer.REFUSED, f"a task got rows of targets {target}, {lowest} and {highest}")
            partition.write(batch)
            rows += batch.num_rows
        if partition is None:
            return None
        partition.finish()
    except (Stopped, wire.Unreachable, wire.Broken) as error:
        # A value and not an exception: Spark would run the task again, and the second claim would only repeat it.
        answer = error.answer if isinstance(error, Stopped) else Answer.RETRY
        wire.discard(job.connection)
        for _ in batches:
            pass
        return Result(target, rows, 0, 0, 0, 0.0, 0.0, answer.name, str(error))
    seconds = time.monotonic() - started
    return Result(
        target,
        rows,
        partition.next_sequence,
        partition.bytes,
        partition.retries,
        seconds,
        partition.waited_s,
        None,
        None,
    )


def _open(job: Job, target: int, first: pa.RecordBatch) -> PartitionWriter:
    if target == len(job.targets):
        said = first.column(REFUSAL)[0].as_py()
        known = ", ".join(sorted({topic for topic, _, _ in job.targets}))
        raise Stopped(
            Answer.REFUSED,
            f"a row is for {said}, which is no partition of {known}: list every topic of the rows in topic=[...]",
        )
    refused = job.office.claim(job.identity, target, _who())
    if refused is not None:
        raise Stopped(Answer.RESTART, refused)
    topic, index, max_bytes = job.targets[target]
    return PartitionWriter(
        wire.shared(job.connection),
        job.transactional_id,
        job.identity,
        topic,
        index,
        compression=job.compression,
        max_bytes=max_bytes,
        delivery_timeout_s=job.delivery_timeout_s,
    )


def _who() -> str:
    """This attempt of this task, for a sentence."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return "a task"
    return f"task {context.taskAttemptId()} (stage {context.stageId()}, attempt {context.attemptNumber()})"
