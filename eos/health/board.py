"""Keeps the last minutes of all statuses for the page: one point a second per worker.

Owns this history; a daemon thread fills it. It must never call into a worker's thread.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

import msgspec

from eos.health.status import Incident, Status

_INTERVAL_S = 1.0
_POINTS = 600
Point = tuple[float, int, int, int | None]
"""The time (seconds since the epoch), the total records in and out, and the lag."""


class View(msgspec.Struct):
    """Holds the data of the page: the current workers, the points that the page lacks, and the incidents."""

    at: float
    workers: list[Status]
    history: dict[str, list[Point]]
    incidents: list[Incident]


class Board:
    """Keeps the statuses of all workers with their history.

    `statuses` is called once a second and for each view; `incidents` returns the supervisor's own, if there is one.
    """

    def __init__(self, statuses: Callable[[], list[Status]], incidents: Callable[[], list[Incident]] = list) -> None:
        self.statuses = statuses
        self._incidents = incidents
        self._history: dict[str, collections.deque[Point]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._record_statuses, name="eos-board", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _record_statuses(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self.note(self.statuses())

    def note(self, statuses: list[Status]) -> None:
        now = time.time()
        for status in statuses:
            points = self._history.setdefault(status.instance, collections.deque(maxlen=_POINTS))
            points.append((now, status.records_in, status.records_out, status.lag))

    def view(self, since: float = 0.0) -> View:
        """Return the current statuses, with the history after the time `since`."""
        history = {name: [p for p in list(points) if p[0] > since] for name, points in list(self._history.items())}
        return View(time.time(), self.statuses(), history, self._incidents())
