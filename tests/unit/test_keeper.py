"""Who keeps the state: what a partition begins with, what is sent, and when it counts."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from eos import App, Record, State
from eos.app.ageing import stamped
from eos.app.cells import cell_of
from eos.errors import ConfigurationError, InputGone, Temporary, Unavailable
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.kafka.tail import Seen, Span
from eos.kafka.watchdog import Job
from eos.state import changelog, folders, restoring
from eos.state.engines import ENGINES, EngineFailed
from eos.state.keeper import Keeper
from eos.state.tasks import Task
from eos.state.values import InMemory

SETTINGS = Settings({"eos.state.dir": ""})
CELL = cell_of("seen", b"k")


def app_of() -> App:
    app = App("shop")

    @app.process("in", to="out")
    def count(value: str, seen: State[int]) -> None:
        seen.set(seen.get(0) + 1)

    return app


def keeper_on(monkeypatch: pytest.MonkeyPatch, *lives: Sequence[Record], folder: Path | None = None) -> Keeper:
    """Its changelog is each of these in turn; a record's offset is its number in it."""
    left = list(lives)

    def settled(
        settings: Settings, topic: str, partitions: Sequence[int], world: object, at_least: dict[int, int]
    ) -> Settled:
        assert (topic, partitions) == ("shop-count-changelog", [0])
        READER.at_least = at_least
        READER.log = [
            msgspec.structs.replace(record, offset=n)
            for n, record in enumerate(left.pop(0) if len(left) > 1 else left[0])
        ]
        yield
        return {0: Span(0, len(READER.log), len(READER.log))}

    READER.starts = []
    monkeypatch.setattr(changelog, "settled", settled)
    monkeypatch.setattr(tail, "TopicReader", READER)
    monkeypatch.setattr(restoring, "_PATIENCE_S", 0.0)
    keeper = Keeper(app_of(), SETTINGS if folder is None else Settings({"eos.state.dir": str(folder)}))
    keeper._fits = fits()
    return keeper


def fits(**more: Any) -> dict[str, changelog.Fit]:
    return {"shop-count-changelog": changelog.Fit("shop-count-changelog", 1, **more)}


Settled = Generator[None, None, dict[int, Span]]


class Reader:
    """Reads `log` one by one; called it is a TopicReader."""

    log: Sequence[Record]
    at_least: dict[int, int]
    starts: list[dict[int, int]]
    fails: ClassVar[list[Exception]] = []
    now = time.monotonic

    def __call__(
        self, settings: Settings, topic: str, starts: dict[int, int], uncommitted: bool, world: object
    ) -> Reader:
        assert (topic, uncommitted) == ("shop-count-changelog", False)
        self.starts.append(starts)
        self._at = starts[0]
        return self

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None: ...

    def at(self, partition: int) -> int:
        return self._at

    def read(self) -> list[Seen]:
        if self.fails:
            raise self.fails.pop()
        self._at += 1
        return [Seen(self.log[self._at - 1])]


READER = Reader()


def restore(keeper: Keeper, beside: object = None) -> None:
    keeper.forget([("in", 0)])
    start = SimpleNamespace(offset=5, metadata="" if beside is None else json.dumps(beside))
    deadline = time.monotonic() + 5
    while ("in", 0) not in keeper.restore({("in", 0): start, ("elsewhere", 0): start}):
        assert time.monotonic() < deadline


def kept(keeper: Keeper, value: bytes | None = None) -> bytes | None:
    cells = keeper.cells_of(app_of().routes["in"])(Record("in", 0, 5))
    if value is not None:
        cells.put(CELL, value)
    return cells.get(CELL)


def note(value: bytes | None) -> Record:
    return Record("shop-count-changelog", 0, 0, key=CELL, value=value)


def test_a_partition_begins_with_what_its_changelog_says_and_nothing_from_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")], [], [note(b"7"), note(None)])
    for found in (b"2", None, None):  # meanwhile another member deleted it, and compaction took the tombstone
        restore(keeper)
        assert kept(keeper) == found


def test_what_changed_is_sent_once_per_key_and_counts_when_its_transaction_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch, [])
    restore(keeper)
    sent: list[tuple[Any, ...]] = []
    for value in (b"1", b"2"):
        kept(keeper, value)
    keeper.last_sends(lambda *send: sent.append(send))
    assert sent == [("shop-count-changelog", b"2", CELL, 0, 0)]
    keeper.undone()
    assert kept(keeper) is None
    kept(keeper, b"3")
    keeper.committed()
    keeper.undone()
    assert kept(keeper) == b"3"
    keeper.last_sends(lambda *send: sent.append(send))
    assert len(sent) == 1
    keeper.forget([("in", 0), ("in", 1)])
    with pytest.raises(KeyError):
        kept(keeper)


def test_a_changelog_is_read_once_the_transaction_before_is_decided_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator answers before its markers are everywhere: what is committed may not be readable yet."""
    now = [0.0]
    world: Any = SimpleNamespace(now=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    spans = [Span(3, 5, 9), Span(3, 5, 9), Span(3, 9, 9)]
    asked: list[int] = []

    def held_by(*_: object) -> Iterator[None]:
        asked[:] = []
        held = yield from changelog.settled(SETTINGS, "log", [0], world)
        asked.append(held[0].stable)

    monkeypatch.setattr(facts, "connect", lambda *_: None)
    monkeypatch.setattr(tail, "held", lambda *_: {0: spans.pop(0) if len(spans) > 1 else spans[0]})
    assert len(list(held_by())) == 2, "the group is polled while it is open"
    assert asked == [9]
    spans[:] = [Span(3, 5, 9)]
    with pytest.raises(Temporary, match=r"state cannot be restored: log\[0\] has an open transaction"):
        list(held_by())


def test_a_changelog_is_not_believed_that_ends_before_what_a_folder_has_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that has just become the leader, or cannot say: what it answers first must not be taken for all."""
    now = [0.0]
    world: Any = SimpleNamespace(now=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    answers: list[Span | Exception] = [Unavailable("no leader"), Span(0, 0, 0), Span(0, 193, 193)]

    def held(*_: object) -> dict[int, Span]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {0: answer}

    monkeypatch.setattr(facts, "connect", lambda *_: None)
    monkeypatch.setattr(tail, "held", held)
    found = changelog.settled(SETTINGS, "log", [0], world, {0: 193})
    assert [next(found), next(found)] == [None, None]
    with pytest.raises(StopIteration) as ended:
        next(found)
    assert ended.value.value == {0: Span(0, 193, 193)}
    # How long the brokers were away before does not count.
    answers[:] = [*[Unavailable("no leader")] * 800, Span(0, 120, 120), Span(0, 120, 120), Span(0, 193, 193)]
    assert len(list(changelog.settled(SETTINGS, "log", [0], world, {0: 193}))) == 802
    answers[:] = [Span(0, 120, 120)]
    with pytest.raises(InputGone, match=r"the changelog log\[0\] ends at 120, and went up to 193 when offsets of its"):
        list(changelog.settled(SETTINGS, "log", [0], world, {0: 193}))


def test_how_far_its_changelog_goes_is_committed_beside_the_offset_and_asked_for_by_who_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")], [note(b"1")] * 6)
    restore(keeper)
    said = []
    for change, committed in ((b"3", False), (b"3", True), (None, True), (b"4", True)):
        if change is not None:
            kept(keeper, change)
        keeper.last_sends(lambda *_: None)
        said.append(keeper.beside(("in", 0)))
        keeper.committed() if committed else keeper.undone()
    # What was read, and for each transaction with changes their records and its marker.
    kinds = {"seen": "State"}
    assert said == [{"state": ["count", end, kinds]} for end in (4, 4, 4, 6)]
    restore(keeper, said[-1])
    assert READER.at_least == {0: 6}
    # Another function's, which had a changelog of its own, and what nobody of ours wrote.
    other = {"state": ["counts", 9, {"seen": "ListState"}]}
    for strange in (other, {"state": 7}, {"state": ["count", "x", 3]}, {"state": ["count", 1, {}, 2]}, [5]):
        keeper = keeper_on(monkeypatch, [note(b"1")])
        restore(keeper, strange)
        assert READER.at_least == {0: 0}


def test_a_store_of_another_kind_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a map holds is no value, and fields of numbers are no text."""
    with pytest.raises(
        ConfigurationError, match=r"the state seen of count was a MapState\[str\] when it was kept, and is a State now"
    ):
        restore(keeper_on(monkeypatch), {"state": ["count", 1, {"seen": "MapState[str]"}]})
    keeper = keeper_on(monkeypatch, [note(b"1")])
    noted = {"state": ["count", 1, {"seen": "State", "gone": "ListState"}]}
    restore(keeper, noted)
    keeper.last_sends(lambda *_: None)
    assert keeper.beside(("in", 0)) == noted


def test_a_source_that_grew_under_a_running_worker_is_refused_with_its_new_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch)

    def require(*_: object) -> None:
        raise ConfigurationError("has 1 partitions, and in has 2")

    monkeypatch.setattr(changelog, "require", require)
    new = {("in", 1): SimpleNamespace(offset=0, metadata="")}
    with pytest.raises(ConfigurationError, match="has 1 partitions, and in has 2"):
        keeper.restore(new)

    def away(*_: object) -> None:
        raise Unavailable("no broker")

    monkeypatch.setattr(changelog, "require", away)
    assert keeper.restore(new) == set(), "asked again in a moment"


def test_a_restore_waits_for_a_broker_that_is_away_while_it_reads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")])
    monkeypatch.setattr(READER, "fails", [Unavailable("reading stands still for 30 s"), Unavailable("again")])
    monkeypatch.setattr(restoring, "_MOMENT_S", 0.0)
    restore(keeper)
    assert len(READER.starts) == 3, "the group is polled in between"
    assert kept(keeper) == b"2"
    waits = [line for line in caplog.messages if "restoring state waits" in line]
    assert len(waits) == 2


def test_an_end_that_is_no_offset_is_not_read_to() -> None:
    """Else a restore would take the changelog for empty."""

    def answers(asked: dict[Any, Any], **_: object) -> dict[Any, Future[Any]]:
        futures = {place: Future[Any]() for place in asked}
        for future in futures.values():
            future.set_result(SimpleNamespace(offset=-1))
        return futures

    with pytest.raises(Unavailable, match=r"the offsets of log\[0\] cannot be had: a broker says -1"):
        tail.stable_ends(SimpleNamespace(list_offsets=answers), "log", [0])


def started(function: Callable[..., Any], *args: Any) -> Job:
    job = Job(function, args)
    job.result = function(*args)
    job.done.set()
    return job


def commit(keeper: Keeper, *partitions: tuple[str, int], before: Callable[[], object] = lambda: None) -> None:
    """A transaction that commits these partitions' offsets; `before`: what happens when its records were sent."""
    keeper.last_sends(lambda *_: None)
    before()
    for partition in partitions or [("in", 0)]:
        keeper.beside(partition)
    keeper.committed()


@pytest.mark.parametrize(
    "why", ["it came while the commit was under way", "another partition's offsets were committed"]
)
def test_an_end_of_the_changelog_that_may_be_another_members_work_is_not_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")], folder=tmp_path)
    restore(keeper)
    monkeypatch.setattr(keeper, "_stable", lambda _: {("in", 0): 9})
    job = Job(lambda: None, ())
    job.result = {("in", 0): 9}
    keeper._thread = SimpleNamespace(start=lambda *_: job, close=lambda: None)  # type: ignore[assignment]
    commit(keeper)  # asks
    task = keeper._tasks["in", 0]
    if why.startswith("it came"):
        commit(keeper, before=job.done.set)
    else:
        job.done.set()
        commit(keeper, ("in", 1))
    assert task.values.position == 2
    keeper._next_ask = 0.0
    keeper.committed()  # asks again, where it must
    commit(keeper)
    assert task.values.position == 9
    keeper.close()


def test_what_is_over_is_deleted_by_a_transaction_that_has_records_of_its_partition() -> None:
    """Another member may have the partition by then, and have renewed the value."""
    values = InMemory(ageing=[b"seen"])
    values.apply({CELL: stamped(0, b"1")}, 0, 0.0)
    keeper = Keeper(app_of(), SETTINGS)
    keeper._tasks["in", 0] = task = Task(values, {b"seen": 10})
    task._committed_ms = task.time_ms = 50
    sent: list[tuple[Any, ...]] = []
    keeper.last_sends(lambda *send: sent.append(send))
    assert sent == []
    task.time_ms = 60
    keeper.last_sends(lambda *send: sent.append(send))
    assert [(value, cell) for _, value, cell, *_ in sent if cell == CELL] == [(None, CELL)]


def test_a_folder_goes_on_where_the_last_commit_left_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    longer = [note(b"%d" % number) for number in range(1, 7)]
    first = keeper_on(monkeypatch, longer[:2], folder=tmp_path)
    restore(first)
    assert kept(first) == b"2"
    kept(first, b"3")
    monkeypatch.setattr(first, "_stable", lambda _: {("in", 0): 3})
    first._thread = SimpleNamespace(start=started, close=lambda: None)  # type: ignore[assignment]
    first.committed()  # asks
    commit(first)  # has the answer
    kept(first, b"lost with the process")
    first.close()

    second = keeper_on(monkeypatch, longer[:5], folder=tmp_path)
    restore(second)
    assert (READER.starts, kept(second)) == ([{0: 3}], b"5")
    # A folder that another process has is left alone.
    third = keeper_on(monkeypatch, longer, folder=tmp_path)
    restore(third)
    assert kept(third) == b"6"
    assert sorted(path.name for path in (tmp_path / "shop").iterdir()) == [
        "shop-count-changelog-0.0",
        "shop-count-changelog-0.1",
    ]
    for keeper in (second, third):
        keeper.close()


@pytest.mark.parametrize("why", ["boot", "another changelog", "behind its end", "away too long", "damaged"])
def test_a_folder_that_may_be_wrong_is_begun_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    one = keeper_on(monkeypatch, [note(b"1"), note(b"2")], folder=tmp_path)
    restore(one)
    one.close()
    # What is not in the changelog any more (a tombstone that was compacted away) must not come back.
    there = [note(None), note(None), Record("", 0, 0, key=b"x"), Record("", 0, 0, key=b"x")]
    other = keeper_on(monkeypatch, there[:1] if why == "behind its end" else there, folder=tmp_path)
    if why == "boot":
        monkeypatch.setattr(folders, "_boot_id", lambda: "another")
    if why == "another changelog":
        other._ids = {"shop-count-changelog": "another"}
    if why == "away too long":
        other._fits = fits(tombstones_s=-1.0)
    if why == "damaged":
        (tmp_path / "shop" / "shop-count-changelog-0.0" / "values" / "data.mdb").write_bytes(b"\1" * 50_000)
    restore(other)
    assert kept(other) is None
    other.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_folder_is_not_thrown_away_where_none_can_be_opened(tmp_path: Path, engine: str) -> None:
    def failing(path: Path, memory_bytes: int) -> None:
        ENGINES[engine](path, memory_bytes).close()
        raise EngineFailed("Too many open files")

    failing.folder = ENGINES[engine].folder  # type: ignore[attr-defined]

    def opened(kind: Any) -> folders.InFolder:
        found = folders.InFolder.of(tmp_path, "t", "id", engine=kind)
        assert found is not None
        return found

    first = opened(ENGINES[engine])
    first.apply({CELL: b"1"}, 7, 1.5)
    first.close()
    with pytest.raises(Temporary, match="Too many open files"):
        opened(failing)
    again = opened(ENGINES[engine])
    assert (again.get(CELL), again.position) == (b"1", 7)
    again.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_deleted_folder_does_not_stop_its_worker(tmp_path: Path, engine: str) -> None:
    """It goes on or ends with 75, and the next start restores it from the changelog."""
    folder = folders.InFolder.of(tmp_path, "t", "id", engine=ENGINES[engine])
    assert folder is not None
    folder.apply({CELL: b"1"}, 7, 1.5)
    assert folder.size_bytes > 0
    shutil.rmtree(tmp_path / "t.0")
    assert folder.size_bytes == 0
    with contextlib.suppress(Temporary):
        folder.apply({CELL: b"2"}, 8, 1.5)
        assert folder.get(CELL) == b"2"
    folder.close()
    again = folders.InFolder.of(tmp_path, "t", "id", engine=ENGINES[engine])
    assert again is not None
    assert (again.get(CELL), again.position) == (None, 0)
    again.close()


def test_keys_of_any_length_are_kept(tmp_path: Path) -> None:
    folder = folders.InFolder.of(tmp_path, "t", "id")
    assert folder is not None
    cells = {
        cell_of("s", b"k" * length): b"%d" % length for length in (0, 1, 490, 491, 492, 493, 494, 495, 5_000, 70_000)
    }
    folder.apply(cells, 7, 1.5)
    assert {cell: folder.get(cell) for cell in cells} == cells
    assert len(folder) == len(cells)
    folder.apply(dict.fromkeys(cells), 8, 1.5)
    assert (len(folder), folder.position) == (0, 8)
    folder.close()


def test_a_folder_that_cannot_be_is_said_before_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"eos.state.dir=.*/file/x cannot be written: Not a directory"):
        folders.check_folder(tmp_path / "file" / "x")


def test_where_the_usual_folder_cannot_be_values_are_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(changelog, "require", lambda *_: {})
    keeper_on(monkeypatch).prepare()
    Keeper(app_of(), Settings({})).prepare()
    (line,) = caplog.messages
    assert "state is kept in memory, and read anew at each start why=eos.state.dir=" in line
    with pytest.raises(ConfigurationError, match="cannot be written: Not a directory"):
        Keeper(app_of(), Settings({"eos.state.dir": str(tmp_path / "home" / "x")})).prepare()


def test_two_functions_of_one_name_do_not_share_their_state() -> None:
    app = app_of()

    def count(value: str, seen: State[int]) -> None: ...

    app.process("other", to="out")(count)
    with pytest.raises(ConfigurationError, match="two functions with state are named count: each needs a name of its"):
        Keeper(app, SETTINGS)
    long = App("a" * 249)
    long.process("in", to="out")(count)
    with pytest.raises(
        ConfigurationError, match=r"the state of count needs the topic 'a{249}-count-changelog', and Kafka"
    ):
        Keeper(long, SETTINGS)
