"""Sets signal handlers for this process only: a child that is forked meanwhile gets the previous handlers back.

Owns only the handlers that were replaced. Otherwise a process that a user's function forks (multiprocessing) would
handle SIGTERM as a request to stop the worker, and continue to run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

Handler = Callable[[int, FrameType | None], Any]


class Handlers:
    """Sets a handler for SIGTERM and SIGINT inside its `with` block, which only the main thread may enter."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        _active.append(self)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.set_handler(number, self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        if self in _active:  # a child that was forked inside the block has cleared the list
            _active.remove(self)

    def set_handler(self, number: int, handler: Handler) -> None:
        """Set the handler of another signal until the end of the block."""
        self._before[number] = signal.signal(number, handler)

    def restore(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: it was not set from Python, so it cannot be restored
                signal.signal(number, handler)
        self._before.clear()


_active: list[Handlers] = []


def _restore_all() -> None:
    while _active:
        _active.pop().restore()


os.register_at_fork(after_in_child=_restore_all)
