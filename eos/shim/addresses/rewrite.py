"""Puts other addresses into a response frame and changes nothing else: the rest is copied byte for byte.

Owns the splicing: the strings, the size of the tagged field around them and the size of the frame.
"""

from __future__ import annotations

from collections.abc import Callable

from eos.shim.addresses.layouts import Found
from eos.shim.wire.cursor import string, uvarint

# (node id, host, port) upstream -> (host, port) to tell the client
Translate = Callable[[int, str, int], tuple[str, int]]


def rewrite(frame: bytes, found: Found, flexible: bool, translate: Translate) -> bytes:
    """The frame with every address translated; the same object when there is none."""
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
