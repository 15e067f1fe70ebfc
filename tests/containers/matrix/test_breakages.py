"""The matrix can fail: each rule of the product, taken out in the worker, is found by the verdict that must find it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.containers.matrix.__main__ import Clusters
from tests.containers.matrix.breakages import ALL
from tests.containers.matrix.cells import Cell
from tests.containers.matrix.run import Run, Size

# A fault that makes use of what is missing. A run that never needed the rule finds nothing and fails here too.
WHERE = {
    "offsets outside the transaction": Cell("kill", "worker", "classic-4.3.1", 1),
    "rewind missing": Cell("pause", "transaction-coordinator", "classic-4.3.1", 1),
    "rewind to the committed offset": Cell("pause", "transaction-coordinator", "classic-4.3.1", 1),
    "no ownership check": Cell("pause", "worker", "classic-4.3.1", 1),
    "metadata of nobody": Cell("pause", "worker", "classic-4.3.1", 1),
    "outputs before the function returned": Cell("stop", "worker", "classic-4.3.1", 1),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ALL))
def test_a_rule_that_is_taken_out_is_found_by_the_verdict_that_must_find_it(
    name: str, clusters: Clusters, tmp_path: Path
) -> None:
    breakage, cell = ALL[name], WHERE[name]
    red: set[str] = set()
    # A fault may miss the moment in which the rule matters: other seeds, until one has hit it.
    for seed in range(1, 4):
        directory = tmp_path / str(seed)
        directory.mkdir()
        prefix = f"m{uuid.uuid4().hex[:8]}"
        outcome = Run(clusters.of(cell.version), cell, seed, prefix, directory, breakage=name).play(Size(60_000, 5))
        print(f"seed {seed}:", *outcome.faults, outcome.report, outcome.explanation, sep="\n")
        red |= set(outcome.report.violated)
        if red:
            break
    assert red & breakage.expected, f"{breakage.what}: expected one of {set(breakage.expected)} to be red, found {red}"
