"""Limit clients to the API versions that both the broker and the shim know, by changing ApiVersions responses.

The module owns the layout of these responses. Without it, a client and brokers of a newer Kafka would use versions that
the shim cannot read, and the client would lose every connection. The job is always in the pipeline. It must never offer
a version that the broker does not offer.
"""

from __future__ import annotations

import struct

from eos.shim.pipeline import Exchange, Job
from eos.shim.wire import api
from eos.shim.wire.cursor import uvarint
from eos.shim.wire.headers import response_body

_UNSUPPORTED_VERSION = 35
_RANGE = struct.Struct(">hhh")  # api_key, min_version, max_version
_NEWEST = api.NEWEST[api.API_VERSIONS]


class VersionsJob(Job):
    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key == api.API_VERSIONS and version > _NEWEST

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key == api.API_VERSIONS and version <= _NEWEST

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        exchange.answer = unsupported_response(exchange.correlation_id)
        return b""

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        return clamp_versions(frame, exchange.version)


def unsupported_response(correlation_id: int) -> bytes:
    """Return the v0 response to an unknown version of ApiVersions, with the versions that clients may use (KIP-511)."""
    ours = struct.pack(">ihi", correlation_id, _UNSUPPORTED_VERSION, 1) + _RANGE.pack(api.API_VERSIONS, 0, _NEWEST)
    return len(ours).to_bytes(4, "big") + ours


def clamp_versions(frame: bytes, version: int) -> bytes:
    """Return an ApiVersions response without APIs and versions newer than `api.NEWEST`, and otherwise unchanged.

    Raises Malformed if the response cannot be read.
    """
    cursor = response_body(frame, api.API_VERSIONS, version)
    if cursor.int16():
        return frame  # an error offers no versions, and UNSUPPORTED_VERSION is always sent as v0
    array_at = cursor.pos
    count = max(0, cursor.count())
    kept: list[bytes] = []
    for _ in range(count):
        at = cursor.pos
        cursor.skip(_RANGE.size)
        key, oldest, newest = _RANGE.unpack_from(frame, at)
        tags_at = cursor.pos
        cursor.skip_tags()
        known = api.NEWEST.get(key, -1)
        if oldest <= known:
            kept.append(_RANGE.pack(key, oldest, min(newest, known)) + frame[tags_at : cursor.pos])
    size = uvarint(len(kept) + 1) if cursor.flexible else struct.pack(">i", len(kept))
    body = b"".join([frame[4:array_at], size, *kept, frame[cursor.pos :]])
    return len(body).to_bytes(4, "big") + body
