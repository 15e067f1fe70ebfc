"""What a session reads: the consumer in its group, the records that wait, and when they are polled.

Owns the membership, and that another one takes its place when its consumer is given up. It never decides what becomes
of a transaction: a CallFailed says what a failed poll asks for. New partitions begin, and topics are added, only while
no transaction is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from eos.errors import CallFailed, EosError
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Record
from eos.session.asking import Finish
from eos.session.committer import Commit
from eos.session.membership import Membership
from eos.session.observe import Pulse
from eos.session.outcomes import Counters
from eos.session.pacing import Pacing
from eos.session.participants import Participant
from eos.session.positions import Positions

_IDLE_POLL_S = 0.1  # a stop waits for no more than this
_BACKLOG_PAUSE_S = 0.005  # how long an open transaction waits for the next record before it ends early
_PAUSE_S = 0.05


class Intake:
    """`stopping`: whether the session is to stop. `participants` are
    told where partitions begin. `on_unreadable`: see Listener.unreadable."""

    def __init__(
        self,
        settings: Settings,
        topics: Sequence[str],
        pacing: Pacing,
        participants: Sequence[Participant],
        *,
        until_end: bool,
        stopping: Callable[[], bool],
        counters: Counters,
        pulse: Pulse,
        world: World,
        on_unreadable: Callable[[str, int, int, str], None],
    ) -> None:
        self._settings, self.topics, self._pacing, self._participants = settings, list(topics), pacing, participants
        self._until_end, self._stopping, self._counters = until_end, stopping, counters
        self._pulse, self._world, self._on_unreadable = pulse, world, on_unreadable
        self.by_pattern: set[str] = set()
        """Those of `topics` that nobody named."""
        self.positions: Positions[Record] = Positions()
        self._from_beginning: set[str] = set()  # see Starts
        self._member_ids: set[str] = set()  # see Member
        self._chained: set[str] = set()  # those that the session itself writes
        self._topic_ids: dict[str, str] = {}  # see TopicIds
        self._membership: Membership | None = None
        self._finish: Finish | None = None
        self._destinations: Sequence[str] = ()
        self._failure: CallFailed | None = None  # met while something else was waited for

    @property
    def started(self) -> bool:
        return self._membership is not None

    @property
    def membership(self) -> Membership:
        assert self._membership is not None, "the session is not started"
        return self._membership

    # ---- life -------------------------------------------------------------------------------------------------

    def connect(self, destinations: Sequence[str], deadline: float) -> None:
        """Connect to the cluster. Raises Unavailable unless all topics are there by the deadline (World.now())."""
        self._destinations = destinations
        self._chained = set(self.topics).intersection(destinations)
        self._from_beginning |= self._chained
        self._membership = self._made()
        self._membership.check_topics([*self.topics, *destinations], deadline)

    def join(self, admin: ClusterAdmin) -> None:
        """Raises Stopped."""
        self.membership.member.make_way(admin, self.topics)
        self.membership.note_topics(admin)
        self._from_beginning |= self._came_without_us(admin)
        if self._until_end:
            self._finish = Finish(self.membership.asking, self._settings, self._chained, self._world)
        self.membership.join()

    def _came_without_us(self, admin: ClusterAdmin) -> set[str]:
        """Topics of patterns that came while no worker ran, or whose first worker died before it committed anything of
        them: the group has offsets, but none of these. Where it has none at all, `latest` is about every topic."""
        if not self.by_pattern or self._settings.get("auto.offset.reset") != "latest":
            return set()
        committed = self.membership.asking.topics_with_commits(admin)
        return self.by_pattern - committed if committed else set()

    def _made(self) -> Membership:
        return Membership(
            self._settings,
            self.topics,
            self.positions,
            with_ends=self._until_end,
            pulse=self._pulse,
            world=self._world,
            stopping=self._stopping,
            rebalances=self._counters.rebalances,
            member_ids=self._member_ids,
            from_beginning=self._from_beginning,
            changelogs=[topic for participant in self._participants for topic in participant.topics],
            topic_ids=self._topic_ids,
            on_unreadable=self._on_unreadable,
        )

    def begin_anew(self) -> None:
        """Another consumer in this one's place, whose partitions begin at what is committed. It does not join yet."""
        gone, fresh = self.membership, self._made()
        # Its closing forgets what is uncommitted. In this order: who is interrupted does it again, with the same one.
        fresh.starts.known = gone.starts.known = gone.starts.all_uncommitted()
        fresh.gone = gone.gone = gone.gone | gone.assigned
        gone.abandon()
        self._membership, self._failure = fresh, None
        self.positions.clear()

    def join_again(self) -> None:
        if self._from_beginning - self._chained:
            with contextlib.suppress(EosError), self._world.admin(self._settings, timeout_ms=5_000) as admin:
                self.membership.member.make_way(admin, self.topics)
        self.membership.join()

    def close(self, leave_group: bool) -> None:
        if self._membership is not None:
            self._membership.close(leave_group)
            self._membership = None

    def committed(self, commit: Commit) -> None:
        self.positions.commit(commit.offsets)
        self._counters.repeated = self.positions.repeated
        self.membership.starts.committed()

    # ---- between transactions ---------------------------------------------------------------------------------

    def note(self, topics: Sequence[str]) -> None:
        """Topics that are read from now on as well, by a consumer that takes this one's place too."""
        self.topics.extend(topics)
        self._from_beginning |= set(topics)

    def read_too(self) -> None:
        """The group is told of topics that were noted, and rebalances."""
        self.membership.read_too(self.topics)

    def begin_partitions(self) -> None:
        """Who takes part hears of partitions that left, and those begin that everybody is ready for."""
        membership = self.membership
        if membership.gone:
            for participant in self._participants:
                participant.forget(membership.gone)
            membership.gone = set()  # behind it: who is interrupted tells it again
        if starts := membership.find_starts():
            uncommitted = membership.starts.uncommitted.keys() | {p for p, start in starts.items() if start.offset < 0}
            ready = set(starts).intersection(*(one.restore(starts, uncommitted) for one in self._participants))
            membership.begin(ready)

    def gather(self) -> None:
        """Polls until the interval since the last transaction's begin is over."""
        self._pacing.gathers(now := self._world.now())
        if not len(self.positions) and not self._pacing.left_s(now):
            # Idle: the first record starts a transaction at once.
            self.poll(1, 0.0 if self.membership.waiting else _IDLE_POLL_S)
            if not len(self.positions):
                return
            self._pacing.gathers(now := self._world.now())
        # So many are a backlog, also before the interval is over: the producer has nothing to send until we begin.
        backlog = len(self.positions) + self._pacing.first(len(self.positions))
        while True:
            left_s = self._pacing.gather_s(self._world.now())
            self.poll(backlog - len(self.positions), min(left_s, _IDLE_POLL_S))
            if left_s <= _IDLE_POLL_S or len(self.positions) >= backlog or self._stopping():
                return

    def wait_out_pause(self) -> None:
        """After an abort: gives the group and the cluster a moment, polling so that callbacks come through."""
        while (left_s := self._pacing.pause_left_s(self._world.now())) and not self._stopping():
            self.poll(1, min(left_s, _IDLE_POLL_S))
            self._world.sleep(min(_PAUSE_S, self._pacing.pause_left_s(self._world.now())))

    def finished(self) -> bool:
        """With `until_end`: the whole group has committed all that there was at the start."""
        return self._finish is not None and self._finish.reached(self.membership.asking)

    # ---- polling ----------------------------------------------------------------------------------------------

    def poll(self, most: int, timeout_s: float) -> None:
        self._pulse.beat("polling")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.membership.poll(most, timeout_s)
        if (newest := self.positions.newest) is not None:
            self._pacing.saw(_size(newest))

    def more(self) -> None:
        """For the open transaction, if there is a backlog: its queue may run dry for a moment."""
        most = self._pacing.more(self.positions.taken)
        self.poll(most, 0.0)
        if not len(self.positions) and self.membership.lost_sentence is None:
            self.poll(1, _BACKLOG_PAUSE_S)
            self.poll(most, 0.0)

    def ahead(self, taken: int) -> bool:
        """While the producer is waited for, with a transaction that took so many records: the next ones of a backlog.
        False: there is nothing to do meanwhile."""
        before, newest = len(self.positions), self.positions.newest
        most = self._pacing.ahead(taken, before, _size(newest))
        if most == 0 or self._failure is not None:
            return False
        try:
            self.membership.poll(most, 0.0)
        except CallFailed as failure:
            self._failure = failure  # the next poll's: what is waited for goes first
        return len(self.positions) > before


def _size(record: Record | None) -> int:
    return len((record and record.value) or b"")
