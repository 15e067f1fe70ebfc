"""One direction of a link: frames leave in order, and a held one keeps everything behind it waiting.

Owns that order and nothing else; it knows no sockets. What waits is bounded by what a client has under way, and is
copied: the buffer it came in is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from eos.shim.wire.frames import Piece


class Held(bytes):
    """A frame a job gave out that must not leave yet. `reached` is called once everything before it has left."""

    reached: Callable[[], None] | None = None
    is_open = False
    _lane: Lane | None = None

    def release(self) -> None:
        """It may leave now, or as soon as it is its turn; a second call changes nothing."""
        self.is_open = True
        if self._lane is not None:
            self._lane.go_on()


class Lane:
    """`write` takes pieces of the stream and is given them in order."""

    def __init__(self, write: Callable[[Sequence[Piece]], None]) -> None:
        self._write = write
        self._waiting: deque[bytes] = deque()
        self.kept = 0  # bytes that wait

    @property
    def is_held(self) -> bool:
        return bool(self._waiting)

    def pass_on(self, pieces: Sequence[Piece]) -> None:
        if self._waiting:
            self._keep(pieces)
            return
        for at, piece in enumerate(pieces):
            if type(piece) is Held:
                self._write(pieces[:at])
                self._keep(pieces[at:])
                self.go_on()
                return
        self._write(pieces)

    def go_on(self) -> None:
        waiting = self._waiting
        while waiting:
            head = waiting[0]
            if type(head) is Held and not head.is_open:
                if head._lane is None:
                    head._lane = self
                    if head.reached is not None:
                        head.reached()
                        continue  # it may have been released, or everything dropped
                return
            self.kept -= len(head)
            self._write([waiting.popleft()])

    def _keep(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.kept += len(piece)
            self._waiting.append(piece if isinstance(piece, bytes) else bytes(piece))

    def drop(self) -> None:
        """Nothing that waits will ever leave."""
        self._waiting.clear()
        self.kept = 0
