"""Log warnings about clients, at most a fixed number of lines per interval.

The first warnings of an interval get a line each. The others are counted by client and reported in one line, with the
last reason, when the interval or the shim ends. Every warning must be logged or counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from eos.shim import events

INTERVAL_S = 60.0
LINES_PER_INTERVAL = 50
LINES_PER_HOST = 20
_HOSTS_COUNTED = 1_000
_HOSTS_TOLD = 5


class Complaints:
    """Log `message` for each warning up to the limit, and `together` for the counted ones."""

    def __init__(self, message: str, together: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._message, self._together, self._clock = message, together, clock
        self._began = clock()
        self._lines: Counter[str] = Counter()  # by host
        self._untold: Counter[str] = Counter()
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def say(self, client: str, reason: object, **fields: Any) -> None:
        """Log or count a warning about a client, given as HOST:PORT."""
        if self._clock() - self._began >= INTERVAL_S:
            self.tell()
        host = client.rpartition(":")[0]
        if self._lines.total() < LINES_PER_INTERVAL and self._lines[host] < LINES_PER_HOST:
            self._lines[host] += 1
            events.warning(self._message, **fields, client=client, reason=reason)
            return
        self._untold[host if host in self._untold or len(self._untold) < _HOSTS_COUNTED else "others"] += 1
        self._last = str(reason)
        if self._timer is None:
            with contextlib.suppress(RuntimeError):  # without a loop the next warning or the end reports
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.tell)

    def tell(self) -> None:
        """Report the counted warnings and begin a new interval."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._untold:
            hosts = [f"{host} ({count})" for host, count in self._untold.most_common(_HOSTS_TOLD)]
            more = ["..."] if len(self._untold) > _HOSTS_TOLD else []
            events.warning(
                self._together,
                count=self._untold.total(),
                clients=", ".join(hosts + more),
                last_reason=self._last,
            )
        self._began = self._clock()
        self._lines.clear()
        self._untold.clear()
