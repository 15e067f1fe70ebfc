"""Keeps the state of an App's functions: takes part in a worker's transactions (eos/session/participants.py).

What functions changed is sent to the changelogs as the last of each transaction, one record per changed key; it counts
here once the transaction is committed. A partition that comes begins with what its changelog says
(eos/state/restoring.py): its predecessor's transaction is decided by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from eos import log
from eos.app.definition import App
from eos.app.routes import Route
from eos.app.state import Cells
from eos.app.stores import CellsOf
from eos.errors import ConfigurationError, EosError, describe_error
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.kafka.watchdog import Job, Watchdog
from eos.kafka.world import REAL, World
from eos.records import Committed, Record
from eos.state import changelog
from eos.state.restoring import Restoring
from eos.state.tasks import Task
from eos.state.values import InFolder, InMemory, Values, check_folder

Partition = tuple[str, int]
_NOTE_S = 5.0  # what is committed in so long is what a restart after a kill may read again
_ASK_S = 10.0


class Keeper:
    pipelines = False  # what a transaction changed is known to the next one once it is committed

    def __init__(self, app: App, settings: Settings, world: World = REAL) -> None:
        self._app_id, self._settings, self._world = app.id, settings, world
        self._routes = {route.sources[0]: route for route in app.stateful}
        self._topics = changelog.changelogs_of(app.id, app.stateful)
        self._tasks: dict[Partition, Task] = {}  # those that are ready
        self._restoring: dict[str, list[Restoring]] = {source: [] for source in self._routes}
        self._tombstones_s: dict[str, float] = {}
        self._thread: Watchdog | None = None
        self._asked: tuple[Job, dict[Partition, Task]] | None = None
        self._client: Any = None  # for that
        self._next_note = 0.0
        self._ids: dict[str, str] = {}  # of changelogs
        folder: str = settings["eos.state.dir"]
        self._folder = Path(folder).expanduser() / app.id if folder else None

    def prepare(self) -> None:
        """Before the start: the changelogs are there. Raises ConfigurationError, NotAuthorised, Unavailable."""
        self._check_folder()
        routes = list(self._routes.values())
        self._tombstones_s = changelog.require(self._settings, self._app_id, routes, self._world)
        if self._folder is not None:
            with self._world.admin(self._settings) as admin:
                self._ids = admin.topic_ids(self._tombstones_s)

    def _check_folder(self) -> None:
        """One that was asked for is there; the usual one need not be."""
        if self._folder is None:
            return
        try:
            check_folder(self._folder)
        except ConfigurationError as error:
            if "eos.state.dir" in self._settings.values:
                raise
            log.warning("state is kept in memory, and read anew at each start", why=str(error))
            self._folder = None

    def close(self, finished: bool) -> None:
        """`finished`: all that was done is committed, and no transaction is open."""
        if self._folder is not None and finished and self._tasks:
            try:
                for partition, stable in self._stable(list(self._tasks)).items():
                    self._tasks[partition].values.apply({}, stable, self._world.unix())
            except EosError as error:
                log.debug("the changelogs' ends are not known", error=str(error))
        for task in self._tasks.values():
            task.values.close()
        for restoring in self._all_restoring():
            restoring.close()
        if self._thread is not None:
            self._thread.close()
        self._tasks, self._thread = {}, None

    def cells_of(self, route: Route) -> CellsOf:
        def cells(record: Record) -> Cells:
            return self._tasks[record.topic, record.partition]

        return cells

    def standing(self) -> list[tuple[str, int, int, int]]:
        """Of each function: its name, how many values it has here, their bytes on disk, and how many changes of its
        changelog are still to be read."""
        found = []
        for source, route in self._routes.items():
            mine = [task.values for (topic, _), task in self._tasks.items() if topic == source]
            left = sum(restoring.left for restoring in self._restoring[source])
            found.append((route.name, sum(map(len, mine)), sum(values.size_bytes for values in mine), left))
        return found

    # ---- a Participant ----------------------------------------------------------------------------------------

    def forget(self, gone: Collection[Partition]) -> None:
        for source, partition in gone:
            if (task := self._tasks.pop((source, partition), None)) is not None:
                task.values.close()
            for restoring in self._restoring.get(source, ()):
                if partition in restoring.partitions:
                    restoring.forget(partition)

    def restore(self, starts: Mapping[Partition, Committed]) -> Collection[Partition]:
        for source, route in self._routes.items():
            known = {partition for restoring in self._restoring[source] for partition in restoring.partitions}
            ours = {partition for topic, partition in starts if topic == source} - known
            if new := sorted(partition for partition in ours if (source, partition) not in self._tasks):
                self._restoring[source].append(self._restoring_of(route, self._topics[source], new))
        for source, restorings in self._restoring.items():
            for restoring in restorings:
                self._tasks |= {(source, number): Task(values) for number, values in restoring.go_on().items()}
            self._restoring[source] = [restoring for restoring in restorings if not restoring.done]
        return {partition for partition in starts if partition in self._tasks or partition[0] not in self._routes}

    def _restoring_of(self, route: Route, topic: str, partitions: Sequence[int]) -> Restoring:
        def values(partition: int, whichever: bool) -> Values | None:
            if self._folder is None:
                return InMemory()
            return InFolder.of(self._folder, f"{topic}-{partition}", self._ids.get(topic, ""), whichever)

        kept_s = self._tombstones_s.get(topic, 0.0)
        return Restoring(self._settings, topic, route.name, partitions, values, kept_s, self._world)

    def _all_restoring(self) -> list[Restoring]:
        return [restoring for restorings in self._restoring.values() for restoring in restorings]

    def last_sends(self, send: Callable[..., None]) -> None:
        for (source, partition), task in self._tasks.items():
            for cell, value in task.changed.items():
                send(self._topics[source], value, cell, partition)

    def beside(self, partition: Partition) -> Mapping[str, object]:
        return {}

    def committed(self) -> None:
        now = self._world.unix()
        for task in self._tasks.values():
            task.committed(now)
        if self._folder is not None:
            self._follow(now)

    def undone(self) -> None:
        for task in self._tasks.values():
            task.undone()

    # ---- how far folders stand --------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        """Now and then notes how far each changelog is decided, by an answer that came before this commit: what lies
        before a last stable offset of then is in the values now, whoever wrote it. No transaction is open."""
        if self._asked is None:
            tasks = dict(self._tasks)
            self._thread = self._thread or self._world.caller("eos-state")
            self._asked = self._thread.start(self._stable, list(tasks)), tasks
            return
        job, tasks = self._asked
        if not job.done.is_set() or self._world.now() < self._next_note:
            return
        self._asked, self._next_note = None, self._world.now() + _NOTE_S
        if job.error is not None:
            log.debug("the changelogs' ends are not known", error=describe_error(job.error))
            return
        for partition, stable in job.result.items():
            task = tasks[partition]
            if self._tasks.get(partition) is task and stable > task.values.position:
                task.values.apply({}, stable, now)

    def _stable(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """The last stable offsets of their changelogs."""
        self._client = self._client or facts.connect(self._settings, _ASK_S, self._world)
        return {
            (source, number): stable
            for source in self._routes
            if (numbers := [number for topic, number in partitions if topic == source])
            for number, stable in tail.stable_ends(self._client, self._topics[source], numbers).items()
        }
