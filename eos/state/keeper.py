"""Keeps the state of an App's functions: takes part in a worker's transactions (eos/session/participants.py).

What functions changed is sent to the changelogs as the last of each transaction, one record per changed key; it counts
here once the transaction is committed. A partition that comes begins with what its changelog says: its predecessor's
transaction is decided by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from eos import log
from eos.app.definition import App
from eos.app.routes import Route
from eos.app.state import Cells, CellsOf
from eos.kafka.settings import Settings
from eos.kafka.world import REAL, World
from eos.records import Committed, Record
from eos.state import changelog
from eos.state.tasks import Task

Partition = tuple[str, int]


class Keeper:
    pipelines = False  # what a transaction changed is known to the next one once it is committed

    def __init__(self, app: App, settings: Settings, world: World = REAL) -> None:
        self._app_id, self._settings, self._world = app.id, settings, world
        self._routes = {route.sources[0]: route for route in app.stateful}
        self._tasks: dict[Partition, Task] = {}
        self.owned: Callable[[], Collection[Partition]] = frozenset
        """The session's partitions."""

    def prepare(self) -> None:
        """Before the start: the changelogs are there. Raises ConfigurationError, NotAuthorised, Unavailable."""
        changelog.require(self._settings, self._app_id, list(self._routes.values()), self._world)

    def cells_of(self, route: Route) -> CellsOf:
        def cells(record: Record) -> Cells:
            return self._tasks[record.topic, record.partition]

        return cells

    # ---- a Participant ----------------------------------------------------------------------------------------

    def restore(self, starts: Mapping[Partition, Committed]) -> None:
        owned = {*self.owned(), *starts}
        self._tasks = {partition: task for partition, task in self._tasks.items() if partition in owned}
        for source, route in self._routes.items():
            if partitions := sorted(number for topic, number in starts if topic == source):
                self._restore(route, source, partitions)

    def _restore(self, route: Route, source: str, partitions: list[int]) -> None:
        began, topic = self._world.now(), changelog.changelog_of(self._app_id, route)
        tasks = {partition: Task() for partition in partitions}
        for record in changelog.read(self._settings, topic, partitions, self._world):
            tasks[record.partition].restored(record.key or b"", record.value)
        self._tasks |= {(source, partition): task for partition, task in tasks.items()}
        log.info(
            "state restored",
            function=route.name,
            partitions=",".join(map(str, partitions)),
            keys=sum(len(task.values) for task in tasks.values()),
            seconds=round(self._world.now() - began, 1),
        )

    def last_sends(self, send: Callable[..., None]) -> None:
        for (source, partition), task in self._tasks.items():
            if task.changed:
                topic = changelog.changelog_of(self._app_id, self._routes[source])
                for cell, value in task.changed.items():
                    send(topic, value, cell, partition)

    def beside(self, partition: Partition) -> Mapping[str, object]:
        return {}

    def committed(self) -> None:
        for task in self._tasks.values():
            task.committed()

    def undone(self) -> None:
        for task in self._tasks.values():
            task.undone()
