"""Start offsets of a group's partitions, without a broker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from eos.errors import InputGone
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL
from eos.session.consumer import start_offsets as starts_module
from eos.session.consumer.queries import NotNow
from eos.session.consumer.start_offsets import StartOffsets

SETTINGS = Settings({"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t"})
ZERO, ONE = ("in", 0), ("in", 1)


def starts(committed: dict[tuple[str, int], int]) -> StartOffsets:
    def try_committed(partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], TopicPartition]:
        return {p: TopicPartition(*p, committed[p]) for p in partitions}

    asking: Any = SimpleNamespace(try_committed=try_committed)
    return StartOffsets(asking, SETTINGS, (), {}, REAL)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Script the places topic: `found` are its notes, and `meanwhile` runs while they are read."""
    said: dict[str, Any] = {"found": {}, "meanwhile": lambda: None}

    def noted(_settings: Settings, _group: str, asked: Collection[tuple[str, int]], *_: object) -> dict[Any, int]:
        said["meanwhile"]()
        return {p: when for p, when in said["found"].items() if p in asked}

    monkeypatch.setattr(starts_module, "read_notes", noted)
    return said


def test_offset_committed_between_two_queries_is_not_forgotten(
    notes: dict[str, Any],
) -> None:
    """A worker that paused after the first query ended with 66 and stopped its supervisor."""
    committed = {ZERO: -1001, ONE: 5}
    notes["found"] = {ZERO: 1_700_000_000_000}
    notes["meanwhile"] = lambda: committed.update({ZERO: 7})
    asked = starts(committed)
    with pytest.raises(NotNow, match="another member"):
        asked.find([ZERO, ONE])
    assert {p: tp.offset for p, tp in asked.find([ZERO, ONE]).items()} == {ZERO: 7, ONE: 5}


def test_missing_offset_with_a_note_counts_as_lost(notes: dict[str, Any]) -> None:
    committed = {ZERO: -1001, ONE: -1001}
    notes["found"] = {ZERO: 1_700_000_000_000, ONE: 1_700_000_000_000}
    notes["meanwhile"] = lambda: committed.update({ZERO: 7})
    with pytest.raises(InputGone, match=r"has handled in\[1\] before"):
        starts(committed).find([ZERO, ONE])


def test_partition_without_a_note_follows_the_reset_policy(notes: dict[str, Any]) -> None:
    assert starts({ZERO: -1001}).find([ZERO])[ZERO].offset == OFFSET_BEGINNING
