"""Draw the live view of a terminal: one line for a worker, a table for a supervisor's workers.

The view only reads statuses (eos/health), a few times a second, and never asks a worker's thread for anything.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eos import log
from eos.health.status import Status

_INTERVAL_S = 0.5


class Rates:
    """Compute the records per second of each worker between two readings. A restarted worker counts from zero."""

    def __init__(self) -> None:
        self._last_readings: dict[str, tuple[float, int]] = {}
        self._rate: dict[str, float] = {}

    def of(self, status: Status) -> float:
        at, before = self._last_readings.get(status.instance, (status.started_at, 0))
        if status.at - at >= _INTERVAL_S:
            gained = status.records_in - before if status.records_in >= before else status.records_in
            self._rate[status.instance] = gained / (status.at - at)
            self._last_readings[status.instance] = (status.at, status.records_in)
        return self._rate.get(status.instance, 0.0)


@contextlib.contextmanager
def live_view(
    statuses: Callable[[], list[Status]], render: Callable[[list[Status], Rates], RenderableType]
) -> Iterator[None]:
    """Draw on stderr twice a second, on a separate thread. Log lines scroll above the view."""
    rates = Rates()
    live = Live(
        console=Console(stderr=True),
        get_renderable=lambda: render(statuses(), rates),
        refresh_per_second=1 / _INTERVAL_S,
        transient=True,
    )
    with live:
        log.redirect(sys.stderr)  # rich has replaced sys.stderr by its own stream
        try:
            yield
        finally:
            log.redirect(sys.__stderr__)


def _lag(status: Status) -> Text:
    if not status.lags:
        return Text("-", "dim")
    lag = status.lag
    return Text("?" if lag is None else f"{lag:,}", "yellow" if lag else "green")


def _failures(status: Status) -> Text:
    count = sum(status.aborts.values()) + sum(status.rebuilds.values())
    return Text(f"{count:,}", "red" if count else "green")


def line(statuses: list[Status], rates: Rates) -> Text:
    """Render one worker as one line."""
    (status,) = statuses
    head = f" {rates.of(status):>9,.0f} records/s   {status.transactions:,} transactions   lag "
    shown = Text.assemble((f" {status.app} ", "bold reverse"), head, _lag(status), "   aborts ", _failures(status))
    if status.states:
        shown.append(f"   state {sum(state.values for state in status.states):,} values")
    for name, count in (("late", status.late), ("duplicates", status.duplicates)):
        if count:
            shown.append(f"   {name} {count:,}")
    if not status.ready:
        shown.append(f"   {status.reason}", "red" if not status.live else "yellow")
    return shown


def table(statuses: list[Status], rates: Rates) -> Table:
    """Render one row per worker."""
    shown = Table(expand=False, header_style="bold", border_style="dim")
    shown.add_column("worker", no_wrap=True)
    for name in ("records/s", "transactions", "lag", "aborts", "restarts"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("state")  # the only column that may wrap
    for status in statuses:
        style = "green" if status.ready else "yellow" if status.live else "red"
        restarts = Text(f"{status.restarts:,}", "red" if status.restarts else "green")
        numbers = (f"{rates.of(status):,.0f}", f"{status.transactions:,}", _lag(status), _failures(status), restarts)
        shown.add_row(status.instance, *numbers, Text(status.reason, style))
    return shown
