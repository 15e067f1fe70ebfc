"""The two questions that must be put to one chosen node, which no client library lets a caller choose.

Owns the bytes of FindCoordinator (KIP-98) and DescribeQuorum (KIP-595), in one version each that every broker from 3.9
on serves. A client would ask any node it knows, a paused one too, and wait for it. Raises OSError for no answer.
"""

from __future__ import annotations

import socket
import struct

GROUP, TRANSACTION = 0, 1
ANSWER_TIMEOUT_S = 5.0
_FIND_COORDINATOR, _DESCRIBE_QUORUM = 10, 55
_METADATA_TOPIC = b"__cluster_metadata"


def coordinator(server: str, name: str, kind: int, timeout_s: float = ANSWER_TIMEOUT_S) -> int | None:
    """The node that coordinates the group or transactional.id `name`; None while there is none.

    The broker makes the internal topic if it has to.
    """
    key = name.encode()
    answer = _ask(server, _FIND_COORDINATOR, 1, struct.pack(f">h{len(key)}sb", len(key), key, kind), timeout_s)
    # throttle_time_ms, error_code, error_message (nullable), node_id
    error, length = struct.unpack_from(">hh", answer, 4)
    (node,) = struct.unpack_from(">i", answer, 8 + max(length, 0))
    return None if error else int(node)


def quorum_leader(server: str, timeout_s: float = ANSWER_TIMEOUT_S) -> int | None:
    """The active controller; None while there is none."""
    # Compact arrays and strings, each with its length plus one; three empty sets of tagged fields at the end.
    topic = bytes([2, len(_METADATA_TOPIC) + 1]) + _METADATA_TOPIC
    answer = _ask(server, _DESCRIBE_QUORUM, 0, b"\0" + topic + b"\2" + bytes(4) + b"\0\0\0", timeout_s)
    # Tagged fields of the header, error_code, one topic with its name, one partition: index, error_code, leader_id.
    (error,) = struct.unpack_from(">h", answer, 1)
    if error:
        return None
    error, leader = struct.unpack_from(">hi", answer, 3 + len(topic) + 1 + 4)
    return int(leader) if not error and leader >= 0 else None


def _ask(server: str, api_key: int, version: int, body: bytes, timeout_s: float) -> bytes:
    """The answer after its correlation id."""
    host, _, port = server.rpartition(":")
    # Correlation id 1, no client id.
    request = struct.pack(">hhih", api_key, version, 1, -1) + body
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        with connection.makefile("rb") as answers:
            (length,) = struct.unpack(">i", _exactly(answers.read(4), 4))
            return _exactly(answers.read(length), length)[4:]


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ConnectionError("the broker closed the connection instead of answering")
    return data
