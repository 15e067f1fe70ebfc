"""Runs functions with state over groups of records: the executor code for `applyInPandasWithState`.

A group is the unit that has its own state on a worker too: the records of one key in one partition of a topic. Spark
keeps its cells (eos/app/cells.py) as one value in its checkpoint. Records are packed into one binary column before the
shuffle, and outputs are unpacked after it, because each column of each group costs pandas more than a record does. The
prohibitions of apply.py apply here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from eos.engine.handling import Handler
from eos.engine.hooks import Hooks
from eos.errors import EosError
from eos.records import Record, Send
from eos.state.tasks import Task
from eos.state.values import InMemory
from spark_connector.apply import OUTPUTS, OnSpark, handle, prepare, read, write
from spark_connector.failures import to_line

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

_encode: Final = msgspec.msgpack.Encoder().encode
_record: Final = msgspec.msgpack.Decoder(Record).decode
_cells: Final = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode
_sends: Final = msgspec.msgpack.Decoder(list[Send]).decode


def with_state(source: DataFrame, keyed: Keyed) -> DataFrame:
    """Return the outputs of the App's functions with state, as Apply yields them, for rows of Spark's Kafka source."""
    groups = source.mapInArrow(pack, "place binary, record binary").groupBy("place")
    made = groups.applyInPandasWithState(keyed, "sends binary", "cells binary", "append", "NoTimeout")
    return made.mapInArrow(unpack, OUTPUTS)


def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        records = read(batch)
        places = [_encode((record.topic, record.partition, record.key)) for record in records]
        columns: list[Any] = [pa.array(places, pa.binary()), pa.array(map(_encode, records), pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, ["place", "record"])


def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if sends := [send for packed in batch.column("sends").to_pylist() for send in _sends(packed)]:
            yield write(sends)


class Keyed(OnSpark):
    """The function for `applyInPandasWithState`; the App's `on_start` functions run in each task."""

    _task: Task  # of the current group
    _handler: Handler | None = None

    def __call__(
        self, place: tuple[bytes], frames: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        """Yield the outputs of one group's rows. Raise ExecutorFailure as Apply does."""
        import pandas as pd

        # After a shuffle the rows come in any order.
        records = sorted((_record(packed) for frame in frames for packed in frame["record"]), key=attrgetter("offset"))
        values = InMemory(_cells(state.get[0]) if state.exists else {})
        self._task = Task(values)
        try:
            self._handler = self._handler or self._begin()
            made = [send for sends in handle(self._handler, records, self._batch_most) for send in sends]
        except EosError as error:
            raise to_line(error) from error
        if self._task.changed:
            self._task.committed(0.0)
            if len(values):
                state.update((_encode(dict(values.items())),))
            elif state.exists:
                state.remove()
        if made:
            yield pd.DataFrame({"sends": [_encode(made)]})

    def _begin(self) -> Handler:
        prepare()
        Hooks(self._app).start()
        return self._handler_of(lambda _: lambda _: self._task)
