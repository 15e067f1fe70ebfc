"""Each page of docs/howto/migrate has both programs, and ours does the job. tests/broker/test_migrations.py moves."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import eos.testing
from tests.support.migrations import OURS, PAGES, SETTINGS, THEIRS, programs_of

STATEFUL = {"from-faust", "from-kafka-streams", "from-quix"}
RECORDS = [("orders", {"id": 1, "customer": "ada", "cents": 250, "quantity": 3}), ("orders", "no JSON")]


def test_all_migration_pages_are_tested() -> None:
    assert {path.stem for path in PAGES.glob("from-*.md")} == set(THEIRS)


@pytest.mark.parametrize("page", THEIRS)
def test_page_shows_the_old_program_before_the_eos_one(page: str) -> None:
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
