"""Read the protocol's primitive fields from one whole frame.

The cursor owns the position in the frame. A read or a length beyond the frame's end raises Malformed. It must never
copy more than the field it returns, nor read more elements than a real message has: any client may send a frame, and
all connections wait while it is read.
"""

from __future__ import annotations

import struct

from eos.shim.errors import Malformed
from eos.shim.wire.frames import Piece

# The longest string that brokers accept (a 16 bit length, even if the encoding allows more).
LONGEST_STRING_BYTES = 32_767
# The maximum number of tagged fields in one section. The messages of Kafka 4.3.1 have only a few.
MOST_TAGS = 100
# The maximum number of elements of all arrays and tagged fields in one message, such as the partitions of a request.
MOST_ELEMENTS = 50_000

_INT16, _INT32, _INT64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")


class Cursor:
    """Read fields in sequence. `flexible` selects the encoding of strings, arrays and tagged fields (KIP-482)."""

    __slots__ = ("data", "elements", "end", "flexible", "pos")

    def __init__(self, data: Piece, pos: int, flexible: bool) -> None:
        self.data, self.pos, self.end, self.flexible = data, pos, len(data), flexible
        self.elements = 0  # number of elements of all arrays so far

    def skip(self, count: int) -> None:
        self.pos += count
        if count < 0 or self.pos > self.end:
            raise Malformed(f"a field of {count} bytes does not fit into its frame")

    def int8(self) -> int:
        self.skip(1)
        value = self.data[self.pos - 1]
        return value - 256 if value > 127 else value

    def int16(self) -> int:
        self.skip(2)
        return int(_INT16.unpack_from(self.data, self.pos - 2)[0])

    def int32(self) -> int:
        self.skip(4)
        return int(_INT32.unpack_from(self.data, self.pos - 4)[0])

    def int64(self) -> int:
        self.skip(8)
        return int(_INT64.unpack_from(self.data, self.pos - 8)[0])

    def uvarint(self) -> int:
        value = shift = 0
        for at in range(self.pos, self.end):
            byte = self.data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.pos = at + 1
                return value
            shift += 7
            if shift > 28:
                raise Malformed("a varint is longer than five bytes")
        raise Malformed("a varint does not fit into its frame")

    def count(self) -> int:
        """Read an array's length, -1 for null. Raises Malformed if less than one byte per element is left."""
        count = self.uvarint() - 1 if self.flexible else self.int32()
        if count < -1 or count > self.end - self.pos:
            raise Malformed(f"an array of {count} elements does not fit into its frame")
        if count > 0:
            self.count_elements(count)
        return count

    def count_elements(self, elements: int) -> None:
        """Count elements. Raises Malformed if there are more than any real message has."""
        self.elements += elements
        if self.elements > MOST_ELEMENTS:
            raise Malformed(f"more than {MOST_ELEMENTS} elements")

    def string(self) -> str | None:
        length = self.uvarint() - 1 if self.flexible else self.int16()
        return self._text(length)

    def header_string(self) -> str | None:
        """Read a string of a header, which is never compact."""
        return self._text(self.int16())

    def _text(self, length: int) -> str | None:
        if length < 0:
            if length < -1:
                raise Malformed(f"a string of {length} bytes")
            return None
        if length > LONGEST_STRING_BYTES:
            raise Malformed(f"a string of {length} bytes")
        self.skip(length)
        return str(self.data[self.pos - length : self.pos], "utf-8", "surrogateescape")

    def skip_string(self) -> None:
        length = self.uvarint() - 1 if self.flexible else self.int16()
        if length > 0:
            self.skip(length)
        elif length < -1:
            raise Malformed(f"a string of {length} bytes")

    def skip_bytes(self) -> None:
        length = self.uvarint() - 1 if self.flexible else self.int32()
        if length > 0:
            self.skip(length)
        elif length < -1:
            raise Malformed(f"{length} bytes")

    def skip_tags(self) -> None:
        """Skip all tagged fields. A version that is not flexible has none."""
        if self.flexible:
            count = check_tag_count(self.uvarint())
            if count:
                self.count_elements(count)
            for _ in range(count):
                self.uvarint()
                self.skip(self.uvarint())


def check_tag_count(count: int) -> int:
    """Return a number of tagged fields. Raises Malformed if it is too large."""
    if count > MOST_TAGS:
        raise Malformed(f"{count} tagged fields")
    return count


def uvarint(value: int) -> bytes:
    """Encode `value` as an unsigned varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def string(value: str, flexible: bool) -> bytes:
    """Encode `value` as a string field of a body."""
    raw = value.encode("utf-8", "surrogateescape")
    return (uvarint(len(raw) + 1) if flexible else _INT16.pack(len(raw))) + raw
