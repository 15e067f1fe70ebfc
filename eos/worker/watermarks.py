"""Finds the event time of functions that read what another function of the App writes.

Such a topic mixes records of all partitions of the first function's input. While that input has a backlog, they are of
very different ages, and the latest timestamp so far says nothing of what is still to come. So each commit of the first
function stores the time that every input partition has reached, in the metadata of the offset. The time of the second
function is the least of these times. This least time takes effect once the second function has read everything that was
written before those commits. An input partition that was read to its end does not hold the others back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from eos import log
from eos.app.definition import App
from eos.errors import Unavailable
from eos.kafka.admin import facts, tail
from eos.kafka.admin.watcher import Check, Watcher
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Committed, Record, SendAll, parse_metadata, read_metadata

Partition = tuple[str, int]
KEY: Final = "time"
"""The entry of the offset metadata: the time that the partition has reached, in milliseconds since the epoch."""
_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0


def upstream_of(app: App) -> dict[str, list[str]]:
    """Map each chained topic that a time-based function reads to the source topics of the functions that write it."""
    return {
        topic: sorted(source for source, writer in app.routes.items() if topic in writer.all_destinations)
        for topic, route in app.routes.items()
        if route.uses_time and topic in app.chained
    }


class ReachedTimes:
    """Stores the time that each input partition has reached in offset metadata, as a Participant in transactions.

    `sources`: the topics whose times are stored. `task_time_ms` returns the time of a partition's task. It returns None
    if there is no task; the latest timestamp of the partition's records then counts.
    """

    topics: Collection[str] = ()

    def __init__(self, sources: Collection[str], task_time_ms: Callable[[Partition], int | None]) -> None:
        self._sources, self._task_time_ms = frozenset(sources), task_time_ms
        self._committed: dict[Partition, int] = {}
        self._open: dict[Partition, int] = {}

    def note(self, records: Iterable[Record]) -> None:
        """Record the timestamps of records that the open transaction took."""
        for record in records:
            if record.topic in self._sources and record.timestamp > self._open.get(place := _place(record), 0):
                self._open[place] = record.timestamp

    def forget(self, gone: Collection[Partition]) -> None:
        for partition in gone:
            self._committed.pop(partition, None)

    def restore(
        self, starts: Mapping[Partition, Committed], uncommitted: Collection[Partition]
    ) -> Collection[Partition]:
        for partition, at in starts.items():
            if partition[0] in self._sources and partition not in self._committed:
                self._committed[partition] = _time_in(read_metadata(at))
        return starts.keys()

    def changed_partitions(self) -> Collection[Partition]:
        return ()

    def before_flush(self, send: SendAll, offsets: Mapping[Partition, int]) -> None: ...

    def offset_metadata(self, partition: Partition) -> Mapping[str, object]:
        if partition[0] not in self._sources:
            return {}
        own = self._task_time_ms(partition)
        reached = max(self._committed.get(partition, 0), self._open.get(partition, 0)) if own is None else own
        return {KEY: reached} if reached else {}

    def committed(self) -> None:
        for partition, time_ms in self._open.items():
            self._committed[partition] = max(time_ms, self._committed.get(partition, 0))
        self._open = {}

    def aborted(self) -> None:
        self._open = {}


def _place(record: Record) -> Partition:
    return record.topic, record.partition


def _time_in(metadata: str | None) -> int:
    found = parse_metadata(metadata).get(KEY, 0)
    return found if isinstance(found, int) else 0


class _Seen(NamedTuple):
    """Holds one answer of the cluster: the time of a topic's writers, and the topic's ends at that moment."""

    time_ms: int
    ends: Mapping[int, int]


def reached_time_ms(
    reached: Mapping[Partition, int], committed: Mapping[Partition, int], ends: Mapping[Partition, int]
) -> int:
    """Return the least time that the partitions have reached; 0 if one of them has more records but no time.

    `committed`: next offsets of the group. A partition that the group has read to its end has no effect, unless all
    partitions are read to their ends: then the result is the latest time of any partition.
    """
    waiting = [place for place, end in ends.items() if committed.get(place, 0) < end]
    if waiting:
        return min(reached.get(place, 0) for place in waiting)
    return max(reached.values(), default=0)


class Watermarks:
    """Queries the times of the time-based functions that read topics of the App, twice a second.

    `position_of` returns the offset up to which the session has handled a partition; it runs on the session's thread.
    """

    def __init__(self, settings: Settings, app: App, position_of: Callable[[Partition], int], world: World) -> None:
        self._settings, self._group, self._position_of, self._world = settings, app.id, position_of, world
        self._upstream = upstream_of(app)
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._times: dict[Partition, int] = {}
        # By partition: the last answer whose end offset this worker has not reached yet.
        self._pending: dict[Partition, _Seen] = {}
        self._queried_at = -math.inf  # World.now() when the last answered query began
        self._client: Any = None

    def start(self, watcher: Watcher) -> None:
        watcher.add(Check(self._query, self._on_error), _INTERVAL_S)

    def time_ms(self, partition: Partition) -> int:
        """Return the time that a partition has reached, in ms since the epoch; 0 while it is unknown."""
        if (seen := self._pending.get(partition)) is None:
            with self._lock:
                newest = self._seen.get(partition[0])
            if newest is None or newest.time_ms <= self._times.get(partition, 0):
                return self._times.get(partition, 0)
            seen = self._pending[partition] = newest
        if self._position_of(partition) >= seen.ends.get(partition[1], 0):
            self._times[partition] = max(seen.time_ms, self._times.get(partition, 0))
            del self._pending[partition]
        return self._times.get(partition, 0)

    def is_current(self, since: float) -> bool:
        """Return whether the cluster was queried after `since` (World.now()), and all partitions have the answer."""
        return self._queried_at > since and not self._pending

    # ---- on the watcher's thread --------------------------------------------------------------------------------

    def _query(self, admin: ClusterAdmin) -> float:
        began = self._world.now()
        self._client = self._client or facts.connect(self._settings, _TIMEOUT_S, self._world)
        # Read the committed times first, so that the outputs of their transactions are below the ends that are read
        # afterwards.
        committed = admin.committed_offsets(self._group)
        reached = {place: _time_in(metadata) for place, (_, metadata) in committed.items()}
        offsets = {place: offset for place, (offset, _) in committed.items()}
        for topic, sources in self._upstream.items():
            ends = {
                (source, number): span.stable
                for source in sources
                for number, span in tail.topic_offsets_with(self._client, self._settings, source).items()
            }
            theirs = {place: time_ms for place, time_ms in reached.items() if place[0] in sources}
            time_ms = reached_time_ms(theirs, offsets, ends)
            spans = tail.topic_offsets_with(self._client, self._settings, topic)
            with self._lock:
                self._seen[topic] = _Seen(time_ms, {number: span.end for number, span in spans.items()})
        self._queried_at = began
        return _INTERVAL_S

    def _on_error(self, error: Exception) -> float:
        if not isinstance(error, Unavailable):
            log.warning("event time of chained functions unknown", error=str(error))
        return 4 * _INTERVAL_S
