"""Tracks the ownership of a transactional.id: ours until a newer instance initialises it, and then lost for good.

Owns the queries to its coordinator (eos/kafka/admin/ownership.py judges the answers) and their consequence: a producer
that lost the id never begins or initialises again, because an init would take the id back from its present owner. Also
owns the metadata that a session commits about itself with each offset (docs/reference/formats.md), and reads that of
others: exit 79 names the process that took over.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from eos import log
from eos.encoding.lineage import OFFSET_FORMAT
from eos.errors import EosError, Fenced, Unavailable
from eos.kafka.admin import ownership
from eos.kafka.admin.ownership import Identity, Owner, Progress
from eos.kafka.client.cluster import ClusterAdmin, TransactionalIdState
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.observe import Pulse
from eos.records import parse_metadata
from eos.session.producer.producer import TransactionalProducer
from eos.session.producer.states import State

T = TypeVar("T")

_PAUSE_S = 0.5
_SEPARATE_IDS = (
    "If several were to run at once, give each its own (eos run: --workers N starts several, or each gets its own "
    "--instance)"
)


class TransactionalIdOwnership:
    """Tracks the ownership of one transactional.id. `describe_loss`: returns who took over, and the producer ids and
    epochs of both, from the producer and the coordinator's answer. `query_group`: asks the group whether no other
    member is in our place, if the coordinator's answer is not conclusive."""

    def __init__(
        self,
        settings: Settings,
        describe_loss: Callable[[TransactionalProducer, TransactionalIdState | None], tuple[str, str]],
        query_group: Callable[[], bool] | None = None,
        pulse: Pulse | None = None,
        world: World = REAL,
    ) -> None:
        self._world = world
        self._settings, self._describe_loss, self._query_group = settings, describe_loss, query_group
        self._pulse = pulse or Pulse(world.now)
        self._lost: str | None = None
        # Arguments of an unfinished call of `settle`.
        self._interrupted_settle: tuple[TransactionalProducer, str, bool] | None = None
        self._settled_at: dict[str, Identity] = {}  # the identity at which `settle` last found each id still ours
        self._answers = log.Reminder(world.now, at_once=True)

    def raise_if_lost(self) -> None:
        """Raise Fenced if a newer instance owns the id. First repeat an interrupted call of `settle`."""
        if self._interrupted_settle is not None:
            self._settle(*self._interrupted_settle)
        if self._lost is not None:
            raise Fenced(self._lost)

    def replace(self, producer: TransactionalProducer, reason: str) -> None:
        """Replace the producer. Raises Fenced instead if a newer instance has its id."""
        self.confirm(producer, reason)
        producer.replace(reason)

    def confirm(self, producer: TransactionalProducer, reason: str) -> None:
        """Raise Fenced before our init if a newer instance has the id.

        No query is sent if our own client may have taken the next epoch, which would look like a newer instance's.
        """
        if producer.epoch_may_have_advanced:
            return
        fenced = producer.state is State.FENCED  # `settle` has then noted the identity at which the id was last ours
        mine = self._settled_at.get(producer.transactional_id) if fenced else None
        mine = mine or producer.poll_identity()
        if mine is None:  # the client has not emitted statistics yet
            return
        answer = self._query(producer, lambda admin: _describe(admin, producer))
        if not ownership.has_newer_epoch(mine, answer):
            return
        # Records that timed out make librdkafka take the next epoch by itself (KIP-360).
        if not fenced and not ownership.has_newer_epoch(producer.poll_identity(fresh=True) or mine, answer):
            return
        # A late request of ours may have begun an empty transaction, which the broker aborted. Without a group this
        # looks like a newer instance whose last transaction was aborted. A producer that is not fenced yet continues,
        # as it would without this query.
        self._settle(producer, reason, empty_transaction_is_ours=True)

    def settle(self, producer: TransactionalProducer, reason: str) -> Owner:
        """Return who owns the id after a call was fenced. Raises Fenced if a newer instance owns it, or may own it."""
        return self._settle(producer, reason, empty_transaction_is_ours=False)

    def _settle(self, producer: TransactionalProducer, reason: str, empty_transaction_is_ours: bool) -> Owner:
        if producer.state is State.UNINITIALISED:
            # One of our inits was interrupted. Its epoch is unknown, so the coordinator's epoch decides nothing.
            return Owner.MINE
        # Keep the arguments until the owner is known. If an exception interrupts this call, no replacement may follow,
        # because its init would take the id over.
        self._interrupted_settle = producer, reason, empty_transaction_is_ours
        situation = producer.describe_fenced()
        owner, answer = Owner.NEWER, None  # the safe answer if our own epoch is unknown
        if situation is not None:
            known = situation

            def judge(admin: ClusterAdmin) -> tuple[Owner, TransactionalIdState | None]:
                owner, answer = ownership.settle(known, lambda: self._describe_and_log(admin, producer))
                if owner in ownership.NEEDS_GROUP_CHECK:
                    if self._query_group is None:
                        ours = empty_transaction_is_ours and owner is not Owner.ABORTED_EARLY
                    else:
                        ours = self._query_group()
                    owner = owner if ours else Owner.NEWER
                return owner, answer

            owner, answer = self._query(producer, judge)
        open_ms = None  # age of our transaction, by our own clock
        if situation is not None and situation.progress is not Progress.NOTHING:
            open_ms = round(situation.age_ms)
        log.warning("fenced", owner=owner.value, open_ms=open_ms, answer=answer, **producer.who())
        if owner is Owner.NEWER:
            who, numbers = self._describe_loss(producer, answer)
            self._lost = (
                f"a newer instance took over transactional.id {producer.transactional_id}{who}: this one stops, and "
                f"has written nothing since. {_SEPARATE_IDS}. [{'; '.join(filter(None, (numbers, reason)))}]"
            )
        self._interrupted_settle = None
        if self._lost is not None:
            raise Fenced(self._lost)
        if answer is not None:
            self._settled_at[producer.transactional_id] = Identity(answer.producer_id, answer.epoch)
        return owner

    def _query(self, producer: TransactionalProducer, query: Callable[[ClusterAdmin], T]) -> T:
        """Return the cluster's answer. Wait for an unreachable cluster: nothing can be decided without it."""
        waits, call = log.Reminder(self._world.now, at_once=True), "DescribeTransactions"
        while True:
            try:
                with self._world.admin(self._settings) as admin:
                    return query(admin)
            except Unavailable as error:
                self._pulse.beat("calling", call)
                producer.poll(0)  # the client's callbacks must not pile up: the cluster may be unreachable for days
                if waits.tick():
                    log.warning("waiting for the cluster", call=call, error=str(error), **producer.who())
                self._world.sleep(_PAUSE_S)

    def _describe_and_log(self, admin: ClusterAdmin, producer: TransactionalProducer) -> TransactionalIdState | None:
        answer = _describe(admin, producer)
        if answer is not None and self._answers.tick():
            log.info("transactional.id owner queried", answer=answer, **producer.who())
        return answer


def _describe(admin: ClusterAdmin, producer: TransactionalProducer) -> TransactionalIdState | None:
    return admin.describe(producer.transactional_id)


class OwnerInfo:
    """Describes this session as the owner of its transactional.id: the metadata that it commits about itself, and the
    last time at which it owned the id."""

    def __init__(self, settings: Settings, world: World) -> None:
        self._settings, self._world = settings, world
        self._transactional_id: str = settings["transactional.id"]
        self._started_at_ms = int(world.unix() * 1000)
        self.note_owned("our start")

    def note_owned(self, by: str) -> None:
        """Record that we own the transactional.id now; `by` names the evidence."""
        self._owned_until, self._owned_by = self._world.unix(), by

    def metadata(self, producer: TransactionalProducer) -> dict[str, object]:
        """Return the fields to commit with each offset, by which a fenced instance names its successor."""
        identity = producer.client.identity
        return {
            "v": OFFSET_FORMAT,
            "instance": self._transactional_id,
            "host": socket.gethostname(),
            "since": self._started_at_ms,
            "epoch": identity.epoch if identity else None,
        }

    def describe_loss(self, producer: TransactionalProducer, answer: TransactionalIdState | None) -> tuple[str, str]:
        """Return who took over and since when, and the producer ids and epochs of both, as far as the cluster reports
        them."""
        mine = producer.poll_identity()
        who = ""
        try:
            with self._world.admin(self._settings) as admin:
                answer = answer or admin.describe(producer.transactional_id)
                metadata = admin.committed_metadata(self._settings["group.id"])
                who = successor_of(self._transactional_id, self._started_at_ms, metadata)
        except EosError as error:
            log.debug("transactional.id owner unavailable", error=str(error))
        theirs = ""
        if answer is not None:
            since = f" since {_clock(answer.start_ms / 1000)}" if answer.start_ms > 0 else ""
            theirs = f"; now producer id {answer.producer_id} epoch {answer.epoch} in state {answer.state}{since}"
        if not who and (answer is None or answer.start_ms <= 0):
            who = f"; initialised after {_clock(self._owned_until)} ({self._owned_by})"
        ours = f"producer id {mine.producer_id} epoch {mine.epoch}" if mine else "its epoch was not known yet"
        return who, f"ours: {ours}{theirs}"


def successor_of(transactional_id: str, our_start_ms: int, metadata: Sequence[str]) -> str:
    """Return "; the last commit is by ..." with the name of our successor, or "" if there is none. The successor is the
    process that started after ours with the same transactional.id and has committed. `metadata`: that of the committed
    offsets, in which each process names itself."""
    owners = []
    for text in metadata:
        owner = parse_metadata(text)
        try:
            if owner["instance"] == transactional_id and owner["since"] > our_start_ms:
                owners.append((owner["since"], owner["host"]))
        except (KeyError, TypeError):
            continue  # metadata of another program
    if not owners:
        return ""
    since, host = max(owners)
    return f"; the last commit is by {transactional_id} on {host}, started {_clock(since / 1000)}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
