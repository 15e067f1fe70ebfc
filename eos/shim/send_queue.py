"""Send the frames of one direction of a link in order. A held frame delays all frames after it.

The module owns that order and knows no sockets. Queued frames are bounded by the client's unanswered requests, and they
are copied, because the buffer they came in is reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from eos.shim.wire.frames import Piece


class HeldFrame(bytes):
    """Hold a frame that must not be sent yet. `on_turn` is called when all frames before it have been sent."""

    on_turn: Callable[[], None] | None = None
    is_released = False
    _queue: SendQueue | None = None

    def release(self) -> None:
        """Send the frame now, or as soon as it is the next one. A second call changes nothing."""
        self.is_released = True
        if self._queue is not None:
            self._queue.resume()


class SendQueue:
    """Call `write` with the pieces of the stream in order."""

    def __init__(self, write: Callable[[Sequence[Piece]], None]) -> None:
        self._write = write
        self._waiting: deque[bytes] = deque()
        self.held_bytes = 0  # bytes in the queue

    @property
    def is_blocked(self) -> bool:
        return bool(self._waiting)

    def send(self, pieces: Sequence[Piece]) -> None:
        if self._waiting:
            self._enqueue(pieces)
            return
        for at, piece in enumerate(pieces):
            if type(piece) is HeldFrame:
                self._write(pieces[:at])
                self._enqueue(pieces[at:])
                self.resume()
                return
        self._write(pieces)

    def resume(self) -> None:
        waiting = self._waiting
        while waiting:
            head = waiting[0]
            if type(head) is HeldFrame and not head.is_released:
                if head._queue is None:
                    head._queue = self
                    if head.on_turn is not None:
                        head.on_turn()
                        continue  # the callback may have released it or cleared the queue
                return
            self.held_bytes -= len(head)
            self._write([waiting.popleft()])

    def _enqueue(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.held_bytes += len(piece)
            self._waiting.append(piece if isinstance(piece, bytes) else bytes(piece))

    def clear(self) -> None:
        """Discard all queued frames."""
        self._waiting.clear()
        self.held_bytes = 0
