"""The parts of a session, made once and put together here; each has a rule, and knows only those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.session.claim import Claim
from eos.session.committer import Committer
from eos.session.intake import Intake
from eos.session.membership import Membership
from eos.session.observe import Pulse
from eos.session.offsets import Offsets
from eos.session.outcomes import Outcomes
from eos.session.pacing import Pacing
from eos.session.participants import Listener, Participant
from eos.session.producer import TransactionalProducer
from eos.session.successor import Successor


class Parts:
    """`stopping`: whether a stop was asked for. The rest is TransactSession's."""

    def __init__(
        self,
        settings: Settings,
        topics: list[str],
        participants: Sequence[Participant],
        listener: Listener,
        *,
        until_end: bool,
        together: int,
        stopping: Callable[[], bool],
        world: World,
    ) -> None:
        self.settings, self.participants, self.listener = settings, participants, listener
        self.stopping, self.world = stopping, world
        self.group: str = settings["group.id"]
        self.pulse = Pulse(world.now)
        interval_s = settings["eos.transaction.interval.ms"] / 1000
        timeout_s = settings.transaction_timeout_ms / 1000
        self.pacing = Pacing(interval_s, settings["eos.transaction.max.records"], together, timeout_s)
        self.outcomes = Outcomes(participants, listener, world)
        self.counters = self.outcomes.counters
        self.intake = Intake(
            settings,
            topics,
            self.pacing,
            participants,
            until_end=until_end,
            stopping=stopping,
            counters=self.counters,
            pulse=self.pulse,
            world=world,
            on_unreadable=listener.unreadable,
        )
        self.positions = self.intake.positions
        self.successor = Successor(settings, world)
        self.offsets = Offsets(settings, self.positions, participants, self.successor, world)
        changelogs = {topic for participant in participants for topic in participant.topics}
        self.producer = TransactionalProducer(
            settings, settings["transactional.id"], pulse=self.pulse, world=world, changelogs=changelogs
        )
        self.committer = Committer(self.producer, self.pulse, world)
        self.claim = Claim(
            settings, self.successor.told, lambda: self.membership.member.nobody_took_our_place(), self.pulse, world
        )

        self.counters.replacements = self.producer.replacements
        for part in (
            self.intake.committed,
            lambda commit: self.pacing.committed(commit.taken, commit.open_s, commit.sending_s),
            lambda commit: self.successor.ours("our last commit"),
            self.offsets.committed,
        ):
            self.outcomes.follow(part)

    @property
    def membership(self) -> Membership:
        """The present one: a new consumer has another."""
        return self.intake.membership
