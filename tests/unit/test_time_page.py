"""Run each program of docs/howto/time.md on records, and compare the outputs with what the page says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import eos
from eos import Record
from eos.encoding.serde import encode
from eos.testing import Ran, advance, run
from tests.support.pages import DOCS, files_of

PAGE = DOCS / "howto" / "time.md"
MINUTE, HOUR = 60_000, 3_600_000


def app_of(file: str) -> eos.App:
    """Return the App of one of the page's files."""
    program: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    exec(compile(files_of(PAGE)[file], file, "exec"), program)
    (app,) = [value for value in program.values() if isinstance(value, eos.App)]
    return app


def records(topic: str, *events: tuple[int, Any]) -> list[Record]:
    """Return a record of each event: time in milliseconds and value."""
    return [Record(topic, 0, number, time_ms, b"key", encode(value)) for number, (time_ms, value) in enumerate(events)]


def sent(ran: Ran, topic: str) -> list[tuple[str, int]]:
    """Return the values and timestamps of the outputs to a topic."""
    return [((one.value or b"").decode(), one.timestamp) for one in ran.to(topic)]


def test_reminder_example_reports_an_abandoned_cart() -> None:
    ran = run(app_of("carts.py"), [*records("cart-events", (0, "book")), advance(30 * MINUTE)])
    assert sent(ran, "reminders") == [("key left book", 30 * MINUTE)]


def test_periodic_timer_example_fires_once_after_a_gap() -> None:
    ran = run(app_of("stations.py"), records("readings", (0, 5.5), (60_000, 6.0), (181 * MINUTE, 7.0)))
    assert sent(ran, "reports") == [("5.5, 0 reports missed", MINUTE), ("6.0, 179 reports missed", 2 * MINUTE)]


def test_hour_example_closes_an_hour_once_and_redirects_late_sales() -> None:
    events = (10 * MINUTE, 5), (59 * MINUTE, 1), (70 * MINUTE, 2), (58 * MINUTE, 3)
    ran = run(app_of("sales.py"), [*records("sales", *events), advance(5 * HOUR)])
    assert sent(ran, "hours") == [("00:00 6", HOUR - 1), ("01:00 2", 2 * HOUR - 1)]
    assert (sent(ran, "late-sales"), ran.late) == ([("3", 58 * MINUTE)], 1)
    assert ran.states == {"add": {"total": {}}}


def test_session_example_merges_overlapping_sessions() -> None:
    clicks = (0, "a"), (33 * MINUTE, "b"), (20 * MINUTE, "c")
    ran = run(app_of("visits.py"), [*records("clicks", *clicks), advance(68 * MINUTE)])
    assert sent(ran, "visits") == [("1:03:00: 3 clicks on a, b, c", 63 * MINUTE - 1)]


def test_daily_sums_example_handles_days_of_23_hours() -> None:
    def at(day: int, hour: int) -> int:
        return int(datetime(2026, 3, day, hour, tzinfo=UTC).timestamp() * 1000)

    # On 29 March the day in Zurich begins at 23:00 UTC and ends at 22:00 UTC.
    events = (at(28, 22), 1), (at(28, 23), 2), (at(29, 21), 4), (at(29, 22), 8), (at(29, 20), 16)
    ran = run(app_of("days.py"), [*records("sales", *events), advance(at(31, 0))])
    assert [value for value, _ in sent(ran, "sales-per-day")] == [
        "2026-03-28 1",
        "2026-03-29 6",
        "2026-03-29 16",  # the sale that came too late
        "2026-03-30 8",
    ]
    assert ran.to("sales-per-day")[1].timestamp == at(29, 22)


def test_payments_example_drops_duplicates_within_a_week() -> None:
    week = timedelta(days=7) // timedelta(milliseconds=1)
    one = {"id": "p1", "cents": 5}
    ran = run(app_of("payments.py"), records("payments", (0, one), (week - 1, one), (week, one)))
    assert sent(ran, "bookings") == [("5", 0), ("5", week)]
    assert (len(ran.to("payments-again")), ran.duplicates) == (1, 1)
