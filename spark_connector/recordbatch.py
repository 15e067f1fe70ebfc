"""Encodes Arrow columns as Kafka record batches (magic 2, KIP-98), without a Python object per record.

Owns the batch layout: records, headers, compression, checksum, and the division into batches below the topic's
max.message.bytes. It must never do I/O, and does not depend on the sender of the bytes: the same rows, sequence and
identity always give the same bytes, and an encoded batch is resent unchanged.

For speed, every record consists of six pieces (lengths and deltas, key, a length, value, a count, headers). NumPy
computes the varints of all records at once, and one Arrow call joins the pieces of all records. The data buffers of the
joined column, one for each chunk of the rows, are the batch's body.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import cramjam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c
from numpy.typing import NDArray

from eos.kafka.admin.ownership import Identity

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview
Column: TypeAlias = "pa.Array | pa.ChunkedArray"

HEADER = struct.Struct(">qiibIhiqqqhii")
_AFTER_CRC = struct.Struct(">hiqqqhii")
_CRC_AT = 17
_MAGIC = 2
_TRANSACTIONAL = 0x10
_XERIAL_HEADER = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK = 32 * 1024
_VARINT_BYTES = 10  # the longest varint, that of a 64-bit number
_NOTHING = pa.scalar(b"", pa.binary())
_MAX_SEQUENCE = 2**31 - 1  # the next sequence is 0


class RecordRefused(ValueError):
    """Reports a record that cannot be written; `args[0]` is a sentence."""


class RecordTooLarge(RecordRefused):
    """Reports a record that exceeds the topic's max.message.bytes by itself."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"a record of {size} bytes does not fit into max.message.bytes={limit}: raise that setting or make the "
            "record smaller"
        )


@dataclass(frozen=True)
class Batch:
    """Holds one encoded record batch; `base_sequence` counts the records before it, without the wrap of Kafka's
    int32."""

    pieces: tuple[Buffer, ...]  # the bytes of the batch in order; the sender concatenates them
    base_sequence: int
    records: int

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def encode(
    rows: pa.RecordBatch | pa.Table,
    identity: Identity,
    first_sequence: int,
    *,
    compression: str = "none",
    max_bytes: int = 1_000_000,
    target_bytes: int = 1_000_000,
    now_ms: int = 0,
) -> Iterator[Batch]:
    """Yield the record batches of `rows`, in order; the first record has `first_sequence`.

    Columns by name: `key` and `value` (binary, may be null), and optionally `headers` (list of struct of `key` string
    and `value` binary) and `timestamp` (int64, ms since 1970; null: `now_ms`). A batch holds at most `target_bytes`
    before compression unless a single record is larger. Raises RecordTooLarge for a record whose own batch is larger
    than `max_bytes`, compressed.
    """
    columns = _Columns.of(rows, now_ms)
    for start, stop in columns.cuts(min(target_bytes, max_bytes) - HEADER.size):
        body = columns.body(start, stop)
        if (compress := COMPRESSIONS[compression].compress) is not None:
            body = [compress(body[0] if len(body) == 1 else b"".join(body))]
        stamps = columns.timestamps[start:stop]
        header = _header(body, stop - start, stamps, identity, first_sequence + start, COMPRESSIONS[compression].code)
        batch = Batch((header, *body), first_sequence + start, stop - start)
        if batch.size > max_bytes:
            # Only a single record can be too large: several records were cut by their size before compression, and
            # incompressible data grows by less than the reserve in `cuts`.
            if batch.records == 1:
                raise RecordTooLarge(batch.size, max_bytes)
            raise AssertionError(f"{batch.records} records became {batch.size} bytes")
        yield batch


def _header(
    body: Sequence[Buffer], records: int, stamps: Int64s, identity: Identity, sequence: int, codec: int
) -> bytes:
    after_crc = _AFTER_CRC.pack(
        codec | _TRANSACTIONAL,
        records - 1,
        int(stamps[0]),
        int(stamps.max()),
        identity.producer_id,
        identity.epoch,
        sequence & _MAX_SEQUENCE,
        records,
    )
    checksum = crc32c(after_crc)
    for piece in body:
        checksum = crc32c(piece, checksum)
    # The broker fills in base offset and leader epoch; the checksum does not cover them.
    length = HEADER.size - 12 + sum(map(len, body))
    return struct.pack(">qiibI", 0, length, -1, _MAGIC, checksum) + after_crc


@dataclass(frozen=True)
class _Columns:
    """Holds the parts of n records that do not depend on a record's batch."""

    key_varints: _Varints  # the last part before `columns`
    columns: list[Column]  # the rest of each record: key, length, value, number of headers, headers if present
    sizes: Int64s  # sizes of the records without their own length and deltas
    timestamps: Int64s

    @classmethod
    def of(cls, rows: pa.RecordBatch | pa.Table, now_ms: int) -> _Columns:
        keys, values = _binary(rows.column("key")), _binary(rows.column("value"))
        key_lengths, value_lengths = _lengths(keys), _lengths(values)
        key_varints, value_varints = _Varints.of(_zigzag(key_lengths)), _Varints.of(_zigzag(value_lengths))
        sizes = 1 + key_varints.sizes + value_varints.sizes  # 1 for the attributes
        sizes += np.maximum(key_lengths, 0) + np.maximum(value_lengths, 0)
        counts, headers = np.zeros(rows.num_rows, np.int64), []
        if "headers" in rows.schema.names:
            encoded, counts = _headers(_whole(rows.column("headers")))
            headers = [encoded]
            sizes += _lengths(encoded)
        count_varints = _Varints.of(_zigzag(counts))
        sizes += count_varints.sizes
        stamps: Int64s = np.full(rows.num_rows, now_ms, np.int64)
        if "timestamp" in rows.schema.names:
            stamps = pc.fill_null(_whole(rows.column("timestamp")), now_ms).to_numpy(zero_copy_only=False)
        columns = [keys, _join_varints(value_varints), values, _join_varints(count_varints), *headers]
        return cls(key_varints, columns, sizes, stamps)

    def cuts(self, limit: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of consecutive slices with an encoded size of at most `limit` bytes, or of one record."""
        # The reserve: 5 bytes for the record's own length, 10 and 5 for the deltas, and 1/256 for what a compressor
        # adds to incompressible bytes.
        ends = np.cumsum((self.sizes + 20) * 257 // 256 + 1)
        limit -= 512
        start, count, done = 0, len(ends), 0
        while start < count:
            stop = max(int(np.searchsorted(ends, done + limit, side="right")), start + 1)
            yield start, stop
            start, done = stop, int(ends[stop - 1])

    def body(self, start: int, stop: int) -> list[Buffer]:
        """Return the records of this slice in order, in as many pieces as their columns have chunks."""
        count = stop - start
        stamps = self.timestamps[start:stop]
        stamp_varints = _Varints.of(_zigzag(stamps - stamps[0]))
        offset_varints = _offsets(count)
        sizes = _Varints.of(_zigzag(self.sizes[start:stop] + stamp_varints.sizes + offset_varints.sizes))
        attributes = _Varints(np.zeros((count, 1), np.uint8), np.ones(count, np.int64))
        front = _join_varints(sizes, attributes, stamp_varints, offset_varints, self.key_varints.slice(start, stop))
        return _data(_join(front, *(column.slice(start, count) for column in self.columns)))


def _join(*pieces: Column) -> Column:
    return pc.binary_join_element_wise(*pieces, _NOTHING, null_handling="replace", null_replacement=b"")


def _headers(column: pa.ListArray) -> tuple[pa.Array, Int64s]:
    """Return each record's encoded headers (binary, never null), and its number of headers."""
    lengths: Int64s = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = column.flatten()  # without the values of null lists
    names, values = _binary(flat.field("key")), _binary(flat.field("value"))
    if names.null_count:
        raise RecordRefused("a header has no key")
    one = _join(
        _join_varints(_Varints.of(_zigzag(_lengths(names)))),
        names,
        _join_varints(_Varints.of(_zigzag(_lengths(values)))),
        values,
    )
    header_ends = np.concatenate(([0], np.cumsum(lengths)))
    offsets = np.frombuffer(one.buffers()[1], np.int32, len(one) + 1, one.offset * 4) if len(one) else np.zeros(1, "i4")
    row_offsets = offsets[header_ends].astype(np.int32)
    data = one.buffers()[2] or pa.py_buffer(b"")
    return pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(row_offsets), data]), lengths


def _binary(column: Column) -> Column:
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _whole(column: Column) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _lengths(column: Column) -> Int64s:
    """Return the size of each element in bytes; -1 for null."""
    lengths: Int64s = pc.fill_null(_whole(pc.binary_length(column)), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _data(column: Column) -> list[Buffer]:
    """Return all elements in order, without a copy."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    found: list[Buffer] = []
    for chunk in chunks:
        offsets = np.frombuffer(chunk.buffers()[1], np.int32, len(chunk) + 1, chunk.offset * 4)
        found.append(memoryview(chunk.buffers()[2])[int(offsets[0]) : int(offsets[-1])])
    return found


def _zigzag(numbers: Int64s) -> NDArray[np.uint64]:
    return ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)


class _Varints(NamedTuple):
    """Holds the varints of n numbers; the bytes of number i are `digits[i, :sizes[i]]`."""

    digits: Bytes  # (n, longest)
    sizes: Int64s  # (n,)

    def slice(self, start: int, stop: int) -> _Varints:
        return _Varints(self.digits[start:stop], self.sizes[start:stop])

    @classmethod
    def of(cls, numbers: NDArray[np.uint64]) -> _Varints:
        longest, rest = 1, int(numbers.max(initial=0)) >> 7
        while rest:
            longest, rest = longest + 1, rest >> 7
        digits = np.empty((len(numbers), longest), np.uint8)
        sizes = np.ones(len(numbers), np.int64)
        for i in range(longest):
            digits[:, i] = (numbers & np.uint64(0x7F)).astype(np.uint8)
            numbers = numbers >> np.uint64(7)
            if i < longest - 1:
                more = numbers > 0
                digits[:, i] |= more.astype(np.uint8) << 7
                sizes += more
        return cls(digits, sizes)


def _offsets(count: int) -> _Varints:
    """Return the varints of 0, 1, 2, ..., `count` - 1."""
    if count > len(_OFFSETS.sizes):
        return _Varints.of(_zigzag(np.arange(count, dtype=np.int64)))
    longest = int(_OFFSETS.sizes[count - 1])
    return _Varints(_OFFSETS.digits[:count, :longest], _OFFSETS.sizes[:count])


_OFFSETS = _Varints.of(_zigzag(np.arange(16_384, dtype=np.int64)))


def _join_varints(*columns: _Varints) -> pa.Array:
    """Return a binary column whose element i joins varint i of each of `columns`."""
    digits = np.concatenate([c.digits for c in columns], axis=1)
    sizes = sum((c.sizes for c in columns[1:]), columns[0].sizes)
    if int(sizes.sum()) == digits.size:
        data = digits
    else:
        used = [np.arange(c.digits.shape[1]) < c.sizes[:, None] for c in columns]
        data = digits[np.concatenate(used, axis=1)]
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)


def _lz4(body: Buffer) -> bytes:
    # Kafka's readers refuse blocks that depend on each other. Level 1 is the Java client's; cramjam's default 4 takes
    # six times as long for 8 % fewer bytes.
    compressor: Any = cramjam.lz4.Compressor(level=1, block_linked=False)
    compressor.compress(bytes(body))  # the compressor's class accepts nothing else
    return bytes(compressor.finish())


def _snappy(body: Buffer) -> bytes:
    """Compress to a header and blocks with their lengths, as the Java client's SnappyOutputStream does."""
    out = [_XERIAL_HEADER]
    for at in range(0, len(body), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(body[at : at + _XERIAL_BLOCK]))
        out += [struct.pack(">i", len(block)), block]
    return b"".join(out)


class Compression(NamedTuple):
    code: int
    compress: Callable[[Buffer], Buffer] | None


COMPRESSIONS: dict[str, Compression] = {
    "none": Compression(0, None),
    "gzip": Compression(1, lambda body: bytes(cramjam.gzip.compress(body))),
    "snappy": Compression(2, _snappy),
    "lz4": Compression(3, _lz4),
    "zstd": Compression(4, lambda body: bytes(cramjam.zstd.compress(body))),
}
