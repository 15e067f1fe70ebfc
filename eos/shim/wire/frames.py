"""Split a byte stream into frames and forward them unchanged, whole through a handler, or piece by piece.

The splitter owns the position in the stream. Unchanged frames are never copied: a chunk with only such frames is
returned as the same object. A chunk may be a view of a buffer that is reused after `feed`, so the splitter copies the
bytes it keeps, and returned pieces may be parts of the view. It must never hold more than one frame's bytes, nor read a
frame beyond its header, nor handle more than a fixed number of frames per turn: a chunk may hold tens of thousands, and
other connections wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from eos.shim.errors import Malformed

# Bytes to forward. A view belongs to a buffer that is reused, so code that keeps it must copy it.
Piece = bytes | memoryview


class Stream(Protocol):
    """Handle the pieces of one frame, including its size prefix. A stream may change bytes but not their number.

    `feed` returns the bytes to forward, if possible the piece itself; a writable view may be changed in place. It
    returns b"" if the bytes are forwarded later, or if they are never forwarded because a job answers the request.
    """

    def feed(self, piece: Piece) -> Piece: ...


# Takes a whole frame with its size prefix and returns the bytes to forward instead (b"" for none).
Handler = Callable[[bytes], bytes]


class Unchanged:
    """Forward the frame's bytes unchanged as they arrive."""


UNCHANGED = Unchanged()
Handling = Unchanged | Handler | Stream


# Other connections get their turn after this many frames of one connection, or after this many bytes of frames that are
# handled whole. Small frames cost 5 to 100 µs each, and a large whole frame up to 0.3 s.
FRAMES_PER_TURN = 64
HANDLED_BYTES_PER_TURN = 64 * 1024


class FrameSplitter:
    """Split a stream into frames.

    `open_frame(data, pos)` gets at least `head` bytes. It returns how to forward the frame at `pos`, or None if it
    needs more bytes. `feed` returns the pieces to forward and sets `rest` to the unhandled bytes, which must be fed
    first the next time, or to None. It raises the errors of `open_frame` and handlers. The splitter must not be used
    after an error. `held_bytes` is the number of bytes held between calls of `feed`.
    """

    def __init__(
        self,
        head: int,
        largest_frame: int,
        open_frame: Callable[[Piece, int], Handling | None],
    ) -> None:
        self._head, self._largest, self._open = head, largest_frame, open_frame
        self.bytes_left = 0  # bytes missing of the current frame
        self.rest: Piece | None = None
        self._handling: Handling = UNCHANGED
        self._incomplete = b""  # the beginning of a frame that could not be opened yet
        self._whole = bytearray()  # the current frame, for a handler
        self._inserted: list[bytes] = []

    @property
    def between_frames(self) -> bool:
        return self.bytes_left == 0 and not self._incomplete and self.rest is None

    @property
    def held_bytes(self) -> int:
        return len(self._incomplete) + len(self._whole)

    def insert(self, frame: bytes) -> None:
        """Forward a frame of a job before the next one to open. Called from `open_frame` or between calls of `feed`."""
        self._inserted.append(frame)

    def feed(self, data: Piece) -> list[Piece]:
        self.rest = None
        if self._incomplete:
            data, self._incomplete = b"".join((self._incomplete, data)), b""
        out: list[Piece] = []
        pos = run = 0  # [run, pos) is to be forwarded unchanged and is not yet in `out`
        end = len(data)
        frames = handled = 0
        while pos < end:
            if self.bytes_left == 0:
                if end - pos < self._head:
                    break
                if frames == FRAMES_PER_TURN or handled > HANDLED_BYTES_PER_TURN:
                    self.rest = memoryview(data)[pos:]
                    break
                frames += 1
                size = 4 + int.from_bytes(data[pos : pos + 4], "big", signed=True)
                if size < self._head or size - 4 > self._largest:
                    raise Malformed(f"a frame of {size - 4} bytes")
                handling = self._open(data, pos)
                if handling is None:
                    if end - pos >= size:
                        raise Malformed("a frame that ends within its header")
                    break
                self._handling, self.bytes_left = handling, size
                if callable(handling):
                    handled += size
                if self._inserted:
                    _flush(out, data, run, pos)
                    run = pos
                    out += self._inserted
                    self._inserted = []
            taken = min(self.bytes_left, end - pos)
            self.bytes_left -= taken
            if self._handling is not UNCHANGED:
                piece = data[pos : pos + taken]
                made = self._handle_piece(piece)
                if made is not piece:
                    _flush(out, data, run, pos)
                    run = pos + taken
                    if made:
                        out.append(made)
            pos += taken
        if run == 0 and pos == end and not out:
            return [data] if data else out
        _flush(out, data, run, pos)
        if self.rest is None:
            self._incomplete = bytes(data[pos:])
        return out

    def _handle_piece(self, piece: Piece) -> Piece:
        """Return the bytes to forward in place of the piece, which may be the last of its frame."""
        handling = self._handling
        if not callable(handling):
            assert not isinstance(handling, Unchanged)
            return handling.feed(piece)
        if self.bytes_left:
            self._whole += piece
            return b""
        if self._whole:
            self._whole += piece
            piece, self._whole = bytes(self._whole), bytearray()
        return handling(bytes(piece))


def _flush(out: list[Piece], data: Piece, start: int, end: int) -> None:
    if start == 0 and end == len(data):
        if data:
            out.append(data)
    elif end > start:
        out.append(data[start:end])
