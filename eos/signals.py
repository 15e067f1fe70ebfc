"""Handlers of signals that are this process's alone: a child that is forked meanwhile has those of before.

Owns nothing but the handlers that were replaced. A process that a user's function forks (multiprocessing) would
otherwise take the SIGTERM that ends it for a request to stop the worker, and go on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

Handler = Callable[[int, FrameType | None], Any]


class Handlers:
    """SIGTERM and SIGINT have this handler in the block, which the main thread alone may enter."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        _entered.append(self)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.take(number, self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
        if self in _entered:  # a child that is forked in the block leaves it, too
            _entered.remove(self)

    def take(self, number: int, handler: Handler) -> None:
        """Another signal, up to the end of the block."""
        self._before[number] = signal.signal(number, handler)

    def give_back(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: it is not Python's, and cannot be set from here
                signal.signal(number, handler)
        self._before.clear()


_entered: list[Handlers] = []


def _give_all_back() -> None:
    while _entered:
        _entered.pop().give_back()


os.register_at_fork(after_in_child=_give_all_back)
