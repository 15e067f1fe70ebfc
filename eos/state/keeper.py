"""Keeps the state of an App's functions, as a participant in a worker's transactions (eos/session/outcomes.py).

Before each commit it sends the functions' changes to the changelogs, one record per changed key. The keeper applies
these changes to its own values once the transaction is committed. A newly assigned partition begins with the state in
its changelog (eos/state/restoring.py), after the last transaction of its previous owner was committed or aborted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from eos import log
from eos.app.cells import HEADER
from eos.app.definition import App
from eos.app.routes import Route
from eos.app.state import TaskCells
from eos.app.stores import CellsOf
from eos.errors import ConfigurationError, Unavailable
from eos.kafka.admin import facts, preflight, tail
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import Job, Watchdog
from eos.kafka.client.world import REAL, World
from eos.records import Committed, Record, SendAll, format_position, read_metadata
from eos.state import changelog, notes
from eos.state.engines import ENGINES, check_engine
from eos.state.files import allow_open_files
from eos.state.folders import InFolder, check_folder, clean_up, folder_of
from eos.state.restoring import Restoring
from eos.state.tasks import Task
from eos.state.values import InMemory, Values

Partition = tuple[str, int]
_REQUEST_TIMEOUT_S = 10.0
_CLEAN_UP_INTERVAL_S = 600.0
_OTHER_FILES = 250  # connections, libraries, files that a function opens
_MAX_DUE = 1_000
_CHECK_INTERVAL_S = 10.0  # how long a check of the changelogs stays valid


class Keeper:
    """Keeps the state of an App's functions for one worker, as a Participant in its session's transactions."""

    def __init__(self, app: App, settings: Settings, world: World = REAL) -> None:
        self._app_id, self._settings, self._world = app.id, settings, world
        self._routes = {route.sources[0]: route for route in app.stateful}
        self._downstream = {source for source, route in self._routes.items() if app.follows(route)}
        self._topics = changelog.changelogs_of(app.id, app.stateful)
        self.topics = frozenset(self._topics.values())
        self._tasks: dict[Partition, Task] = {}  # tasks whose state is restored
        self._restoring: dict[str, list[Restoring]] = {source: [] for source in self._routes}
        # Partitions without a committed offset when they were assigned. Under auto.offset.reset=latest the group may
        # commit their start offsets before they are restored.
        self._uncommitted: set[Partition] = set()
        self._fits: dict[str, changelog.ChangelogFit] = {}  # the fits by the name of the changelog
        self._checked_at = world.now()
        self._thread: Watchdog | None = None  # checks the changelogs again
        self._checking: Job | None = None
        self._client: Any = None  # a client, created for the first query of a changelog's end
        self._next_clean_up = world.now() + _CLEAN_UP_INTERVAL_S / 10
        self._sent_at = 0.0  # World.unix() before the open transaction's offsets are sent
        self._ids: dict[str, str] = {}  # topic ids of the changelogs, by name
        self._folder: Path | None = None
        try:
            self._folder = folder_of(settings["eos.state.dir"], app.id)
        except ConfigurationError as error:
            self._use_memory(error)

    def prepare(self) -> None:
        """Create missing changelogs and check all of them before the worker starts.

        Raises ConfigurationError, NotAuthorised, Unavailable.
        """
        self._check_folder()
        preflight.retry_while_unavailable(self._settings, self._create_and_check, self._world)

    def _create_and_check(self) -> None:
        with self._world.admin(self._settings) as admin:
            committed = admin.metadata_by_partition(self._app_id)
            # First, because a renamed function must not get a new changelog.
            kept = notes.require_all_offset_notes(self._routes, committed)
            self._fits = changelog.create_missing(
                self._settings, self._app_id, list(self._routes.values()), self._world
            )
            self._ids = admin.topic_ids(self._fits)
        for source, beside in kept:
            notes.check_partitions(beside, source, self._fits[self._topics[source]].partitions)
        self._checked_at = self._world.now()

    def _check_folder(self) -> None:
        if self._folder is None:
            return
        check_engine(self._settings["eos.state.engine"])
        try:
            check_folder(self._folder)
        except ConfigurationError as error:
            self._use_memory(error)

    def _use_memory(self, error: ConfigurationError) -> None:
        """Keep state in memory if the default folder is unusable; raise `error` if eos.state.dir was set explicitly."""
        if "eos.state.dir" in self._settings.values:
            raise error
        log.warning("state kept in memory, each start restores all of it", reason=str(error))
        self._folder = None

    def close(self) -> None:
        for task in self._tasks.values():
            task.values.sync()
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

    def time_ms(self, partition: Partition) -> int | None:
        """Return the event time of a partition's task; None if its function does not use time."""
        task = self._tasks.get(partition)
        return task.time_ms if task is not None and task.has_timers else None

    def tasks_of(self, route: Route) -> Mapping[Partition, TaskCells]:
        """Return the restored tasks of a function, by partition."""
        return {place: task for place, task in self._tasks.items() if place[0] == route.sources[0]}

    def _clean_up(self) -> None:
        """Delete folders that have not been used for a long time, every ten minutes; otherwise they fill the volume."""
        unused_s = self._settings["eos.state.cleanup.delay.ms"] / 1000
        if self._folder is None or not unused_s or self._world.now() < self._next_clean_up:
            return
        self._next_clean_up = self._world.now() + _CLEAN_UP_INTERVAL_S
        for folder in clean_up(self._folder, unused_s, self._world.unix()):
            log.info("state folder deleted", folder=folder, unused_s=round(unused_s))

    def sizes(self) -> list[tuple[str, int, int, int]]:
        """Return for each function its name, its number of values, their bytes on disk, and the changes left to
        restore.
        """
        found = []
        for source, route in self._routes.items():
            mine = [task for (topic, _), task in self._tasks.items() if topic == source]
            left = sum(restoring.left for restoring in self._restoring[source])
            size_bytes = sum(task.values.size_bytes for task in mine)
            found.append((route.name, sum(task.size for task in mine), size_bytes, left))
        return found

    def times(self) -> list[tuple[str, int, int, int]]:
        """Return the name of each time-based function, the least time of its tasks, its number of timers and its number
        of due timers. The time is in ms since the epoch; 0: no task had a record. At most 1,000 due timers are counted
        per task.
        """
        found = []
        for source, route in self._routes.items():
            mine = [task for (topic, _), task in self._tasks.items() if topic == source] if route.uses_time else []
            if mine:
                times = [task.time_ms for task in mine if task.time_ms]
                due = sum(len(timers.due(until_ms, _MAX_DUE)) for task in mine for timers, until_ms in task.clocks())
                found.append((route.name, min(times, default=0), sum(task.timer_count for task in mine), due))
        return found

    # ---- the interface of a Participant -----------------------------------------------------------------------

    def forget(self, gone: Collection[Partition]) -> None:
        for source, partition in gone:
            if (task := self._tasks.pop((source, partition), None)) is not None:
                task.values.close()
            for restoring in self._restoring.get(source, ()):
                if partition in restoring.partitions:
                    restoring.forget(partition)

    def restore(
        self, starts: Mapping[Partition, Committed], uncommitted: Collection[Partition]
    ) -> Collection[Partition]:
        for source, route in self._routes.items():
            known = {partition for restoring in self._restoring[source] for partition in restoring.partitions}
            ours = {partition for topic, partition in starts if topic == source} - known
            if new := sorted(partition for partition in ours if (source, partition) not in self._tasks):
                if not self._are_changelogs_checked(new[-1] >= self._fits[self._topics[source]].partitions):
                    continue
                ends = {number: self._min_end((source, number), starts, uncommitted) for number in new}
                self._allow_open_files(len(new))
                self._restoring[source].append(self._restoring_of(route, self._topics[source], ends))
        for source, restorings in self._restoring.items():
            for restoring in restorings:
                for number, values in restoring.run_steps().items():
                    self._tasks[source, number] = self._task((source, number), values)
            self._restoring[source] = [restoring for restoring in restorings if not restoring.done]
        return {partition for partition in starts if partition in self._tasks or partition[0] not in self._routes}

    def _allow_open_files(self, new: int) -> None:
        """Raise this process's limit of open files to fit its tasks and the new ones. Raise ConfigurationError."""
        if self._folder is None:
            return
        engine: str = self._settings["eos.state.engine"]
        coming = ((source, n) for source, few in self._restoring.items() for one in few for n in one.partitions)
        tasks = len(self._tasks.keys() | set(coming)) + new
        needed = tasks * (ENGINES[engine].files + 1) + _OTHER_FILES  # one more file: the lock of the task's folder
        allowed = allow_open_files(2 * needed)  # RocksDB opens more files as state grows
        if allowed < needed:
            raise ConfigurationError(
                f"state of {tasks} partitions needs about {needed} open files with eos.state.engine={engine}, but the "
                f"limit of this process is {allowed}",
                remedy="raise the limit (ulimit -n, LimitNOFILE= of systemd), or run more workers",
            )

    def _min_end(
        self, partition: Partition, starts: Mapping[Partition, Committed], uncommitted: Collection[Partition]
    ) -> int | None:
        """Return the changelog end recorded in the offset metadata, or None if any contents are accepted.

        Raises ConfigurationError.
        """
        self._uncommitted.discard(partition)
        beside = None
        if partition not in uncommitted:
            beside = notes.require_offset_note(self._routes[partition[0]], read_metadata(starts[partition]))
            if beside is None:
                return None
        if beside is None or beside.end == notes.UNSEEN:
            self._uncommitted.add(partition)
            return 0
        return beside.end

    def _are_changelogs_checked(self, grown: bool) -> bool:
        """Return whether the changelogs fit their sources.

        Another thread checks them again, because their configuration may have changed. It does not if the last check is
        recent and no source has `grown`. Raises ConfigurationError, NotAuthorised.
        """
        job, now = self._checking, self._world.now()
        if job is None:
            if not grown and now - self._checked_at < _CHECK_INTERVAL_S:
                return True
            self._thread = self._thread or self._world.watchdog("eos-state")
            self._checking = self._thread.start(self._create_and_check)
            return False
        if not job.done.is_set():
            return False
        self._checking = None
        if isinstance(job.error, Unavailable):
            # The restore itself notices a changelog whose beginning is missing. Nothing else notices that a source has
            # grown.
            log.debug("changelogs not checked", error=str(job.error))
            self._checked_at = now
            return not grown
        if job.error is not None:
            raise job.error
        return True

    def _task(self, partition: Partition, values: Values) -> Task:
        """Return the restored task of a partition.

        Raises ConfigurationError or InputGone for a changelog that belongs to another function or does not match the
        committed offset.
        """
        source, number = partition
        route, where = self._routes[source], format_position(self._topics[source], number)
        try:
            before = values.get(HEADER)
            if before is not None and partition in self._uncommitted:
                raise notes.never_committed(route.name, partition, where)
            header = notes.next_header(self._app_id, route, f"the changelog {where}", before)
        except BaseException:
            values.close()
            raise
        return Task(values, route.ttls, self._world.unix, header.encoded(), route.uses_time, source in self._downstream)

    def _restoring_of(self, route: Route, topic: str, ends: Mapping[int, int | None]) -> Restoring:
        def values(partition: int, whichever: bool) -> Values | None:
            if self._folder is None:
                return InMemory(timed=route.timed_stores)
            task, changelog_id = f"{topic}-{partition}", self._ids.get(topic, "")
            engine, memory = ENGINES[self._settings["eos.state.engine"]], self._settings["eos.state.memory.bytes"]
            return InFolder.of(self._folder, task, changelog_id, whichever, route.timed_stores, engine, memory)

        return Restoring(self._settings, topic, route, ends, values, self._fits[topic].tombstones_s, self._world)

    def _all_restoring(self) -> list[Restoring]:
        return [restoring for restorings in self._restoring.values() for restoring in restorings]

    def changed_partitions(self) -> Collection[Partition]:
        return [partition for partition, task in self._tasks.items() if task.has_changes]

    def before_flush(self, send: SendAll, offsets: Mapping[Partition, int]) -> None:
        self._sent_at = self._world.unix()
        aborted: dict[str, list[int]] = {}
        for source, partition in self.changed_partitions():
            task = self._tasks[source, partition]
            if (source, partition) not in offsets:
                # The transaction commits no offset of this partition, so the group does not check that this member
                # still owns the partition.
                task.roll_back()
                continue
            if task.aborted and self._folder is not None:
                aborted.setdefault(source, []).append(partition)
            task.expire()
            topic = self._topics[source]
            send((topic, value, cell, partition, at_ms, None) for cell, value, at_ms in task.changelog_entries())
        self._skip_aborted(aborted)

    def _skip_aborted(self, partitions: Mapping[str, list[int]]) -> None:
        """Query the changelog ends of partitions in which one of our transactions was aborted.

        Otherwise a restart would read all records written since that abort again. The answer is a last stable offset,
        so the open transaction's records lie after it.
        """
        for source, numbers in partitions.items():
            try:
                self._client = self._client or facts.connect(self._settings, _REQUEST_TIMEOUT_S, self._world)
                stable = tail.stable_offsets(self._client, self._topics[source], numbers)
            except Unavailable as error:
                log.debug("changelog end unknown", topic=self._topics[source], error=str(error))
                continue
            for number, end in stable.items():
                self._tasks[source, number].skip_to(end)

    def offset_metadata(self, partition: Partition) -> Mapping[str, object]:
        if (route := self._routes.get(partition[0])) is None:
            return {}
        # There is no task yet if the first offset of the partition is committed before its changelog was read.
        task = self._tasks.get(partition)
        end = notes.UNSEEN if task is None else task.end
        partitions = self._fits[self._topics[partition[0]]].partitions
        return notes.make_offset_note(route, end, partitions).entries()

    def committed(self) -> None:
        for task in self._tasks.values():
            task.committed(self._sent_at)
        self._clean_up()

    def aborted(self) -> None:
        for task in self._tasks.values():
            task.roll_back()
