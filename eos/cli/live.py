"""The one live line of a terminal: records/s, transactions, lag to the last stable offset, aborts.

It only reads the worker's counters, at most a few times a second.
"""

from __future__ import annotations

import sys
import time
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_INTERVAL_S = 0.5


class LiveLine:
    """A context manager; `stream` is where log lines go so that they scroll above the line."""

    def __init__(self, enabled: bool) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if enabled else None
        self._worker: Any = None
        self._last = (time.monotonic(), 0)

    @property
    def stream(self) -> IO[str]:
        return sys.stderr

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def watch(self, worker: Any) -> None:
        self._worker = worker
        if self._live is not None:
            worker.session.on_idle = worker.on_tick = self._tick

    def _tick(self) -> None:
        now = time.monotonic()
        then, before = self._last
        if self._live is None or now - then < _INTERVAL_S:
            return
        counters = self._worker.session.counters
        rate = (counters.records_in - before) / (now - then)
        self._last = (now, counters.records_in)
        lag = self._worker.session.lag()
        text = Text.assemble(
            (f" {self._worker.app.id} ", "bold reverse"),
            f" {rate:>9,.0f} records/s   {counters.transactions:,} transactions   lag ",
            ("?" if lag is None else f"{lag:,}", "yellow" if lag else "green"),
            "   aborts ",
            (f"{counters.aborts + counters.rebuilds:,}", "red" if counters.aborts + counters.rebuilds else "green"),
        )
        self._live.update(text, refresh=True)
