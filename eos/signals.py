"""Sets signal handlers for this process only, among them those that stop a run.

The first SIGTERM or SIGINT stops a run between two batches, a second one at once; other modules decide the consequence.
A process that a user's function forks (multiprocessing) gets the previous handlers back. Otherwise it would handle
SIGTERM as a request to stop the worker, and continue to run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, Self

from eos import log
from eos.errors import Interruption, Temporary

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
            if handler is not None:  # a handler that was not set from Python is None, and cannot be restored
                signal.signal(number, handler)
        self._before.clear()


_active: list[Handlers] = []


def _restore_all() -> None:
    while _active:
        _active.pop().restore()


os.register_at_fork(after_in_child=_restore_all)


class ShutdownExpired(Interruption):
    """Ends a run whose stop took too long or was requested twice."""


def stop_timeout_error(expired: ShutdownExpired) -> Temporary:
    """Return the error that ends a run whose shutdown took too long."""
    return Temporary(
        f"the stop took too long ({expired}): the open transaction was abandoned, and its records will be handled again"
    )


class Stoppable(Protocol):
    """Can be stopped by StopSignals between two batches."""

    def stop(self) -> None:
        """Request the stop."""


class StopSignals:
    """Handles SIGTERM and SIGINT: the first one requests a stop; a second one, or the deadline, gives up.

    `timeout_s` is eos.shutdown.timeout.ms. The first signal takes over the process's timer and SIGALRM, and the exit
    gives them back."""

    def __init__(self, stoppable: Stoppable, timeout_s: float) -> None:
        self._stoppable, self._timeout_s = stoppable, timeout_s
        self._handlers = Handlers(self._on_signal)
        # The timer that was set before ours, to be restored. None until a signal arrives, even if the code requested a
        # stop.
        self._timer: tuple[float, float] | None = None

    def __enter__(self) -> StopSignals:
        self._handlers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
        self._handlers.__exit__()

    def _on_signal(self, number: int, _: Any) -> None:
        if self._timer is not None:
            raise ShutdownExpired("requested a second time")
        self._stoppable.stop()
        log.info("stopping", signal=signal.Signals(number).name)
        self._handlers.set_handler(signal.SIGALRM, self._on_deadline)
        # setitimer(0) would disarm the timer instead of firing it.
        self._timer = signal.setitimer(signal.ITIMER_REAL, max(0.001, self._timeout_s))

    def _on_deadline(self, *_: Any) -> None:
        raise ShutdownExpired(f"eos.shutdown.timeout.ms={round(self._timeout_s * 1000)} is over")
