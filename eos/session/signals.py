"""Signals that end a loop: the first one between two transactions, the second one at once.

Owns the handlers and the deadline of a stop. What follows from a stop is decided by the loop.
"""

from __future__ import annotations

import signal
from typing import Any, Protocol

from eos import log
from eos.errors import Interruption, Temporary
from eos.kafka.client.settings import Settings
from eos.signals import Handlers


class ShutdownExpired(Interruption):
    """Raised if a stop took too long or was requested twice."""


def took_too_long(expired: ShutdownExpired) -> Temporary:
    """Return the error with which a run ends then."""
    return Temporary(
        f"the stop took too long ({expired}): the open transaction was given up, and its records will be handled again"
    )


class Stoppable(Protocol):
    """Something that StopSignals stops: it checks `stop_requested` between two batches."""

    settings: Settings

    def stop(self) -> None:
        """Request the stop."""


class StopSignals:
    """Handles SIGTERM and SIGINT: the first one requests a stop; a second one, or the deadline, gives up. The first
    one takes over the process's timer and SIGALRM, and the exit gives them back."""

    def __init__(self, session: Stoppable) -> None:
        self._session = session
        self._timeout_s: float = session.settings["eos.shutdown.timeout.ms"] / 1000
        self._handlers = Handlers(self._on_signal)
        # The previous owner's timer. None: no signal arrived, though the code may have requested a stop.
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
        self._session.stop()
        log.info("stopping", signal=signal.Signals(number).name)
        self._handlers.set_handler(signal.SIGALRM, self._on_deadline)
        # setitimer(0) would disarm the timer instead of firing it.
        self._timer = signal.setitimer(signal.ITIMER_REAL, max(0.001, self._timeout_s))

    def _on_deadline(self, *_: Any) -> None:
        raise ShutdownExpired(f"eos.shutdown.timeout.ms={round(self._timeout_s * 1000)} is over")
