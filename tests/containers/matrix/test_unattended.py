"""Let the matrix run unattended for an hour: a problem of one cell becomes one row of the table."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eos.errors import Unavailable
from eos.testing.clusters import Cluster
from tests.containers.matrix import faults
from tests.containers.matrix.__main__ import (
    FAILED,
    NOT_RUN,
    PASSED,
    TO_BE_RUN,
    Clusters,
    Result,
    known,
    play,
    prefix_of,
    was_run,
    write_table,
)
from tests.containers.matrix.cells import pairwise
from tests.containers.matrix.run import Size
from tests.containers.matrix.stage_worker import Orders
from tests.containers.matrix.workers import Workers


class WithoutAnEngine(Clusters):
    def of(self, version: str) -> Cluster:
        raise ConnectionError("the engine went away")


def test_cell_that_raises_gets_a_row_and_later_cells_run(tmp_path: Path) -> None:
    cells = pairwise()
    result = play(WithoutAnEngine("jvm"), cells[0], 7, Size(), tmp_path / "logs")
    assert (result.result, result.reason) == (FAILED, "ConnectionError: the engine went away")
    assert "the engine went away" in (tmp_path / "logs" / "traceback.txt").read_text()

    (tmp_path / f"{cells[0].name}.json").write_text(json.dumps(dataclasses.asdict(result)))
    rows = write_table(tmp_path, cells, seed=7)
    assert rows[0] == result
    assert [(row.result, row.reason) for row in rows[1:]] == [(NOT_RUN, TO_BE_RUN)] * (len(cells) - 1)
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len(cells)


def no_orders(stage: int, instance: str) -> Orders:
    raise AssertionError(f"there is no worker {instance} of stage {stage}")


def test_slow_broker_start_is_reported_and_awaited(tmp_path: Path) -> None:
    """Simulate a slow start of a broker; tests/containers/test_clusters.py has a real one."""
    asked: list[str] = []

    def slowly(what: str) -> Callable[..., None]:
        def ask(*_: object) -> None:
            asked.append(what)
            if len(asked) < 3:
                raise Unavailable("it answers late")

        return ask

    cluster: Any = SimpleNamespace(running=lambda _: bool(asked), start=slowly("start"), wait_ready=slowly("ready"))
    made = faults.Faults(cluster, Workers(no_orders, tmp_path), random.Random(1), lambda _: None)
    made.start_again(0)
    assert asked == ["start", "ready", "ready"]
    assert [line.partition(" s: ")[2] for line in made.slow] == ["node 0: it answers late"] * 2


PLAYED = Result("c", "faults", PASSED, 7, "jvm", "2026-11-22", records=100_000, faults=["x"] * 5)


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"result": FAILED, "records": 0, "faults": []}, True),  # `--failed` runs it again.
        ({"result": NOT_RUN}, False),
        ({"records": 99_999}, False),
        ({"faults": ["x"] * 4}, False),
        ({"seed": 8}, False),
    ],
)
def test_finished_cells_are_not_run_again(changes: dict[str, Any], is_kept: bool, tmp_path: Path) -> None:
    cell = pairwise()[0]
    found = dataclasses.replace(PLAYED, **changes)
    (tmp_path / f"{cell.name}.json").write_text(json.dumps(dataclasses.asdict(found)))
    assert was_run(known(tmp_path, cell, seed=7), Size()) == is_kept


def test_seed_decides_names_and_coordinator_nodes() -> None:
    first, second, *_ = pairwise()
    assert prefix_of(first, 1) == prefix_of(first, 1)
    assert len({prefix_of(first, 1), prefix_of(first, 2), prefix_of(second, 1)}) == 3
