"""Packs rows for the shuffle: the rows of one writing task, a few thousand at a time, as one binary value.

Owns the packing (map side), the unpacking (writing side) and the splitting of rows by a number. Spark's shuffle and its
sort take microseconds for each row; Arrow avoids that, and the encoder needs columns anyway. It must never change the
order of rows with the same target, and never copy more than 4 MB of a task's rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spark_connector.placing import TARGET, Places
from spark_connector.workers import begin_task

SHARE, ORDER, ROWS = "__eos_share", "__eos_order", "__eos_rows"
PACKED = pa.schema([(SHARE, pa.int32()), (ORDER, pa.int64()), (ROWS, pa.binary())])
# The size of one value, estimated before compression: above half a region of the JVM's heap (at least 1 MB) an array
# costs the garbage collector more.
_VALUE_BYTES = 400_000
# This many bytes of Arrow's batches are packed at once, which bounds the copies that packing makes.
SLICE_BYTES = 4_000_000
# If a batch has this many bytes per target or more, each value holds the rows of one target only, and the writing task
# need not split it.
_BYTES_OF_ONE_TARGET = 60_000
# Compress the rows, because each byte is copied a dozen times on its way through the JVM.
_WRITE = pa.ipc.IpcWriteOptions(compression="lz4" if pa.Codec.is_available("lz4") else None, use_threads=False)
_READ = pa.ipc.IpcReadOptions(use_threads=False)
# A row's place in its partition takes 33 bits, below the partition's number, as in monotonically_increasing_id.
_PLACES = 33


def packer(shares: int, places: Places) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for mapInArrow that packs rows into PACKED.

    The values of a share, sorted by ORDER, hold its rows in order: by Spark partition, and within it as they came.
    """

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        begin_task()
        context = TaskContext.get()
        assert context is not None, "this runs in a task"
        placed = (part for batch in batches if batch.num_rows for part in places.place(batch))
        return pack_partition(placed, shares, context.partitionId())

    return pack


def pack_partition(batches: Iterator[pa.RecordBatch], shares: int, number: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of Spark partition `number` as PACKED."""
    place, value_bytes = number << _PLACES, _VALUE_BYTES
    for rows in slices(batches):
        packed = pack_rows(rows, shares, place, value_bytes)
        place += packed.num_rows
        # Estimate the compression from the previous rows, because a few large values cost less than many small ones.
        value_bytes = max(_VALUE_BYTES * rows.nbytes // packed.nbytes, _VALUE_BYTES)
        yield packed


def slices(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `batches` in order, in slices that are packed at once."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in (batch for batch in batches if batch.num_rows):
        if held and (size + batch.nbytes > SLICE_BYTES or batch.schema != held[0].schema):
            yield together(held)
            held, size = [], 0
        if batch.nbytes < SLICE_BYTES:
            held.append(batch)
            size += batch.nbytes
            continue
        step = -(-batch.num_rows // -(-batch.nbytes // SLICE_BYTES))
        for at in range(0, batch.num_rows, step):
            yield batch.slice(at, step)
    if held:
        yield together(held)


def together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def pack_rows(rows: pa.RecordBatch, shares: int, place: int, value_bytes: int = _VALUE_BYTES) -> pa.RecordBatch:
    """Pack `rows` into the columns PACKED. ORDER counts up from `place`; a value holds about `value_bytes` of rows
    before compression.
    """
    by = numbers(rows, TARGET)
    if np.count_nonzero(np.bincount(by)) * _BYTES_OF_ONE_TARGET > rows.nbytes:
        by = by % shares
    pieces = []
    for number, held in split(rows, by):
        values = -(-held.nbytes // value_bytes)
        step = -(-held.num_rows // max(values, 1))
        pieces += [(number % shares, held.slice(at, step)) for at in range(0, held.num_rows, step)]
    out, ends = pa.BufferOutputStream(), [0]
    for _, piece in pieces:
        with pa.ipc.new_stream(out, piece.schema, options=_WRITE) as stream:
            stream.write_batch(piece)
        ends.append(out.tell())
    offsets = pa.py_buffer(np.array(ends, np.int32))
    packed = pa.Array.from_buffers(pa.binary(), len(pieces), [None, offsets, out.getvalue()])
    where = pa.array([share for share, _ in pieces], pa.int32())
    return pa.RecordBatch.from_arrays([where, pa.array(range(place, place + len(pieces))), packed], schema=PACKED)


def unpack(packed: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of each value, in order."""
    for value in packed.column(ROWS):
        with pa.ipc.open_stream(value.as_buffer(), options=_READ) as stream:
            yield from stream


def targets_of(packed: pa.RecordBatch) -> set[int]:
    """Return the targets that have rows."""
    return {int(target) for rows in unpack(packed) for target in np.unique(numbers(rows, TARGET))}


def split(rows: pa.RecordBatch, by: NDArray[np.int32]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each number with its rows, in their order.

    If the rows have several numbers, the results are slices of one copy, and each slice keeps the whole copy in memory.
    """
    lowest, highest = int(by.min()), int(by.max())
    if lowest == highest:
        yield lowest, rows
        return
    # NumPy sorts 16-bit numbers by counting, in a quarter of the time.
    order = np.argsort(by.astype(np.uint16) if highest < 1 << 16 else by, kind="stable")
    numbered = by[order]
    starts = np.flatnonzero(np.diff(numbered, prepend=numbered[0] - 1))
    taken = rows.take(pa.array(order))
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        yield int(numbered[start]), taken.slice(start, stop - start)


def numbers(rows: pa.RecordBatch, column: str) -> NDArray[np.int32]:
    found: NDArray[np.int32] = rows.column(column).to_numpy()
    return found
