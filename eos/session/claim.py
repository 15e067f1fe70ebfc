"""Our claim to a transactional.id: ours until a newer instance initialises it, and then lost for good.

Owns the questions to its coordinator (eos/kafka/admin/ownership.py judges the answers) and what follows: a
producer that lost it never begins or initialises again, because an init takes the id back from its present owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from eos import log
from eos.errors import Fenced, Unavailable
from eos.kafka.admin import ownership
from eos.kafka.admin.ownership import Identity, Owner, Progress
from eos.kafka.client.cluster import ClusterAdmin, TransactionalIdState
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.session.observe import Pulse
from eos.session.producer import TransactionalProducer
from eos.session.states import State

T = TypeVar("T")

_PAUSE_S = 0.5
_LOG_INTERVAL_S = 10.0
_EACH_ITS_OWN = (
    "If several were to run at once, give each its own (eos run: --workers N starts several, or each gets its own "
    "--instance)"
)


class Claim:
    """`lost_to`: who took over, and the numbers, from the producer and what the coordinator said.
    `nobody_took_our_place`: a group's word on what the coordinator leaves open.
    """

    def __init__(
        self,
        settings: Settings,
        lost_to: Callable[[TransactionalProducer, TransactionalIdState | None], tuple[str, str]],
        nobody_took_our_place: Callable[[], bool] | None = None,
        pulse: Pulse | None = None,
        world: World = REAL,
    ) -> None:
        self._world = world
        self._settings, self._lost_to, self._nobody_took_our_place = settings, lost_to, nobody_took_our_place
        self._pulse = pulse or Pulse(world.now)
        self._lost: str | None = None
        self._unlearnt: tuple[TransactionalProducer, str, bool] | None = None  # a question that was interrupted
        self._left_at: dict[str, Identity] = {}  # where `settle` last found an id that is still ours
        self._told = 0.0

    def hold(self) -> None:
        """Raises Fenced once it is lost, and asks again where the question was interrupted."""
        if self._unlearnt is not None:
            self._settle(*self._unlearnt)
        if self._lost is not None:
            raise Fenced(self._lost)

    def replace(self, producer: TransactionalProducer, reason: str) -> None:
        """The producer's replacement; Fenced instead when a newer instance has its id, unknown to us until now."""
        self.confirm(producer, reason)
        producer.replace(reason)

    def confirm(self, producer: TransactionalProducer, reason: str) -> None:
        """Raise Fenced, before an init of ours, when a newer instance has the id.

        Not asked where our own client may have taken the next epoch unheard: that looks like a newer instance's init.
        """
        if producer.may_have_bumped:
            return
        fenced = producer.state is State.FENCED  # and `settle` has found since when
        mine = self._left_at.get(producer.transactional_id) if fenced else None
        mine = mine or producer.identity()  # None: a client younger than its first statistics
        if mine is None:
            return
        answer = self._ask(producer, lambda admin: _owner(admin, producer))
        if not ownership.has_newer_epoch(mine, answer):
            return
        # Records that timed out make librdkafka take the next epoch by itself (KIP-360).
        if not fenced and not ownership.has_newer_epoch(producer.identity(fresh=True) or mine, answer):
            return
        # Without a group a ghost of our own cannot be told from a newer instance whose last transaction was aborted.
        # Who is not fenced yet goes on, as it would if nobody had asked.
        self._settle(producer, reason, ghost_is_ours=True)

    def settle(self, producer: TransactionalProducer, reason: str) -> Owner:
        """Who owns the id, after a call that was fenced; raises Fenced if a newer instance does, or may."""
        return self._settle(producer, reason, ghost_is_ours=False)

    def _settle(self, producer: TransactionalProducer, reason: str, ghost_is_ours: bool) -> Owner:
        if producer.state is State.UNINITIALISED:
            # An init of ours was interrupted. Which epoch it took nobody knows, so the coordinator's tells nothing.
            return Owner.MINE
        # Until it is learnt: an exception out of here must not lead to a replacement, whose init would take the id.
        self._unlearnt = producer, reason, ghost_is_ours
        situation = producer.situation()
        owner, answer = Owner.NEWER, None  # it may be, if our own epoch is not known
        if situation is not None:
            asked = situation

            def settled(admin: ClusterAdmin) -> tuple[Owner, TransactionalIdState | None]:
                owner, answer = ownership.settle(asked, lambda: self._looked(admin, producer))
                if owner in ownership.NEEDS_GROUP_CHECK:
                    if self._nobody_took_our_place is None:
                        ours = ghost_is_ours and owner is not Owner.ABORTED_EARLY
                    else:
                        ours = self._nobody_took_our_place()
                    owner = owner if ours else Owner.NEWER
                return owner, answer

            owner, answer = self._ask(producer, settled)
        open_ms = None  # of our transaction, by our own clock
        if situation is not None and situation.progress is not Progress.NOTHING:
            open_ms = round(situation.age_ms)
        log.warning("fenced", owner=owner.value, open_ms=open_ms, answer=answer, **producer.who())
        if owner is Owner.NEWER:
            who, numbers = self._lost_to(producer, answer)
            self._lost = (
                f"a newer instance took over transactional.id {producer.transactional_id}{who}: this one stops, and "
                f"has written nothing since. {_EACH_ITS_OWN}. [{'; '.join(filter(None, (numbers, reason)))}]"
            )
        self._unlearnt = None
        if self._lost is not None:
            raise Fenced(self._lost)
        if answer is not None:
            self._left_at[producer.transactional_id] = Identity(answer.producer_id, answer.epoch)
        return owner

    def _ask(self, producer: TransactionalProducer, question: Callable[[ClusterAdmin], T]) -> T:
        """Waits for an unreachable cluster: without it nothing can be decided."""
        told = self._world.now() - _LOG_INTERVAL_S
        while True:
            try:
                with self._world.admin(self._settings) as admin:
                    return question(admin)
            except Unavailable as error:
                self._pulse.beat("calling", "DescribeTransactions")
                producer.poll(0)  # what the client says must not gather, the cluster may be away for days
                if self._world.now() - told >= _LOG_INTERVAL_S:
                    told, call = self._world.now(), "DescribeTransactions"
                    log.warning("waiting for the cluster", call=call, error=str(error), **producer.who())
                self._world.sleep(_PAUSE_S)

    def _looked(self, admin: ClusterAdmin, producer: TransactionalProducer) -> TransactionalIdState | None:
        answer, now = _owner(admin, producer), self._world.now()
        if answer is not None and now - self._told >= _LOG_INTERVAL_S:
            self._told = now
            log.info("asking who owns the transactional.id", answer=answer, **producer.who())
        return answer


def _owner(admin: ClusterAdmin, producer: TransactionalProducer) -> TransactionalIdState | None:
    return admin.describe(producer.transactional_id)
