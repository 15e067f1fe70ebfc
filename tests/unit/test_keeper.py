"""Who keeps the state: what a partition begins with, what is sent, and when it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from eos import App, Record, State
from eos.app.cells import cell_of
from eos.errors import ConfigurationError, Temporary
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.kafka.tail import Seen, Span
from eos.kafka.watchdog import Job
from eos.state import changelog, restoring, values
from eos.state.keeper import Keeper

START = SimpleNamespace(offset=0, metadata="")
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

    def settled(settings: Settings, topic: str, partitions: Sequence[int], world: object) -> Settled:
        assert (topic, partitions) == ("shop-count-changelog", [0])
        READER.log = [msgspec.structs.replace(record, offset=n) for n, record in enumerate(left.pop(0))]
        yield
        return {0: Span(0, len(READER.log), len(READER.log))}

    READER.starts = []
    monkeypatch.setattr(changelog, "settled", settled)
    monkeypatch.setattr(tail, "TopicReader", READER)
    monkeypatch.setattr(restoring, "_PATIENCE_S", 0.0)
    return Keeper(app_of(), SETTINGS if folder is None else Settings({"eos.state.dir": str(folder)}))


Settled = Generator[None, None, dict[int, Span]]


class Reader:
    """Reads `log` one by one; called it is a TopicReader."""

    log: Sequence[Record]
    starts: list[dict[int, int]]
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
        self._at += 1
        return [Seen(self.log[self._at - 1])]


READER = Reader()


def restore(keeper: Keeper) -> None:
    keeper.forget([("in", 0)])
    deadline = time.monotonic() + 5
    while ("in", 0) not in keeper.restore({("in", 0): START, ("elsewhere", 0): START}):
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
    assert sent == [("shop-count-changelog", b"2", CELL, 0)]
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
    with pytest.raises(Temporary, match=r"state cannot be restored: a transaction is open in log\[0\]"):
        list(held_by())


def started(function: Callable[..., Any], *args: Any) -> Job:
    job = Job(function, args)
    job.result = function(*args)
    job.done.set()
    return job


def test_a_folder_goes_on_where_the_last_commit_left_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    longer = note(b"1"), note(b"2"), note(b"3"), note(b"4"), note(b"5")
    first = keeper_on(monkeypatch, longer[:2], folder=tmp_path)
    restore(first)
    assert kept(first) == b"2"
    kept(first, b"3")
    monkeypatch.setattr(first, "_stable", lambda _: {("in", 0): 3})
    first._thread = SimpleNamespace(start=started, close=lambda: None)  # type: ignore[assignment]
    first.committed()  # asks
    first.committed()  # has the answer
    kept(first, b"lost with the process")
    first.close(finished=False)

    second = keeper_on(monkeypatch, longer[:4], folder=tmp_path)
    restore(second)
    assert (READER.starts, kept(second)) == ([{0: 3}], b"4")
    # A folder that another process has is left alone.
    third = keeper_on(monkeypatch, longer, folder=tmp_path)
    restore(third)
    assert kept(third) == b"5"
    assert sorted(path.name for path in (tmp_path / "shop").iterdir()) == [
        "shop-count-changelog-0.0",
        "shop-count-changelog-0.1",
    ]
    for keeper in (second, third):
        keeper.close(finished=False)


@pytest.mark.parametrize("why", ["boot", "another changelog", "behind its end", "away too long", "damaged"])
def test_a_folder_that_may_be_wrong_is_begun_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    one = keeper_on(monkeypatch, [note(b"1"), note(b"2")], folder=tmp_path)
    restore(one)
    one.close(finished=False)
    # What is not in the changelog any more (a tombstone that was compacted away) must not come back.
    there = [note(None), note(None), Record("", 0, 0, key=b"x"), Record("", 0, 0, key=b"x")]
    other = keeper_on(monkeypatch, there[:1] if why == "behind its end" else there, folder=tmp_path)
    if why == "boot":
        monkeypatch.setattr(values, "_boot_id", lambda: "another")
    if why == "another changelog":
        other._ids = {"shop-count-changelog": "another"}
    if why == "away too long":
        other._tombstones_s = {"shop-count-changelog": -1.0}
    if why == "damaged":
        (tmp_path / "shop" / "shop-count-changelog-0.0" / "values" / "data.mdb").write_bytes(b"\1" * 50_000)
    restore(other)
    assert kept(other) is None
    other.close(finished=False)


def test_keys_of_any_length_are_kept(tmp_path: Path) -> None:
    folder = values.InFolder.of(tmp_path, "t", "id")
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
        values.check_folder(tmp_path / "file" / "x")


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
