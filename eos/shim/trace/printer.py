"""Print lines on a separate thread, so that a slow terminal never delays traffic.

The printer owns a thread and a bounded queue. If the reader of standard output is too slow, lines are dropped and the
next line gives their number. If the reader closes (`| head`), printing ends and traffic continues.
"""

from __future__ import annotations

import queue
import threading
from typing import TextIO

_MOST_WAITING = 10_000
_END = None


class Printer:
    def __init__(self, stream: TextIO, most_waiting: int = _MOST_WAITING) -> None:
        self._stream = stream
        self._queue: queue.Queue[str | None] = queue.Queue(most_waiting)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="trace-printer", daemon=True)
        self._thread.start()

    def print(self, line: str) -> None:
        try:
            if self._dropped:
                self._queue.put_nowait(f"... {self._dropped} lines dropped: the output is read too slowly")
                self._dropped = 0
            self._queue.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Print the queued lines and stop, after at most about twice `timeout_s`."""
        try:
            self._queue.put(_END, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (line := self._queue.get()) is not _END:
                self._stream.write(line + "\n")
                if self._queue.empty():
                    self._stream.flush()
            self._stream.flush()
        except (OSError, ValueError):
            while self._queue.get() is not _END:
                pass
