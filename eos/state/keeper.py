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
from eos.app.state import TaskCells
from eos.app.stores import CellsOf
from eos.errors import ConfigurationError, Unavailable, describe_error
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.kafka.watchdog import Job, Watchdog
from eos.kafka.world import REAL, World
from eos.records import Committed, Record
from eos.state import changelog
from eos.state.beside import Beside, beside_of
from eos.state.engines import ENGINES, check_engine
from eos.state.folders import InFolder, check_folder
from eos.state.restoring import Restoring
from eos.state.tasks import Task
from eos.state.values import InMemory, Values

Partition = tuple[str, int]
_NOTE_S = 1.0  # what is committed in so long, and a little more, is what a restart reads again
_ASK_S = 10.0


class Keeper:
    pipelines = False  # what a transaction changed is known to the next one once it is committed

    def __init__(self, app: App, settings: Settings, world: World = REAL) -> None:
        self._app_id, self._settings, self._world = app.id, settings, world
        self._routes = {route.sources[0]: route for route in app.stateful}
        self._topics = changelog.changelogs_of(app.id, app.stateful)
        self._tasks: dict[Partition, Task] = {}  # those that are ready
        self._restoring: dict[str, list[Restoring]] = {source: [] for source in self._routes}
        self._fits: dict[str, changelog.Fit] = {}  # of changelogs, by their names
        self._beside: dict[Partition, Beside] = {}  # what is committed; of ours, and of those that were
        self._thread: Watchdog | None = None
        self._asked: tuple[Job, dict[Partition, Task]] | None = None
        self._answered: tuple[Job, dict[Partition, Task]] | None = None  # before the open transaction is to commit
        self._client: Any = None  # for that
        self._committing: dict[Partition, Beside] = {}
        self._next_ask = 0.0
        self._ids: dict[str, str] = {}  # of changelogs
        folder: str = settings["eos.state.dir"]
        self._folder = Path(folder).expanduser() / app.id if folder else None

    def prepare(self) -> None:
        """Before the start: the changelogs are there. Raises ConfigurationError, NotAuthorised, Unavailable."""
        self._check_folder()
        self._require()

    def _require(self) -> None:
        routes = list(self._routes.values())
        self._fits = changelog.require(self._settings, self._app_id, routes, self._world)
        if self._folder is not None:
            with self._world.admin(self._settings) as admin:
                self._ids = admin.topic_ids(self._fits)

    def _check_folder(self) -> None:
        """One that was asked for is there; the usual one need not be."""
        if self._folder is None:
            return
        check_engine(self._settings["eos.state.engine"])
        try:
            check_folder(self._folder)
        except ConfigurationError as error:
            if "eos.state.dir" in self._settings.values:
                raise
            log.warning("state is kept in memory, and read anew at each start", why=str(error))
            self._folder = None

    def close(self) -> None:
        for task in self._tasks.values():
            task.values.close()
        for restoring in self._all_restoring():
            restoring.close()
        if self._thread is not None:
            self._thread.close()
        self._tasks, self._thread = {}, None

    def cells_of(self, route: Route) -> CellsOf:
        def cells(record: Record) -> TaskCells:
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
                if new[-1] >= self._fits[self._topics[source]].partitions and not self._fits_now():
                    continue
                beside = {(source, number): beside_of(starts[source, number], route) for number in new}
                self._beside |= beside
                ends = {number: beside[source, number].end for number in new}
                self._restoring[source].append(self._restoring_of(route, self._topics[source], ends))
        for source, restorings in self._restoring.items():
            for restoring in restorings:
                ready = restoring.go_on().items()
                self._tasks |= {(source, number): self._task(source, values) for number, values in ready}
            self._restoring[source] = [restoring for restoring in restorings if not restoring.done]
        return {partition for partition in starts if partition in self._tasks or partition[0] not in self._routes}

    def _fits_now(self) -> bool:
        """The source has more partitions than it had: raises ConfigurationError unless its changelog has, too. False:
        nobody can say at the moment."""
        try:
            self._require()
        except Unavailable as error:
            log.debug("the changelogs cannot be looked at", error=str(error))
            return False
        return True

    def _task(self, source: str, values: Values) -> Task:
        return Task(values, self._routes[source].ttls, self._world.unix)

    def _restoring_of(self, route: Route, topic: str, ends: Mapping[int, int]) -> Restoring:
        def values(partition: int, whichever: bool) -> Values | None:
            if self._folder is None:
                return InMemory(ageing=route.ttls)
            task, changelog_id = f"{topic}-{partition}", self._ids.get(topic, "")
            engine, memory = ENGINES[self._settings["eos.state.engine"]], self._settings["eos.state.memory.bytes"]
            return InFolder.of(self._folder, task, changelog_id, whichever, route.ttls, engine, memory)

        return Restoring(self._settings, topic, route, ends, values, self._fits[topic].tombstones_s, self._world)

    def _all_restoring(self) -> list[Restoring]:
        return [restoring for restorings in self._restoring.values() for restoring in restorings]

    def last_sends(self, send: Callable[..., None]) -> None:
        self._answered = self._asked if self._asked is not None and self._asked[0].done.is_set() else None
        self._committing = {}
        for (source, partition), task in self._tasks.items():
            if not task.touched:
                continue  # it may be another member's by now: the commit asks only for partitions that gave records
            task.expire()
            for cell, value, timestamp_ms in task.to_send():
                send(self._topics[source], value, cell, partition, timestamp_ms)

    def beside(self, partition: Partition) -> Mapping[str, object]:
        if (task := self._tasks.get(partition)) is None:
            return {}
        said = self._beside[partition]
        if task.changed:  # a record of each, and the transaction's marker
            said = said._replace(end=max(said.end, task.values.position) + len(task.changed) + 1)
        self._committing[partition] = said
        return said.noted()

    def committed(self) -> None:
        now = self._world.unix()
        for task in self._tasks.values():
            task.committed(now)
        self._beside |= self._committing
        if self._folder is not None:
            self._note(now)
            self._ask()

    def undone(self) -> None:
        for task in self._tasks.values():
            task.undone()

    # ---- how far folders stand --------------------------------------------------------------------------------

    def _note(self, now: float) -> None:
        """How far each changelog is decided, by an answer that came before this transaction's offsets were sent.

        These were taken, so the partitions they name were ours then, and nobody else had written to their changelogs:
        what lies before that last stable offset is our predecessors' and ours, and all of it is in the values. A later
        answer, or one about another partition, may count what another member committed."""
        if self._answered is None:
            return
        (job, tasks), self._answered, self._asked = self._answered, None, None
        if job.error is not None:
            log.debug("the changelogs' ends are not known", error=describe_error(job.error))
            return
        for partition, stable in job.result.items():
            task = tasks[partition]
            ours = partition in self._committing and self._tasks.get(partition) is task
            if ours and stable > task.values.position:
                task.values.apply({}, stable, now)

    def _ask(self) -> None:
        if self._asked is not None or self._world.now() < self._next_ask:
            return
        self._next_ask = self._world.now() + _NOTE_S
        tasks = dict(self._tasks)
        self._thread = self._thread or self._world.caller("eos-state")
        self._asked = self._thread.start(self._stable, list(tasks)), tasks

    def _stable(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """The last stable offsets of their changelogs."""
        self._client = self._client or facts.connect(self._settings, _ASK_S, self._world)
        return {
            (source, number): stable
            for source in self._routes
            if (numbers := [number for topic, number in partitions if topic == source])
            for number, stable in tail.stable_ends(self._client, self._topics[source], numbers).items()
        }
