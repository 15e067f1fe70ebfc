"""Encodes and decodes the stamp with which an output record names its input record, one by one or in bulk.

Owns the stamp's byte format and nothing else. It must never call Kafka and never judge. An unreadable stamp (of a
foreign record) is an error here; the checker finds wrong ones.

The stamp is 20 bytes, little endian, `<iiqi`: index of the source topic, source partition, source offset, number of the
copy (an input with fan-out n has copies 0..n-1). It stands at the start of the value, followed by any payload, or alone
in the header `eos-source` if the value must stay as the application wrote it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEADER = "eos-source"
_FORMAT = struct.Struct("<iiqi")
WIDTH_BYTES = _FORMAT.size
_DTYPE = np.dtype([("topic", "<i4"), ("partition", "<i4"), ("offset", "<i8"), ("copy", "<i4")])
assert _DTYPE.itemsize == WIDTH_BYTES, "the bulk reader and the writer must agree on the stamp's width"


@dataclass(frozen=True, eq=False)
class Lineage:
    """Holds the sources of n output records: four arrays of shape (n,), int32, int32, int64, int32."""

    topic: NDArray[np.int32]
    partition: NDArray[np.int32]
    offset: NDArray[np.int64]
    copy: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offset)


def stamp(topic_index: int, partition: int, offset: int, copy: int = 0) -> bytes:
    """Return 20 bytes that name copy number `copy` of one input record; put them before the value or in `HEADER`.

    Raises `struct.error` for a number that does not fit its field.
    """
    return _FORMAT.pack(topic_index, partition, offset, copy)


def unstamp(stamped: bytes) -> tuple[int, int, int, int]:
    """Return (topic index, partition, offset, copy) of a value or header. Raise `ValueError` if it has no stamp."""
    if len(stamped) < WIDTH_BYTES:
        raise ValueError(f"{len(stamped)} bytes cannot hold a stamp of {WIDTH_BYTES}")
    topic_index, partition, offset, copy = _FORMAT.unpack_from(stamped)
    return topic_index, partition, offset, copy


def payload(stamped: bytes) -> bytes:
    """Return the application's bytes after the stamp."""
    return stamped[WIDTH_BYTES:]


def unstamp_many(stamped: Sequence[bytes | None]) -> Lineage:
    """Return the stamps of many values or headers, in their order, at millions per second.

    Raises `ValueError` naming the first element that is None or too short. If it were skipped silently, a checker would
    report a loss that did not happen, or overlook a foreign record.
    """
    joined = b"".join([value[:WIDTH_BYTES] for value in stamped if value is not None])
    # A short value and a missing one both shorten the joined prefixes, so one comparison covers both.
    if len(joined) != len(stamped) * WIDTH_BYTES:
        for index, value in enumerate(stamped):
            if value is None or len(value) < WIDTH_BYTES:
                found = "no bytes" if value is None else f"{len(value)} bytes"
                raise ValueError(f"element {index} of {len(stamped)} has {found}, a stamp needs {WIDTH_BYTES}")
    table = np.frombuffer(joined, dtype=_DTYPE)
    # Copies, because the fields of a packed struct are unaligned views, which slow down every later operation.
    return Lineage(
        topic=table["topic"].astype(np.int32),
        partition=table["partition"].astype(np.int32),
        offset=table["offset"].astype(np.int64),
        copy=table["copy"].astype(np.int32),
    )
