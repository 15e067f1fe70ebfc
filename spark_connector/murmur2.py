"""Kafka's murmur2 (org.apache.kafka.common.utils.Utils.murmur2) over an Arrow column, without a Python object per key.

Must give what the Java client gives: the partition of a key is part of a topic's contract.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

UInt32s = NDArray[np.uint32]

_SEED, _M = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
_13, _15, _24 = np.uint32(13), np.uint32(15), np.uint32(24)


def murmur2_column(keys: pa.Array) -> pa.Array:
    """int32 hashes of a binary column; null for null."""
    if not len(keys):
        return pa.array([], pa.int32())
    offsets = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, keys.offset * 4)
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    hashes = np.empty(len(keys), np.uint32)
    for length in np.unique(lengths):
        chosen = np.flatnonzero(lengths == length)
        block = data[starts[chosen][:, None] + np.arange(length)]
        hashes[chosen] = _hash(block.astype(np.uint32))
    null = np.asarray(keys.is_null().to_numpy(zero_copy_only=False), bool)
    return pa.array(hashes.view(np.int32), pa.int32(), mask=null)


def _hash(block: UInt32s) -> UInt32s:
    """Hashes of n keys of one length, (n, length) bytes as uint32; arithmetic modulo 2^32."""
    count, length = block.shape
    h: UInt32s = np.full(count, _SEED ^ np.uint32(length), np.uint32)
    whole = length - length % 4
    for at in range(0, whole, 4):
        k = _little_endian(block[:, at : at + 4]) * _M
        k = (k ^ (k >> _24)) * _M
        h = (h * _M) ^ k
    if whole < length:
        h = (h ^ _little_endian(block[:, whole:])) * _M
    h = (h ^ (h >> _13)) * _M
    return h ^ (h >> _15)


def _little_endian(columns: UInt32s) -> UInt32s:
    number = columns[:, 0]
    for i in range(1, columns.shape[1]):
        number = number | columns[:, i] << np.uint32(8 * i)
    return number
