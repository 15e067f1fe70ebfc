"""Read the headers of record batches (magic 2) and the markers in control batches, but never records.

The module owns the batch layout and the positions of batches in Produce requests and Fetch responses. A topic is given
by name or, from Produce v13 and Fetch v13 on, by id, as in the message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from eos.shim.wire import api, walk
from eos.shim.wire.headers import REQUEST_HEAD, RESPONSE_HEAD
from eos.shim.wire.walk import Layout, Walk

# Base offset, length, leader epoch, magic, crc, attributes, last offset delta, two timestamps, producer id and epoch,
# base sequence, records.
HEADER = struct.Struct(">qiibIhiqqqhii")
LENGTH_COUNTS_FROM, MAGIC = 12, 2
TRANSACTIONAL, _CONTROL = 0x10, 0x20  # bits of a batch's attributes
_HEADER_AFTER_LENGTH = HEADER.size - LENGTH_COUNTS_FROM

Topic = str | bytes  # a name or a 16 byte topic id


class Batch(NamedTuple):
    topic: Topic
    partition: int
    base_offset: int
    size: int  # bytes, header included
    producer_id: int
    epoch: int
    base_sequence: int
    records: int
    marker: str | None = None  # COMMIT or ABORT of a control batch


Seen = Callable[[Batch], None]


class ProduceHead(NamedTuple):
    transactional_id: str | None
    acks: int


def produce_request(version: int, head: Callable[[ProduceHead], None], seen: Seen) -> Callable[[Walk], Layout]:
    """Return the layout of a Produce request for a `Walk`. `head` is called before the first batch."""
    flexible = api.is_flexible(api.PRODUCE, version)

    def layout(at: Walk) -> Layout:
        yield -REQUEST_HEAD.size
        yield -(yield from walk.string_length(False))  # client_id
        yield from walk.tags(flexible)
        name = (yield from walk.text(flexible)) if version >= 3 else None
        acks = yield from walk.int16()
        head(ProduceHead(name, acks))
        yield -4  # timeout_ms
        for _ in range((yield from walk.count(flexible))):
            topic: Topic = (yield 16) if version >= 13 else ((yield from walk.text(flexible)) or "")
            for _ in range((yield from walk.count(flexible))):
                partition = yield from walk.int32()
                yield from _batches(topic, partition, (yield from walk.count(flexible)), seen)
                yield from walk.tags(flexible)
            yield from walk.tags(flexible)

    return layout


def fetch_response(version: int, seen: Seen) -> Callable[[Walk], Layout]:
    """Return the layout of a Fetch response (v4 and later) up to the last batch."""
    flexible = api.is_flexible(api.FETCH, version)

    def layout(at: Walk) -> Layout:
        yield -RESPONSE_HEAD.size
        yield from walk.tags(flexible)
        yield -4 if version < 7 else -10
        for _ in range((yield from walk.count(flexible))):
            topic: Topic = (yield 16) if version >= 13 else ((yield from walk.text(flexible)) or "")
            for _ in range((yield from walk.count(flexible))):
                partition = yield from walk.int32()
                yield -18 if version < 5 else -26
                for _ in range((yield from walk.count(flexible))):
                    yield -16
                    yield from walk.tags(flexible)
                if version >= 11:
                    yield -4
                yield from _batches(topic, partition, (yield from walk.count(flexible)), seen)
                yield from walk.tags(flexible)
            yield from walk.tags(flexible)

    return layout


def all_transactional(records: bytes) -> bool:
    """Return whether the bytes are whole batches that all belong to transactions. Invalid bytes do not count."""
    at = 0
    while len(records) - at >= HEADER.size:
        _, length, _, magic, _, attributes, *_ = HEADER.unpack_from(records, at)
        at += LENGTH_COUNTS_FROM + length
        if magic != MAGIC or length < _HEADER_AFTER_LENGTH or not attributes & TRANSACTIONAL:
            return False
    return at == len(records)


def _batches(topic: Topic, partition: int, left: int, seen: Seen) -> Layout:
    """Walk over `left` bytes of batches. The last batch of a Fetch response may be cut off."""
    while left >= HEADER.size:
        fields = HEADER.unpack((yield HEADER.size))
        base_offset, length, _, magic, _, attributes, _, _, _, producer_id, epoch, sequence, records = fields
        left -= HEADER.size
        if magic != MAGIC or length < _HEADER_AFTER_LENGTH:
            break
        body = min(length - _HEADER_AFTER_LENGTH, left)
        left -= body
        marker = None
        if attributes & _CONTROL and 7 <= body <= 200:
            marker = _marker((yield body))
        else:
            yield -body
        seen(
            Batch(
                topic,
                partition,
                base_offset,
                length + LENGTH_COUNTS_FROM,
                producer_id,
                epoch,
                sequence,
                records,
                marker,
            )
        )
    yield -left


def _marker(record: bytes) -> str | None:
    """Return the type of a control record.

    The record is length, attributes, two deltas, and a key of version (2 bytes) and type (2 bytes).
    """
    pos = 0
    for skip in (1, 0, 1, 1, 1):  # varint, byte, varint, varint, varint: the last is the key's length
        if not skip:
            pos += 1
            continue
        while pos < len(record) and record[pos] >= 0x80:
            pos += 1
        pos += 1
    kind = record[pos + 2 : pos + 4]
    return {b"\0\0": "ABORT", b"\0\1": "COMMIT"}.get(kind)
