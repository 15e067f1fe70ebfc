"""Request and response headers: what a frame is and where its body begins.

Owns their layout: a request header is api_key, api_version, correlation_id, client_id and, in flexible versions, tagged
fields; client_id is never compact (KIP-482). A response header is the correlation id and, in flexible versions of every
API but ApiVersions, tagged fields (KIP-511).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from eos.shim.wire import api
from eos.shim.wire.cursor import Cursor
from eos.shim.wire.frames import Piece

# size, api_key, api_version, correlation_id; and the same of a response
REQUEST_HEAD = struct.Struct(">ihhi")
RESPONSE_HEAD = struct.Struct(">ii")


class RequestHead(NamedTuple):
    """The fixed part of a request frame, with its size prefix; `size` does not count the prefix itself."""

    size: int
    api_key: int
    version: int
    correlation_id: int


def request_head(data: Piece, pos: int) -> RequestHead:
    return RequestHead._make(REQUEST_HEAD.unpack_from(data, pos))


# Kafka's keys are small and grow slowly; what is far beyond them is another protocol's bytes.
_LARGEST_PLAUSIBLE_KEY = 1_000
_LARGEST_PLAUSIBLE_VERSION = 100


def implausible(head: RequestHead, largest_frame: int) -> str | None:
    """Why these cannot be the first bytes of a Kafka client, or None."""
    if not 8 <= head.size <= largest_frame:
        return f"it announces a frame of {head.size} bytes"
    if not 0 <= head.api_key <= _LARGEST_PLAUSIBLE_KEY or not 0 <= head.version <= _LARGEST_PLAUSIBLE_VERSION:
        return f"it asks for API {head.api_key} in version {head.version}"
    return None


def request_body(frame: Piece, api_key: int, version: int) -> tuple[str | None, Cursor]:
    """client_id, and a cursor at the body of a whole request frame; for the APIs of `api.FIRST_FLEXIBLE`."""
    cursor = Cursor(frame, REQUEST_HEAD.size, api.is_flexible(api_key, version))
    client_id = cursor.header_string()
    cursor.skip_tags()
    return client_id, cursor


def response_body(frame: bytes, api_key: int, version: int) -> Cursor:
    """A cursor at the body of a whole response frame; for the APIs of `api.FIRST_FLEXIBLE`."""
    cursor = Cursor(frame, RESPONSE_HEAD.size, api.is_flexible(api_key, version))
    if api_key != api.API_VERSIONS:
        cursor.skip_tags()
    return cursor


def produce_acks(data: Piece, pos: int, version: int) -> int | None:
    """The acks of a Produce request of which at least the head is there; None while more bytes are needed.

    With acks=0 the broker never answers, so this has to be known before the request goes on.
    """
    flexible = api.is_flexible(api.PRODUCE, version)
    end = len(data)
    pos += REQUEST_HEAD.size
    if end < pos + 2:
        return None
    pos += 2 + max(0, int.from_bytes(data[pos : pos + 2], "big", signed=True))
    if flexible:
        found = _skip_tags(data, pos)
        if found is None:
            return None
        pos = found
    if version >= 3:
        if flexible:
            varint = _uvarint(data, pos)
            if varint is None:
                return None
            length, pos = varint[0] - 1, varint[1]
        else:
            if end < pos + 2:
                return None
            length, pos = int.from_bytes(data[pos : pos + 2], "big", signed=True), pos + 2
        pos += max(0, length)
    if end < pos + 2:
        return None
    return int.from_bytes(data[pos : pos + 2], "big", signed=True)


def _uvarint(data: Piece, pos: int) -> tuple[int, int] | None:
    value = shift = 0
    while pos < len(data):
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7
    return None


def _skip_tags(data: Piece, pos: int) -> int | None:
    count = _uvarint(data, pos)
    if count is None:
        return None
    left, pos = count
    for _ in range(left):
        tag = _uvarint(data, pos)
        size = None if tag is None else _uvarint(data, tag[1])
        if size is None:
            return None
        pos = size[1] + size[0]
        if pos > len(data):
            return None
    return pos
