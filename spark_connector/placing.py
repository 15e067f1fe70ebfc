"""Chooses the Kafka partition of a row by Java's default partitioner, with Kafka's murmur2, as the worker does.

Owns the target number of a row, computed over Arrow columns without a Python object per row. Spark's own expressions
would need one more column for Arrow and a copy of each key, at several times the cost. The result must equal the Java
client's (org.apache.kafka.common.utils.Utils.murmur2), because the partition of a key is part of a topic's contract. It
must never compute a partition from anything but the row: a lost shuffle file is computed again, and a row must get the
same partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c
from numpy.typing import NDArray

TARGET, REFUSAL = "__eos_target", "__eos_refusal"
KEY, VALUE, TOPIC, PARTITION = "key", "value", "topic", "partition"
_POSITIVE = 0x7FFFFFFF
_NOWHERE = -1
Int64s = NDArray[np.int64]
UInt32s = NDArray[np.uint32]
_SEED, _M = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
_13, _15, _24 = np.uint32(13), np.uint32(15), np.uint32(24)
# Masks for the first 0 to 3 bytes of a little-endian word.
_FIRST_BYTES = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)


@dataclass(frozen=True)
class Places:
    """Holds the targets of a sink, and the rule that assigns each row to a target.

    `topics`: (name, number of partitions) in the order of the targets: target i is a partition of the first topic,
    later targets belong to the next ones. A row goes to the topic in its column `topic`, or else to the first topic. In
    the topic it goes to the partition in its column `partition`, or else to the partition of its key. A row without a
    key goes to a partition chosen by its value.
    """

    topics: tuple[tuple[str, int], ...]

    def place(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield `rows` with TARGET and a nullable key, without `topic` and `partition`.

        Rows without a target come separately: their TARGET is the number after the last target, and REFUSAL has the
        reason.
        """
        keys = _keys(rows)
        target, nowhere = self._targets(rows, keys)
        names = [name for name in rows.schema.names if name not in (KEY, TOPIC, PARTITION)]
        columns = [pa.array(target), keys, *(rows.column(name) for name in names)]
        placed = pa.RecordBatch.from_arrays(columns, names=[TARGET, KEY, *names])
        if not nowhere.any():
            yield placed
            return
        if not nowhere.all():
            yield placed.filter(pa.array(~nowhere))
        mask = pa.array(nowhere)
        yield placed.filter(mask).append_column(REFUSAL, _format_targets(rows.filter(mask)))

    def _targets(self, rows: pa.RecordBatch, keys: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the number of each row's target, and which rows have none."""
        counts = np.array([count for _, count in self.topics])
        which, nowhere = np.zeros(rows.num_rows, np.int64), np.zeros(rows.num_rows, bool)
        if TOPIC in rows.schema.names:
            which = self._topics(rows.column(TOPIC))
            nowhere = which == _NOWHERE
        count = counts[which]
        within = (_hashes(rows, keys).astype(np.int64) & _POSITIVE) % count
        if PARTITION in rows.schema.names:
            within = pc.fill_null(rows.column(PARTITION).cast(pa.int64()), pa.array(within)).to_numpy()
            nowhere = nowhere | (within < 0) | (within >= count)
        first = np.cumsum(counts) - counts
        return np.where(nowhere, counts.sum(), first[which] + within).astype(np.int32), nowhere

    def _topics(self, column: pa.Array) -> NDArray[np.int64]:
        """Return the index of each row's topic in `topics`."""
        encoded = column.dictionary_encode()
        ours = {name: place for place, (name, _) in enumerate(self.topics)}
        places = [ours.get(name, _NOWHERE) for name in encoded.dictionary.to_pylist()]
        null = len(places)
        found: NDArray[np.int64] = np.array([*places, _NOWHERE], np.int64)[
            pc.fill_null(encoded.indices, null).to_numpy()
        ]
        return found


def _keys(rows: pa.RecordBatch) -> pa.Array:
    if KEY not in rows.schema.names:
        return pa.nulls(rows.num_rows, pa.binary())
    keys = rows.column(KEY)
    # spark.sql.execution.arrow.useLargeVarTypes changes the type.
    return keys if pa.types.is_binary(keys.type) else keys.cast(pa.binary())


def _hashes(rows: pa.RecordBatch, keys: pa.Array) -> NDArray[np.int32]:
    """Return the murmur2 hash of each key, and for a row without a key a number that depends only on its value."""
    found: NDArray[np.int32] = pc.fill_null(murmur2_column(keys), 0).to_numpy(zero_copy_only=False)
    if keys.null_count:
        found = found.copy()
        without = np.flatnonzero(keys.is_null().to_numpy(zero_copy_only=False))
        values = rows.column(VALUE).take(pa.array(without))
        found[without] = [crc32c(b"" if value is None else value) & _POSITIVE for value in values.to_pylist()]
    return found


def _format_targets(rows: pa.RecordBatch) -> pa.Array:
    """Return the topic and partition that each of these rows names, as text."""
    asked = [rows.column(name).cast(pa.string()) for name in (TOPIC, PARTITION) if name in rows.schema.names]
    return pc.binary_join_element_wise(*asked, "-", null_handling="replace", null_replacement="null")


def murmur2_column(keys: pa.Array) -> pa.Array:
    """Return the int32 hashes of a binary column; null for null."""
    if not len(keys):
        return pa.array([], pa.int32())
    offsets = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, keys.offset * 4)
    data = memoryview(keys.buffers()[2] or b"")[int(offsets[0]) : int(offsets[-1])]
    hashes = _murmur2(data, offsets[:-1].astype(np.int64) - int(offsets[0]), np.diff(offsets).astype(np.int64))
    null = np.asarray(keys.is_null().to_numpy(zero_copy_only=False), bool)
    return pa.array(hashes.view(np.int32), pa.int32(), mask=null)


def _murmur2(data: memoryview, starts: Int64s, lengths: Int64s) -> UInt32s:
    """Hash all keys at once, word by word; the keys with the most words come first, so unfinished ones are in front."""
    padded = b"".join((data, bytes(8)))
    words = np.ndarray(len(padded) - 3, np.dtype("<u4"), padded, strides=(1,))  # the word at each byte
    whole = lengths >> 2
    order = None
    if whole.min() != whole.max():
        order = np.argsort(-whole, kind="stable")
        starts, lengths, whole = starts[order], lengths[order], whole[order]
    h: UInt32s = _SEED ^ lengths.astype(np.uint32)
    ends = np.searchsorted(-whole, -np.arange(int(whole[0])), side="left")  # number of keys that have a word i
    for i, count in enumerate(ends.tolist()):
        k = words[starts[:count] + 4 * i] * _M
        k = (k ^ (k >> _24)) * _M
        h[:count] = (h[:count] * _M) ^ k
    left = lengths & 3
    tail = words[starts + 4 * whole] & _FIRST_BYTES[left]
    h = np.where(left > 0, (h ^ tail) * _M, h)
    h = (h ^ (h >> _13)) * _M
    h ^= h >> _15
    if order is None:
        return h
    found = np.empty_like(h)
    found[order] = h
    return found
