"""Explain a violation in a few lines: the input offset, the transactions that handled it, and their outcome.

Two independent sources are joined by time. The workers' step logs record their steps, and the coordinators' log
records what was decided. The first request of a transaction lies between its `begun` and `flushed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eos.testing.checker import Inputs, Outputs, Position, Report, join
from tests.containers.matrix.faults import Fault
from tests.containers.matrix.stage_worker import ENTRY, STEPS
from tests.containers.matrix.transaction_log import Written, clock

_ENTRIES = np.dtype(
    [("at_ns", "<i8"), ("transaction", "<i4"), ("step", "<i4"), ("partition", "<i4"), ("offset", "<i8")]
)
_UNFLUSHED_MS = 1_000
_CLOCKS_MS = 5  # Brokers and workers share one clock, which they read in milliseconds.


@dataclass
class Handling:
    """Hold one transaction of one worker, as its step log records it."""

    worker: str
    transaction: int
    steps: list[tuple[int, str]] = field(default_factory=list)  # (ns since 1970, name)

    def __str__(self) -> str:
        steps = ", ".join(f"{step} {clock(at_ns // 1_000_000)}" for at_ns, step in self.steps)
        last = self.steps[-1][1] if self.steps else "nothing"
        end = "committed" if last == "committed" else f"its last step was {last!r}"
        return f"transaction {self.transaction} of {self.worker} ({steps}): {end}"


def first_damaged(inputs: Inputs, outputs: Outputs, fan_out: int) -> tuple[int, int, str] | None:
    """Return (partition, offset, what) of the lowest input whose outputs do not exist exactly once."""
    joined = join(inputs, outputs, fan_out)
    wrong = np.flatnonzero(joined.times != 1)
    if not wrong.size:
        return None
    cell = int(wrong[0])
    row = cell // fan_out
    times = joined.times[row * fan_out : (row + 1) * fan_out]
    what = f"its outputs are visible {', '.join(map(str, times))} times"
    return int(joined.inputs.partition[row]), int(joined.inputs.offset[row]), what


def explain(
    inputs: Inputs,
    outputs: Outputs,
    fan_out: int,
    directory: Path,
    log: Sequence[Written],
    groups: Sequence[str],
    report: Report | None = None,
    origin: Callable[[Position], Position | None] = lambda position: None,
) -> str:
    """Explain the lowest damaged input; without one, explain the subject of the first failed rule.

    `groups`: the consumer group of each stage; `log`: the records of the coordinators; `origin`: the input from which a
    record between two stages was produced.
    """

    def explanation_of(position: Position) -> Iterator[str]:
        handlings = list(_handlings(directory, *position[1:]))
        for handling in handlings:
            yield f"  {handling}"
            yield from (f"    coordinator: {decided}" for decided in _decided(handling, log, groups))
        if not handlings:
            yield "  no transaction"

    damaged = first_damaged(inputs, outputs, fan_out)
    red = next((v for v in (report.verdicts if report else ()) if v.about), None)
    lines: list[str] = []
    if damaged is not None:
        partition, offset, what = damaged
        position = (inputs.topics[0], partition, offset)
        lines += [f"{_name(position)}: {what}; it was handled in", *explanation_of(position)]
    elif red is not None:
        lines.append(f"{red.rule}: {red.examples[0]}")
        for position in dict.fromkeys(red.about):
            source = position if position[0] == inputs.topics[0] else origin(position)
            if source is None:
                lines.append(f"{_name(position)}: the input that it comes from is unknown")
                continue
            made = "" if source == position else f", made of {_name(source)},"
            lines += [f"{_name(position)}{made} was handled in", *explanation_of(source)]
    else:
        lines.append("each input has its outputs exactly once")
    last = {written.transactional_id: written for written in log}
    lines += [f"still open: {written}" for written in last.values() if written.state == "Ongoing"]
    return "\n".join(lines)


def _name(position: Position) -> str:
    topic, partition, offset = position
    return f"{topic}[{partition}]@{offset}"


def _decided(handling: Handling, log: Sequence[Written], groups: Sequence[str]) -> Iterator[str]:
    """Return the outcome of the transaction that this worker began then, one line per possible producer."""
    _, stage, instance = handling.worker.split("-", 2)
    name = f"{groups[int(stage)]}-{instance.rpartition('-')[0]}"
    times = {step: at_ns // 1_000_000 for at_ns, step in handling.steps}
    first = times.get("begun", 0) - _CLOCKS_MS
    last = times.get("flushed", times.get("begun", 0) + _UNFLUSHED_MS) + _CLOCKS_MS
    lives: dict[tuple[str, int, int], list[Written]] = {}
    for written in log:
        if written.transactional_id.startswith(name) and first <= written.began_ms <= last:
            lives.setdefault((written.transactional_id, written.producer_id, written.began_ms), []).append(written)
    for (transactional_id, producer_id, _), found in lives.items():
        last_state = dict.fromkeys(f"{written.state} {clock(written.at_ms)}" for written in found)
        yield f"{transactional_id} producer {producer_id} epoch {found[0].epoch}: {', '.join(last_state)}"


def count_in_transaction(directory: Path, faults: Sequence[Fault]) -> int:
    """Count the faults that happened during an open transaction of a worker that they could hit."""
    steps = {}
    for step_log in directory.glob("*.steps"):
        written = np.frombuffer(step_log.read_bytes()[: step_log.stat().st_size // ENTRY.size * ENTRY.size], _ENTRIES)
        steps[step_log.stem] = written[written["step"] >= 0]
    return sum(
        any(_was_open(steps[name], fault.at_ns) for name in steps if fault.hits in (None, name)) for fault in faults
    )


def _was_open(steps: NDArray[np.void], at_ns: int) -> bool:
    last: dict[int, str] = {}
    end = int(np.searchsorted(steps["at_ns"], at_ns, "right"))
    # At most two transactions are unfinished, with six steps each. An older one without a commit was aborted.
    for entry in steps[max(0, end - 2 * len(STEPS)) : end]:
        last[int(entry["transaction"])] = STEPS[entry["step"]]
    return any(step not in ("begin", "committed") for _, step in sorted(last.items())[-2:])


def _entries(step_log: Path) -> Iterator[tuple[int, int, int, int, int]]:
    written = step_log.read_bytes()
    return ENTRY.iter_unpack(written[: len(written) // ENTRY.size * ENTRY.size])  # type: ignore[return-value]


def _handlings(directory: Path, partition: int, offset: int) -> Iterator[Handling]:
    for step_log in sorted(directory.glob("*.steps")):
        steps: dict[int, Handling] = {}
        touched: set[int] = set()
        for at_ns, transaction, step, of, at in _entries(step_log):
            if step >= 0:
                handling = steps.setdefault(transaction, Handling(step_log.stem, transaction))
                handling.steps.append((at_ns, STEPS[step]))
            elif (of, at) == (partition, offset):
                touched.add(transaction)
        yield from (steps[transaction] for transaction in sorted(touched))
