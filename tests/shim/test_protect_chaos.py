"""Run a small part of the chaos; `make chaos-shim` runs all of it."""

from __future__ import annotations

import re

import pytest

from tests.shim.chaos import Run

pytestmark = pytest.mark.takes(91)


def test_random_faults_lose_and_duplicate_nothing() -> None:
    run = Run(transactions=150, faults=30, seed=7, option="--protect", clients=4, kills=False)
    run.execute()
    print(run.report())
    assert run.wrong == []
    assert run.ended >= 150
    assert run.done >= 30
    assert all(ledger.committed and ledger.aborted for ledger in run.ledgers)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_chaos_without_protection_loses_and_duplicates_records() -> None:
    """Run without protection, to show that the chaos finds losses."""
    run = Run(
        transactions=1_500, faults=500, seed=20261121, option="--no-protect", clients=8, kills=True, at_most_s=400
    )
    run.execute()
    print(run.report())
    wrong = " ".join(run.wrong)
    assert re.search(r"lost \[\d", wrong), wrong
    assert re.search(r"doubled \[\d", wrong), wrong
