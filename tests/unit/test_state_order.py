"""Ordered maps and lists: they behave like a dict and a list, and cost the same with many entries as with few."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import eos
from benchmarks.state_order import SHAPES, Shape, values_of
from eos import App, ListState, MapState, Record, State
from eos.app.cells import cell_of, encode_key
from eos.app.layers import Bounds, Overlay, Span, Value
from eos.app.state import CompiledStore, Store
from eos.engine.handling import Collector, Handler
from eos.state import tasks
from eos.state.engines import ENGINES
from eos.state.tasks import Task
from eos.state.values import InMemory

MAP = CompiledStore(Store("map", MapState, (int, int)))
LIST = CompiledStore(Store("list", ListState, (int,)))
ROW = cell_of("map", b"k")


# ---- the same as a dict and a list -----------------------------------------------------------------------------------


class Walk:
    """Run random steps on a map and a list of state, and the same on a dict and a list."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.map: dict[int, int] = {}
        self.list: list[int] = []
        self.top = 0

    def step(self, each: MapState[int, int], every: ListState[int]) -> None:
        chosen = self.random.choice(
            [self.set, self.set_next, self.delete, self.first, self.due, self.last, self.read, self.put_back]
        )
        chosen(each)
        self.random.choice([self.append, self.append, self.popleft, self.clear_list, self.read_list])(every)
        if self.random.random() < 0.02:
            each.clear()
            self.map.clear()

    def key(self) -> int:
        return self.random.randrange(-3, self.top + 3)

    def set(self, each: MapState[int, int]) -> None:
        key = self.key()
        each[key] = self.map[key] = self.random.randrange(9)

    def set_next(self, each: MapState[int, int]) -> None:
        """Set many entries at the end: more than are sorted each time."""
        for _ in range(self.random.choice([1, 1, 40])):
            self.top += 1
            each[self.top] = self.map[self.top] = self.random.randrange(9)

    def delete(self, each: MapState[int, int]) -> None:
        key = self.random.choice(sorted(self.map)) if self.map else self.key()
        assert each.pop(key, None) == self.map.pop(key, None)

    def first(self, each: MapState[int, int]) -> None:
        for _ in range(self.random.choice([1, 1, 50])):
            assert next(iter(each), None) == min(self.map, default=None)
            if self.map:
                del each[min(self.map)], self.map[min(self.map)]

    def due(self, each: MapState[int, int]) -> None:
        """Delete and set during an iteration: new later entries may appear, unchanged entries must."""
        stop, met = self.key(), []
        there = {key: value for key, value in self.map.items() if key < stop}
        for key, value in each.range(stop=stop):
            met.append(key)
            assert self.map[key] == value
            del each[key], self.map[key]
            if self.random.random() < 0.2:
                new = self.key()
                each[new] = self.map[new] = 1
        assert met == sorted(met)
        assert there.keys() <= set(met)

    def last(self, each: MapState[int, int]) -> None:
        for _ in range(self.random.choice([1, 1, 50])):
            found = next(each.range(reverse=True), None)
            assert found == max(self.map.items(), default=None)
            if found is not None:
                del each[found[0]], self.map[found[0]]

    def read(self, each: MapState[int, int]) -> None:
        start, stop = self.random.choice([None, self.key()]), self.random.choice([None, self.key()])
        wanted = [
            (key, value)
            for key, value in sorted(self.map.items())
            if (start is None or key >= start) and (stop is None or key < stop)
        ]
        assert list(each.range(start, stop)) == wanted
        assert list(each.range(start, stop, reverse=True)) == wanted[::-1]

    def put_back(self, each: MapState[int, int]) -> None:
        """Delete while all are listed, not in the iteration, and set one of them again."""
        for key in list(each):
            del each[key]
        if self.map:
            key = self.random.choice(sorted(self.map))
            each[key] = 7
            self.map = {key: 7}

    def append(self, every: ListState[int]) -> None:
        more = [self.random.randrange(9) for _ in range(self.random.choice([1, 1, 40]))]
        every.extend(more)
        self.list += more

    def popleft(self, every: ListState[int]) -> None:
        for _ in range(self.random.choice([1, 1, 50])):
            if self.list:
                assert every.popleft() == self.list.pop(0)
            else:
                with pytest.raises(IndexError):
                    every.popleft()

    def clear_list(self, every: ListState[int]) -> None:
        if self.random.random() < 0.2:
            every.clear()
            self.list.clear()

    def read_list(self, every: ListState[int]) -> None:
        assert (list(every), len(every), bool(every)) == (self.list, len(self.list), bool(self.list))


@pytest.mark.parametrize("where", ["memory", *ENGINES])
@pytest.mark.parametrize("seed", range(8))
def test_ordered_state_matches_dict_and_list_through_aborts(
    where: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_MAX_BOUNDS", seed % 2)
    walk, values = Walk(seed), values_of(where, tmp_path)
    task, committed, steps = Task(values), ({}, []), 0
    for _ in range(150):
        each, every = MapState[int, int](MAP, task, encode_key(b"k")), ListState[int](LIST, task, encode_key(b"k"))
        before = walk.map.copy(), walk.list.copy()
        for _ in range(walk.random.choice([1, 1, 1, 5])):
            walk.step(each, every)
            steps += 1
        fails = walk.random.random() < 0.1
        for one in (each, every):
            one._encode()
            one._close()
            if not fails:
                one._write(task)
        if fails:
            walk.map, walk.list = before
        then = walk.random.choice(["go on", "go on", "commit", "abort", "restart"])
        if then in ("commit", "restart"):
            task.committed(0.0)
            committed = walk.map.copy(), walk.list.copy()
        if then == "abort":
            task.roll_back()
            walk.map, walk.list = committed[0].copy(), committed[1].copy()
        if then == "restart":
            task = Task(values)
    assert steps > 150
    values.close()


# ---- as cheap with many entries --------------------------------------------------------------------------------------


class Walked(InMemory):
    """Counts names that a scan passes: those it gives, and the deleted ones on the way, as in RocksDB."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[bytes] = []
        self.walked = self.scans = 0

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        self.scans += 1
        low, high = span.names(row)
        at = high if span.back else low
        for field, value in super().scan(row, span):
            self._walk(at, row + field)
            at = row + field
            yield field, value
        self._walk(at, low if span.back else high)

    def _walk(self, one: bytes, other: bytes) -> None:
        low, high = sorted((one, other))
        self.walked += 1 + max(0, bisect.bisect_left(self.deleted, high) - bisect.bisect_left(self.deleted, low))

    def apply(self, changes: Mapping[bytes, Value], position: int, now: float) -> None:
        super().apply(changes, position, now)
        self.deleted = sorted(
            {*self.deleted, *(c for c, value in changes.items() if value is None)} - self._values.keys()
        )


def walked(shape: Shape, entries: int) -> tuple[int, int]:
    """Return the names passed and the scans of 200 records in one transaction, after this many entries."""
    app, values = App("order"), Walked()
    app.process("in", to="out")(shape.function)
    cells = [cell_of("held", b"hot", MAP.field(number)) for number in range(entries)]
    values.apply(dict.fromkeys(cells, b"1"), 0, 0.0)
    values.apply(dict.fromkeys(cells[: entries - (entries if shape.left is None else shape.left)]), 0, 0.0)
    task = Task(values)
    handler = Handler(app, cells_of=lambda _: lambda record: task)

    def handle(first: int, many: int) -> None:
        records = [Record("in", 0, n, 1, b"hot", b"%d" % n) for n in range(first, first + many)]
        assert handler.handle(Collector(), records) is None
        task.committed(0.0)

    for first in range(entries, 3 * entries, 200):  # finds where the row begins and ends, and takes new numbers
        handle(first, 200)
    values.walked = values.scans = 0
    handle(3 * entries, 200)
    handle(3 * entries + 200, 200)
    return values.walked, values.scans


@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if not shape.once])
def test_ordered_access_visits_no_more_entries_in_a_large_state(shape: str) -> None:
    few, many = walked(SHAPES[shape], 200), walked(SHAPES[shape], 4_000)
    assert few == many
    assert few[0] < 20 * 400
    assert few[1] > 0 or shape == "list that grows", "which needs no look at the existing entries"


def test_only_the_first_scan_visits_deleted_entries() -> None:
    """The count above includes deleted names."""
    values = Walked()
    cells = [cell_of("map", b"k", MAP.field(number)) for number in range(100)]
    values.apply(dict.fromkeys(cells, b"1"), 0, 0.0)
    values.apply(dict.fromkeys(cells[:90]), 0, 0.0)
    task = Task(values)
    for expected in (91, 92):
        each = MapState[int, int](MAP, task, encode_key(b"k"))
        assert next(iter(each)) == 90
        each._encode()
        each._write(task)
        assert values.walked == expected


@pytest.mark.parametrize("size", [100, 2_000])
def test_one_call_walks_each_entry_once(size: int) -> None:
    values = Walked()
    cells = [cell_of("list", b"k", LIST.field(number)) for number in range(size)]
    values.apply(dict.fromkeys(cells, b"1"), 0, 0.0)
    every = ListState[int](LIST, Task(values), encode_key(b"k"))
    for number in range(size):
        every.append(number)
        assert every.popleft() == 1
    assert values.walked < 3 * size


def test_counting_function_never_sorts_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overlay, "fields", None)
    app, task = App("order"), Task()

    @app.process("in", to="out")
    def count(value: str, seen: State[int], pages: MapState[str, int]) -> None:
        seen.set(seen.get(0) + 1)
        pages[value] = pages.get(value, 0) + 1

    handler = Handler(app, cells_of=lambda _: lambda record: task)
    assert handler.handle(Collector(), [Record("in", 0, n, 1, b"k%d" % (n % 99), b"x") for n in range(999)]) is None
    assert len(task.changed) == 2 * 99
    assert task._rows is None


# ---- leftovers -------------------------------------------------------------------------------------------------------


def record(task: Task, change: Callable[[MapState[int, int]], Any]) -> None:
    each = MapState[int, int](MAP, task, encode_key(b"k"))
    change(each)
    each._encode()
    each._write(task)


def test_entry_added_and_deleted_in_a_transaction_leaves_nothing() -> None:
    task = Task()
    record(task, lambda each: each.update({1: 1, 2: 2}))
    record(task, lambda each: each.pop(1))
    record(task, lambda each: (each.update({3: 3}), each.pop(3)))
    assert [cell for cell, *_ in task.changelog_entries()] == [ROW + MAP.field(2)]
    task.committed(0.0)
    record(task, lambda each: each.update({2: 5}))
    record(task, lambda each: each.pop(2))
    assert [(cell, value) for cell, value, _ in task.changelog_entries()] == [(ROW + MAP.field(2), None)], (
        "it is committed"
    )
    task.committed(0.0)
    assert not task.has_changes

    task.put(cell_of("s", b"k"), b"1")
    task.put(cell_of("s", b"k"), None)
    assert not task.has_changes


def test_abort_restores_bounds() -> None:
    task = Task()
    record(task, lambda each: each.update({n: n for n in range(5)}))
    record(task, lambda each: next(iter(each)))
    task.committed(0.0)
    for end in (task.roll_back, lambda: task.committed(0.0)):
        record(task, lambda each: [each.pop(next(iter(each))) for _ in range(3)])
        low = MAP.field(2) + b"\0"
        assert task.bounds(ROW) == Bounds(low, MAP.field(4) + b"\0") or task.bounds(ROW).low == low
        end()
        assert (task.bounds(ROW).low == low) is (end != task.roll_back)
    record(task, lambda each: each.update({0: 0}))
    assert task.bounds(ROW).low == MAP.field(0), "a change of a row that is not read in order counts too"


def test_number_of_bounds_kept_per_task_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_MAX_BOUNDS", 3)
    task = Task()
    for key in range(9):
        each = MapState[int, int](MAP, task, encode_key(b"%d" % key))
        each[1] = 1
        list(each)
        each._encode()
        each._write(task)
        task.committed(0.0)
    assert len(task._committed_bounds) == 3


def test_failed_record_does_not_change_bounds() -> None:
    app, task = App("order"), Task()

    @app.process("in", to="out", on_error=eos.skip)
    def visit(value: str, held: MapState[int, int]) -> str:
        if value == "bad":
            held.clear()
            raise ValueError(value)
        held[int(value)] = 1
        return f"{list(held)}"

    handler, kept = Handler(app, cells_of=lambda _: lambda record: task), Collector()
    records = [Record("in", 0, n, 1, b"k", value) for n, value in enumerate([b"3", b"bad", b"bad", b"1"])]
    assert handler.handle(kept, records) is None
    assert [value for _, value, *_ in kept.sends] == [b"[3]", b"[1, 3]"]
