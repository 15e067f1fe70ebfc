"""Each page of docs/howto/migrate has both programs, and ours does the job. tests/broker/test_migrations.py moves."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import eos.testing
from eos import Record
from eos.testing import advance, run
from tests.support.migrations import OURS, PAGES, SETTINGS, THEIRS, WITH_TIME, programs_of, timed_programs_of

STATEFUL = {"from-faust", "from-kafka-streams", "from-quix"}
RECORDS = [("orders", {"id": 1, "customer": "ada", "cents": 250, "quantity": 3}), ("orders", "no JSON")]


def test_all_migration_pages_are_tested() -> None:
    assert {path.stem for path in PAGES.glob("from-*.md")} == {*THEIRS, *WITH_TIME}


@pytest.mark.parametrize("page", THEIRS)
def test_migration_page_has_the_old_program_before_the_eos_program(page: str) -> None:
    assert [name for name in programs_of(page) if name != SETTINGS] == [THEIRS[page], OURS]


@pytest.mark.parametrize("page", THEIRS)
def test_eos_program_of_a_page_works(page: str, tmp_path: Path) -> None:
    path = tmp_path / OURS
    path.write_text(programs_of(page)[OURS])
    program = runpy.run_path(str(path))
    ran = eos.testing.run(program["app"], RECORDS)
    (sent,) = ran.to("order-totals")
    assert (sent.key, sent.value) == (b"ada", b'{"customer":"ada","cents":750}')
    assert ran.values("orders.dlq") == [b"no JSON"]
    assert ("sums" in program) == (page in STATEFUL)
    if page in STATEFUL:
        ran = eos.testing.run(program["sums"], [("order-totals", sent.value, sent.key)] * 2)
        assert [sent.key for sent in ran.to("customer-totals-2")] == [b"ada"] * 2
        assert ran.values("customer-totals-2") == [
            b'{"customer":"ada","cents":750}',
            b'{"customer":"ada","cents":1500}',
        ]


# ---- windows and timers ------------------------------------------------------------------------------------------

MINUTE = 60_000
SALES = [
    Record("sales", 0, offset, minute * MINUTE, shop, cents)
    for offset, (shop, cents, minute) in enumerate(
        [(b"a", b"5", 10), (b"b", b"1", 15), (b"a", b"7", 65), (b"a", b"1", 59), (b"a", b"2", 70), (b"a", b"3", 58)]
    )
]
"""The last one comes after its hour has closed."""
HOURS = {
    "from-faust": [b"0 6", b"0 1", b"3600 9"],
    "from-kafka-streams": [b"1970-01-01T00:00:00Z 6", b"1970-01-01T00:00:00Z 1", b"1970-01-01T01:00:00Z 9"],
    "from-quix": [
        b'{"start":0,"end":3600000,"value":6}',
        b'{"start":0,"end":3600000,"value":1}',
        b'{"start":3600000,"end":7200000,"value":9}',
    ],
}


def program_with_time(page: str) -> dict[str, Any]:
    """Run our program with windows or timers, and compile theirs if it is Python."""
    programs = timed_programs_of(page)
    assert tuple(programs) == WITH_TIME[page]
    theirs, ours = programs
    if theirs.endswith(".py"):
        compile(programs[theirs], theirs, "exec")
    program: dict[str, Any] = {"__name__": ours.removesuffix(".py")}
    exec(compile(programs[ours], ours, "exec"), program)
    return program


@pytest.mark.parametrize("page", HOURS)
def test_eos_program_with_windows_of_a_page_works(page: str) -> None:
    ran = run(program_with_time(page)["hours"], [*SALES, advance(200 * MINUTE)])
    assert ran.values("hours-2") == HOURS[page]
    assert ran.late == 1


def test_eos_program_with_timers_replaces_a_punctuator() -> None:
    ran = run(program_with_time("from-kafka-streams")["silence"], [*SALES, advance(200 * MINUTE)])
    silent = [(sent.key, sent.value, sent.timestamp // MINUTE) for sent in ran.to("silent-shops-2")]
    assert silent == [(b"b", b"silent", 75), (b"a", b"silent", 118)]


def test_eos_program_with_timers_replaces_a_keyed_process_function() -> None:
    events = [("ann", "book", 0), ("ann", "pen", 5), ("bob", "cup", 6), ("bob", "checkout", 7), ("cyd", "hat", 60)]
    records = [
        Record(
            "cart-events",
            0,
            n,
            minute * MINUTE,
            who.encode(),
            b'{"customer":"%b","item":"%b"}' % (who.encode(), item.encode()),
        )
        for n, (who, item, minute) in enumerate(events)
    ]
    ran = run(program_with_time("from-flink")["app"], records)
    assert [(sent.key, sent.value, sent.timestamp // MINUTE) for sent in ran.to("reminders-2")] == [
        (b"ann", b"ann left book, pen", 35)
    ]
