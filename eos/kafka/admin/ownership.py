"""Decides who owns a transactional.id after a call was fenced: the rule, as a pure function, and its queries.

`_FENCED` means either that the broker aborted our transaction at its timeout or that a newer instance initialised the
same transactional.id; a producer cannot distinguish the two. Initialising again to find out would fence the newer
instance, so the coordinator is asked first (DescribeTransactions, KIP-664). Everything here only reads. Each row of the
rule was measured on 4.3.1 and 3.9.2; tests/broker/test_zombies.py reproduces every row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from eos.kafka.client.cluster import TransactionalIdState

ABORTING = ("PrepareEpochFence", "PrepareAbort")
AGREEMENT_INTERVAL_S = 1.5  # for a moment, a newer instance's init cannot be told from our own timeout


class Identity(NamedTuple):
    """Holds the producer id and epoch that InitProducerId returned."""

    producer_id: int
    epoch: int


class Progress(Enum):
    """States the progress that the current transaction has certainly made."""

    NOTHING = "nothing was sent"
    SENT = "passed to the client: it may have arrived, and the answer been lost"
    ACKNOWLEDGED = "the cluster confirmed a record, or the offsets"


@dataclass(frozen=True)
class Situation:
    """Holds what this producer knows itself at the first fenced call."""

    mine: Identity
    progress: Progress
    age_ms: float  # age of the current transaction
    timeout_ms: int  # transaction.timeout.ms
    inits: int = 1  # InitProducerId requests that our client sent: all but one may have arrived late


class Owner(Enum):
    MINE = "the epoch is still ours"
    OWN_TIMEOUT = "the broker aborted our transaction at its timeout"
    UNKNOWN_TIMEOUT = "a transaction under this id that is not ours timed out while we were idle"
    LATE_INIT = "a late copy of our own InitProducerId, which the client had retried, took the next epoch"
    ABORTED_EARLY = "our transaction was aborted before its timeout by our clock, without a newer instance"
    NEWER = "a newer instance initialised this transactional.id"
    EXPIRED = "the transactional.id expired"
    ASK_AGAIN = "the coordinator has not finished the transaction"


NEEDS_GROUP_CHECK = (Owner.UNKNOWN_TIMEOUT, Owner.LATE_INIT, Owner.ABORTED_EARLY)
"""Owners that look the same if a newer instance died early or has not done any work yet: the group must be asked."""


def judge(situation: Situation, answer: TransactionalIdState | None) -> Owner:
    """Return the owner according to one answer of the coordinator.

    OWN_TIMEOUT and NEEDS_GROUP_CHECK count only if a second answer 1.5 s later agrees. NEEDS_GROUP_CHECK also requires
    that the group has no other member in our place."""
    if answer is None:
        return Owner.EXPIRED
    mine = situation.mine
    if (answer.producer_id, answer.epoch) == (mine.producer_id, mine.epoch):
        return Owner.ASK_AGAIN if answer.state in ABORTING else Owner.MINE
    if _has_older_epoch(answer, mine):
        return Owner.ASK_AGAIN
    late = range(mine.epoch + 1, mine.epoch + situation.inits)
    if answer.producer_id == mine.producer_id and answer.epoch in late and answer.state == "Empty":
        return Owner.LATE_INIT
    if (answer.producer_id, answer.epoch) != (mine.producer_id, mine.epoch + 1):
        return Owner.NEWER
    # Our own timeout bumps the epoch by exactly one and ends in CompleteAbort. In 3.9.2 the state before that is
    # Ongoing.
    if answer.state in ABORTING or answer.state == "Ongoing":
        return Owner.ASK_AGAIN
    if answer.state != "CompleteAbort":
        return Owner.NEWER
    if situation.age_ms >= situation.timeout_ms and situation.progress is not Progress.NOTHING:
        return Owner.OWN_TIMEOUT
    # A newer instance that completed its init would have left a different state. So it died during its init, its
    # init is still in progress, or this virtual machine was paused and our clock with it.
    return Owner.ABORTED_EARLY if situation.progress is Progress.ACKNOWLEDGED else Owner.UNKNOWN_TIMEOUT


def has_newer_epoch(mine: Identity, answer: TransactionalIdState | None) -> bool:
    """Return True if the coordinator has a newer epoch than ours, by a newer init or by our own timeout."""
    if answer is None or _has_older_epoch(answer, mine):
        return False
    return (answer.producer_id, answer.epoch) != (mine.producer_id, mine.epoch)


def _has_older_epoch(answer: TransactionalIdState, mine: Identity) -> bool:
    """Return True if the answer has an older epoch than ours.

    Such an answer comes from an isolated broker that does not know yet that it is no longer the coordinator."""
    return answer.producer_id == mine.producer_id and answer.epoch < mine.epoch


def settle(
    situation: Situation,
    describe: Callable[[], TransactionalIdState | None],
    patience_s: float = 10.0,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Owner, TransactionalIdState | None]:
    """Query until two answers at least 1.5 s apart agree. Return the owner and the last answer.

    While the coordinator aborts a transaction, this queries without a limit: the markers wait for the leaders of their
    partitions, possibly for minutes, and until then no transaction can begin. After that, a transactional.id that stays
    busy for `patience_s` is used by another instance: NEWER. An id that has an older epoch for that long is ours: MINE.
    `describe` may raise: the caller waits for an unreachable coordinator.
    """
    deadline: float | None = None
    first: tuple[Owner, float] | None = None
    while True:
        asked = clock()  # the answer describes the state after this time, even if it arrives late
        answer = describe()
        owner = judge(situation, answer)
        if deadline is None and (answer is None or answer.state not in ABORTING):
            deadline = asked + patience_s
        if owner in (Owner.NEWER, Owner.MINE, Owner.EXPIRED):
            return owner, answer
        if owner is Owner.ASK_AGAIN:
            first = None
            if deadline is not None and clock() >= deadline:
                behind = answer is not None and _has_older_epoch(answer, situation.mine)
                return (Owner.MINE if behind else Owner.NEWER), answer
        elif first is None or first[0] is not owner:
            first = (owner, clock())
        elif asked - first[1] >= AGREEMENT_INTERVAL_S:
            return owner, answer
        pause(0.25)
