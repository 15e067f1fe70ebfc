"""Who keeps the state: what a partition begins with, what is sent, and when it counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from eos import App, Record, State
from eos.errors import Temporary
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.kafka.tail import Seen, Span
from eos.state import changelog
from eos.state.keeper import Keeper
from eos.state.tasks import cell_of

START = SimpleNamespace(offset=0, metadata="")
SETTINGS = Settings({})
CELL = cell_of("seen", b"k")


def app_of() -> App:
    app = App("shop")

    @app.process("in", to="out")
    def count(value: str, seen: State[int]) -> None:
        seen.set(seen.get(0) + 1)

    return app


def keeper_on(monkeypatch: pytest.MonkeyPatch, *lives: Sequence[Record]) -> Keeper:
    """Its changelog is read once for each of these lives."""
    left = list(lives)

    def read(settings: Settings, topic: str, partitions: Sequence[int], world: object) -> Iterator[Record]:
        assert (topic, partitions) == ("shop-count-changelog", [0])
        return iter(left.pop(0))

    monkeypatch.setattr(changelog, "read", read)
    return Keeper(app_of(), SETTINGS)


def kept(keeper: Keeper, value: bytes | None = None) -> bytes | None:
    cells = keeper.cells_of(app_of().routes["in"])(Record("in", 0, 5))
    if value is not None:
        cells.write("seen", b"k", value)
    return cells.read("seen", b"k")


def note(value: bytes | None) -> Record:
    return Record("shop-count-changelog", 0, 0, key=CELL, value=value)


def test_a_partition_begins_with_what_its_changelog_says_and_nothing_from_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch, [note(b"1"), note(b"2")], [], [note(b"7"), note(None)])
    for found in (b"2", None, None):  # meanwhile another member deleted it, and compaction took the tombstone
        keeper.restore({("in", 0): START, ("elsewhere", 0): START})
        assert kept(keeper) == found


def test_what_changed_is_sent_once_per_key_and_counts_when_its_transaction_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = keeper_on(monkeypatch, [])
    keeper.restore({("in", 0): START})
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
    keeper.owned = lambda: {("in", 1)}
    keeper.restore({})
    with pytest.raises(KeyError):
        kept(keeper)


class Reader:
    """Hands out what lies before the ends, once."""

    def __init__(
        self, settings: Settings, topic: str, starts: dict[int, int], uncommitted: bool, world: object
    ) -> None:
        assert (topic, starts, uncommitted) == ("log", {0: 3}, False)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_changelog_is_read_once_the_transaction_before_is_decided_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator answers before its markers are everywhere: what is committed may not be readable yet."""
    now = [0.0]
    world: Any = SimpleNamespace(now=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    spans = [Span(3, 5, 9), Span(3, 5, 9), Span(3, 9, 9)]
    read_to: list[dict[int, int]] = []

    def read_until(reader: Reader, ends: dict[int, int]) -> Iterator[Seen]:
        read_to.append(ends)
        yield Seen(Record("log", 0, 4))

    monkeypatch.setattr(facts, "connect", lambda *_: None)
    monkeypatch.setattr(tail, "held", lambda *_: {0: spans.pop(0) if len(spans) > 1 else spans[0]})
    monkeypatch.setattr(tail, "TopicReader", Reader)
    monkeypatch.setattr(tail, "read_until", read_until)
    assert [record.offset for record in changelog.read(SETTINGS, "log", [0], world)] == [4]
    assert read_to == [{0: 9}]
    spans[:] = [Span(3, 5, 9)]
    with pytest.raises(Temporary, match=r"state cannot be restored: a transaction is open in log\[0\]"):
        list(changelog.read(SETTINGS, "log", [0], world))
