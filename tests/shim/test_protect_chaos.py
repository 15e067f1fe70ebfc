"""A small chaos run; the big one is `make chaos-shim`."""

from __future__ import annotations

from tests.shim.chaos import Run


def test_random_faults_on_both_sides_lose_double_and_tear_nothing() -> None:
    run = Run(transactions=250, faults=50, seed=7, option="--protect", clients=4, kills=False)
    run.execute()
    print(run.report())
    assert run.wrong == []
    assert run.ended >= 250
    assert run.done >= 50
    assert all(ledger.committed and ledger.aborted for ledger in run.ledgers)
