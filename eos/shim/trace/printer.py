"""Prints lines without ever making the traffic wait for a terminal.

Owns a thread and a bounded queue: when the reader of standard output is slower than the transactions, lines are left
out and the next one says how many. A reader that has gone (`| head`) ends the printing, nothing else.
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
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="trace-printer", daemon=True)
        self._thread.start()

    def print(self, line: str) -> None:
        try:
            if self._left_out:
                self._queue.put_nowait(f"... {self._left_out} lines left out: they are not read fast enough")
                self._left_out = 0
            self._queue.put_nowait(line)
        except queue.Full:
            self._left_out += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Waits for what is queued, but not for a reader that does not read."""
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
