"""Finds partitions that were read to their end and stay silent, so that the clock may move their event time.

A partition counts as silent only if the cluster says so after the silence: its high watermark is still the offset at
which it was read to its end. So neither a backlog that is slow to arrive nor an open transaction of a producer counts
as silence.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from eos import log
from eos.errors import Unavailable
from eos.kafka.admin import facts, tail
from eos.kafka.admin.watcher import Check, Watcher
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World

Partition = tuple[str, int]
_TIMEOUT_S = 5.0


class IdlePartitions:
    """Finds the silent partitions of one session. `find_end`: see TransactSession.find_end."""

    def __init__(
        self, settings: Settings, find_end: Callable[[Partition], tuple[int, float] | None], world: World
    ) -> None:
        self._settings, self._find_end, self._world = settings, find_end, world
        self._check = Check(self._query, self._on_error)
        self._watcher: Watcher | None = None
        self._client: Any = None
        self._lock = threading.Lock()
        self._partitions_to_query: set[Partition] = set()  # the partitions for the next query
        self._is_queried = False
        self._error: Exception | None = None  # a permanent error of the query
        self._ends: Mapping[Partition, int] = {}
        self._known_at = -math.inf  # World.unix() when the query of `_ends` began

    def start(self, watcher: Watcher) -> None:
        self._watcher = watcher
        watcher.add(self._check)

    def silent_until_ms(self, partition: Partition, idle_ms: int) -> int:
        """Return the time up to which the partition's event time follows the clock, in ms since the epoch.

        That is `idle_ms` before the last time at which the cluster confirmed the silence; 0 while the partition has
        records, or until the cluster has answered. Raises the error of a permanent refusal.
        """
        found = self._find_end(partition)
        if found is None or self._world.now() - found[1] < idle_ms / 1000:
            return 0
        self._request_end(partition)
        since_ms = (self._world.unix() - (self._world.now() - found[1])) * 1000
        with self._lock:
            end, known_ms = self._ends.get(partition), self._known_at * 1000
        return 0 if end != found[0] or known_ms < since_ms + idle_ms else int(known_ms) - idle_ms

    def _request_end(self, partition: Partition) -> None:
        """Let the watcher query the end of this partition, unless a query runs already."""
        assert self._watcher is not None, "started with its worker"
        with self._lock:
            if self._error is not None:
                raise self._error
            self._partitions_to_query.add(partition)
            if self._is_queried:
                return
            self._is_queried = True
        self._watcher.wake(self._check)

    # ---- on the watcher's thread --------------------------------------------------------------------------------

    def _query(self, _: ClusterAdmin) -> None:
        with self._lock:
            wanted, self._partitions_to_query, began = self._partitions_to_query, set(), self._world.unix()
        self._client = self._client or facts.connect(self._settings, _TIMEOUT_S, self._world)
        ends: dict[Partition, int] = {}
        for topic in {topic for topic, _ in wanted}:
            numbers = [number for name, number in wanted if name == topic]
            for number, span in tail.partition_offsets_or_errors(self._client, topic, numbers).items():
                if not isinstance(span, Unavailable):
                    ends[topic, number] = span.end
        with self._lock:
            self._ends, self._known_at, self._is_queried = ends, began, False

    def _on_error(self, error: Exception) -> None:
        log.debug("end offsets of idle partitions unavailable", error=str(error))
        with self._lock:
            self._is_queried = False
            if not isinstance(error, Unavailable):
                self._error = error
