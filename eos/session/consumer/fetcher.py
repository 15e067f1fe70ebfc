"""Fetch a session's input: the consumer in its group, the waiting records, and the times of its polls.

Owns the group consumer and its replacement by a new one after a failure. This module never decides how a transaction
ends: it raises CallFailed with the action that a failed poll requires. New partitions start, and topics are added, only
while no transaction is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from eos.errors import CallFailed, EosError
from eos.kafka.admin.facts import check_topics
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.observe import Pulse
from eos.records import Committed, Record
from eos.session.consumer.group_consumer import GroupConsumer, Handover
from eos.session.consumer.pacing import Pacing
from eos.session.consumer.positions import Positions
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.consumer.queries import EndOfInput

_IDLE_POLL_S = 0.1  # longest time until a stop is noticed
_JOIN_POLL_S = 0.01
_BACKLOG_PAUSE_S = 0.005  # how long an open transaction waits for its next record before it ends early
_PAUSE_S = 0.05
_REJOIN_ADMIN_MS = 5_000


class Follower(Protocol):
    """Keeps data for each partition. The fetcher reports which partitions come and go, while no transaction is open."""

    @property
    def topics(self) -> Collection[str]:
        """Return the topics that only this follower writes; errors about them are classified separately."""

    def forget(self, revoked: Collection[Partition]) -> None:
        """Drop these partitions, which may include partitions that are assigned again at once or that never started."""

    def restore(
        self, starts: Mapping[Partition, Committed], uncommitted: Collection[Partition]
    ) -> Collection[Partition]:
        """Take over these partitions, which start at the given offsets; return those that are ready to be read.

        The fetcher calls this again a moment later for the partitions that are not ready. Meanwhile it polls the group
        and reads the ready ones. `uncommitted`: the partitions for which the group has committed no offset."""


@runtime_checkable
class KeepsOffsets(Protocol):
    """Describes a follower with offsets outside of Kafka. Where such an offset is lower than the group's, reading
    starts there. Where it is higher, the follower skips the records in between."""

    def keeps_offset(self, partition: Partition) -> bool:
        """Return whether this follower keeps the offset of this partition. The group's offset may then be lower."""

    def take_over(self, starts: Mapping[Partition, int]) -> Mapping[Partition, int]:
        """Take these partitions over, and return the earlier offsets at which some of them must start.

        `starts`: the offsets at which the group starts, negative without a committed offset. Raises Unavailable.
        """


@runtime_checkable
class KeepsPosition(Protocol):
    """Describes a follower that keeps its position in an input topic, and reads the position from there itself."""

    @property
    def position_topic(self) -> str: ...


class Fetcher:
    """Fetches the input of one session. `stopping` returns True once a stop was requested. `on_unreadable`,
    `needs_records`: see Listener."""

    def __init__(
        self,
        settings: Settings,
        topics: Sequence[str],
        pacing: Pacing,
        followers: Sequence[Follower],
        watcher: Watcher,
        *,
        until_end: bool,
        with_ends: bool,
        stopping: Callable[[], bool],
        pulse: Pulse,
        world: World,
        on_unreadable: Callable[[str, int, int, str], None],
        needs_records: bool = True,
    ) -> None:
        self._settings, self.topics, self._pacing, self._followers = settings, list(topics), pacing, followers
        self._watcher = watcher
        self._until_end, self._stopping = until_end, stopping
        self._with_ends = with_ends or until_end
        self._pulse, self._world, self._on_unreadable = pulse, world, on_unreadable
        self._needs_records = needs_records
        self._pattern_topics: set[str] = set()
        self.positions: Positions[Record] = Positions()
        self._chained: set[str] = set()  # input topics that the session itself writes
        self._handover = Handover()
        self._group_consumer: GroupConsumer | None = None
        self._end: EndOfInput | None = None
        self._failure: CallFailed | None = None  # the failure of a prefetch

    @property
    def is_started(self) -> bool:
        return self._group_consumer is not None

    @property
    def group_consumer(self) -> GroupConsumer:
        """Return the present consumer; a replacement is another object."""
        assert self._group_consumer is not None, "the session is not started"
        return self._group_consumer

    @property
    def rebalances(self) -> dict[str, int]:
        """Return the counts of rebalances of all consumers so far: see Handover."""
        return self._handover.rebalances

    # ---- life -------------------------------------------------------------------------------------------------

    def set_topics(self, topics: Sequence[str], by_pattern: Collection[str]) -> None:
        """Set the input topics before the start; `by_pattern` are those that only a pattern matched."""
        self.topics, self._pattern_topics = list(topics), set(by_pattern)

    def connect(self, destinations: Sequence[str], deadline: float) -> None:
        """Connect to the cluster. Raises Unavailable unless all topics exist by the deadline (World.now())."""
        self._world.step("connect")
        self._chained = set(self.topics).intersection(destinations)
        self._handover.from_beginning |= self._chained
        self._group_consumer = self._create_consumer()
        servers, topics = self._settings.bootstrap_servers, [*self.topics, *destinations]
        check_topics(self._group_consumer.consumer, servers, topics, deadline, self._world)

    def join(self, admin: ClusterAdmin) -> None:
        """Join the group. Raises Stopped."""
        self._world.step("join")
        consumer = self.group_consumer
        consumer.member.remove_predecessor(admin, self.topics)
        consumer.topic_ids.learn_changelog_ids(admin)
        self._handover.from_beginning |= self._topics_added_while_stopped(admin)
        if self._until_end:
            self._end = EndOfInput(consumer.queries, self._settings, self._chained, self._world)
        consumer.join()

    def _topics_added_while_stopped(self, admin: ClusterAdmin) -> set[str]:
        """Return topics matched by a pattern that are younger than the group's commits: they appeared while no worker
        ran, or their first worker died before its first commit. Without any committed offset in the group, `latest`
        applies to every topic."""
        if not self._pattern_topics or self._settings.get("auto.offset.reset") != "latest":
            return set()
        committed = self.group_consumer.queries.topics_with_commits(admin)
        return self._pattern_topics - committed if committed else set()

    def _create_consumer(self) -> GroupConsumer:
        return GroupConsumer(
            self._settings,
            self.topics,
            self.positions,
            self._watcher,
            with_ends=self._with_ends,
            pulse=self._pulse,
            world=self._world,
            stopping=self._stopping,
            handover=self._handover,
            changelogs=[topic for follower in self._followers for topic in follower.topics],
            on_unreadable=self._on_unreadable,
            needs_records=self._needs_records,
            take_over=self._take_over,
            kept=[follower.position_topic for follower in self._followers if isinstance(follower, KeepsPosition)],
        )

    def _take_over(self, starts: Mapping[Partition, int]) -> dict[Partition, int]:
        earlier: dict[Partition, int] = {}
        for follower in self._followers:
            if isinstance(follower, KeepsOffsets):
                earlier |= follower.take_over(starts)
        return earlier

    def replace_consumer(self) -> None:
        """Replace the consumer by a new one, whose partitions start at their committed offsets. It does not join yet.

        An interrupted call can be repeated."""
        replacement = self._create_consumer()
        self.group_consumer.abandon()
        self._group_consumer, self._failure = replacement, None
        self.positions.clear()

    def rejoin(self) -> None:
        """Join the group with the new consumer."""
        if self._handover.from_beginning - self._chained:
            with contextlib.suppress(EosError), self._world.admin(self._settings, timeout_ms=_REJOIN_ADMIN_MS) as admin:
                self.group_consumer.member.remove_predecessor(admin, self.topics)
        self.group_consumer.join()

    def close(self, leave_group: bool) -> None:
        if self._group_consumer is not None:
            self._group_consumer.close(leave_group)
            self._group_consumer = None

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Record that a transaction with these offsets was committed."""
        self.positions.commit(offsets)
        self.group_consumer.start_offsets.committed()

    # ---- between transactions ---------------------------------------------------------------------------------

    def add_topics(self, topics: Sequence[str]) -> None:
        """Read these topics too, from their beginning; the group rebalances."""
        self.topics.extend(topics)
        self._handover.from_beginning |= set(topics)
        self.group_consumer.subscribe(self.topics)

    def update_partitions(self) -> None:
        """Report revoked partitions to the followers, and start to read the assigned partitions for which all followers
        are ready.
        """
        consumer, assignment = self.group_consumer, self.group_consumer.assignment
        if assignment.revoked:
            revoked = set(assignment.revoked)
            for follower in self._followers:
                follower.forget(revoked)
            assignment.note_reported(revoked)  # after the reports, so that an interrupted report is repeated
        if assignment.unlocated:
            self._world.step("committed offsets")
            consumer.start_offsets.locate(assignment)
        if starts := assignment.restoring:
            new = {p for p, start in starts.items() if start.offset < 0}
            uncommitted = consumer.start_offsets.uncommitted.keys() | new
            ready = set(starts).intersection(*(f.restore(starts, uncommitted) for f in self._followers))
            self._world.step("fetch")
            consumer.start(ready)

    def gather(self) -> None:
        """Poll until one interval after the last transaction began, or until a backlog waits."""
        self._pacing.begin_gathering(now := self._world.now())
        if not len(self.positions) and not self._pacing.left_s(now):
            # Idle: the first record starts a transaction at once.
            self.poll(1, self._idle_poll_s())
            if not len(self.positions):
                return
            self._pacing.begin_gathering(now := self._world.now())
        # Stop gathering at this many records. The producer is idle until the transaction begins, so a backlog must not
        # wait.
        backlog = len(self.positions) + self._pacing.most_to_gather(len(self.positions))
        while True:
            left_s = self._pacing.gather_s(self._world.now())
            self.poll(backlog - len(self.positions), min(left_s, _IDLE_POLL_S))
            if left_s <= _IDLE_POLL_S or len(self.positions) >= backlog or self._stopping():
                return

    def _idle_poll_s(self) -> float:
        if self.group_consumer.assignment.restoring:
            return 0.0
        return _JOIN_POLL_S if self.group_consumer.awaits_assignment else _IDLE_POLL_S

    def wait_out_pause(self) -> None:
        """Wait after an abort, which gives the group and the cluster a moment; poll so that callbacks run."""
        while (left_s := self._pacing.pause_left_s(self._world.now())) and not self._stopping():
            self.poll(1, min(left_s, _IDLE_POLL_S))
            self._world.sleep(min(_PAUSE_S, self._pacing.pause_left_s(self._world.now())))

    def query_finished(self) -> bool:
        """With `until_end`, query whether the whole group has committed everything that was readable at the start.

        Return False before the first assignment: under `latest` the starts of its partitions must be committed first.
        """
        consumer = self.group_consumer
        if self._end is None or consumer.awaits_assignment or consumer.assignment.unlocated:
            return False
        return self._end.query_reached(consumer.queries)

    # ---- polling ----------------------------------------------------------------------------------------------

    def poll(self, most: int, timeout_s: float) -> None:
        self._pulse.beat("polling")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.group_consumer.poll(most, timeout_s)
        if (newest := self.positions.newest) is not None:
            self._pacing.observe_size(_size(newest))

    def fetch_more(self) -> None:
        """Fetch more of a backlog for the open transaction. Wait a moment for the client's queue to fill again."""
        most = self._pacing.most_to_add(self.positions.taken)
        self.poll(most, 0.0)
        if not len(self.positions) and self.group_consumer.lost_reason is None:
            self.poll(1, _BACKLOG_PAUSE_S)
            self.poll(most, 0.0)

    def prefetch(self, taken: int) -> bool:
        """Fetch the next records of a backlog while the producer ends a transaction that took `taken` records. Return
        False if there is nothing to fetch."""
        before, newest = len(self.positions), self.positions.newest
        most = self._pacing.most_to_prefetch(taken, before, _size(newest))
        if most == 0 or self._failure is not None:
            return False
        try:
            self.group_consumer.poll(most, 0.0)
        except CallFailed as failure:
            self._failure = failure  # the next poll raises the failure, after the transaction has ended
        return len(self.positions) > before


def _size(record: Record | None) -> int:
    return len((record and record.value) or b"")
