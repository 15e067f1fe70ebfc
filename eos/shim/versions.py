"""The job that keeps clients to what this program knows: ApiVersions answers with what broker and shim both speak.

Owns the layout of these answers. A client of Kafka's next version in front of brokers of that version would else ask in
ways that nobody here can follow, and lose its connections one after the other. Always in the pipeline. It must never
offer what the broker does not.
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
        exchange.answer = unsupported(exchange.correlation_id)
        return b""

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        return clamped(frame, exchange.version)


def unsupported(correlation_id: int) -> bytes:
    """The answer to an ApiVersions newer than any known: as v0, and it says which the client may ask (KIP-511)."""
    ours = struct.pack(">ihi", correlation_id, _UNSUPPORTED_VERSION, 1) + _RANGE.pack(api.API_VERSIONS, 0, _NEWEST)
    return len(ours).to_bytes(4, "big") + ours


def clamped(frame: bytes, version: int) -> bytes:
    """An ApiVersions answer without the APIs and versions that are newer than `api.NEWEST`; all else as it was. Raises
    Malformed for one that cannot be followed.
    """
    cursor = response_body(frame, api.API_VERSIONS, version)
    if cursor.int16():
        return frame  # an error offers nothing; UNSUPPORTED_VERSION comes as v0 whatever was asked
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
