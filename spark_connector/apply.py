"""Runs an App's functions over Arrow batches: the executor code for `mapInArrow`.

Owns the conversion from rows of Spark's Kafka source to Records, and from an App's outputs to rows of the sink.
eos/app/routes/ calls the function and eos/engine/handling.py handles failed records, as on a worker. This module must
never import a Kafka client, open a connection or decide the outcome of a micro-batch: it yields rows or raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from eos import log
from eos.app.definition import App
from eos.app.routes import Route
from eos.app.state import TaskCells
from eos.app.stores import CellsOf
from eos.engine.handling import Collector, Handler
from eos.engine.hooks import Hooks
from eos.engine.slices import Partition
from eos.errors import EosError
from eos.records import Header, Record, Send
from spark_connector.failures import to_line
from spark_connector.workers import begin_task

# The columns that mapInArrow yields. A null in `timestamp_ms` means the time when the row is sent, and a null in
# `partition` leaves the choice to the partitioner. A task reads a range of one partition of one topic in order, and the
# sink keeps the order of each task's rows.
OUTPUTS = (
    "topic string, partition int, key binary, value binary, headers array<struct<key: string, value: binary>>, "
    "timestamp_ms bigint"
)
_MOST_OUTPUTS = 10_000  # when due timers have made this many outputs, these are yielded before more timers fire
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("timestamp_ms", pa.int64()),
    ]
)


class OnSpark:
    """Holds an App for the executors, pickled with its functions.

    `batch_most`, `concurrent_most`: the settings `eos.batch.max.records` and `eos.async.max.records`. `passing`: the
    header names of `eos.headers.pass`.
    """

    def __init__(self, app: App, batch_most: int, concurrent_most: int = 100, passing: Collection[str] = ()) -> None:
        self._app, self._batch_most, self._concurrent_most = app, batch_most, concurrent_most
        self._passing = passing

    def _handler_of(
        self,
        cells_of: Callable[[Route], CellsOf] | None = None,
        tasks_of: Callable[[Route], Mapping[Partition, TaskCells]] | None = None,
    ) -> Handler:
        most = self._concurrent_most, self._batch_most
        return Handler(self._app, None, *most, self._passing, cells_of=cells_of, tasks_of=tasks_of)


class Apply(OnSpark):
    """Implements the function for `mapInArrow`. The App's hooks run before and after each task."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the outputs of the rows.

        Raises ExecutorFailure for an error that ends the run: a record whose policy is to stop, an invalid App, or a
        hook that failed.
        """
        prepare()
        handler = self._handler_of()
        hooks, finished = Hooks(self._app), False
        try:
            hooks.start()
            for batch in batches:
                if batch.num_rows:
                    yield from map(write, handle(handler, read(batch), self._batch_most))
            finished = True
        except EosError as error:
            raise to_line(error) from error
        finally:
            handler.end()
            hooks.stop(failed=not finished)


def prepare() -> None:
    """Prepare the Python worker for a task, before the task's first record."""
    begin_task()
    if not log.logger.handlers:
        log.configure(level="warning")  # skipped records and dead letters appear in the executor's stderr


def handle(handler: Handler, records: list[Record], most: int) -> Iterator[Sequence[Send]]:
    """Yield the outputs of the records, `most` records at a time, and of the timers that are due after them.

    Raises the EosError that ends the run.
    """
    at = 0
    while at < len(records) or handler.has_due_timers():
        part = records[at : at + most]
        outputs = Collector(_MOST_OUTPUTS)
        halt = handler.handle(outputs, part) if part else handler.fire_waiting(outputs)
        at += len(part) if halt is None else halt.handled
        if halt is not None and halt.error is not None:
            raise halt.error
        if outputs.sends:
            yield outputs.sends
        if halt is not None:
            time.sleep(halt.pause_s or 0.0)  # the pause before a record is retried


def read(batch: pa.RecordBatch) -> list[Record]:
    """Return the Records of the rows of Spark's Kafka source; an unknown timestamp is -1."""
    columns = [
        batch.column("topic"),
        batch.column("partition"),
        batch.column("offset"),
        _milliseconds(batch.column("timestamp")),
        batch.column("key"),
        batch.column("value"),
    ]
    lists = [column.to_pylist() for column in columns]
    headers = batch.column("headers")
    if headers.null_count == len(headers):
        return list(map(Record, *lists))
    lists.append([[(h["key"], h["value"]) for h in held] if held else () for held in headers.to_pylist()])
    return list(map(Record, *lists))


def _milliseconds(column: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    # Spark's source converts milliseconds to microseconds; -1 (unknown) becomes -1000.
    return pc.divide(column.cast(pa.int64()), 1000)


def write(sends: Sequence[Send]) -> pa.RecordBatch:
    """Return the outputs as rows of the sink, in the same order."""
    topics, values, keys, partitions, timestamps, headers = zip(*sends, strict=True)
    columns: list[Any] = [
        pa.array(topics, pa.string()),
        pa.array([None if number < 0 else number for number in partitions], pa.int32()),
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        _header_column(headers),
        pa.array([stamp or None for stamp in timestamps], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _header_column(headers: Sequence[list[Header] | None]) -> pa.Array:
    if not any(headers):
        return pa.nulls(len(headers), _HEADERS)
    return pa.array([[{"key": k, "value": v} for k, v in held] if held else None for held in headers], _HEADERS)
