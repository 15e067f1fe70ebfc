"""Read request and response headers.

A request header is api_key, api_version, correlation_id, client_id and, in flexible versions, tagged fields; client_id
is never compact (KIP-482). A response header is the correlation id and, in flexible versions of every API but
ApiVersions, tagged fields (KIP-511).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from eos.shim.errors import Malformed
from eos.shim.wire import api
from eos.shim.wire.cursor import Cursor, check_tag_count
from eos.shim.wire.frames import Piece

# size, api_key, api_version, correlation_id; in a response size, correlation_id
REQUEST_HEAD = struct.Struct(">ihhi")
RESPONSE_HEAD = struct.Struct(">ii")


class RequestHead(NamedTuple):
    """Hold the fixed part of a request frame. `size` does not count the size prefix itself."""

    size: int
    api_key: int
    version: int
    correlation_id: int


def request_head(data: Piece, pos: int) -> RequestHead:
    return RequestHead._make(REQUEST_HEAD.unpack_from(data, pos))


# Kafka's API keys are small and grow slowly. Much larger ones are bytes of another protocol.
_LARGEST_PLAUSIBLE_KEY = 1_000
_LARGEST_PLAUSIBLE_VERSION = 100

# The bytes before the first batch of a Produce: a client id, a transactional.id and a topic of at most 32 KB each, and
# tagged fields.
LONGEST_HEAD_BYTES = 128 * 1024
# The fields of that head, in order. Only flexible versions have tags. Versions since v3 have a transactional.id.
_CLIENT_ID, _TAGS, _NAME, _ACKS = range(4)
_FLEXIBLE_SINCE, _NAMED_SINCE = api.FIRST_FLEXIBLE[api.PRODUCE], 3
_INT16 = struct.Struct(">h")


def implausible_reason(head: RequestHead, largest_frame: int) -> str | None:
    """Return why these cannot be the first bytes of a Kafka request, or None."""
    if not 8 <= head.size <= largest_frame:
        return f"its frame size is {head.size} bytes"
    if not 0 <= head.api_key <= _LARGEST_PLAUSIBLE_KEY or not 0 <= head.version <= _LARGEST_PLAUSIBLE_VERSION:
        return f"it requests API {head.api_key} in version {head.version}"
    return None


def request_body(frame: Piece, api_key: int, version: int) -> tuple[str | None, Cursor]:
    """Return client_id and a cursor at the body of a whole request frame, for APIs in `api.FIRST_FLEXIBLE`."""
    cursor = Cursor(frame, REQUEST_HEAD.size, api.is_flexible(api_key, version))
    client_id = cursor.header_string()
    cursor.skip_tags()
    return client_id, cursor


def response_body(frame: bytes, api_key: int, version: int) -> Cursor:
    """Return a cursor at the body of a whole response frame, for APIs in `api.FIRST_FLEXIBLE`."""
    cursor = Cursor(frame, RESPONSE_HEAD.size, api.is_flexible(api_key, version))
    if api_key != api.API_VERSIONS:
        cursor.skip_tags()
    return cursor


class AcksReader:
    """Find the acks of one Produce in its first bytes, and continue at the same field when more bytes arrive.

    With acks=0 the broker sends no response, so acks must be known before the request is forwarded.
    """

    __slots__ = ("_position", "_step", "_tags", "_version")

    def __init__(self, version: int) -> None:
        self._version = version
        self._step, self._position = _CLIENT_ID, REQUEST_HEAD.size  # the next field, and its position in the frame
        self._tags = 0  # tagged fields left to skip

    def read(self, data: Piece, pos: int) -> int | None:
        """Return acks, given the bytes of the frame that have arrived: `data[pos:]`. Return None if more are needed.

        Raises Malformed."""
        step, at, tags, end = self._step, pos + self._position, self._tags, len(data)
        flexible = self._version >= _FLEXIBLE_SINCE
        if step == _CLIENT_ID:
            if end < at + 2:
                return self._wait(step, at - pos)
            at += 2 + max(0, _INT16.unpack_from(data, at)[0])
            step = _TAGS if flexible else _NAME
        if step == _TAGS:
            found = _uvarint(data, at)
            if found is None:
                return self._wait(step, at - pos)
            tags, at = check_tag_count(found[0]), found[1]
            step = _NAME
        while tags:
            found = _uvarint(data, at)  # the tag's number, and then its size
            found = found and _uvarint(data, found[1])
            if found is None:
                return self._wait(_NAME, at - pos, tags)
            at = found[1] + found[0]
            tags -= 1
        if step == _NAME and self._version >= _NAMED_SINCE:
            found = _uvarint(data, at) if flexible else _int16(data, at)
            if found is None:
                return self._wait(step, at - pos)
            at = found[1] + max(0, found[0] - flexible)
        if end < at + 2:
            return self._wait(_ACKS, at - pos)
        return int(_INT16.unpack_from(data, at)[0])

    def _wait(self, step: int, at: int, tags: int = 0) -> int | None:
        """Save the position of the next field and return None. Raises Malformed if the head is too long."""
        if at > LONGEST_HEAD_BYTES:
            raise Malformed(f"a Produce with a head of more than {LONGEST_HEAD_BYTES} bytes")
        self._step, self._position, self._tags = step, at, tags
        return None


def _int16(data: Piece, pos: int) -> tuple[int, int] | None:
    return (_INT16.unpack_from(data, pos)[0], pos + 2) if len(data) >= pos + 2 else None


def _uvarint(data: Piece, pos: int) -> tuple[int, int] | None:
    """Return a varint's value and end position, or None if it is incomplete."""
    value = shift = 0
    for at in range(pos, min(pos + 5, len(data))):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    if shift > 28:
        raise Malformed("a varint is longer than five bytes")
    return None
