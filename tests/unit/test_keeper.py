"""The keeper of state: restored state, sent changes, and when they take effect."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from eos import App, Record, State
from eos.app.cells import HEADER, cell_of
from eos.app.expiry import add_write_time
from eos.app.routes import Route
from eos.app.state import Store
from eos.broker.jars import cache_directory
from eos.errors import ConfigurationError, InputGone, Temporary, Unavailable
from eos.kafka.admin import facts, tail
from eos.kafka.admin.tail import MarkedRecord, OffsetRange
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL
from eos.records import Send
from eos.state import changelog, folders, restoring
from eos.state.engines import ENGINES, EngineFailed
from eos.state.keeper import Keeper
from eos.state.notes import OffsetNote, check_partitions, current_header, make_offset_note
from eos.state.tasks import Task
from eos.state.values import InMemory
from tests.support.reading import wait_until

SETTINGS = Settings({"eos.state.dir": ""})
CELL = cell_of("seen", b"k")
HEADER_VALUE = (
    b'{"app":"shop","function":"count","sources":["in"],"stores":{"seen":"State"},"v":1}'  # docs/reference/formats.md
)


def app_of() -> App:
    app = App("shop")

    @app.process("in", to="out")
    def count(value: str, seen: State[int]) -> None:
        seen.set(seen.get(0) + 1)

    return app


def keeper_on(monkeypatch: pytest.MonkeyPatch, *lives: Sequence[Record], folder: Path | None = None) -> Keeper:
    """Return a keeper whose changelog has each of these lists in turn; a record's offset is its index."""
    left = list(lives)

    def held(_: object, topic: str, partitions: Collection[int]) -> dict[int, OffsetRange]:
        assert (topic, list(partitions)) == ("shop-count-changelog", [0])
        READER.log = [
            msgspec.structs.replace(record, offset=n)
            for n, record in enumerate(left.pop(0) if len(left) > 1 else left[0])
        ]
        return {0: OffsetRange(READER.low, len(READER.log), len(READER.log))}

    READER.starts, READER.low = [], 0
    monkeypatch.setattr(facts, "connect", lambda *_: None)
    monkeypatch.setattr(tail, "partition_offsets_or_errors", held)
    monkeypatch.setattr(facts, "find_leaderless", lambda *_: frozenset())
    monkeypatch.setattr(tail, "TopicReader", READER)
    monkeypatch.setattr(restoring, "_FOLDER_WAIT_S", 0.0)
    keeper = Keeper(app_of(), SETTINGS if folder is None else Settings({"eos.state.dir": str(folder)}))
    keeper._fits = fits()
    return keeper


def fits(**more: Any) -> dict[str, changelog.ChangelogFit]:
    return {"shop-count-changelog": changelog.ChangelogFit("shop-count-changelog", 1, **more)}


class Reader:
    """Reads `log` one by one; called it is a TopicReader."""

    log: Sequence[Record]
    low = 0
    most = 0
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

    def read(self) -> list[MarkedRecord]:
        if self.fails:
            raise self.fails.pop()
        self._at += 1
        return [MarkedRecord(self.log[self._at - 1])]


READER = Reader()


NOTE = {"state": ["count", 0, 1, ["seen"]]}


def restore(keeper: Keeper, beside: object = NOTE, uncommitted: Collection[tuple[str, int]] = ()) -> None:
    keeper.forget([("in", 0)])
    start = SimpleNamespace(offset=5, metadata=json.dumps(beside))
    deadline = time.monotonic() + 5
    while ("in", 0) not in keeper.restore({("in", 0): start, ("elsewhere", 0): start}, uncommitted):
        assert time.monotonic() < deadline


def kept(keeper: Keeper, value: bytes | None = None) -> bytes | None:
    cells = keeper.cells_of(app_of().routes["in"])(Record("in", 0, 5))
    if value is not None:
        cells.put(CELL, value)
    return cells.get(CELL)


def note(value: bytes | None) -> Record:
    return Record("shop-count-changelog", 0, 0, key=CELL, value=value)


def test_restore_returns_exactly_the_changelogs_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")], [], [note(b"7"), note(None)])
    for found in (b"2", None, None):  # meanwhile another member deleted the value, and compaction removed the tombstone
        restore(keeper)
        assert kept(keeper) == found


def send(keeper: Keeper, *partitions: tuple[str, int]) -> list[tuple[bytes, bytes | None]]:
    """Return the changelog sends of a transaction that commits these partitions' offsets, in order."""
    sent: list[tuple[bytes, bytes | None]] = []

    def take(sends: Iterable[Send]) -> None:
        for topic, value, cell, partition, _, _ in sends:
            assert (topic, partition) == ("shop-count-changelog", 0)
            sent.append((cell, value))

    keeper.before_flush(take, partitions or [("in", 0)])
    return sent


def test_keeper_sends_each_changed_key_once_and_keeps_it_after_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keeper_on(monkeypatch, [])
    restore(keeper)
    for value in (b"1", b"2"):
        kept(keeper, value)
    assert keeper.changed_partitions() == [("in", 0)]
    assert send(keeper) == [(CELL, b"2"), (HEADER, HEADER_VALUE)]
    keeper.aborted()
    assert (kept(keeper), keeper.changed_partitions()) == (None, [])
    kept(keeper, b"3")
    commit(keeper)
    keeper.aborted()
    assert kept(keeper) == b"3"
    assert send(keeper) == [], "nothing changed, and the header is there"
    kept(keeper, b"4")
    assert send(keeper) == [(CELL, b"4")]
    keeper.forget([("in", 0), ("in", 1)])
    with pytest.raises(KeyError):
        kept(keeper)


def test_keeper_writes_nothing_for_a_partition_without_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group checks a transaction by its offsets: without one, another member may own the partition."""
    keeper = keeper_on(monkeypatch, [])
    restore(keeper)
    kept(keeper, b"1")
    assert send(keeper, ("in", 1)) == []
    assert kept(keeper) is None, "unsent changes do not count"


OPEN = OffsetRange(0, 5, 9)


def restoring_of(
    monkeypatch: pytest.MonkeyPatch, answers: dict[int, list[OffsetRange | Unavailable]], at_least: int = 0
) -> tuple[restoring.Restoring, list[float]]:
    """Return a restore of these partitions into memory, with the brokers' answers for each in turn, and its clock."""
    now = [0.0]
    world: Any = SimpleNamespace(
        now=lambda: now[0], unix=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    )

    def held(_: object, topic: str, partitions: Collection[int]) -> dict[int, OffsetRange | Unavailable]:
        return {p: answers[p].pop(0) if len(answers[p]) > 1 else answers[p][0] for p in partitions}

    class Skipping(Reader):
        """Reads nothing but aborted records, at once."""

        def __call__(self, *_: object, **__: object) -> Skipping:
            self._at = 0
            return self

        def read(self) -> list[MarkedRecord]:
            self._at = 1_000
            return []

    monkeypatch.setattr(facts, "connect", lambda *_: None)
    monkeypatch.setattr(tail, "partition_offsets_or_errors", held)
    monkeypatch.setattr(facts, "find_leaderless", lambda *_: frozenset())
    monkeypatch.setattr(tail, "TopicReader", Skipping())
    ends = dict.fromkeys(answers, at_least)
    route = app_of().routes["in"]
    return restoring.Restoring(SETTINGS, "log", route, ends, lambda *_: InMemory(), 1.0, world), now


def until_ready(one: restoring.Restoring, now: list[float], most_s: float = 200.0) -> set[int]:
    """Return the partitions that become ready within that time."""
    ready: set[int] = set()
    until = now[0] + most_s
    while not one.done and now[0] < until:
        ready |= one.run_steps().keys()
    return ready


def test_restore_waits_for_the_outcome_of_the_previous_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator answers before its markers are everywhere: committed records may not be readable yet."""
    one, now = restoring_of(monkeypatch, {0: [OPEN, OPEN, OffsetRange(0, 9, 9)]})
    assert until_ready(one, now) == {0}
    one, now = restoring_of(monkeypatch, {0: [OPEN]})
    with pytest.raises(Temporary, match=r"state cannot be restored: log\[0\] has an open transaction"):
        until_ready(one, now)


def test_restore_waits_for_a_leader_that_does_not_know_the_end_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broker that has just become the leader answers first must not be taken for all."""
    short, whole = OffsetRange(0, 120, 120), OffsetRange(0, 193, 193)
    one, now = restoring_of(monkeypatch, {0: [Unavailable("no leader"), OffsetRange(0, 0, 0), whole]}, 193)
    assert until_ready(one, now) == {0}
    # Earlier unavailability of the brokers does not count.
    one, now = restoring_of(monkeypatch, {0: [*[Unavailable("no leader")] * 900, short, short, whole]}, 193)
    assert until_ready(one, now) == {0}
    one, now = restoring_of(monkeypatch, {0: [short]}, 193)
    with pytest.raises(InputGone, match=r"the changelog log\[0\] ends at 120, but went up to 193 when offsets of its"):
        until_ready(one, now)


def test_restore_of_a_leaderless_partition_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, now = restoring_of(monkeypatch, {0: [], 1: [OffsetRange(0, 7, 7)]})
    monkeypatch.setattr(facts, "find_leaderless", lambda *_: frozenset({0}))  # the client would wait for it
    assert until_ready(one, now, 300.0) == {1}
    assert (list(one.partitions), one.done) == ([0], False)
    waits = [line for line in caplog.messages if "state restore waiting" in line]
    assert 10 < len(waits) < 40, "the wait is logged every ten seconds"


@pytest.mark.parametrize(
    ("low", "position", "age_s", "start"),
    [
        (40, 0, 0.0, None),  # an empty folder
        (40, 39, 0.0, None),
        (40, 40, 0.0, (40, True)),
        (40, 70, 0.0, (70, True)),
        (40, 70, 11.0, None),  # tombstones may be gone
        (40, 99, 11.0, (99, True)),  # all records are there except for a marker
        (0, 0, 0.0, (0, True)),
        (0, 70, 0.0, (70, True)),
        (0, 70, 11.0, (0, False)),
        (0, 99, 11.0, (99, True)),
        (0, 101, 0.0, (0, False)),
    ],
)
def test_restore_starts_at_folder_position_or_at_beginning(
    low: int, position: int, age_s: float, start: tuple[int, bool] | None
) -> None:
    found = changelog.find_start(position, 50.0, OffsetRange(low, 100, 100), tombstones_s=10.0, now=50.0 + age_s)
    assert found == start


def test_restore_fails_if_changelog_beginning_was_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = [note(b"%d" % number) for number in range(5)]
    first = keeper_on(monkeypatch, log, folder=tmp_path)
    restore(first)
    first.close()
    empty = keeper_on(monkeypatch, log, folder=tmp_path / "other")
    READER.low = 3
    with pytest.raises(InputGone, match=r"the changelog shop-count-changelog\[0\] begins at 3, so values"):
        restore(empty)
    empty.close()
    again = keeper_on(monkeypatch, log, folder=tmp_path)
    READER.low = 3
    restore(again)
    assert kept(again) == b"4", "the folder has the missing records"
    again.close()


@pytest.mark.parametrize(
    "key", [None, b"", b"hello", b"seen\0\0\0\0", b"seen\0\0\0\0\5abc", b"seen\0\0\0\0\1k" + b"f" * 402]
)
def test_restore_refuses_a_record_of_another_program(monkeypatch: pytest.MonkeyPatch, key: bytes | None) -> None:
    strange = Record("shop-count-changelog", 0, 0, key=key, value=b"x")
    with pytest.raises(
        ConfigurationError, match=r"the changelog record shop-count-changelog\[0\]@1 was written by another program"
    ):
        restore(keeper_on(monkeypatch, [note(b"1"), strange]))


def test_restore_writes_in_bounded_batches_with_position(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A killed restore continues at its position, even with large values."""
    large = [note(b"%d" % number + b"x" * 3_000_000) for number in range(6)]
    keeper = keeper_on(monkeypatch, large, folder=tmp_path)
    fails = [RuntimeError("killed"), *[None] * 5]
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self: _raised(fails.pop()) or read(self))
    with pytest.raises(RuntimeError):
        restore(keeper)
    keeper.close()
    monkeypatch.setattr(Reader, "read", read)
    again = keeper_on(monkeypatch, large, folder=tmp_path)
    restore(again)
    assert READER.starts == [{0: 3}]
    again.close()


def _raised(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_keeper_notes_changelog_end_in_offset_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")], [note(b"1")] * 7)
    restore(keeper)
    said = []
    for change, committed in ((b"3", False), (b"3", True), (None, True), (b"4", True)):
        if change is not None:
            kept(keeper, change)
        send(keeper)
        said.append(keeper.offset_metadata(("in", 0)))
        keeper.committed() if committed else keeper.aborted()
    # The end counts the records read, and for each transaction with changes its records and the marker. The header is a
    # record too.
    assert said == [{"state": ["count", end, 1, ("seen",)]} for end in (5, 5, 5, 7)]
    asked: list[int] = []
    unsettled = changelog.explain_unsettled
    monkeypatch.setattr(changelog, "explain_unsettled", lambda *a: asked.append(a[2]) or unsettled(*a))
    restore(keeper, said[-1])
    restore(keeper_on(monkeypatch, [note(b"1")] * 9), {"state": ["count", 9, 1]})  # metadata of an earlier version
    assert asked == [7, 9]


@pytest.mark.parametrize(
    ("beside", "sentence"),
    [
        (
            {"state": ["counts", 9, 1]},
            'the function counts kept state for records of in, .* name="counts" in the decorator of',
        ),
        (
            {"state": ["count", 9, 1, ["a", "old"]]},
            r'count kept the state a, old, but the code has seen instead, .*was=\{"seen": "a"\}',
        ),
        ({"state": ["count", 9, 1, ["old", "seen"]]}, "count kept the state old, which the code no longer has"),
        *[
            (other, "count has state now, but handled records of in without it before")
            for other in ({"state": 7}, {"state": ["count", "x", 3]}, {"state": []}, [5], {})
        ],
    ],
)
def test_keeper_refuses_offsets_committed_with_other_state(
    monkeypatch: pytest.MonkeyPatch, beside: object, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        restore(keeper_on(monkeypatch, [note(b"1")] * 9), beside)


def test_start_committed_before_the_restore_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With auto.offset.reset=latest a start is committed at once, possibly before the changelog is examined."""
    keeper = keeper_on(monkeypatch, [])
    unseen = keeper.offset_metadata(("in", 0))
    assert unseen == {"state": ["count", -1, 1, ("seen",)]}
    restore(keeper, unseen)
    assert keeper.offset_metadata(("in", 0)) == {"state": ["count", 0, 1, ("seen",)]}
    there = [note(b"1"), Record("", 0, 0, key=HEADER, value=HEADER_VALUE)]
    with pytest.raises(InputGone, match="has no committed offset"):
        restore(keeper_on(monkeypatch, there), unseen)


def test_user_without_home_directory_keeps_state_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert Keeper(app_of(), Settings({}))._folder is None
    assert "state kept in memory" in caplog.text
    with pytest.raises(ConfigurationError, match="~/state cannot be found: this user has no home folder: set it, or"):
        Keeper(app_of(), Settings({"eos.state.dir": "~/state"}))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ConfigurationError, match="no home folder: set HOME or XDG_CACHE_HOME"):
        cache_directory()


def header(**more: object) -> bytes:
    return json.dumps(json.loads(HEADER_VALUE) | more).encode()


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        # A map's fields are not a single value, and number fields are not text.
        (
            header(stores={"seen": "MapState[str]"}),
            r"seen of count was a MapState\[str\] when it was stored, and is a State",
        ),
        (header(app="shop-count"), r"belongs to the App shop-count, but App shop would write to it"),
        (header(function="counts"), r"belongs to the function counts, but function count would write to it"),
        (header(v=2), r"has format 2, but this version of eos reads formats up to 1: run a newer version"),
        (
            header(stores={"gone": "State"}),
            r'count kept the state gone, but the code has seen instead, .* was=\{"seen": "gone"\}',
        ),
        (header(stores={"gone": "State", "seen": "State"}), "count kept the state gone, which the code no longer has"),
        (header(stores={}), "the state seen of count is new, and would begin empty"),
        (b"{}", r"the header of the changelog shop-count-changelog\[0\] cannot be read"),
    ],
)
def test_keeper_refuses_a_changelog_by_its_header(monkeypatch: pytest.MonkeyPatch, there: bytes, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        restore(keeper_on(monkeypatch, [Record("", 0, 0, key=HEADER, value=there)]))


def test_state_names_are_in_the_header_not_in_offset_metadata() -> None:
    """Brokers accept 4,096 bytes of offset metadata."""
    stores = tuple(Store(f"a_long_name_of_a_state_{number}", State, (int,)) for number in range(90))
    route = Route(lambda value: None, str, ("in",), (), False, stores=stores, name="count")
    assert make_offset_note(route, 7, 1) == OffsetNote("count", 7, 1)
    assert len(current_header("shop", route).stores) == 90


def test_keeper_refuses_state_without_a_committed_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [note(b"1"), Record("", 0, 0, key=HEADER, value=HEADER_VALUE)]
    with pytest.raises(
        InputGone, match=r"in\[0\] has no committed offset, but the changelog shop-count-changelog\[0\]"
    ):
        restore(keeper_on(monkeypatch, there), uncommitted=[("in", 0)])
    restore(keeper_on(monkeypatch, there))
    restore(keeper_on(monkeypatch, []), uncommitted=[("in", 0)])


def test_keeper_refuses_partitions_that_grew_with_their_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = OffsetNote("count", 7, 3)
    check_partitions(beside, "in", 3)
    with pytest.raises(
        ConfigurationError, match="in and its changelog had 3 partitions when it was stored, and have 4"
    ):
        check_partitions(beside, "in", 4)


def test_partition_added_to_a_source_during_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch)
    admin = SimpleNamespace(metadata_by_partition=lambda _: {})
    keeper._world = dataclasses.replace(REAL, admin=lambda _: contextlib.nullcontext(admin))  # type: ignore[arg-type]

    def require(*_: object) -> None:
        raise ConfigurationError("has 1 partitions, and in has 2")

    monkeypatch.setattr(changelog, "create_missing", require)
    new = {("in", 1): SimpleNamespace(offset=0, metadata=json.dumps(NOTE))}
    with pytest.raises(ConfigurationError, match="has 1 partitions, and in has 2"):
        wait_until("it is checked again", lambda: keeper.restore(new, new))

    def away(*_: object) -> None:
        raise Unavailable("no broker")

    monkeypatch.setattr(changelog, "create_missing", away)
    asked: list[int] = []

    def asks() -> None:
        asked.append(1)
        away()

    monkeypatch.setattr(keeper, "_create_and_check", asks)
    wait_until("it is asked again and again", lambda: len(asked) > 2 or keeper.restore(new, new))
    assert keeper.restore(new, new) == set()
    # Without growth of the source the partitions begin. A defect in a changelog is found during the restore.
    keeper = keeper_on(monkeypatch, [])
    keeper._checked_at -= 60.0
    monkeypatch.setattr(keeper, "_create_and_check", away)
    restore(keeper)
    keeper.close()


def test_restore_waits_for_unavailable_broker_while_reading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")])
    monkeypatch.setattr(READER, "fails", [Unavailable("reading stands still for 30 s"), Unavailable("again")])
    monkeypatch.setattr(restoring, "_STEP_S", 0.0)
    restore(keeper)
    assert len(READER.starts) == 3, "the group is polled in between"
    assert kept(keeper) == b"2"
    waits = [line for line in caplog.messages if "state restore waiting" in line]
    assert len(waits) == 2


def test_restore_does_not_read_to_a_negative_end() -> None:
    """Otherwise a restore would treat the changelog as empty."""

    def answers(asked: dict[Any, Any], **_: object) -> dict[Any, Future[Any]]:
        futures = {place: Future[Any]() for place in asked}
        for future in futures.values():
            future.set_result(SimpleNamespace(offset=-1))
        return futures

    with pytest.raises(Unavailable, match=r"the offsets of log\[0\] are unavailable: a broker answered -1"):
        tail.stable_offsets(SimpleNamespace(list_offsets=answers), "log", [0])


def commit(keeper: Keeper) -> None:
    send(keeper)
    keeper.offset_metadata(("in", 0))
    keeper.committed()


def test_restart_after_aborts_reads_no_known_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an abort left in the changelog is passed by the next commit that changes something there."""
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")], folder=tmp_path)
    restore(keeper)
    task = keeper._tasks["in", 0]
    asked: list[list[int]] = []

    def stable_ends(_: object, topic: str, partitions: list[int]) -> dict[int, int]:
        asked.append(partitions)
        return {0: 9}

    monkeypatch.setattr(tail, "stable_offsets", stable_ends)
    kept(keeper, b"3")
    commit(keeper)
    assert (task.values.position, asked) == (2 + 2 + 1, []), "a record, the header and the marker"
    kept(keeper, b"4")
    send(keeper)
    keeper.aborted()
    assert task.values.position == 5
    kept(keeper, b"5")
    send(keeper)
    keeper.aborted()
    assert task.values.position == 5, "the answer counts only after a commit, which shows that no other member wrote"
    kept(keeper, b"6")
    commit(keeper)
    assert (task.values.position, asked) == (9 + 1 + 1, [[0], [0]])
    kept(keeper, b"7")
    commit(keeper)
    assert (task.values.position, asked) == (13, [[0], [0]])
    keeper.close()


def test_folder_time_precedes_the_offsets_of_its_transaction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process may pause between a commit and the folder's write, while others delete keys."""
    clock = [1_000.0]
    keeper = keeper_on(monkeypatch, [], folder=tmp_path)
    keeper._world = dataclasses.replace(keeper._world, unix=lambda: clock[0])
    restore(keeper)
    kept(keeper, b"1")
    send(keeper)
    clock[0] = 5_000.0
    keeper.committed()
    assert keeper._tasks["in", 0].values.as_of == 1_000.0
    keeper.close()


def test_expired_entries_are_deleted_by_a_transaction_of_the_partition() -> None:
    """Another member may own the partition by then and may have renewed the value."""
    values = InMemory(timed=[b"seen"])
    values.apply({CELL: add_write_time(0, b"1")}, 0, 0.0)
    keeper = Keeper(app_of(), SETTINGS)
    keeper._tasks["in", 0] = task = Task(values, {b"seen": 10})
    task._committed_ms = task.time_ms = 50
    assert send(keeper) == []
    task.time_ms = 60
    assert [entry for entry in send(keeper) if entry[0] == CELL] == [(CELL, None)]


def test_folder_continues_after_the_last_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    longer = [note(b"%d" % number) for number in range(1, 9)]
    first = keeper_on(monkeypatch, longer[:2], folder=tmp_path)
    restore(first)
    assert kept(first) == b"2"
    kept(first, b"3")
    commit(first)
    kept(first, b"lost with the process")
    first.close()

    second = keeper_on(monkeypatch, longer[:7], folder=tmp_path)
    restore(second)
    assert (READER.starts, kept(second)) == ([{0: 5}], b"7")  # after two records, two more and a marker
    # The folder of another process stays as it is.
    third = keeper_on(monkeypatch, longer, folder=tmp_path)
    restore(third)
    assert kept(third) == b"8"
    assert sorted(path.name for path in (tmp_path / "shop").iterdir()) == [
        "shop-count-changelog-0.0",
        "shop-count-changelog-0.1",
    ]
    for keeper in (second, third):
        keeper.close()


@pytest.mark.parametrize("why", ["boot", "another changelog", "away too long", "damaged"])
def test_untrusted_folder_is_discarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    one = keeper_on(monkeypatch, [note(b"1"), note(b"2")], folder=tmp_path)
    restore(one)
    one.close()
    # A key that compaction removed from the changelog with its tombstone must not return.
    there = [note(None), note(None), note(None), note(None)]
    other = keeper_on(monkeypatch, there, folder=tmp_path)
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
def test_folder_is_kept_if_no_engine_can_be_opened(tmp_path: Path, engine: str) -> None:
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
    """The worker continues or ends with 75, and the next start restores the state from the changelog."""
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


def test_unusable_folder_is_reported_before_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"eos.state.dir=.*/file/x cannot be written: Not a directory"):
        folders.check_folder(tmp_path / "file" / "x")


def test_keeper_waits_for_the_coordinator_of_a_new_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception | None] = [Unavailable("NotCoordinatorError"), None]
    monkeypatch.setattr(Keeper, "_create_and_check", lambda _: _raised(answers.pop(0)))
    Keeper(app_of(), SETTINGS).prepare()
    assert answers == []
    answers += [Unavailable("NotCoordinatorError")] * 20
    with pytest.raises(Unavailable, match="NotCoordinatorError"):
        Keeper(app_of(), Settings({"eos.state.dir": "", "eos.startup.timeout.ms": "1000"})).prepare()


def test_unusable_default_folder_keeps_state_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Keeper, "_create_and_check", lambda _: None)
    keeper_on(monkeypatch).prepare()
    Keeper(app_of(), Settings({})).prepare()
    (line,) = caplog.messages
    assert "state kept in memory, each start restores all of it reason=eos.state.dir=" in line
    with pytest.raises(ConfigurationError, match="cannot be written: Not a directory"):
        Keeper(app_of(), Settings({"eos.state.dir": str(tmp_path / "home" / "x")})).prepare()


def test_functions_with_the_same_name_do_not_share_state() -> None:
    app = app_of()

    def count(value: str, seen: State[int]) -> None: ...

    app.process("other", to="out")(count)
    with pytest.raises(ConfigurationError, match="two functions with state are named count: give one another name="):
        Keeper(app, SETTINGS)
    long = App("a" * 249)
    long.process("in", to="out")(count)
    with pytest.raises(
        ConfigurationError, match=r"the state of count needs the topic 'a{249}-count-changelog', which Kafka"
    ):
        Keeper(long, SETTINGS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("synced", [True, False])
def test_folder_synced_at_close_is_kept_after_a_reboot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, synced: bool
) -> None:
    def opened() -> folders.InFolder:
        found = folders.InFolder.of(tmp_path, "t", "id", engine=ENGINES[engine])
        assert found is not None
        return found

    first = opened()
    first.apply({CELL: b"1"}, 7, 1.5)
    if synced:
        first.sync()
    first.close()
    monkeypatch.setattr(folders, "_boot_id", lambda: "another")
    second = opened()
    assert (second.get(CELL), second.position) == ((b"1", 7) if synced else (None, 0))
    second.close()  # not synced, so it is valid in this boot only
    third = opened()
    assert third.position == second.position
    third.close()
    monkeypatch.setattr(folders, "_boot_id", lambda: "a third one")
    fourth = opened()
    assert fourth.position == 0
    fourth.close()


def test_unused_folders_are_deleted(tmp_path: Path) -> None:
    def opened(task: str) -> folders.InFolder:
        found = folders.InFolder.of(tmp_path, task, "id")
        assert found is not None
        return found

    used, left = opened("used"), opened("left")
    other = opened("left")
    left.apply({CELL: b"1"}, 7, 1.5)
    left.close()
    now = time.time()
    assert folders.clean_up(tmp_path, 10.0, now) == []
    assert folders.clean_up(tmp_path, 10.0, now + 20.0) == [tmp_path / "left.0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left.1", "used.0"]
    other.close()
    again = opened("left")
    assert again._folder == tmp_path / "left.1", "a gap in the numbers hides none"
    again.close()
    used.close()


def test_folder_deleted_while_locked_never_has_two_owners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock = fcntl.flock

    def deleted_first(opened: int, how: int) -> None:
        lock(opened, how)
        monkeypatch.setattr("fcntl.flock", lock)
        (tmp_path / "t.0" / "lock").unlink()

    monkeypatch.setattr("fcntl.flock", deleted_first)
    owned = folders._acquire_folder(tmp_path, "t", True)
    assert owned is None, "asked again in a moment"
    owned = folders._acquire_folder(tmp_path, "t", True)
    assert owned is not None
    assert owned[0] == tmp_path / "t.0"


def test_changelog_with_short_tombstone_retention_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(facts, "connect", lambda *_: None)
    for tombstones_s in (3_599.0, 3_600.0):
        fit = changelog.ChangelogFit("shop-count-changelog", 1, tombstones_s=tombstones_s)
        monkeypatch.setattr(changelog, "check_fit", lambda *_, fit=fit: fit)
        changelog.create_missing(SETTINGS, "shop", app_of().stateful)
    (line,) = [line for line in caplog.messages if "changelog keeps tombstones too briefly" in line]
    assert "topic=shop-count-changelog delete_retention_ms=3599000" in line


@pytest.mark.parametrize(("engine", "needed"), [("lmdb", 280), ("rocksdb", 320)])
def test_error_for_too_few_open_files_names_the_needed_number(
    engine: str, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten partitions, before a folder of theirs is opened."""
    asked: list[int] = []

    def allows(wanted: int) -> int:
        asked.append(wanted)
        return needed - 1

    monkeypatch.setattr("eos.state.keeper.allow_open_files", allows)
    keeper = Keeper(app_of(), Settings({"eos.state.dir": str(tmp_path), "eos.state.engine": engine}))
    keeper._fits = {"shop-count-changelog": changelog.ChangelogFit("shop-count-changelog", 10)}
    starts: Any = {("in", number): SimpleNamespace(offset=5, metadata="") for number in range(10)}
    sentence = rf"about {needed} open files with eos.state.engine={engine}, but the limit of this process is"
    with pytest.raises(ConfigurationError, match=f"{sentence} {needed - 1}: raise the limit"):
        keeper.restore(starts, starts)
    assert asked == [2 * needed]
    assert list(tmp_path.iterdir()) == []
