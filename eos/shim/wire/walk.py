"""Follow a message's layout over bytes that arrive in pieces, without keeping skipped bytes.

A layout is a generator. It yields the number of bytes it wants to read, or the negative number of bytes to skip. The
walk owns the position in the frame and must never hold more than one field.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from eos.shim.errors import Malformed
from eos.shim.wire.cursor import LONGEST_STRING_BYTES, check_tag_count
from eos.shim.wire.frames import Piece

Layout = Generator[int, bytes, None]
Field = Generator[int, bytes, int]


class Walk:
    """Run one layout over one frame. `position` counts from the frame's first byte.

    A layout that ends early leaves the rest of the frame unread. `most_fields` bounds the work for one frame, because a
    client may send a frame full of empty fields.
    """

    def __init__(self, layout: Callable[[Walk], Layout], most_fields: int | None = None) -> None:
        self.position = 0
        self.is_complete = False
        self._partial = b""
        self._layout = layout(self)
        self._fields_left = most_fields
        self._bytes_wanted = 0  # number of bytes that the layout wants: positive to read, negative to skip
        self._advance(None)

    def feed(self, data: Piece) -> None:
        """Read the next piece. Raises Malformed if the layout raises it."""
        pos, end = 0, len(data)
        while pos < end and not self.is_complete:
            wants = self._bytes_wanted
            if wants < 0:
                taken = min(-wants, end - pos)
                pos += taken
                self.position += taken
                self._bytes_wanted += taken
                if self._bytes_wanted == 0:
                    self._advance(b"")
                continue
            taken = min(wants - len(self._partial), end - pos)
            piece = bytes(data[pos : pos + taken])
            pos += taken
            self.position += taken
            if self._partial:
                piece = self._partial + piece
            if len(piece) < wants:
                self._partial = piece
                continue
            self._partial = b""
            self._advance(piece)

    def _advance(self, data: bytes | None) -> None:
        if self._fields_left is not None:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise Malformed("too many fields")
        try:
            wants = next(self._layout) if data is None else self._layout.send(data)
            while wants == 0:
                wants = self._layout.send(b"")
            self._bytes_wanted = wants
        except StopIteration:
            self.is_complete = True


def uvarint() -> Field:
    value = shift = 0
    while True:
        byte = (yield 1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
        if shift > 28:
            raise Malformed("a varint is longer than five bytes")


def int16() -> Field:
    return int.from_bytes((yield 2), "big", signed=True)


def int32() -> Field:
    return int.from_bytes((yield 4), "big", signed=True)


def count(flexible: bool) -> Field:
    """Read the length of an array or a byte string, 0 for null."""
    length = ((yield from uvarint()) - 1) if flexible else (yield from int32())
    return max(0, length)


def string_length(flexible: bool) -> Field:
    length = ((yield from uvarint()) - 1) if flexible else (yield from int16())
    return max(0, length)


def text(flexible: bool) -> Generator[int, bytes, str | None]:
    """Read a string, None for null."""
    length = ((yield from uvarint()) - 1) if flexible else (yield from int16())
    if length > LONGEST_STRING_BYTES:
        raise Malformed(f"a string of {length} bytes")
    return None if length < 0 else (yield length).decode("utf-8", "replace")


def tags(flexible: bool) -> Field:
    """Skip tagged fields and return their number."""
    if not flexible:
        return 0
    number = check_tag_count((yield from uvarint()))
    for _ in range(number):
        yield from uvarint()
        yield -(yield from uvarint())
    return number
