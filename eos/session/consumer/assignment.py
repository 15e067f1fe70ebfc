"""Defines the life of a partition in a consumer, from its assignment to its revocation: a table, no I/O.

A partition is assigned by the group, its start offset is located, the participants restore their state of it, and then
its records are read. The group may take it away at any point. All views of an assignment are derived from the phases
below. If you change a row, read group_consumer.py, which fires the events, and tests/unit/test_assignment.py, which
repeats every entry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView, Mapping
from enum import Enum

from confluent_kafka import TopicPartition

from eos.errors import IllegalState
from eos.session.consumer.positions import TopicPartition as Partition


class Phase(Enum):
    """Lists the phases of a partition."""

    NOT_OURS = "not assigned to this consumer"
    ASSIGNED = "assigned by the group; its start offset is unknown"
    RESTORING = "its start offset is known; a participant may still restore its state"
    READING = "its records are read"


class Event(Enum):
    ASSIGN = "assign"
    LOCATE = "locate"
    READ = "read"
    REVOKE = "revoke"


_P, _E = Phase, Event
TABLE: dict[tuple[Phase, Event], Phase] = {
    (_P.ASSIGNED, _E.LOCATE): _P.RESTORING,
    (_P.RESTORING, _E.READ): _P.READING,
}
# A partition that the group assigns again starts at its committed offset again. A revocation may name partitions that
# were never assigned.
TABLE |= {(phase, _E.ASSIGN): _P.ASSIGNED for phase in Phase}
TABLE |= {(phase, _E.REVOKE): _P.NOT_OURS for phase in Phase}


class Assignment:
    """Tracks the partitions of one consumer. `revoked` collects those whose revocation was not reported yet."""

    def __init__(self, revoked: set[Partition] | None = None) -> None:
        self._phases: dict[Partition, Phase] = {}
        self._starts: dict[Partition, TopicPartition] = {}  # the starts of partitions in RESTORING and READING
        self.revoked: set[Partition] = set() if revoked is None else revoked
        """Partitions revoked since the last report, including those that never started or were assigned again."""
        self.unlocated: frozenset[Partition] = frozenset()
        """Partitions in ASSIGNED."""
        self.restoring: Mapping[Partition, TopicPartition] = {}
        """Partitions in RESTORING with their starts, which have the metadata of the committed offsets."""
        self.reading: frozenset[Partition] = frozenset()
        """Partitions in READING."""

    def phase(self, partition: Partition) -> Phase:
        return self._phases.get(partition, Phase.NOT_OURS)

    def assign(self, partitions: Collection[Partition]) -> None:
        """Add partitions that the group assigned."""
        self._fire(Event.ASSIGN, partitions)

    def locate(self, starts: Mapping[Partition, TopicPartition]) -> None:
        """Record the start offsets of assigned partitions."""
        self._fire(Event.LOCATE, starts, starts)

    def read(self, partitions: Collection[Partition]) -> None:
        """Mark located partitions as being read from now on."""
        self._fire(Event.READ, partitions)

    def revoke(self, partitions: Collection[Partition]) -> None:
        """Remove partitions that the group took away."""
        self._fire(Event.REVOKE, partitions)
        self.revoked |= set(partitions)

    def note_reported(self, partitions: Collection[Partition]) -> None:
        """Mark these revocations as reported to the participants."""
        self.revoked -= set(partitions)

    def _fire(
        self, event: Event, partitions: Iterable[Partition], starts: Mapping[Partition, TopicPartition] | None = None
    ) -> None:
        """Change the phase of each partition as TABLE says. If one has no entry, raise IllegalState and change none."""
        phases = dict(self._phases)
        for partition in partitions:
            before = self.phase(partition)
            if (after := TABLE.get((before, event))) is None:
                raise IllegalState(f"{event.value} is not possible for partition {partition}: {before.value}")
            phases[partition] = after
        self._phases = {p: phase for p, phase in phases.items() if phase is not Phase.NOT_OURS}
        located = self._in_phase(Phase.RESTORING, Phase.READING)
        self._starts = {p: start for p, start in {**self._starts, **(starts or {})}.items() if p in located}
        self.unlocated, self.reading = self._in_phase(Phase.ASSIGNED), self._in_phase(Phase.READING)
        self.restoring = {p: start for p, start in self._starts.items() if p not in self.reading}

    def _in_phase(self, *phases: Phase) -> frozenset[Partition]:
        return frozenset(p for p, phase in self._phases.items() if phase in phases)

    @property
    def located(self) -> KeysView[Partition]:
        """Return the partitions whose start offset is known: those that are read, and those that participants
        restore."""
        return self._starts.keys()

    @property
    def all(self) -> Collection[Partition]:
        return self._phases.keys()

    def start_of(self, partition: Partition) -> int:
        """Return the offset at which this partition was started. OFFSET_BEGINNING is negative."""
        return int(self._starts[partition].offset)

    def fetch_offsets(self, expected: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the offset from which each partition that is read must be fetched next. `expected` comes from
        Positions. A partition of which nothing was fetched is fetched from its start."""
        offsets = {}
        for partition in sorted(self.reading & expected.keys()):
            start, offset = self.start_of(partition), expected[partition]
            offsets[partition] = start if offset == max(start, 0) else offset
        return offsets
