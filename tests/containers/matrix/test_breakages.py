"""Check that the matrix can fail: the expected verdict finds each rule that is removed in the worker."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.containers.matrix.__main__ import Clusters
from tests.containers.matrix.breakages import ALL
from tests.containers.matrix.run import Run, Size

RECORDS, RECORDS_PER_S = 10_000, 500


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ALL))
def test_checks_fail_when_a_rule_of_the_engine_is_removed(name: str, single_nodes: Clusters, tmp_path: Path) -> None:
    breakage = ALL[name]
    red: list[set[str]] = []
    # A fault may miss the moment in which the rule matters, so try other seeds until one hits it.
    for seed in range(1, 4):
        directory = tmp_path / str(seed)
        directory.mkdir()
        prefix = f"m{uuid.uuid4().hex[:8]}"
        run = Run(single_nodes.of(breakage.cell.version), breakage.cell, seed, prefix, directory, breakage=name)
        outcome = run.play(Size(RECORDS, breakage.faults, records_per_s=RECORDS_PER_S))
        print(f"seed {seed}:", *outcome.faults, outcome.report, outcome.explanation, sep="\n")
        red.append(set(outcome.report.violated))
        if red[-1] >= breakage.expected:
            break
    assert red[-1] >= breakage.expected, f"{breakage.what}: {set(breakage.expected)} must fail, but these failed: {red}"
