"""State with a time-to-live: it expires by the time of the records, not by the time of their handling."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eos
import eos.testing
from eos import App, ConfigurationError, ListState, MapState, Out, Record, State
from eos.app.cells import TIME, cell_of, store_of
from eos.app.expiry import add_write_time
from eos.app.state import OPEN_STATE
from eos.state import tasks
from eos.state.engines import ENGINES
from eos.state.folders import InFolder
from eos.state.tasks import ChangelogEntry, Task
from eos.state.values import InMemory, Values

TTL = timedelta(milliseconds=10)


def app_of(ttl: Any = TTL) -> App:
    app = App("shop")

    @app.process("in", to="out", ttl=ttl, on_error=eos.skip)
    def visit(page: str, times: State[int], pages: MapState[str, int], last: ListState[str], all: State[int]) -> str:
        all.set(all.get(0) + 1)
        if page == "look":
            return f"{times.get()} {dict(pages)} {list(last)} {all.get()}"
        before, of_page = times.get(0), pages.get(page, 0)
        times.set(1 if page == "same" else before + 1)
        pages[page] = 1 if page == "same" else of_page + 1
        last.append(page)
        if page == "bad":
            raise ValueError(page)
        return f"{times.get()} {dict(pages)} {list(last)} {all.get()}"

    return app


def test_reading_a_value_does_not_extend_its_life() -> None:
    """Equal sets may have different encodings."""
    app = App("shop")
    names: set[int] = set()
    for number in (17, 8, 32, 15, -17, -8, 63, 57):  # deleted entries once collided with later entries
        names.add(number) if number > 0 else names.discard(-number)
    assert list(names) != list(set(list(names)))  # noqa: C414 - as they come back

    @app.process("in", to="out", ttl=TTL)
    def visit(what: str, seen: State[set[int]], each: MapState[str, set[int]]) -> str:
        if what == "keep":
            seen.set(names)
            each["x"] = names
        return f"{seen.get() == names} {each.get('x') == names}"

    records = [
        Record("in", 0, number, timestamp=100 + number * 4, key=b"a", value=what)
        for number, what in enumerate([b"keep", b"look", b"look", b"look"])
    ]
    assert eos.testing.run(app, records).values("out") == [b"True True"] * 3 + [b"False False"]


class Model:
    """A model of `visit`: per key, values with the time of their last write."""

    def __init__(self) -> None:
        self.time = 0
        self.times: dict[bytes, tuple[int, int]] = {}
        self.pages: dict[bytes, dict[str, tuple[int, int]]] = {}
        self.last: dict[bytes, list[tuple[str, int]]] = {}
        self.all: dict[bytes, int] = {}

    def visit(self, record: Record) -> str | None:
        assert record.key is not None
        assert record.value is not None
        key, page = record.key, record.value.decode()
        now = max(self.time, record.timestamp)
        times, at = self.times.get(key, (0, 0))
        times = times if now < at + 10 else 0
        pages = {p: (n, at) for p, (n, at) in self.pages.get(key, {}).items() if now < at + 10}
        last = [(p, at) for p, at in self.last.get(key, ()) if now < at + 10]
        all_ = self.all.get(key, 0) + 1
        if page == "bad":
            return None
        self.time = now
        if page != "look":
            times = 1 if page == "same" else times + 1
            pages[page] = 1 if page == "same" else pages.get(page, (0, 0))[0] + 1, now
            last.append((page, now))
            self.times[key], self.pages[key], self.last[key] = (times, now), pages, last
        self.all[key] = all_
        pages_told = {p: n for p, (n, _) in sorted(pages.items())}
        return f"{times or None} {pages_told} {[p for p, _ in last]} {all_}"


RECORDS = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b"]),
        st.sampled_from(["x", "y", "same", "bad", "look", "look"]),
        st.integers(-8, 12),  # how much later than the previous record
        st.sampled_from(["go on", "go on", "commit", "abort", "restart", "lost"]),
    ),
    max_size=40,
)


@given(where=st.sampled_from(["memory", *ENGINES]), steps=RECORDS)
def test_value_expires_after_its_last_write(
    where: str, steps: list[tuple[bytes, str, int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base, changelog = tmp_path_factory.mktemp("ages"), list[ChangelogEntry]()
    route = app_of({"times": TTL, "pages": TTL, "last": TTL}).routes["in"]

    def values_of() -> Values:
        return values_in(where, base, route.ttls)

    task = Task(values_of(), route.ttls)
    bound = route.bind(cells_of=lambda _: task)
    model, now, uncommitted = Model(), 100, list[Record]()

    def handle(record: Record) -> str | None:
        try:
            (send,) = bound.outputs(record)
        except ValueError:
            return None
        assert send[1] is not None
        return send[1].decode()

    for number, (key, page, later, then) in enumerate(steps):
        now += later
        record = Record("in", 0, number, now, key, page.encode())
        assert handle(record) == model.visit(record)
        uncommitted.append(record)
        if then in ("commit", "restart", "lost"):
            task.expire()
            changelog += task.changelog_entries()
            task.committed(0.0)
            uncommitted = []
        if then == "abort":
            task.roll_back()
            for again in uncommitted:
                handle(again)
        if then in ("restart", "lost"):
            task.values.close()
            if then == "lost" or where == "memory":
                base = tmp_path_factory.mktemp("lost")
            task = Task(restored(values_of(), changelog, route.ttls), route.ttls)
    task.values.close()


def values_in(where: str, base: Path, ttls: Mapping[bytes, int]) -> Values:
    if where == "memory":
        return InMemory(timed=ttls)
    folder = InFolder.of(base, "t", "id", timed=ttls, engine=ENGINES[where])
    assert folder is not None
    return folder


def restored(values: Values, changelog: list[ChangelogEntry], ttls: Mapping[bytes, int]) -> Values:
    """Restore from the position of these values, as eos/state/restoring.py does."""
    news: dict[bytes, bytes | None] = {}
    for cell, value, at in changelog:
        news[cell] = add_write_time(at, value) if store_of(cell) in ttls and value is not None else value
    if values.get(TIME) is None:
        values.apply(news, 0, 0.0)
    written = [at for _, at in values.oldest(b"times")]
    assert written == sorted(written)
    return values


def test_expired_entries_are_deleted_by_next_transactions() -> None:
    route = app_of().routes["in"]
    task = Task(InMemory(timed=route.ttls), route.ttls)
    bound = route.bind(cells_of=lambda _: task)
    bound.outputs(Record("in", 0, 0, 1_000, b"a", b"x"))
    sent = {cell: (value, at) for cell, value, at in task.changelog_entries()}
    assert sent[cell_of("times", b"a")] == (b"1", 1_000), "the value itself, and the records' time"
    assert sent[cell_of("all", b"a")] == (b"1", 1_000)
    task.expire()
    task.committed(0.0)
    for at in (1_009, 900, 1_010):  # a late record does not turn back the time
        bound.outputs(Record("in", 0, 1, at, b"b", b"look"))
        task.expire()
        gone = {cell for cell, value, _ in task.changelog_entries() if value is None}
        assert len(gone) == (4 if at == 1_010 else 0)
    task.committed(0.0)
    assert len(task.values) == 2, "the value of b and its time"


@pytest.mark.parametrize("where", ["memory", *ENGINES])
def test_setting_an_equal_value_extends_its_life(where: str, tmp_path: Path) -> None:
    route = app_of().routes["in"]
    values = values_in(where, tmp_path, route.ttls)
    task = Task(values, route.ttls)
    bound = route.bind(cells_of=lambda _: task)
    for at in (100, 109, 118):
        bound.outputs(Record("in", 0, 0, at, b"a", b"same"))
        task.expire()
        task.committed(0.0)
        assert list(values.oldest(b"times")) == [(cell_of("times", b"a"), at)], "once, by its last write"
    ((_, value, *_),) = bound.outputs(Record("in", 0, 1, 120, b"a", b"look"))
    assert value == b"1 {'same': 1} ['same'] 4"
    values.close()


def test_many_expired_entries_are_deleted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_MAX_EXPIRED", 5)
    values = InMemory(timed=[b"s"])
    values.apply({cell_of("s", b"%d" % n): add_write_time(n, b"") for n in range(12)} | {TIME: b"50"}, 0, 0.0)
    task = Task(values, {b"s": 10})
    for left in (8, 3, 1, 1):
        task.expire()
        task.committed(0.0)
        assert len(values) == left


def test_future_timestamp_does_not_advance_time() -> None:
    task = Task(clock=lambda: 5.0)
    assert [task.at(ms) for ms in (4_000, 99_000, -1, 0)] == [4_000, 5_000, 5_000, 0]


def test_async_and_batch_functions_use_their_records_time() -> None:
    app = App("shop")

    @app.process("one", to="out", ttl=TTL, on_error=eos.skip)
    async def one(page: str, times: State[int]) -> str:
        await asyncio.sleep(0.005 if page == "slow" else 0)
        times.set(times.get(0) + 1)
        if page == "bad":
            raise ValueError
        return str(times.get())

    def at(topic: str, *records: tuple[bytes, str, int]) -> list[bytes | None]:
        given_ = [Record(topic, 0, n, ms, key, value.encode()) for n, (key, value, ms) in enumerate(records)]
        return eos.testing.run(app, given_).values("out")

    # b is handled while a's first record waits: b does not have the last time yet, and a's last record sees no state.
    assert at("one", (b"a", "slow", 100), (b"b", "x", 101), (b"b", "x", 102), (b"a", "x", 110)) == [
        b"1", b"1", b"2", b"1",
    ]  # fmt: skip
    # The time of a failed record does not count, although the last record ran concurrently.
    assert at("one", (b"a", "x", 100), (b"b", "bad", 110), (b"a", "x", 101)) == [b"1", b"2"]
    # It does not count for later records of the last record's key either.
    assert at("one", (b"a", "x", 100), (b"b", "bad", 110), (b"a", "x", 101), (b"a", "x", 110)) == [b"1", b"2", b"3"]


def failing_apps() -> list[App]:
    single, many, one_async = App("shop"), App("shop"), App("shop")

    @single.process("in", to="out", ttl=TTL)
    def single_record(page: str, times: State[int]) -> object:
        times.set(1)
        return object() if page == "unsendable" else 1 / (page != "bad")

    @many.process_batch("in", to="out", ttl=TTL)
    def batch(records: list[Record], times: dict[bytes, State[int]]) -> Any:
        times[b"a"].set(1)
        return [object() if records[0].value == b"unsendable" else records[0].out(1 / (records[0].value != b"bad"))]

    @one_async.process("in", to="out", ttl=TTL)
    async def async_record(page: str, times: State[int]) -> object:
        times.set(1)
        return object() if page == "unsendable" else 1 / (page != "bad")

    return [single, many, one_async]


@pytest.mark.parametrize("app", failing_apps(), ids=lambda app: app.routes["in"].name)
@pytest.mark.parametrize("page", [b"bad", b"unsendable", b"unstorable"])
def test_failed_record_does_not_advance_time_or_touch_a_task(
    app: App, page: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(ttls={b"times": 10})
    route = app.routes["in"].bind(cells_of=lambda _: task)

    def run(at: int, value: bytes) -> None:
        route.outputs(Record("in", 0, 0, at, b"a", value))

    if page == b"unstorable":
        monkeypatch.setattr(OPEN_STATE, "set", lambda state, value: setattr(state, "_value", object()))
    with pytest.raises((TypeError, ZeroDivisionError)):
        run(100, page)
    assert (task.time_ms, task.has_changes) == (0, False)
    monkeypatch.undo()
    run(90, b"x")
    assert (task.time_ms, task.has_changes) == (90, True)


def batch_app(calls: list[int]) -> App:
    app = App("shop")

    @app.process_batch("in", to="out", ttl={"times": TTL, "pages": TTL, "last": TTL})
    def visit(
        records: list[Record],
        times: dict[bytes, State[int]],
        pages: dict[bytes, MapState[str, int]],
        last: dict[bytes, ListState[str]],
        all: dict[bytes, State[int]],
    ) -> list[Out]:
        calls.append(len(records))
        outs = []
        for record in records:
            key, page = record.key or b"", (record.value or b"").decode()
            all[key].set(all[key].get(0) + 1)
            if page != "look":
                times[key].set(times[key].get(0) + 1)
                pages[key][page] = pages[key].get(page, 0) + 1
                last[key].append(page)
            outs.append(record.out(f"{times[key].get()} {dict(pages[key])} {list(last[key])} {all[key].get()}"))
            if page == "bad":
                raise ValueError(page)
        return outs

    return app


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.sampled_from(["x", "y", "look"]), st.integers(-8, 12)),
        min_size=1,
        max_size=30,
    ),
    data=st.data(),
)
def test_batch_with_ttl_matches_single_records(steps: list[tuple[bytes, str, int]], data: st.DataObject) -> None:
    now, records = 100, []
    for number, (key, page, later) in enumerate(steps):
        now += later
        records.append(Record("in", number % 2, number, now, key, page.encode()))
    found = []
    for fetched in (1, len(records), data.draw(st.integers(1, len(records)))):
        app = batch_app([])
        tasks_ = [Task(ttls=app.routes["in"].ttls) for _ in range(2)]
        bound = app.routes["in"].bind(cells_of=lambda record, tasks_=tasks_: tasks_[record.partition])
        sends: list[list[Any]] = [[], []]
        for at in range(0, len(records), fetched):
            for partition in (0, 1):
                some = [record for record in records[at : at + fetched] if record.partition == partition]
                sends[partition] += bound.outputs_batch(some) if some else []
        # The numbers of a list's values do not matter, only their order and times.
        lists = [[cell for cell in sorted(task.changed) if store_of(cell) == b"last"] for task in tasks_]
        live = [
            [task.changed[cell] for cell in of_task if task.changed[cell] > add_write_time(task.time_ms - 10, b"\xff")]
            for task, of_task in zip(tasks_, lists, strict=True)
        ]
        others = [{cell: value for cell, value in task.changed.items() if store_of(cell) != b"last"} for task in tasks_]
        found.append((sends, live, others, [task.time_ms for task in tasks_]))
    assert found[0] == found[1] == found[2]


def test_batch_is_split_only_at_a_repeated_key() -> None:
    def calls(ttl: bool, *records: tuple[bytes, int]) -> list[int]:
        found: list[int] = []
        app = batch_app(found)
        if not ttl:
            app.routes["in"].stores = tuple(store._replace(ttl_ms=None) for store in app.routes["in"].stores)
        task = Task(ttls=app.routes["in"].ttls)
        bound = app.routes["in"].bind(cells_of=lambda _: task)
        bound.outputs_batch([Record("in", 0, n, at, key, b"x") for n, (key, at) in enumerate(records)])
        return found

    repeated = (b"a", 100), (b"a", 100), (b"b", 101), (b"a", 90), (b"a", 102), (b"b", 102)
    assert calls(True, *repeated) == [3, 1, 2]
    assert calls(False, *repeated) == [6]
    assert calls(True, *((b"%d" % n, 100 + n) for n in range(9))) == [9]


def test_batch_failing_in_later_part_changes_nothing() -> None:
    found: list[int] = []
    app = batch_app(found)
    task = Task(ttls=app.routes["in"].ttls)
    bound = app.routes["in"].bind(cells_of=lambda _: task)
    with pytest.raises(ValueError, match="bad"):
        bound.outputs_batch([Record("in", 0, n, 100 + n, b"a", page) for n, page in enumerate([b"x", b"y", b"bad"])])
    assert found == [1, 1, 1]
    assert (task.changed, task.has_changes) == ({}, False)


def test_final_state_has_only_unexpired_values() -> None:
    record = Record("in", 0, 0, 100, b"a", b"x")
    later = Record("in", 0, 1, 110, b"b", b"x")
    states = eos.testing.run(app_of({"times": TTL}), [record, later]).states["visit"]
    assert states["times"] == {b"b": 1}
    assert states["pages"] == {b"a": {"x": 1}, b"b": {"x": 1}}


@pytest.mark.parametrize(
    ("ttl", "said"),
    [
        ({"seen": TTL}, "ttl= of visit names 'seen', but its state is times, pages, last, all"),
        (timedelta(0), r"ttl= of visit is datetime.timedelta\(0\): it must be a timedelta of at least a millisecond"),
        (60, "ttl= of visit is 60: it must be a timedelta"),
        ({"times": 60}, "ttl= of visit is 60: it must be a timedelta"),
    ],
)
def test_invalid_ttl_is_refused_at_definition(ttl: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        app_of(ttl)


def test_ttl_without_state_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="f has ttl= but no state"):
        App("shop").process("in", ttl=TTL)(f)


def f(value: str) -> None: ...


def test_folder_with_other_ttl_is_discarded(tmp_path: Path) -> None:
    for expiring, left in (([b"s"], 0), ([b"s"], 1), ([], 0)):
        folder = InFolder.of(tmp_path, "t", "id", timed=expiring)
        assert folder is not None
        assert len(folder) == left
        folder.apply({cell_of("s", b"k"): add_write_time(5, b"v")}, 1, 0.0)
        assert list(folder.oldest(b"s") if expiring else ()) == [(cell_of("s", b"k"), 5)] * len(expiring)
        folder.close()


@pytest.mark.parametrize("where", ENGINES)
def test_scan_for_oldest_entries_starts_at_its_last_position(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = values_in(where, tmp_path, {b"s": 10})
    assert isinstance(folder, InFolder)
    starts: list[bytes] = []
    scan_notes = folder._engine.scan_notes
    monkeypatch.setattr(folder._engine, "scan_notes", lambda low, high: (starts.append(low), scan_notes(low, high))[1])

    def oldest() -> list[int]:
        return [at for _, at in folder.oldest(b"s")]

    def write(*times: int) -> None:
        folder.apply({cell_of("s", b"%d" % at): add_write_time(at, b"") for at in times}, 0, 0.0)

    write(*range(5, 100))
    for at in range(5, 100):
        assert next(folder.oldest(b"s"))[1] == at
        folder.apply({cell_of("s", b"%d" % at): None}, 0, 0.0)
    assert len({start[16:24] for start in starts}) == 95, "each scan continues after the last entry found"
    assert (oldest(), oldest()) == ([], [])
    assert starts[-1] > starts[-2], "after all deleted entries"
    write(50, 60)
    write(40)
    assert oldest() == [40, 50, 60]
    folder.close()


@pytest.mark.parametrize("where", ENGINES)
def test_entries_of_one_time_with_long_keys_are_all_found(where: str, tmp_path: Path) -> None:
    """A folder shortens long names; two that begin alike must stay apart."""
    folder = values_in(where, tmp_path, {b"s": 10})
    cells = {cell_of("s", b"k" * 1_000 + end): add_write_time(5, b"") for end in (b"a", b"b")}
    folder.apply(cells, 0, 0.0)
    assert {cell for cell, _ in folder.oldest(b"s")} == set(cells)
    folder.close()
