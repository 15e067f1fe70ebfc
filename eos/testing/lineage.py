"""How an output record says which input record it came from: a stamp of fixed width, written once and read in bulk.

Owns the stamp's byte format and nothing else. It must never talk to Kafka and never judge: an unreadable stamp is an
error here (a record that is not ours), a wrong one is the checker's business.

The stamp is 20 bytes, little endian, `<iiqi`: index of the source topic, source partition, source offset, number of
the copy (an input with fan-out n has copies 0..n-1). It stands at the start of the value, with any payload behind it,
or alone in the header `eos-source` where the value must stay what the application made it.
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
    """The sources of n output records: four arrays of shape (n,), int32, int32, int64, int32."""

    topic: NDArray[np.int32]
    partition: NDArray[np.int32]
    offset: NDArray[np.int64]
    copy: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offset)


def stamp(topic_index: int, partition: int, offset: int, copy: int = 0) -> bytes:
    """20 bytes that name copy number `copy` of one input record; put them in front of the value or in `HEADER`.

    Raises `struct.error` for a number that does not fit its field.
    """
    return _FORMAT.pack(topic_index, partition, offset, copy)


def unstamp(stamped: bytes) -> tuple[int, int, int, int]:
    """(topic index, partition, offset, copy) of one value or header; `ValueError` if it is too short to be stamped."""
    if len(stamped) < WIDTH_BYTES:
        raise ValueError(f"{len(stamped)} bytes cannot hold a stamp of {WIDTH_BYTES}")
    topic_index, partition, offset, copy = _FORMAT.unpack_from(stamped)
    return topic_index, partition, offset, copy


def payload(stamped: bytes) -> bytes:
    """What the application wrote behind the stamp."""
    return stamped[WIDTH_BYTES:]


def unstamp_many(stamped: Sequence[bytes | None]) -> Lineage:
    """The stamps of many values or headers, in their order; millions per second.

    Raises `ValueError` naming the first element that is None or too short: dropping it silently would make a checker
    report a loss that did not happen, or overlook a record that is not ours.
    """
    joined = b"".join([value[:WIDTH_BYTES] for value in stamped if value is not None])
    # A short value and a missing one both leave the joined prefixes short, so one comparison guards all of them.
    if len(joined) != len(stamped) * WIDTH_BYTES:
        for index, value in enumerate(stamped):
            if value is None or len(value) < WIDTH_BYTES:
                found = "no bytes" if value is None else f"{len(value)} bytes"
                raise ValueError(f"element {index} of {len(stamped)} has {found}, a stamp needs {WIDTH_BYTES}")
    table = np.frombuffer(joined, dtype=_DTYPE)
    # Copies, because the fields of a packed struct are unaligned views that slow every later operation down.
    return Lineage(
        topic=table["topic"].astype(np.int32),
        partition=table["partition"].astype(np.int32),
        offset=table["offset"].astype(np.int64),
        copy=table["copy"].astype(np.int32),
    )
