"""Says why connections ended, in a number of lines that no client decides.

Owns that number: the first endings in each interval have a line each, the others are counted and told together, by
client and with the last reason. It must never let one be untold.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from eos.shim import events

INTERVAL_S = 60.0
LINES_PER_INTERVAL = 50
LINES_PER_HOST = 10
_HOSTS_COUNTED = 1_000
_HOSTS_TOLD = 5


class Complaints:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lines: Counter[str] = Counter()  # by host
        self._untold: Counter[str] = Counter()
        self._last = ""

    @property
    def waiting(self) -> bool:
        return bool(self._untold)

    def closed(self, connection: int, client: str, by: str, reason: object) -> None:
        if self._clock() - self._began >= INTERVAL_S:
            self.tell()
        host = client.rpartition(":")[0]
        if self._lines.total() < LINES_PER_INTERVAL and self._lines[host] < LINES_PER_HOST:
            self._lines[host] += 1
            events.warning("connection closed", connection=connection, client=client, by=by, reason=reason)
            return
        self._untold[host if host in self._untold or len(self._untold) < _HOSTS_COUNTED else "others"] += 1
        self._last = str(reason)

    def tell(self) -> None:
        """What was not told yet; a new interval begins."""
        if self._untold:
            hosts = [f"{host} ({count})" for host, count in self._untold.most_common(_HOSTS_TOLD)]
            more = ["..."] if len(self._untold) > _HOSTS_TOLD else []
            events.warning(
                "more connections closed",
                count=self._untold.total(),
                clients=", ".join(hosts + more),
                last_reason=self._last,
            )
        self._began = self._clock()
        self._lines.clear()
        self._untold.clear()
