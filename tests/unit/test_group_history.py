"""When a session writes the notes about its committed offsets; the notes themselves need a broker."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from eos.errors import Unavailable
from eos.kafka.admin import group_history
from eos.kafka.admin.group_history import GroupHistory
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import Job
from eos.kafka.client.world import World


class _Thread:
    """Runs each call at once."""

    def start(self, function: Callable[..., Any], *args: Any) -> Job:
        job = Job(function, args)
        function(*args)
        job.done.set()
        return job

    def close(self) -> None:
        pass


class _Notes:
    """A history of 100 partitions, and the numbers of partitions of each write; the first `failing` writes fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int = 0) -> None:
        self.clock, self.failing, self.writes = SimpleNamespace(now=0.0), failing, list[int]()
        monkeypatch.setattr(group_history, "write_notes", self._write)
        world = World(now=lambda: self.clock.now, watchdog=lambda name: _Thread())  # type: ignore[arg-type, return-value]
        self.history = GroupHistory(Settings({}), "group", world)

    def _write(self, settings: Settings, group: str, partitions: Collection[Any], world: World) -> None:
        self.writes.append(len(partitions))
        if len(self.writes) <= self.failing:
            raise Unavailable("no broker")

    def commit_all(self) -> None:
        """Commit ten partitions in each of ten transactions of 100 ms."""
        for first in range(0, 100, 10):
            self.history.add_committed(("in", number) for number in range(first, first + 10))
            self.clock.now += 0.1


def test_first_commits_of_many_partitions_take_two_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write connects three clients."""
    notes = _Notes(monkeypatch)
    notes.commit_all()
    assert notes.writes == [10]
    notes.clock.now += group_history._WRITE_INTERVAL_S
    notes.history.add_committed([])
    notes.history.add_committed([("in", 0)])
    assert notes.writes == [10, 90]


def test_close_writes_the_remaining_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = _Notes(monkeypatch)
    notes.commit_all()
    notes.history.close()
    assert notes.writes == [10, 90]


def test_failed_write_is_not_repeated_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the same unavailable cluster."""
    notes = _Notes(monkeypatch, failing=1)
    notes.commit_all()
    notes.history.close()
    assert notes.writes == [10]


def test_failed_write_is_repeated_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = _Notes(monkeypatch, failing=1)
    notes.commit_all()
    notes.clock.now += group_history._RETRY_INTERVAL_S
    notes.history.add_committed([])
    assert notes.writes == [10, 100]
