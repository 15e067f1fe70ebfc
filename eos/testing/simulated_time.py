"""Gives a run without a broker (eos/testing/offline.py) its tasks, and the time that the test sets."""

from __future__ import annotations

import time
from datetime import datetime
from typing import NamedTuple

from eos.app.definition import App
from eos.app.routes import Route
from eos.app.state import TaskCells
from eos.app.stores import CellsOf
from eos.app.timers import to_ms
from eos.records import Record
from eos.state.tasks import Task
from eos.state.values import InMemory


class Advance(NamedTuple):
    """Moves the time of a run (`advance`)."""

    to_ms: int
    clock: bool


def advance(to: datetime | int, *, clock: bool = False) -> Advance:
    """Return a step for `run` that moves the time of all partitions to `to`, as a record of that time would.

    Put it between the records: `run(app, [record, advance(noon), record])`. With `clock` it sets the wall clock
    instead. `to`: a datetime with a time zone, or milliseconds since the epoch.
    """
    return Advance(to_ms(to, "the time of advance()"), clock)


class _TestTask(Task):
    """Represents a task whose clock the test sets."""

    clock: Tasks

    def clock_ms(self) -> int:
        return self.clock.clock_ms


class Tasks:
    """Holds the tasks of a run, and the time that the test has set."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._tasks: dict[tuple[str, int], _TestTask] = {}
        self.clock_ms = int(time.time() * 1000)
        self.event_ms = 0

    def advance(self, step: Advance) -> None:
        if step.clock:
            self.clock_ms = step.to_ms
        else:
            self.event_ms = step.to_ms

    def cells_of(self, route: Route) -> CellsOf:
        def cells(record: Record) -> TaskCells:
            place = record.topic, record.partition
            if (task := self._tasks.get(place)) is None:
                values = InMemory(timed=route.timed_stores)
                timed, follows = route.uses_time, self._app.follows(route)
                task = self._tasks[place] = _TestTask(values, route.ttls, has_timers=timed, follows=follows)
                task.clock = self
            return task

        return cells

    def tasks_of(self, route: Route) -> dict[tuple[str, int], _TestTask]:
        return {place: task for place, task in self._tasks.items() if place[0] in route.sources}
