"""Finds partitions that were read to their end and stay silent, so that the clock may move their event time.

A partition counts as silent only if the cluster says so after the silence: its high watermark is still the offset at
which it was read to its end. So neither a backlog that is slow to arrive nor an open transaction of a producer counts
as silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eos import log
from eos.errors import Unavailable
from eos.kafka.admin import facts, tail
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import Job, Watchdog
from eos.kafka.client.world import World

Partition = tuple[str, int]
_TIMEOUT_S = 5.0


class IdlePartitions:
    """`find_end`: see TransactSession.find_end."""

    def __init__(
        self, settings: Settings, find_end: Callable[[Partition], tuple[int, float] | None], world: World
    ) -> None:
        self._settings, self._find_end, self._world = settings, find_end, world
        self._thread: Watchdog | None = None
        self._client: Any = None
        self._query: tuple[float, Job] | None = None  # World.unix() when it began
        self._wanted: set[Partition] = set()  # for the next query
        self._ends: Mapping[Partition, int] = {}
        self._known_at = 0.0  # World.unix() when the query of `_ends` began

    def silent_until_ms(self, partition: Partition, idle_ms: int) -> int:
        """Return the time up to which the partition's event time follows the clock, in ms since the epoch.

        That is `idle_ms` before the last time at which the cluster confirmed the silence; 0 while the partition has
        records, or until the cluster has answered.
        """
        found = self._find_end(partition)
        if found is None or self._world.now() - found[1] < idle_ms / 1000:
            return 0
        self._take_answer()
        self._wanted.add(partition)
        self._start_query()
        since_ms = (self._world.unix() - (self._world.now() - found[1])) * 1000
        if self._ends.get(partition) != found[0] or self._known_at * 1000 < since_ms + idle_ms:
            return 0
        return int(self._known_at * 1000) - idle_ms

    def _take_answer(self) -> None:
        if self._query is None or not self._query[1].done.is_set():
            return
        (began, job), self._query = self._query, None
        if isinstance(job.error, Unavailable):
            log.debug("end offsets of idle partitions unavailable", error=str(job.error))
        elif job.error is not None:
            raise job.error
        else:
            self._ends, self._known_at = job.result, began

    def _start_query(self) -> None:
        if self._query is None:
            self._thread = self._thread or self._world.watchdog("eos-idle")
            wanted, self._wanted = self._wanted, set()
            self._query = self._world.unix(), self._thread.start(self._query_ends, wanted)

    def _query_ends(self, wanted: set[Partition]) -> dict[Partition, int]:
        """Return the high watermarks of these partitions. Raises Unavailable."""
        self._client = self._client or facts.connect(self._settings, _TIMEOUT_S, self._world)
        ends: dict[Partition, int] = {}
        for topic in {topic for topic, _ in wanted}:
            numbers = [number for name, number in wanted if name == topic]
            for number, span in tail.partition_offsets_or_errors(self._client, topic, numbers).items():
                if not isinstance(span, Unavailable):
                    ends[topic, number] = span.end
        return ends

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
