"""Runs functions with state over groups of records: the executor code for `applyInPandasWithState`.

Each group has its own state. Usually a group is one key in one partition of a topic, so that Spark can distribute the
keys. A function that uses time (timers, windows, `once=`, `ttl=`) needs the time of the partition, so its group is the
whole partition, as on a worker. Spark keeps the cells of a group (eos/app/cells.py) as one value in its checkpoint.
Each record is packed into one binary column before the shuffle, and the outputs are unpacked afterwards, because each
column of each group costs pandas more than a record does. This module too must never import a Kafka client, open a
connection or decide the outcome of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from eos.app.cells import CLOCK_TIMERS, parse_cell, store_prefix
from eos.app.routes import Route
from eos.app.state import TaskCells
from eos.engine.handling import Handler
from eos.engine.hooks import Hooks
from eos.errors import ConfigurationError, EosError
from eos.records import Record, Send
from eos.state.tasks import Task
from eos.state.values import InMemory
from spark_connector.apply import OUTPUTS, OnSpark, handle, prepare, read, write
from spark_connector.failures import to_line

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

Partition = tuple[str, int]
_OFFSET_BYTES: Final = 8
_CLOCK_TIMERS: Final = store_prefix(CLOCK_TIMERS)
_encode: Final = msgspec.msgpack.Encoder().encode
_record: Final = msgspec.msgpack.Decoder(Record).decode
_place: Final = msgspec.msgpack.Decoder(tuple[Any, ...]).decode
_cells: Final = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode
_sends: Final = msgspec.msgpack.Decoder(list[Send]).decode


def with_state(source: DataFrame, keyed: Keyed) -> DataFrame:
    """Return the outputs of the functions with state for rows of Spark's Kafka source, in the columns of Apply."""
    timed = keyed.timed_topics
    groups = source.mapInArrow(lambda rows: pack(rows, timed), "place binary, record binary").groupBy("place")
    made = groups.applyInPandasWithState(keyed, "sends binary", "cells binary", "append", "NoTimeout")
    return made.mapInArrow(unpack, OUTPUTS)


def pack(batches: Iterator[pa.RecordBatch], timed: Collection[str]) -> Iterator[pa.RecordBatch]:
    """Yield each record with the encoded key of its group (`place`). `timed`: see Keyed.timed_topics."""
    for batch in batches:
        records = read(batch)
        places = [
            _encode((one.topic, one.partition) if one.topic in timed else (one.topic, one.partition, one.key))
            for one in records
        ]
        columns: list[Any] = [pa.array(places, pa.binary()), pa.array(map(_pack, records), pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, ["place", "record"])


def _pack(record: Record) -> bytes:
    """Return the record as bytes that sort by its offset."""
    return record.offset.to_bytes(_OFFSET_BYTES, "big") + _encode(record)


def _unpack(packed: bytes) -> Record:
    return _record(packed[_OFFSET_BYTES:])


def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if sends := [send for packed in batch.column("sends").to_pylist() for send in _sends(packed)]:
            yield write(sends)


class _Task(Task):
    """Holds the task of a group. Its clock is the start of the micro-batch, which a repeated batch keeps."""

    def set_timer(self, cell: bytes, due_ms: int | None) -> None:
        if due_ms is not None and cell.startswith(_CLOCK_TIMERS):
            _, key, name = parse_cell(cell)
            raise ConfigurationError(
                f"the timer {name.decode()!r} of {key!r} was set with clock=True, but on Spark nothing runs for a "
                "partition without new records, so it would not fire in time",
                remedy="use event time (without clock=True), or run the App with `eos run`",
            )
        super().set_timer(cell, due_ms)


class Keyed(OnSpark):
    """Implements the function for `applyInPandasWithState`. The App's `on_start` functions run in each task."""

    _task: Task  # the task of the current group
    _at: Partition
    _handler: Handler | None = None

    @property
    def timed_topics(self) -> frozenset[str]:
        """Return the topics whose functions use time, so that their groups are whole partitions."""
        return frozenset(topic for topic, route in self._app.routes.items() if route.timed_stores)

    def __call__(
        self, place: tuple[bytes], frames: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        """Yield the outputs of one group's rows, in the order of the offsets. Raises ExecutorFailure, as Apply does."""
        import pandas as pd

        # Sort the rows, because a shuffle changes their order.
        ordered = sorted(packed for frame in frames for packed in frame["record"])
        topic, number, *_ = _place(place[0])
        route = self._app.routes[topic]
        values = InMemory(_cells(state.get[0]) if state.exists else {}, route.timed_stores)
        clock_s = state.getCurrentProcessingTimeMs() / 1000
        self._at = topic, number
        self._task = _Task(values, route.ttls, lambda: clock_s, has_timers=route.uses_time)
        try:
            self._handler = self._handler or self._begin()
            for at in range(0, len(ordered), self._batch_most):
                records = [_unpack(packed) for packed in ordered[at : at + self._batch_most]]
                for sends in handle(self._handler, records, self._batch_most):
                    yield pd.DataFrame({"sends": [_encode(sends)]})
        except EosError as error:
            raise to_line(error) from error
        if self._task.has_changes:
            self._task.expire()
            self._task.committed(0.0)
            if len(values):
                state.update((_encode(dict(values.items())),))
            elif state.exists:
                state.remove()

    def _begin(self) -> Handler:
        prepare()
        Hooks(self._app).start()
        return self._handler_of(lambda _: lambda _: self._task, self._tasks_of)

    def _tasks_of(self, route: Route) -> Mapping[Partition, TaskCells]:
        return {self._at: self._task} if self._at[0] in route.sources else {}
