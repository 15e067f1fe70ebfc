"""Assemble a session: create its parts once and subscribe them to the outcomes of transactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.observe import Counters, Pulse
from eos.session.commit_offsets import CommitOffsets
from eos.session.committer import Committer
from eos.session.consumer.fetcher import Fetcher
from eos.session.consumer.group_consumer import GroupConsumer
from eos.session.consumer.pacing import Pacing
from eos.session.outcomes import Commit, Listener, Outcomes, Participant
from eos.session.producer.ownership import OwnerInfo, TransactionalIdOwnership
from eos.session.producer.producer import TransactionalProducer


class Parts:
    """Assembles the parts of one session. `stopping` returns True once a stop was requested. The other arguments are
    TransactSession's."""

    def __init__(
        self,
        settings: Settings,
        topics: list[str],
        participants: Sequence[Participant],
        listener: Listener,
        *,
        until_end: bool,
        handled_at_once: int,
        with_ends: bool,
        stopping: Callable[[], bool],
        world: World,
    ) -> None:
        self.settings, self.participants, self.listener = settings, participants, listener
        self.stopping, self.world = stopping, world
        self.group: str = settings["group.id"]
        self.pulse = Pulse(world.now)
        interval_s = settings["eos.transaction.interval.ms"] / 1000
        timeout_s = settings.transaction_timeout_ms / 1000
        self.pacing = Pacing(interval_s, settings["eos.transaction.max.records"], handled_at_once, timeout_s)
        self.watcher = Watcher(settings, world)
        self.fetcher = Fetcher(
            settings,
            topics,
            self.pacing,
            participants,
            self.watcher,
            until_end=until_end,
            with_ends=with_ends,
            stopping=stopping,
            pulse=self.pulse,
            world=world,
            on_unreadable=listener.on_unreadable,
            needs_records=listener.needs_records,
        )
        self.positions = self.fetcher.positions
        changelogs = {topic for participant in participants for topic in participant.topics}
        self.producer = TransactionalProducer(
            settings, settings["transactional.id"], pulse=self.pulse, world=world, changelogs=changelogs
        )
        self.committer = Committer(self.producer, self.pulse, world)
        self.counters = Counters(replacements=self.producer.replacements, rebalances=self.fetcher.rebalances)
        self.outcomes = Outcomes(participants, listener, self.counters, world)
        self.owner_info = OwnerInfo(settings, world)
        self.offsets = CommitOffsets(settings, self.positions, participants, self.owner_info, world)
        self.ownership = TransactionalIdOwnership(
            settings,
            self.owner_info.describe_loss,
            lambda: self.group_consumer.member.query_is_ours(),
            self.pulse,
            world,
        )
        for subscriber in (
            lambda commit: self.fetcher.committed(commit.offsets),
            lambda commit: self.counters.note_repeated(self.positions.repeated),
            lambda commit: self.pacing.committed(commit.taken, commit.open_s, commit.sending_s),
            self._note_owned,
            self.offsets.committed,
        ):
            self.outcomes.subscribe(subscriber)

    def _note_owned(self, commit: Commit) -> None:
        if not commit.defers_offsets:
            self.owner_info.note_owned("our last commit")

    @property
    def group_consumer(self) -> GroupConsumer:
        """Return the present consumer; a replacement is another object."""
        return self.fetcher.group_consumer
