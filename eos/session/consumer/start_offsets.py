"""Find where a group's partitions start: at their stable committed offset, or else where auto.offset.reset says.

Owns the start offsets that nobody committed yet. Under `latest` they must be committed at once: if the worker died
before its first record, it would lose the records that arrived since. A partition whose start cannot be found yet does
not hold up the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from eos import log
from eos.errors import Unavailable
from eos.kafka.admin.group_history import offsets_expired, read_notes
from eos.kafka.client.client_calls import call_client
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.session.consumer.assignment import Assignment
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.consumer.positions import names_of
from eos.session.consumer.queries import LOOK_S, ClusterQueries, NotNow

OTHERS = "another member's open transaction"
NEWER = "the offset that another member committed a moment ago"
_RETRY_S = 0.2
_LOG_INTERVAL_S = 2.0


class StartOffsets:
    """Finds start offsets. `from_beginning`: topics that are read from their beginning under `latest` too; the caller
    may add more. `earlier`: offsets at which earlier consumers of this session started under `latest`, not committed
    yet. `kept`: topics whose records only matter to a follower, which reads them itself; their offsets may expire."""

    def __init__(
        self,
        queries: ClusterQueries,
        settings: Settings,
        from_beginning: Collection[str],
        earlier: Mapping[Partition, int],
        world: World,
        take_over: Callable[[Mapping[Partition, int]], Mapping[Partition, int]] = lambda _: {},
        kept: Collection[str] = (),
    ) -> None:
        self._take_over, self._kept_topics = take_over, frozenset(kept)
        self._queries, self._settings, self._from_beginning, self._world = queries, settings, from_beginning, world
        self._earlier_starts = earlier
        self._group: str = settings["group.id"]
        self._next_query = 0.0
        self._waits = log.Reminder(world.now, _LOG_INTERVAL_S)
        self._blocked = log.Reminder(world.now)
        self.uncommitted: dict[Partition, int] = {}
        """Start offsets under `latest` of partitions without a committed offset: to be committed at once."""

    # ---- when -------------------------------------------------------------------------------------------------

    def restart_wait(self) -> None:
        """Query at the next opportunity: the assignment has new partitions."""
        self._next_query = 0.0
        self._waits.restart()
        self._blocked.restart()

    def are_due(self, assignment: Assignment) -> bool:
        """Return whether it is time to query the starts of assigned partitions."""
        return bool(assignment.unlocated) and self._world.now() >= self._next_query

    def locate(self, assignment: Assignment) -> None:
        """Find the starts of all assigned partitions, if a query is due and the cluster can answer."""
        if not self.are_due(assignment):
            return
        try:
            assignment.locate(self.find(sorted(assignment.unlocated)))
        except NotNow as error:
            # Do not wait here. A partition may lack a leader for hours, and meanwhile the session must poll the group
            # and notice a stop.
            self._next_query = self._world.now() + _RETRY_S
            if self._waits.tick():
                log.info(f"waiting for {error}", partitions=names_of(assignment.unlocated), group=self._group)
                if str(error) == OTHERS and self._blocked.tick():
                    self._queries.warn_of_open_transaction()

    # ---- where ------------------------------------------------------------------------------------------------

    def find(self, partitions: Collection[Partition]) -> dict[Partition, TopicPartition]:
        """Return the start of each new partition: its stable committed offset, or else the offset that
        auto.offset.reset selects.

        Raises NotNow, and InputGone for partitions that had a committed offset once."""
        starts = self._committed(partitions)
        missing = [p for p, tp in starts.items() if tp.offset < 0]
        reset = str(self._settings.get("auto.offset.reset", "earliest"))
        # Query the ends before the notes. A partition may lack a leader for hours, and each read of the notes needs
        # clients of its own.
        ends = self._start_at_ends(missing) if reset == "latest" else {}
        try:
            noted = [partition for partition in missing if partition[0] not in self._kept_topics]
            found = call_client(read_notes, self._settings, self._group, noted, self._world)
        except Unavailable as error:
            raise NotNow(f"the list of partitions that this group has committed: {error}") from error
        if found:
            self._refuse_forgotten(found, reset)
        starts |= {p: TopicPartition(*p, OFFSET_BEGINNING) for p in missing}
        starts |= {p: TopicPartition(*p, end) for p, end in ends.items()}
        try:
            ends |= self._take_over({p: tp.offset for p, tp in starts.items()})
        except Unavailable as error:
            raise NotNow(str(error)) from error
        self.uncommitted |= ends
        return starts | {p: TopicPartition(*p, end) for p, end in ends.items()}

    def _committed(self, partitions: Collection[Partition], waits_for: str = OTHERS) -> dict[Partition, TopicPartition]:
        """Return the stable committed offsets. Raises NotNow."""
        found = self._queries.try_committed(sorted(partitions))
        if found is None:
            raise NotNow(waits_for)
        return found

    def _refuse_forgotten(self, noted_since: Mapping[Partition, int], reset: str) -> None:
        """Raise InputGone for noted partitions without a committed offset; NotNow if one was committed meanwhile.

        A note is written after its commit. So an offset that exists now was committed after our first query, by the
        member that owned the partition while this process was stopped."""
        committed = self._committed(noted_since)
        if gone := {p: when for p, when in noted_since.items() if committed[p].offset < 0}:
            raise offsets_expired(self._group, gone, reset)
        raise NotNow(NEWER)

    def _start_at_ends(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """Return the start offsets of the partitions that start at their end under `latest`. A partition that is
        younger than the group's first commit of its topic is left out: it starts at its beginning. Raises NotNow."""
        is_older = dict.fromkeys(self._from_beginning, True)  # the group is older than the topic
        ends = {}
        for topic, partition in partitions:
            if (start := self._earlier_starts.get((topic, partition))) is not None:
                ends[topic, partition] = start
                continue
            if topic not in is_older:
                is_older[topic] = self._has_commits(topic)
            if not is_older[topic]:
                _, ends[topic, partition] = self._queries.watermarks((topic, partition), LOOK_S)
        return ends

    def _has_commits(self, topic: str) -> bool:
        """Return whether the group has committed offsets of this topic. Raises NotNow while they are not stable."""
        partitions = self._queries.partitions_of(topic)
        committed = self._committed(partitions, f"stable committed offsets of {topic}")
        return any(tp.offset >= 0 for tp in committed.values())

    # ---- commits and revocations --------------------------------------------------------------------------------

    def forget(self, partitions: Collection[Partition]) -> None:
        """Drop revoked partitions: their next owner decides where they start."""
        self.uncommitted = {p: offset for p, offset in self.uncommitted.items() if p not in partitions}

    def committed(self) -> None:
        """Mark all start offsets as committed, because a transaction committed them."""
        self.uncommitted = {}

    def resolve(self, stable: Mapping[Partition, TopicPartition]) -> None:
        """Drop start offsets that are committed by now; `stable` are the group's committed offsets."""
        self.uncommitted = {p: offset for p, offset in self.uncommitted.items() if stable[p].offset < 0}
