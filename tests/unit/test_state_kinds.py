"""Maps and lists per key, batch functions and async functions: state behaves like a dict and a list."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eos
import eos.testing
from eos import App, ListState, MapState, Out, Record, State
from eos.app import state
from eos.app.cells import cell_of, encode_key
from eos.app.layers import Span
from eos.app.state import CompiledStore, Store
from eos.errors import ConfigurationError, IllegalState, Temporary
from eos.state import values
from eos.state.engines import ENGINES
from eos.state.folders import InFolder
from eos.state.tasks import Task
from eos.state.values import InMemory


def run(function: Callable[..., Any], *records: Record | tuple[Any, ...], **more: Any) -> eos.testing.Ran:
    app = App("bank")
    (app.process_batch if more.pop("batch", False) else app.process)("in", to="out", **more)(function)
    return eos.testing.run(app, records)


def of_key(key: str, *values: str) -> list[tuple[str, str, str]]:
    return [("in", value, key) for value in values]


class Sale(msgspec.Struct):
    town: str
    cents: int


# ---- maps ------------------------------------------------------------------------------------------------------------


KEYS: Mapping[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=3),
    bytes: st.binary(max_size=3),
    int: st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3),
}
STEPS = st.sampled_from(["set", "del", "get", "change", "range", "back", "commit", "abort", "fail"])


@pytest.mark.parametrize("kind", KEYS)
@given(where=st.sampled_from(["memory", *ENGINES]), data=st.data())
def test_map_is_a_dict_read_in_order(
    kind: type, where: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("map")
    folder = None if where == "memory" else InFolder.of(base, "t", "id", engine=ENGINES[where])
    task = Task(InMemory() if folder is None else folder)
    row_key = data.draw(st.sampled_from([b"k", b"\xff" * 40, b"a key that is too long for a name of LMDB's" * 9]))
    compiled = CompiledStore(Store("seen", MapState, (kind, list[int])))
    committed: dict[Any, list[int]] = {}
    open_: dict[Any, list[int]] = {}
    for step in data.draw(st.lists(STEPS, max_size=25)):
        if step in ("commit", "abort"):
            (lambda: task.committed(0.0) if step == "commit" else task.roll_back())()
            committed, open_ = (open_, open_) if step == "commit" else (committed, committed)
            continue
        seen: MapState[Any, list[int]] = MapState(compiled, task, encode_key(row_key))
        now = {key: value.copy() for key, value in open_.items()}
        for _ in range(data.draw(st.integers(1, 3))):
            touch(step, data, seen, now, KEYS[kind])
        seen._encode()
        seen._close()
        if step != "fail":
            seen._write(task)
            open_ = now
    if folder is not None:
        folder.close()


@pytest.mark.parametrize("where", ["memory", *ENGINES])
def test_map_range_includes_start_and_excludes_stop(where: str, tmp_path: Path) -> None:
    folder = None if where == "memory" else InFolder.of(tmp_path, "t", "id", engine=ENGINES[where])
    task = Task(InMemory() if folder is None else folder)
    compiled = CompiledStore(Store("seen", MapState, (str, int)))
    seen: MapState[str, int] = MapState(compiled, task, encode_key(b"k"))
    seen.update(a=1, b=2, c=3)
    seen._encode()
    seen._write(task)
    task.committed(0.0)
    seen = MapState(compiled, task, encode_key(b"k"))
    for start, stop, keys in (("a", "c", "ab"), ("b", None, "bc"), (None, "b", "a"), ("b", "b", ""), ("aa", "bb", "b")):
        assert "".join(key for key, _ in seen.range(start, stop)) == keys
        assert "".join(key for key, _ in seen.range(start, stop, reverse=True)) == keys[::-1]
    task.values.close()


def touch(step: str, data: st.DataObject, seen: MapState[Any, list[int]], now: dict[Any, Any], keys: Any) -> None:
    there_or_not = st.sampled_from(sorted(now)) | keys if now else keys
    key = data.draw(there_or_not)
    if step in ("set", "fail"):
        seen[key] = now[key] = [data.draw(st.integers(0, 9))]
        now[key] = now[key].copy()
    elif step == "del":
        assert seen.pop(key, None) == now.pop(key, None)
    elif step == "get":
        assert (seen.get(key), key in seen) == (now.get(key), key in now)
    elif step == "change":
        seen.get(key, []).append(7)
        now.setdefault(key, []).append(7)
    else:
        start, stop = data.draw(st.none() | there_or_not), data.draw(st.none() | there_or_not)
        back = step == "back"
        wanted = [
            (k, v) for k, v in sorted(now.items()) if (start is None or k >= start) and (stop is None or k < stop)
        ]
        assert list(seen.range(start, stop, reverse=back)) == (wanted[::-1] if back else wanted)
        assert (list(seen), len(seen)) == (sorted(now), len(now))


def test_map_stores_in_place_changes_except_of_a_failed_record() -> None:
    def visit(page: str, seen: MapState[str, list[int]], total: State[int]) -> str:
        total.set(total.get(0) + 1)
        for _, times in seen.range():
            times.append(0)
        seen.setdefault(page, []).append(total.get(0))
        if page == "bad":
            raise ValueError(page)
        return f"{len(seen)}"

    ran = run(visit, *of_key("a", "x", "y", "bad", "x"), *of_key("b", "x"), on_error=eos.skip)
    assert ran.values("out") == [b"1", b"2", b"2", b"1"]
    assert ran.states["visit"]["seen"] == {b"a": {"x": [1, 0, 0, 3], "y": [2, 0]}, b"b": {"x": [1]}}


def test_changed_default_is_stored_and_a_second_default_is_refused() -> None:
    def visit(what: str, pages: MapState[str, list[int]], one: State[list[int]]) -> None:
        if what == "popped":
            pages.pop("x")
            given = pages.get("x", [])
            assert "y" not in pages
            given.append(7)
        if what == "set":
            pages.get("s", []).append(1)
            pages["s"], pages["x"] = [8], [9]
        if what == "deleted":
            pages.get("z", []).append(1)
            del pages["z"]
        if what == "two of a map":
            for given in (pages.get("new", []), pages.get("new", [])):
                given.append(1)
        if what == "two":
            for given in (one.get([]), one.get([])):
                given.append(1)
        if what == "two, one by one":
            first, second = one.get([]), one.get([])
            first.append(1)
            assert one.get() == [1]
            second.append(2)
        if what == "the same twice":
            same: list[int] = []
            for _ in range(2):
                one.get(same)
                pages.get("same", same)
            one.get(same).append(1)

    steps = "set", "popped", "deleted", "two of a map", "two", "two, one by one", "the same twice"
    ran = run(visit, *of_key("a", *steps), on_error=eos.dlq)
    assert ran.states["visit"] == {"pages": {b"a": {"s": [8], "x": [7], "same": [1]}}, "one": {b"a": [1]}}
    assert [dict(sent.headers)["eos-dlq-message"] for sent in ran.to("in.dlq")] == [
        b"two defaults of the state pages were changed, but only one can become its value",
        *[b"two defaults of the state one were changed, but only one can become its value"] * 2,
    ]


def test_unstorable_changed_default_is_refused() -> None:
    def visit(what: str, pages: MapState[str, list[int]], one: State[list[int]]) -> None:
        if what == "left alone":
            pages.get("x", deque())
            one.get(threading.Lock())
        if what == "of a map":
            pages.get("x", deque()).append(1)
        if what == "one":
            one.get(deque()).append(1)

    ran = run(visit, *of_key("a", "left alone", "of a map", "one"), on_error=eos.dlq)
    assert ran.states["visit"] == {"pages": {}, "one": {}}
    assert [dict(sent.headers)["eos-dlq-message"] for sent in ran.to("in.dlq")] == [
        f"the state {name} cannot be deque([1]): Encoding objects of type collections.deque is unsupported".encode()
        for name in ("pages", "one")
    ]


def test_map_with_defaults_reads_each_field_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded = []
    real = state._fingerprint
    monkeypatch.setattr(state, "_fingerprint", lambda value: encoded.append(value) or real(value))

    def visit(what: str, pages: MapState[int, list[int]]) -> None:
        for number in range(100):
            pages.get(number, [])

    run(visit, *of_key("a", "once"))
    assert len(encoded) == 200, "when it was given, and at the end"


def test_unstorable_map_value_fails_its_record() -> None:
    def bad(what: str, seen: MapState[str, int]) -> None:
        if what == "none":
            seen["x"] = None  # type: ignore[assignment]
        if what == "kind":
            seen[5] = 1  # type: ignore[index]
        if what == "long":
            seen["x" * 401] = 1
        if what == "missing":
            del seen["never"]
        seen["x" * 400] = 1

    ran = run(bad, *of_key("a", "none", "kind", "long", "missing", "fits"), on_error=eos.dlq)
    assert [dict(sent.headers)["eos-dlq-message"] for sent in ran.to("in.dlq")] == [
        b"the state seen cannot be None: use `del` of its key to delete it",
        b"5 is not of type str, as the map's keys are",
        b"a map's key has at most 400 bytes, but this one has 401",
        b"'never'",
    ]
    assert ran.states["bad"]["seen"] == {b"a": {"x" * 400: 1}}


USES: list[Callable[[State[int], MapState[str, int], ListState[int], dict[str, Any]], object]] = [
    lambda one, each, every, iterators: one.get(),
    lambda one, each, every, iterators: one.set(9),
    lambda one, each, every, iterators: one.delete(),
    lambda one, each, every, iterators: each.get("x"),
    lambda one, each, every, iterators: each.update(x=9),
    lambda one, each, every, iterators: each.pop("x"),
    lambda one, each, every, iterators: each.clear(),
    lambda one, each, every, iterators: list(each.items()),
    lambda one, each, every, iterators: every.append(9),
    lambda one, each, every, iterators: every.popleft(),
    lambda one, each, every, iterators: every.clear(),
    lambda one, each, every, iterators: len(every),
    lambda one, each, every, iterators: next(iterators["range"].pop()),
    lambda one, each, every, iterators: next(iterators["keys"].pop()),
    lambda one, each, every, iterators: next(iterators["list"].pop()),
]


@pytest.mark.parametrize("shape", ["single", "batch", "async"])
def test_kept_state_object_raises_during_another_record(shape: str) -> None:
    kept: list[tuple[Any, ...]] = []
    raised: list[str] = []

    def use() -> None:
        for keeping in USES:
            with pytest.raises(IllegalState, match="was used after its function had returned") as error:
                keeping(*kept[0])
            raised.append(str(error.value))

    def visit(value: str, one: State[int], each: MapState[str, int], every: ListState[int]) -> str:
        if value == "keep":
            one.set(1)
            each.update(x=1, y=1)
            every.extend([1, 2])
            iterators = {
                "range": [each.range() for _ in range(4)],
                "keys": [iter(each) for _ in range(4)],
                "list": [iter(every) for _ in range(4)],
            }
            assert [next(some[0]) for some in iterators.values()] == [("x", 1), "x", 1]
            kept.append((one, each, every, iterators))
        else:
            use()
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        return f"{one.get()} {dict(each)} {list(every)}"

    async def visit_async(value: str, one: State[int], each: MapState[str, int], every: ListState[int]) -> str:
        if value != "keep":
            while not kept:
                await asyncio.sleep(0)
        result = visit(value, one, each, every)
        await asyncio.sleep(0)
        return result

    def batch(
        records: list[Record],
        one: dict[bytes, State[int]],
        each: dict[bytes, MapState[str, int]],
        every: dict[bytes, ListState[int]],
    ) -> list[Out]:
        (record,) = records
        key, value = record.key or b"", (record.value or b"").decode()
        return [record.out(visit(value, one[key], each[key], every[key]))]

    app = App("bank")
    if shape == "batch":
        app.process_batch("in", to="out")(batch)
    else:
        app.process("in", to="out")(visit if shape == "single" else visit_async)
    task = Task()
    bound = app.routes["in"].bind(cells_of=lambda _: task)
    outputs = [
        bound.outputs(Record("in", 0, n, key=key, value=value))[0][1]
        for n, (key, value) in enumerate([(b"a", b"keep"), (b"b", b"use"), (b"a", b"use")])
    ]
    before = b"1 {'x': 1, 'y': 1} [1, 2]"
    assert outputs == [before, b"None {} []", before]
    assert len(raised) == 4 * len(USES)


def test_kept_async_state_object_raises_during_other_records() -> None:
    kept: list[State[int]] = []

    async def visit(value: str, seen: State[int]) -> str:
        if value == "keep":
            kept.append(seen)
            return "kept"
        await asyncio.sleep(0.001)
        with pytest.raises(IllegalState, match="was used after its function had returned"):
            kept[0].set(9)
        return f"{seen.get()}"

    ran = run(visit, ("in", "keep", "a"), ("in", "use", "b"), ("in", "use", "a"))
    assert (ran.values("out"), ran.states["visit"]["seen"]) == ([b"kept", b"None", b"None"], {})


@pytest.mark.parametrize("where", ["memory", *ENGINES])
def test_kept_iterator_raises_before_reading_the_engine(where: str, tmp_path: Path) -> None:
    folder = None if where == "memory" else InFolder.of(tmp_path, "t", "id", engine=ENGINES[where])
    task = Task(InMemory() if folder is None else folder)
    compiled = CompiledStore(Store("seen", MapState, (int, int)))
    task.values.apply({compiled.begin + encode_key(b"k") + compiled.field(n): b"1" for n in range(9)}, 1, 0.0)
    seen: MapState[int, int] = MapState(compiled, task, encode_key(b"k"))
    begun, not_begun = seen.range(), seen.range(reverse=True)
    assert next(begun) == (0, 1)
    seen._close()
    task.values.apply({cell_of("seen", b"other"): b"1"}, 2, 0.0)
    for iterator in (begun, not_begun):
        with pytest.raises(IllegalState, match="the state seen was used after its function had returned"):
            next(iterator)
    assert not list(tmp_path.glob("*/damaged"))
    task.values.close()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_keys_of_any_length_have_separate_and_ordered_fields(where: str, tmp_path: Path) -> None:
    folder = InFolder.of(tmp_path, "t", "id")
    assert folder is not None
    store: values.Values = InMemory() if where == "memory" else folder
    rows = [
        cell_of("s", key) for key in (b"", b"k", b"k" * 92, b"k" * 93, b"k" * 94, b"k" * 95, b"k" * 9_000, b"\xff" * 99)
    ]
    store.apply({row + b"\0%d" % n: b"%d" % n for row in rows for n in (3, 1, 2)} | {rows[1]: b"no field"}, 1, 0.0)
    for row in rows:
        assert [value for _, value in store.scan(row, Span(b"\0"))] == [b"1", b"2", b"3"]
        assert [field for field, _ in store.scan(row, Span(b"\0002", back=True))] == [b"\0003", b"\0002"]
    store.apply({rows[1] + b"\0002": None, rows[1] + b"\0004": b"4", rows[1] + b"\0001": b"one"}, 2, 0.0)
    assert [value for _, value in store.scan(rows[1], Span(b"\0"))] == [b"one", b"3", b"4"]
    folder.close()


# ---- lists -----------------------------------------------------------------------------------------------------------


def test_list_append_writes_only_its_own_value() -> None:
    def last_three(value: str, seen: ListState[str]) -> str:
        assert bool(seen) is (len(seen) > 0)
        seen.extend([value, value.upper()])
        if value == "bad":
            raise ValueError
        if value == "clear":
            seen.clear()
        while len(seen) > 3:
            seen.popleft()
        return ",".join(seen)

    ran = run(last_three, *of_key("a", "x", "y", "bad", "clear", "z"), *of_key("b", "x"), on_error=eos.skip)
    assert ran.values("out") == [b"x,X", b"X,y,Y", b"", b"z,Z", b"x,X"]
    assert ran.states["last_three"]["seen"] == {b"a": ["z", "Z"], b"b": ["x", "X"]}

    def empty(value: str, seen: ListState[int]) -> None:
        seen.popleft()

    with pytest.raises(eos.PoisonRecord, match="the state seen is empty"):
        run(empty, *of_key("a", "x"))

    task = Task()
    compiled = CompiledStore(Store("seen", ListState, (int,)))
    for number in range(3):
        held: ListState[int] = ListState(compiled, task, encode_key(b"k"))
        held.append(number)
        held._encode()
        held._write(task)
    assert sorted(task.changed.values()) == [b"0", b"1", b"2"]


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_batch_changes_all_states_of_its_keys_or_none() -> None:
    calls: list[int] = []

    def totals(records: list[Record], seen: dict[bytes, State[int]], names: dict[bytes, ListState[str]]) -> list[Out]:
        calls.append(len(records))
        for record in records:
            state = seen[record.key or b""]
            state.set(state.get(0) + 1)
            names[record.key or b""].append(str(record.offset))
            if record.value == b"bad":
                raise ValueError("bad")
        return [record.out(str(seen[record.key or b""].get())) for record in records]

    given_ = [*of_key("a", "x", "x", "bad"), *of_key("b", "x")]
    ran = run(totals, *given_, ("in", "no key"), batch=True, on_error=eos.dlq)
    assert calls == [4, 1, 1, 1, 1] or calls == [1, 1, 1, 1], "record by record, after the failed batch"
    assert ran.values("out") == [b"1", b"2", b"1"]
    assert ran.states["totals"] == {"seen": {b"a": 2, b"b": 1}, "names": {b"a": ["0", "1"], b"b": ["3"]}}
    assert len(ran.to("in.dlq")) == 2


def test_batch_has_one_partition_with_its_own_state_per_key() -> None:
    tasks = {0: Task(), 1: Task()}
    app = App("bank")

    @app.process_batch("in", to="out")
    def count(records: list[Record], seen: dict[bytes, State[int]]) -> list[Out]:
        assert len({record.partition for record in records}) == 1
        for record in records:
            seen[record.key or b""].set(seen[record.key or b""].get(0) + 1)
        return []

    bound = app.routes["in"].bind(cells_of=lambda record: tasks[record.partition])
    bound.outputs_batch([Record("in", n % 3 % 2, n, key=b"k", value=b"x") for n in range(6)])
    assert [task.get(cell_of("seen", b"k")) for task in tasks.values()] == [b"4", b"2"]


@pytest.mark.parametrize("engine", ENGINES)
def test_unreadable_folder_is_discarded_and_is_not_a_record_failure(tmp_path: Path, engine: str) -> None:
    def folder() -> InFolder:
        found = InFolder.of(tmp_path, "t", "id", engine=ENGINES[engine])
        assert found is not None
        return found

    kept = folder()
    for part in range(20):
        numbers = range(part * 1_000, part * 1_000 + 1_000)
        kept.apply({cell_of("seen", b"k%d" % n): b"%d" % n for n in numbers}, 5, 1.0)
    if engine == "rocksdb":
        kept._engine._db.flush()  # type: ignore[attr-defined]
    kept.close()
    for file in (tmp_path / "t.0" / ENGINES[engine].folder).glob("*.sst" if engine == "rocksdb" else "data.mdb"):
        damaged = bytearray(file.read_bytes())
        # Keep LMDB's last pages, which are its roots, so that it can be opened.
        begin, end = (100, len(damaged) // 2) if engine == "rocksdb" else (20 * 4096, len(damaged) - 30 * 4096)
        damaged[begin:end] = b"\xab" * (end - begin)
        file.write_bytes(damaged)

    def count(value: str, seen: State[int]) -> None:
        seen.set(seen.get(0) + 1)

    app = App("bank")
    app.process("in", to="out", on_error=eos.skip)(count)
    kept = folder()
    with pytest.raises(Temporary, match="state cannot be read"):
        task = Task(kept)
        bound = app.routes["in"].bind(cells_of=lambda _: task)
        for n in range(0, 20_000, 40):
            bound.outputs(Record("in", 0, n, key=b"k%d" % n, value=b"x"))
    kept.close()
    anew = folder()
    assert (anew.get(cell_of("seen", b"k40")), anew.position) == (None, 0)
    anew.close()


def test_async_functions_run_each_key_in_order_and_keys_concurrently() -> None:
    running, most = 0, 0

    async def count(value: str, seen: State[int], pages: MapState[str, int]) -> str:
        nonlocal running, most
        before = seen.get(0)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        seen.set(before + 1)
        pages[value] = pages.get(value, 0) + 1
        if value == "bad":
            raise ValueError(value)
        return f"{seen.get()}"

    records = [("in", "bad" if n == 4 else f"v{n % 3}", "abc"[n % 3]) for n in range(30)]
    ran = run(count, *records, on_error=eos.skip)
    assert most == 3, "one of each key"
    assert ran.skipped == 1
    expected = [b"%d" % (1 + n // 3 - (n > 4 and n % 3 == 1)) for n in range(30) if n != 4]
    assert ran.values("out") == expected
    assert ran.states["count"]["seen"] == {b"a": 10, b"b": 9, b"c": 10}
    assert ran.states["count"]["pages"] == {b"a": {"v0": 10}, b"b": {"v1": 9}, b"c": {"v2": 10}}


def test_async_record_cancelled_from_within_fails_alone() -> None:
    calls: list[str] = []

    async def count(value: str, seen: State[int]) -> str:
        calls.append(value)
        seen.set(seen.get(0) + 1)
        if value == "bad":
            elsewhere = asyncio.ensure_future(asyncio.sleep(9))
            elsewhere.cancel()
            await elsewhere
        return f"{value} {seen.get()}"

    ran = run(count, *(("in", "bad" if n == 5 else f"v{n}", f"k{n}") for n in range(8)), on_error=eos.skip)
    assert ran.skipped == 1
    assert ran.values("out") == [b"v%d 1" % n for n in range(8) if n != 5]
    assert sorted(calls) == ["bad", *(f"v{n}" for n in range(8) if n != 5)]


def test_async_retry_runs_alone_and_changes_its_key_once() -> None:
    calls: list[str] = []

    async def count(value: str, seen: State[int]) -> str:
        calls.append(value)
        seen.set(seen.get(0) + 1)
        if value == "flaky" and calls.count("flaky") < 3:
            raise ValueError(value)
        return f"{value} {seen.get()}"

    records = [*of_key("a", "flaky", "behind"), *of_key("b", "other", "more")]
    ran = run(count, *records, on_error=eos.retry(5, then=eos.stop))
    assert ran.values("out") == [b"flaky 1", b"behind 2", b"other 1", b"more 2"]
    assert sorted(calls) == ["behind", "flaky", "flaky", "flaky", "more", "other"]


def test_async_generator_and_async_batch_have_state() -> None:
    async def twice(value: str, seen: State[int]) -> Any:
        seen.set(seen.get(0) + 1)
        yield str(seen.get())
        await asyncio.sleep(0)
        yield value

    assert run(twice, *of_key("a", "x", "y")).values("out") == [b"1", b"x", b"2", b"y"]

    async def batch(records: list[Record], seen: Mapping[bytes, State[int]]) -> list[Out]:
        await asyncio.sleep(0)
        seen[b"a"].set(len(records))
        return []

    assert run(batch, *of_key("a", "x", "y"), batch=True).states["batch"]["seen"] == {b"a": 2}


def test_chained_function_reads_by_another_key() -> None:
    app = App("shop")

    @app.process("sales", to="by-town")
    def by_town(sale: Sale) -> Out:
        return Out(sale.cents, key=sale.town)

    @app.process("by-town", to="totals")
    def total(cents: int, sold: State[int]) -> str:
        sold.set(sold.get(0) + cents)
        return f"{sold.get()}"

    sales = [("sales", {"town": town, "cents": cents}, "a") for town, cents in (("X", 1), ("Y", 2), ("X", 3))]
    ran = eos.testing.run(app, [*sales, ("by-town", 10, "X")])
    assert ran.values("by-town") == [b"1", b"2", b"3"]
    assert ran.values("totals") == [b"10", b"11", b"2", b"14"]
    assert ran.states["total"]["sold"] == {b"X": 14, b"Y": 2}


# ---- definitions -----------------------------------------------------------------------------------------------------


def refused(function: Any, batch: bool = False) -> str:
    app = App("bank")
    with pytest.raises(ConfigurationError) as error:
        (app.process_batch if batch else app.process)("in", to="out")(function)
    return str(error.value)


def test_wrong_kind_of_state_is_refused_at_definition() -> None:
    def untyped(value: str, seen: MapState) -> None: ...  # type: ignore[type-arg]

    def dated(value: str, seen: MapState[float, int]) -> None: ...  # type: ignore[type-var]

    def one(records: list[Record], seen: State[int]) -> None: ...

    def many(value: str, seen: dict[bytes, State[int]]) -> None: ...

    def text(records: list[Record], seen: dict[str, State[int]]) -> None: ...

    def alone(seen: State[int]) -> None: ...

    def foreign(value: str, seen: State[object]) -> None: ...

    assert "the first parameter of alone, seen, is annotated as state, but gets the record" in refused(alone)
    assert refused(foreign).startswith("the state seen of foreign: no decoder for the annotation object: ")
    assert "the state seen of untyped has no type: annotate it, for example MapState[str, int]" in refused(untyped)
    assert "the keys of the map seen of dated are float, but must be one of str, bytes, int" in refused(dated)
    assert refused(one, batch=True) == (
        "one gets many records, but the state seen is for one key: annotate it dict[bytes, State[int]]"
    )
    assert "seen is a mapping for many keys: annotate it State[int]" in refused(many)
    assert "annotated dict[bytes, ...]: keys are bytes" in refused(text, batch=True)
