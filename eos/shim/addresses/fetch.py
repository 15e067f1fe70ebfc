"""Replace or hide the NodeEndpoints of Fetch responses (v16 and later, KIP-951), which follow up to 50 MB of records.

The module owns the layout of Fetch responses. A whole frame is rewritten like other responses. The size of a streamed
frame cannot change, so its NodeEndpoints are hidden instead: tag 0 becomes an unknown tag, and its value zeros. The
client then learns the new leader from Metadata, as before KIP-951. It must never look at records.
"""

from __future__ import annotations

from eos.shim.addresses.layouts import FoundAddresses, tagged_endpoints
from eos.shim.errors import Malformed
from eos.shim.wire import walk
from eos.shim.wire.cursor import Cursor, check_tag_count
from eos.shim.wire.frames import Piece
from eos.shim.wire.headers import RESPONSE_HEAD
from eos.shim.wire.walk import Layout, Walk

# One byte long as a varint, like tag 0, and far above the tags that KIPs use.
_UNKNOWN_TAG = 0x7F


def find(frame: bytes) -> FoundAddresses:
    """Return the addresses in a whole Fetch response of a version in `layouts.KNOWN`. Raises Malformed."""
    tags_at: list[int] = []

    def layout(at: Walk) -> Layout:
        yield from _skip_to_tags(at)
        tags_at.append(at.position)

    Walk(layout).feed(frame)
    if not tags_at:
        raise Malformed("a Fetch response ends before its tagged fields")
    return tagged_endpoints(Cursor(frame, tags_at[0], flexible=True))


class HideEndpoints:
    """Hide the endpoints in a stream of one Fetch response of `size` bytes.

    Raises Malformed if the layout does not end with the frame.
    """

    def __init__(self, size: int) -> None:
        self._bytes_left = size
        # (start, end, byte): bytes [start, end) are overwritten with `byte`.
        self._hidden: list[tuple[int, int, int]] = []
        self._walk = Walk(self._layout)

    def feed(self, piece: Piece) -> Piece:
        start = self._walk.position
        self._walk.feed(piece)
        self._bytes_left -= len(piece)
        if self._walk.position != start + len(piece) or self._walk.is_complete != (self._bytes_left == 0):
            # Fail before the last piece is forwarded: it may contain addresses in unexpected places.
            raise Malformed("a Fetch response does not match its layout")
        if not self._hidden:
            return piece
        changed = bytearray(piece)
        for at, end, byte in self._hidden:
            low, high = max(at, start), min(end, start + len(piece))
            if low < high:
                changed[low - start : high - start] = bytes([byte]) * (high - low)
        return bytes(changed)

    def _layout(self, at: Walk) -> Layout:
        yield from _skip_to_tags(at)
        for _ in range(check_tag_count((yield from walk.uvarint()))):
            tag_at = at.position
            tag = yield from walk.uvarint()
            if tag == 0:
                # Hide the tag now, because its single byte is in this piece, but the field's size may only come with
                # the next one.
                self._hidden.append((tag_at, tag_at + 1, _UNKNOWN_TAG))
            size = yield from walk.uvarint()
            if tag == 0:
                self._hidden.append((at.position, at.position + size, 0))
            yield -size


def _skip_to_tags(at: Walk) -> Layout:
    yield -RESPONSE_HEAD.size
    yield from walk.tags(True)
    yield -10  # throttle_time_ms, error_code, session_id
    for _ in range((yield from walk.count(True))):
        yield -16  # topic_id
        for _ in range((yield from walk.count(True))):
            yield -30  # index, error_code, high watermark, last stable offset, log start offset
            for _ in range((yield from walk.count(True))):
                yield -16  # an aborted transaction
                yield from walk.tags(True)
            yield -4  # preferred read replica
            yield -(yield from walk.count(True))  # records
            yield from walk.tags(True)
        yield from walk.tags(True)
