"""Signals that end a loop: the first one between two transactions, the second one at once.

Owns the handlers and the deadline of a stop. What a stop leads to is the loop's.
"""

from __future__ import annotations

import signal
from typing import Any, Protocol

from eos import log
from eos.errors import Interruption, Temporary
from eos.kafka.client.settings import Settings
from eos.signals import Handlers


class ShutdownExpired(Interruption):
    """Raised when a stop took too long, or was asked for twice."""


def took_too_long(expired: ShutdownExpired) -> Temporary:
    """What a run ends with then."""
    return Temporary(f"the stop took too long ({expired}): what was not committed yet was given up, and comes again")


class Stoppable(Protocol):
    """What StopSignals stops: it looks at `stop_requested` between two batches."""

    settings: Settings
    stop_requested: bool


class StopSignals:
    """SIGTERM and SIGINT: the first asks for a stop after the batch, the second or the deadline gives up. The process's
    timer and SIGALRM are taken at the first one, and given back."""

    def __init__(self, session: Stoppable) -> None:
        self._session = session
        self._timeout_s: float = session.settings["eos.shutdown.timeout.ms"] / 1000
        self._handlers = Handlers(self._asked)
        # Of whoever had the timer before. None: no signal was heard, though `stop_requested` may be set by the code.
        self._timer: tuple[float, float] | None = None

    def __enter__(self) -> StopSignals:
        self._handlers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
        self._handlers.__exit__()

    def _asked(self, number: int, _: Any) -> None:
        if self._timer is not None:
            raise ShutdownExpired("asked a second time")
        self._session.stop_requested = True
        log.info("stopping", signal=signal.Signals(number).name)
        self._handlers.set_handler(signal.SIGALRM, self._expired)
        # setitimer(0) would switch the timer off instead of firing it.
        self._timer = signal.setitimer(signal.ITIMER_REAL, max(0.001, self._timeout_s))

    def _expired(self, *_: Any) -> None:
        raise ShutdownExpired(f"eos.shutdown.timeout.ms={round(self._timeout_s * 1000)} is over")
