"""Detect partitions that the group assigned to this member without its client noticing.

Under group.protocol=consumer (KIP-848) the coordinator sends a member's assignment when it changes, in the response to
a heartbeat. librdkafka (2.16.0) drops a response that takes longer than the heartbeat interval, and its next heartbeat
does not ask for the assignment again. Nobody reads those partitions, and no error says so (docs/findings.md). So after
each late response this module asks the coordinator for the member's assignment, on the watcher's thread.

Owns the times of the queries and the comparison. It never touches the consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from eos import log
from eos.errors import Action, CallFailed, EosError, NotAuthorised
from eos.kafka.admin.watcher import Check, Watcher
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.consumer.positions import names_of

_PAUSE_S = 5.0
# A response that the coordinator sent a moment ago may still arrive. Brokers allow heartbeats at most every 15 s
# (group.consumer.max.heartbeat.interval.ms).
_PATIENCE_S = 20.0


class ReportedAssignment(NamedTuple):
    """Holds the member's partitions according to the coordinator. `asked_at`: World.now() of the query."""

    asked_at: float
    partitions: frozenset[Partition]


class LostAssignment:
    def __init__(self, settings: Settings, group: str, watcher: Watcher, world: World) -> None:
        self._settings, self._group, self._world = settings, group, world
        self._watcher, self._check = watcher, Check(self._query, self._on_error)
        self._timed_out_requests = 0
        self._looking = False
        self._answers_since = 0.0  # answers to earlier queries do not count
        # The time of the first query in a row whose answer named the partition.
        self._missing_since: dict[Partition, float] = {}
        self._unchecked_report: ReportedAssignment | None = None  # a report that was not compared yet
        self._member_id = ""  # the id to query; "" while no query runs
        self._is_refused = False
        watcher.add(self._check)

    def note(self, timed_out: int) -> None:
        """Record the number of requests to the coordinator that have timed out up to now."""
        if timed_out > self._timed_out_requests and not self._settings.classic_group:
            self._looking = True
            self.reset()  # a slow coordinator gets time: its next responses may arrive
        self._timed_out_requests = timed_out

    def reset(self) -> None:
        """Record that a rebalance callback ran, so the client knows the member's whole assignment."""
        self._answers_since, self._missing_since = self._world.now(), {}

    def check(self, member_id: Callable[[], str | None], known: Callable[[], Collection[Partition]]) -> None:
        """Raise CallFailed(REJOIN) if the client has ignored some of the member's partitions for a while. Called after
        each poll: a poll delivers the assignments that wait in the client, so `known` includes them.
        """
        if missing := self.find_missing(member_id, known):
            sentence = f"the group assigned {names_of(missing)} in a response that came too late for the client"
            raise CallFailed("consume", Action.REJOIN, RuntimeError(sentence))

    def find_missing(
        self, member_id: Callable[[], str | None], known: Callable[[], Collection[Partition]]
    ) -> set[Partition]:
        if not self._looking:
            return set()
        if not self._member_id and not self._is_refused and (member := member_id()):
            self._member_id = member
            self._watcher.wake(self._check)
        report, self._unchecked_report = self._unchecked_report, None
        if report is None or report.asked_at < self._answers_since:
            return set()
        missing = report.partitions.difference(known())
        self._missing_since = {partition: self._missing_since.get(partition, report.asked_at) for partition in missing}
        self._looking = bool(missing) or report.asked_at - self._answers_since < _PATIENCE_S
        return {p for p, first in self._missing_since.items() if report.asked_at - first >= _PATIENCE_S}

    def stop(self) -> None:
        self._watcher.remove(self._check)

    def _query(self, admin: ClusterAdmin) -> float | None:
        if not self._looking:
            self._member_id = ""
            return None
        asked_at = self._world.now()
        self._unchecked_report = ReportedAssignment(asked_at, admin.assigned_partitions(self._group, self._member_id))
        return _PAUSE_S

    def _on_error(self, error: Exception) -> float | None:
        if isinstance(error, NotAuthorised):
            log.warning("cannot detect lost assignments", error=str(error), group=self._group)
            self._is_refused = True
            return None
        level = log.debug if isinstance(error, EosError) else log.warning
        level("assignment query failed", error=str(error), group=self._group)
        return _PAUSE_S
