"""Cuts a byte stream into frames and moves them: untouched, whole through a handler, or piece by piece.

Owns the place in the stream. What nobody asked for is never copied: a chunk that holds only passing frames comes out as
the object that went in. A chunk may be a view of a buffer that is used again after `feed`: what the splitter keeps it
copies, what it gives out may be parts of that view. It must never hold more than one frame's bytes, nor look into a
frame beyond its header, nor deal with more than so many frames in one go: a chunk may hold tens of thousands, and who
sent them is not alone here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from eos.shim.errors import Malformed

# Bytes on their way; a view is of a buffer that is used again, so whoever keeps it copies it.
Piece = bytes | memoryview


class Stream(Protocol):
    """Sees the pieces of one frame, its size prefix included, as they pass; may change bytes but not their number.

    What comes back goes on: the piece itself where nothing had to move (a writable view may be changed in place), b""
    for what is given out later, or never when the request is answered here.
    """

    def feed(self, piece: Piece) -> Piece: ...


# Takes a whole frame with its size prefix; what it returns goes on in its place (b"": nothing does).
Handler = Callable[[bytes], bytes]


class Passing:
    """The frame's bytes go on as they come."""


PASSING = Passing()
Passage = Passing | Handler | Stream


# So many frames of one connection, or so many bytes of collected ones, then the others have their turn. Small frames
# cost 5 to 100 µs each, a large collected one up to 0.3 s.
FRAMES_PER_TURN = 64
HANDLED_BYTES_PER_TURN = 64 * 1024


class FrameSplitter:
    """`open_frame(data, pos)` is asked at the head of each frame and says how it passes; None: show me more of it.

    `head` is the number of bytes it is shown at least. `feed` returns the pieces that go on; `rest` is then what it did
    not get to, to be fed before anything else, or None. Whatever `open_frame` and handlers raise leaves `feed`, and the
    splitter must not be used again. `kept` is how much it holds between feeds.
    """

    def __init__(
        self,
        head: int,
        largest_frame: int,
        open_frame: Callable[[Piece, int], Passage | None],
    ) -> None:
        self._head, self._largest, self._open = head, largest_frame, open_frame
        self.left = 0  # bytes still to come of the frame under way
        self.rest: Piece | None = None
        self._passage: Passage = PASSING
        self._carried = b""  # the beginning of a frame that could not be opened yet
        self._whole = bytearray()  # the frame under way, for a handler
        self._inserted: list[bytes] = []

    @property
    def between_frames(self) -> bool:
        return self.left == 0 and not self._carried and self.rest is None

    @property
    def kept(self) -> int:
        return len(self._carried) + len(self._whole)

    def insert(self, frame: bytes) -> None:
        """From `open_frame` or between feeds: a frame of ours that goes out before the one about to open."""
        self._inserted.append(frame)

    def feed(self, data: Piece) -> list[Piece]:
        self.rest = None
        if self._carried:
            data, self._carried = b"".join((self._carried, data)), b""
        out: list[Piece] = []
        pos = run = 0  # [run, pos) goes on as it is and is not yet in `out`
        end = len(data)
        frames = handled = 0
        while pos < end:
            if self.left == 0:
                if end - pos < self._head:
                    break
                if frames == FRAMES_PER_TURN or handled > HANDLED_BYTES_PER_TURN:
                    self.rest = memoryview(data)[pos:]
                    break
                frames += 1
                size = 4 + int.from_bytes(data[pos : pos + 4], "big", signed=True)
                if size < self._head or size - 4 > self._largest:
                    raise Malformed(f"a frame of {size - 4} bytes")
                passage = self._open(data, pos)
                if passage is None:
                    if end - pos >= size:
                        raise Malformed("a frame that ends within its header")
                    break
                self._passage, self.left = passage, size
                if callable(passage):
                    handled += size
                if self._inserted:
                    _flush(out, data, run, pos)
                    run = pos
                    out += self._inserted
                    self._inserted = []
            taken = min(self.left, end - pos)
            self.left -= taken
            if self._passage is not PASSING:
                piece = data[pos : pos + taken]
                made = self._hand_over(piece)
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
            self._carried = bytes(data[pos:])
        return out

    def _hand_over(self, piece: Piece) -> Piece:
        """What goes on in place of the piece, which may be the last of its frame."""
        passage = self._passage
        if not callable(passage):
            assert not isinstance(passage, Passing)
            return passage.feed(piece)
        if self.left:
            self._whole += piece
            return b""
        if self._whole:
            self._whole += piece
            piece, self._whole = bytes(self._whole), bytearray()
        return passage(bytes(piece))


def _flush(out: list[Piece], data: Piece, start: int, end: int) -> None:
    if start == 0 and end == len(data):
        if data:
            out.append(data)
    elif end > start:
        out.append(data[start:end])
