"""Find every broker address in a whole response frame, field by field, and replace it.

The module owns the layouts of the responses that contain addresses: Metadata, FindCoordinator (batched since v4,
KIP-699), DescribeCluster, NodeEndpoints of Produce since v10 (KIP-951), ShareFetch and ShareAcknowledge (KIP-932).
Fetch is in fetch.py because its frames are large. A rewrite changes the addresses, the size of the tagged field around
them and the frame's size; it copies the rest byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from eos.shim.wire import api
from eos.shim.wire.cursor import Cursor, check_tag_count, string, uvarint
from eos.shim.wire.headers import response_body


class AddressSpan(NamedTuple):
    """Locate one address: bytes [start, end) of the frame are its host (with length) and its port."""

    node_id: int
    host: str
    port: int
    start: int
    end: int


class TaggedField(NamedTuple):
    """Locate the tagged field that contains the addresses. Its size is a varint at [size_at, value_at)."""

    size_at: int
    value_at: int
    end: int


class FoundAddresses(NamedTuple):
    spots: list[AddressSpan]
    inside: TaggedField | None = None


# The first and last version whose layout is known here. Responses of earlier versions contain no address.
KNOWN = {
    api.PRODUCE: (10, 13),
    api.FETCH: (16, 18),
    api.METADATA: (0, 13),
    api.FIND_COORDINATOR: (0, 6),
    api.DESCRIBE_CLUSTER: (0, 2),
    api.SHARE_FETCH: (0, 2),
    api.SHARE_ACKNOWLEDGE: (0, 2),
}


def find(api_key: int, version: int, frame: bytes) -> FoundAddresses:
    """Return the addresses in a response. `KNOWN` must contain its API and version, and the API must not be Fetch.
    Raises Malformed."""
    return _FINDERS[api_key](response_body(frame, api_key, version), version)


def _address(cursor: Cursor, node_id: int) -> AddressSpan:
    start = cursor.pos
    host = cursor.string() or ""
    port = cursor.int32()
    return AddressSpan(node_id, host, port, start, cursor.pos)


def _metadata(cursor: Cursor, version: int) -> FoundAddresses:
    if version >= 3:
        cursor.skip(4)  # throttle_time_ms
    spots = []
    for _ in range(cursor.count()):
        spots.append(_address(cursor, cursor.int32()))
        if version >= 1:
            cursor.skip_string()  # rack
        cursor.skip_tags()
    return FoundAddresses(spots)


def _find_coordinator(cursor: Cursor, version: int) -> FoundAddresses:
    if version >= 1:
        cursor.skip(4)
    if version <= 3:
        cursor.skip(2)  # error_code
        if version >= 1:
            cursor.skip_string()
        return FoundAddresses([_address(cursor, cursor.int32())])
    spots = []
    for _ in range(cursor.count()):
        cursor.skip_string()  # key
        spots.append(_address(cursor, cursor.int32()))
        cursor.skip(2)
        cursor.skip_string()
        cursor.skip_tags()
    return FoundAddresses(spots)


def _describe_cluster(cursor: Cursor, version: int) -> FoundAddresses:
    cursor.skip(6)  # throttle_time_ms, error_code
    cursor.skip_string()
    if version >= 1:
        cursor.skip(1)  # endpoint_type
    cursor.skip_string()  # cluster_id
    cursor.skip(4)  # controller_id
    spots = []
    for _ in range(cursor.count()):
        spots.append(_address(cursor, cursor.int32()))
        cursor.skip_string()
        if version >= 2:
            cursor.skip(1)  # is_fenced
        cursor.skip_tags()
    return FoundAddresses(spots)


def _produce(cursor: Cursor, version: int) -> FoundAddresses:
    for _ in range(cursor.count()):
        if version >= 13:
            cursor.skip(16)
        else:
            cursor.skip_string()
        for _ in range(cursor.count()):
            cursor.skip(30)  # index, error_code, base_offset, log_append_time_ms, log_start_offset
            for _ in range(cursor.count()):
                cursor.skip(4)
                cursor.skip_string()
                cursor.skip_tags()
            cursor.skip_string()
            cursor.skip_tags()
        cursor.skip_tags()
    cursor.skip(4)
    return tagged_endpoints(cursor)


def tagged_endpoints(cursor: Cursor) -> FoundAddresses:
    """Return the NodeEndpoints (tag 0) among the tagged fields at the end of a response."""
    for _ in range(check_tag_count(cursor.uvarint())):
        tag, size_at = cursor.uvarint(), cursor.pos
        size, value_at = cursor.uvarint(), cursor.pos
        cursor.skip(size)
        if tag == 0:
            inside = Cursor(cursor.data, value_at, flexible=True)
            inside.end = cursor.pos
            return FoundAddresses(_endpoints(inside), TaggedField(size_at, value_at, cursor.pos))
    return FoundAddresses([])


def _endpoints(cursor: Cursor) -> list[AddressSpan]:
    spots = []
    for _ in range(cursor.count()):
        spots.append(_address(cursor, cursor.int32()))
        cursor.skip_string()  # rack
        cursor.skip_tags()
    return spots


def _share_fetch(cursor: Cursor, version: int) -> FoundAddresses:
    cursor.skip(6)
    cursor.skip_string()
    if version >= 1:
        cursor.skip(4)  # acquisition_lock_timeout_ms
    for _ in range(cursor.count()):
        cursor.skip(16)
        for _ in range(cursor.count()):
            _share_partition(cursor)
            cursor.skip_bytes()  # records
            for _ in range(cursor.count()):
                cursor.skip(18)
                cursor.skip_tags()
            cursor.skip_tags()
        cursor.skip_tags()
    return FoundAddresses(_endpoints(cursor))


def _share_partition(cursor: Cursor) -> None:
    cursor.skip(6)  # index, error_code
    cursor.skip_string()
    cursor.skip(2)  # acknowledge_error_code
    cursor.skip_string()
    cursor.skip(8)  # current_leader
    cursor.skip_tags()


def _share_acknowledge(cursor: Cursor, version: int) -> FoundAddresses:
    cursor.skip(6)
    cursor.skip_string()
    if version >= 2:
        cursor.skip(4)
    for _ in range(cursor.count()):
        cursor.skip(16)
        for _ in range(cursor.count()):
            cursor.skip(6)
            cursor.skip_string()
            cursor.skip(8)
            cursor.skip_tags()
            cursor.skip_tags()
        cursor.skip_tags()
    return FoundAddresses(_endpoints(cursor))


_FINDERS: dict[int, Callable[[Cursor, int], FoundAddresses]] = {
    api.PRODUCE: _produce,
    api.METADATA: _metadata,
    api.FIND_COORDINATOR: _find_coordinator,
    api.DESCRIBE_CLUSTER: _describe_cluster,
    api.SHARE_FETCH: _share_fetch,
    api.SHARE_ACKNOWLEDGE: _share_acknowledge,
}


# (node id, host, port) upstream -> (host, port) for clients
Translate = Callable[[int, str, int], tuple[str, int]]


def rewrite(frame: bytes, found: FoundAddresses, flexible: bool, translate: Translate) -> bytes:
    """Return the frame with every address translated, or the same object if it has none."""
    if not found.spots:
        return frame
    parts: list[bytes] = []
    pos = 4
    if found.inside is not None:
        parts.append(frame[pos : found.inside.size_at])
        pos = found.inside.value_at
    inner: list[bytes] = []
    for spot in found.spots:
        inner.append(frame[pos : spot.start])
        pos = spot.end
        if spot.port < 0 or not spot.host:  # "no coordinator": not an address
            inner.append(frame[spot.start : spot.end])
            continue
        host, port = translate(spot.node_id, spot.host, spot.port)
        inner += [string(host, flexible), port.to_bytes(4, "big")]
    if found.inside is not None:
        inner.append(frame[pos : found.inside.end])
        pos = found.inside.end
        parts.append(uvarint(sum(map(len, inner))))
    body = b"".join([*parts, *inner, frame[pos:]])
    return len(body).to_bytes(4, "big") + body
