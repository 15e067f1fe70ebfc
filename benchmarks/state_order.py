"""Measure ordered access to the state of one key, in microseconds per record, with 1,000 to 100,000 entries there.

Each shape runs on values in memory, in LMDB and in RocksDB, without a broker: `python -m benchmarks.state_order`, or
with names of shapes and engines. The time is that of the function, its state and the commit into the values.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from eos import App, ListState, MapState, Out, Record
from eos.app.cells import cell_of
from eos.app.state import FIELDS
from eos.engine.handling import Collector, Handler
from eos.state.engines import ENGINES
from eos.state.folders import InFolder
from eos.state.tasks import Task
from eos.state.values import InMemory, Values

SIZES = (1_000, 10_000, 100_000)
RECORDS = 2_000  # measured of each shape that is not one transaction
PER_TRANSACTION = 200
_PER_FILL = 10_000
_NUMBER = FIELDS[int][0]


def short_list(value: int, held: ListState[int]) -> None:
    held.append(value)
    while len(held) > 3:
        held.popleft()


def growing_list(value: int, held: ListState[int]) -> None:
    held.append(value)


def queue(value: int, held: ListState[int]) -> None:
    held.append(value)
    held.popleft()


def timers(value: int, held: MapState[int, int]) -> None:
    held[value] = value
    del held[next(iter(held))]


def due_timers(value: int, held: MapState[int, int]) -> None:
    """Set one, and fire what is due."""
    held[value] = value
    for due, _ in held.range(stop=value - 2):
        del held[due]


def growing_map(value: int, held: MapState[int, int]) -> str:
    held[value] = value
    return f"{next(iter(held))}"


def refilled(value: int, held: ListState[int]) -> None:
    """A hundred in, a hundred out."""
    if value % 200 < 100:
        held.append(value)
    else:
        held.popleft()


def refilled_map(value: int, held: MapState[int, int]) -> None:
    if value % 200 < 100:
        held[value] = value
    else:
        del held[next(iter(held))]


def batch(records: list[Record], held: dict[bytes, ListState[int]]) -> list[Out]:
    every = held[b"hot"]
    for number in range(len(records)):
        every.append(number)
        if number >= 3:
            every.popleft()
    return []


class Shape(NamedTuple):
    function: Callable[..., object]
    left: int | None  # of the entries before; None: all
    once: bool = False  # as many records as entries, in one transaction


SHAPES = {
    "list of three": Shape(short_list, 3),
    "list that grows": Shape(growing_list, None),
    "queue": Shape(queue, None),
    "map, first deleted": Shape(timers, None),
    "map, due deleted": Shape(due_timers, 2),
    "map that grows": Shape(growing_map, None),
    "queue refilled": Shape(refilled, 0),
    "map refilled": Shape(refilled_map, 0),
    "one transaction": Shape(short_list, 0, once=True),
    "one batch call": Shape(batch, 0, once=True),
}


def values_of(engine: str, base: Path) -> Values:
    if engine == "memory":
        return InMemory()
    folder = InFolder.of(base, "task", "id", engine=ENGINES[engine])
    assert folder is not None
    return folder


def fill(values: Values, entries: int, left: int) -> None:
    """Write `entries` entries and delete all but the last `left`."""
    cells = [cell_of("held", b"hot", _NUMBER(number)) for number in range(entries)]
    for at in range(0, entries, _PER_FILL):
        values.apply(dict.fromkeys(cells[at : at + _PER_FILL], b"1"), 0, 0.0)
    gone = cells[: entries - left]
    for at in range(0, len(gone), _PER_FILL):
        values.apply(dict.fromkeys(gone[at : at + _PER_FILL]), 0, 0.0)


def measure(shape: Shape, engine: str, size: int) -> float:
    app = App("order")
    many = shape.function is batch
    (app.process_batch if many else app.process)("in", to="out")(shape.function)
    with tempfile.TemporaryDirectory() as folder:
        values = values_of(engine, Path(folder))
        if not shape.once:
            fill(values, size, size if shape.left is None else shape.left)
        task = Task(values)
        handler = Handler(app, batch_most=size if many else 5_000, cells_of=lambda _: lambda record: task)
        records = list(records_from(0 if shape.once else size, size if shape.once else RECORDS))
        per = len(records) if shape.once else PER_TRANSACTION
        commit(handler, task, [] if shape.once else records_from(size - 200, 1))
        began = time.perf_counter()
        for at in range(0, len(records), per):
            commit(handler, task, records[at : at + per])
        took = time.perf_counter() - began
        values.close()
    return took / len(records) * 1e6


def records_from(first: int, many: int) -> Iterator[Record]:
    return (Record("in", 0, n, 1, b"hot", b"%d" % n) for n in range(first, first + many))


def commit(handler: Handler, task: Task, records: list[Record] | Iterator[Record]) -> None:
    halt = handler.handle(Collector(), list(records))
    if halt is not None and halt.error is not None:
        raise halt.error
    task.committed(0.0)


def main(words: list[str]) -> None:
    shapes = [name for name in SHAPES if name in words] or list(SHAPES)
    engines = [name for name in ("memory", *ENGINES) if name in words] or ["memory", *ENGINES]
    print(f"{'us per record':20}{'':10}" + "".join(f"{size:>10,}" for size in SIZES))
    for name in shapes:
        for engine in engines:
            found = [measure(SHAPES[name], engine, size) for size in SIZES]
            print(f"{name:20}{engine:10}" + "".join(f"{each:>10.1f}" for each in found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
