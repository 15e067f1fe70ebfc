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
_HOSTS_LISTED = 5


class LimitedWarnings:
    """Log `message` for each warning up to the limit, and `summary` for the counted ones."""

    def __init__(self, message: str, summary: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._message, self._summary, self._clock = message, summary, clock
        self._began = clock()
        self._lines: Counter[str] = Counter()  # by host
        self._suppressed: Counter[str] = Counter()
        self._last_reason = ""
        self._timer: asyncio.TimerHandle | None = None

    def warn(self, client: str, reason: object, **fields: Any) -> None:
        """Log or count a warning about a client, given as HOST:PORT."""
        if self._clock() - self._began >= INTERVAL_S:
            self.flush()
        host = client.rpartition(":")[0]
        if self._lines.total() < LINES_PER_INTERVAL and self._lines[host] < LINES_PER_HOST:
            self._lines[host] += 1
            events.warning(self._message, **fields, client=client, reason=reason)
            return
        self._suppressed[host if host in self._suppressed or len(self._suppressed) < _HOSTS_COUNTED else "others"] += 1
        self._last_reason = str(reason)
        if self._timer is None:
            # Without a loop, the next warning or the end of the shim reports the counts.
            with contextlib.suppress(RuntimeError):
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Report the counted warnings and begin a new interval."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._suppressed:
            hosts = [f"{host} ({count})" for host, count in self._suppressed.most_common(_HOSTS_LISTED)]
            more = ["..."] if len(self._suppressed) > _HOSTS_LISTED else []
            events.warning(
                self._summary,
                count=self._suppressed.total(),
                clients=", ".join(hosts + more),
                last_reason=self._last_reason,
            )
        self._began = self._clock()
        self._lines.clear()
        self._suppressed.clear()
