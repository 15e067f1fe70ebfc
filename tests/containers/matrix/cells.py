"""List the cells of the matrix: which fault hits which target, with how many stages and which group protocol.

No I/O. All combinations are 240 cells; `pairwise` is a cover in which every two values of two dimensions meet. The
columns K12 (the coordinator moves at each step of a transaction) and K19 (an output partition is unavailable) have
their own cells.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from allpairspy import AllPairs

FAULTS = ("kill", "stop", "pause", "cut")
TARGETS = ("worker", "leader", "transaction-coordinator", "group-coordinator", "controller")
STAGES = (1, 3)
STATES = (False, True)
PROTOCOLS = ("classic-3.9.2", "classic-4.4.0", "consumer-4.4.0")
STEPS = ("begun", "flush", "flushed", "offsets sent", "committed")
"""Where K12 moves the coordinator: the names of the steps of one transaction (World.step)."""

LEADERLESS, SILENT = "leaderless", "silent"
"""The two ways of K19. Either the only replica is stopped and the partition has no leader, or the replica is paused
for
less than its broker's session, and stays the leader without answering."""
COLUMNS = {"move": "K12", LEADERLESS: "K19", SILENT: "K19"}

KNOWN_DEFECTS = {
    (
        LEADERLESS,
        "4.4.0",
    ): "a defect of this Kafka: its coordinator skips the markers of partitions without a leader "
    "(docs/explanation/guarantees.md, known limits)",
}
"""(fault, version of Kafka) -> why no client can pass. Newer versions, which are not listed, run again."""


@dataclass(frozen=True)
class Cell:
    fault: str
    target: str
    protocol: str
    stages: int
    state: bool = False
    """Whether the last stage's function counts by key, and adds the count to its outputs."""

    @property
    def name(self) -> str:
        state = " state" if self.state else ""
        return f"{self.fault} {self.target} {self.protocol} {self.stages}{state}".replace(" ", "-")

    @property
    def version(self) -> str:
        return self.protocol.rpartition("-")[2]

    @property
    def group_protocol(self) -> str:
        return self.protocol.partition("-")[0]

    @property
    def column(self) -> str:
        return COLUMNS.get(self.fault, "faults")

    @property
    def why_not(self) -> str | None:
        """Return why the cell must not run, or None."""
        return KNOWN_DEFECTS.get((self.fault, self.version))


def pairwise() -> list[Cell]:
    """Return a cover of all pairs of two dimensions, and K12 and K19 for each protocol, with cells of a version in a
    row."""
    chosen = [
        Cell(fault, target, protocol, stages, state)
        for target, fault, protocol, stages, state in AllPairs([TARGETS, FAULTS, PROTOCOLS, STAGES, STATES])
    ]
    return _ordered(chosen + _columns())


def product() -> list[Cell]:
    """Return all cells."""
    every = itertools.product(FAULTS, TARGETS, PROTOCOLS, STAGES, STATES)
    return _ordered([Cell(*values) for values in every] + _columns())


def _columns() -> list[Cell]:
    moved = [Cell("move", "transaction-coordinator", protocol, 1) for protocol in PROTOCOLS]
    away = [Cell(fault, "output-partition", protocol, 1) for protocol in PROTOCOLS for fault in (LEADERLESS, SILENT)]
    return moved + away


def _ordered(cells: list[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: PROTOCOLS.index(cell.protocol))


SHORT = (
    Cell("kill", "transaction-coordinator", "classic-4.4.0", 3, state=True),
    Cell("cut", "leader", "consumer-4.4.0", 1),
)
"""The cells that tests run: both protocols, both numbers of stages."""
