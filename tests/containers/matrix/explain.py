"""The shortest explanation of a violation: which input offset, which transactions handled it, what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eos.testing.checker import Inputs, Outputs, join
from tests.containers.matrix.stage_worker import ENTRY, STEPS


@dataclass
class Handling:
    """One transaction of one worker, as its diary tells."""

    worker: str
    transaction: int
    steps: list[tuple[float, str]] = field(default_factory=list)

    def __str__(self) -> str:
        told = ", ".join(f"{step} {at:.3f}" for at, step in self.steps)
        last = self.steps[-1][1] if self.steps else "nothing"
        end = "committed" if last == "committed" else f"its last step was {last!r}"
        return f"transaction {self.transaction} of {self.worker} ({told}): {end}"


def first_damaged(inputs: Inputs, outputs: Outputs, fan_out: int) -> tuple[int, int, str] | None:
    """(partition, offset, what) of the lowest input whose outputs are not there exactly once."""
    joined = join(inputs, outputs, fan_out)
    wrong = np.flatnonzero(joined.times != 1)
    if not wrong.size:
        return None
    cell = int(wrong[0])
    row = cell // fan_out
    times = joined.times[row * fan_out : (row + 1) * fan_out]
    what = f"its outputs are visible {', '.join(map(str, times))} times"
    return int(joined.inputs.partition[row]), int(joined.inputs.offset[row]), what


def explain(inputs: Inputs, outputs: Outputs, fan_out: int, directory: Path) -> str:
    damaged = first_damaged(inputs, outputs, fan_out)
    if damaged is None:
        return "each input has its outputs exactly once"
    partition, offset, what = damaged
    lines = [f"{inputs.topics[0]}[{partition}]@{offset}: {what}; it was handled in"]
    lines += [f"  {handling}" for handling in _handlings(directory, partition, offset)] or ["  no transaction"]
    return "\n".join(lines)


def in_transaction(directory: Path, at_ns: int, process: str | None) -> bool:
    """Whether a worker (`process`, or any) had a transaction open at that time, as the diaries tell."""
    for diary in directory.glob(f"{process or '*'}.diary"):
        last: dict[int, str] = {}
        for when_ns, transaction, step, _, _ in _entries(diary):
            if step >= 0 and when_ns <= at_ns:
                last[transaction] = STEPS[step]
        # At most two are on their way; an older one without a commit was aborted.
        if any(step not in ("begin", "committed") for _, step in sorted(last.items())[-2:]):
            return True
    return False


def _entries(diary: Path) -> Iterator[tuple[int, int, int, int, int]]:
    written = diary.read_bytes()
    return ENTRY.iter_unpack(written[: len(written) // ENTRY.size * ENTRY.size])  # type: ignore[return-value]


def _handlings(directory: Path, partition: int, offset: int) -> Iterator[Handling]:
    for diary in sorted(directory.glob("*.diary")):
        steps: dict[int, Handling] = {}
        touched: set[int] = set()
        for at_ns, transaction, step, of, at in _entries(diary):
            if step >= 0:
                handling = steps.setdefault(transaction, Handling(diary.stem, transaction))
                handling.steps.append((at_ns / 1e9 % 10_000, STEPS[step]))
            elif (of, at) == (partition, offset):
                touched.add(transaction)
        yield from (steps[transaction] for transaction in sorted(touched))
