"""Run the tests' part of the matrix: `SHORT`, with one fault in `make test`. `make matrix` runs all of it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.containers.matrix.__main__ import Clusters
from tests.containers.matrix.cells import (
    FAULTS,
    PROTOCOLS,
    SHORT,
    STAGES,
    STATES,
    STEPS,
    TARGETS,
    Cell,
    pairwise,
    product,
)
from tests.containers.matrix.run import Run, Size

pytestmark = pytest.mark.takes(168)


@pytest.mark.deep_for("*-whole", "kill-*")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [Size(10_000, faults=1), Size()], ids=["one fault", "whole"])
@pytest.mark.parametrize("cell", SHORT, ids=lambda cell: cell.name)
def test_matrix_cell_is_exactly_once(cell: Cell, size: Size, clusters: Clusters, tmp_path: Path) -> None:
    run = Run(clusters.of(cell.version), cell, 1, f"m{uuid.uuid4().hex[:8]}", tmp_path)
    outcome = run.play(size)
    print(*outcome.faults, f"{outcome.in_transaction} of them in a transaction", sep="\n")
    print(outcome.report, outcome.explanation, f"kept: {tmp_path}", sep="\n")
    outcome.report.raise_if_violated()  # A violation is final: no second try may replace it.
    assert outcome.records >= size.records
    assert len(outcome.faults) >= size.faults


def test_cover_has_every_pair_in_at_most_40_cells() -> None:
    cells = pairwise()
    assert len(cells) <= 40
    faults = [cell for cell in cells if cell.column == "faults"]
    dimensions = {"fault": FAULTS, "target": TARGETS, "protocol": PROTOCOLS, "stages": STAGES, "state": STATES}
    names = list(dimensions)
    examined = 0
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            for a in dimensions[first]:
                for b in dimensions[second]:
                    examined += 1
                    assert any(getattr(c, first) == a and getattr(c, second) == b for c in faults), (a, b)
    assert examined == 4 * 5 + 4 * 3 + 4 * 2 + 5 * 3 + 5 * 2 + 3 * 2 + 2 * (4 + 5 + 3 + 2)
    assert {cell.column for cell in cells} == {"faults", "K12", "K19"}
    assert set(cells) <= set(product())
    assert len(STEPS) == Size().faults, "K12 must move the coordinator once at each step"
