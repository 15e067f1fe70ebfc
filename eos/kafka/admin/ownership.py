"""Who owns a transactional.id after a call was fenced: the rule, as a pure function, and the asking.

`_FENCED` means either that the broker timed our own transaction out or that a newer instance initialised the same
transactional.id; a producer cannot tell. Initialising again to find out would fence the successor, so the coordinator
is asked first (DescribeTransactions, KIP-664). Everything here only reads. The rule was measured row by row on 4.3.1
and 3.9.2; tests/broker/test_zombies.py makes every row happen again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from eos.kafka.client.cluster import Described

ABORTING = ("PrepareEpochFence", "PrepareAbort")
AGREEMENT_INTERVAL_S = 1.5  # a successor that is still inside its init passes through our own timeout's state


class Identity(NamedTuple):
    """What a producer got at its init."""

    producer_id: int
    epoch: int


class Reach(Enum):
    """How far something of the present transaction came, as far as we know."""

    NOTHING = "nothing was sent"
    SENT = "handed to the client: it may have arrived, and the answer been lost"
    ACKNOWLEDGED = "the cluster confirmed a record, or the offsets"


@dataclass(frozen=True)
class Situation:
    """What we know ourselves at the first fenced call."""

    mine: Identity
    reach: Reach
    age_ms: float  # since the present transaction began
    timeout_ms: int  # transaction.timeout.ms
    inits: int = 1  # InitProducerId requests that our client sent: each but one may have arrived late


class Owner(Enum):
    MINE = "the epoch is still ours"
    OWN_TIMEOUT = "the broker aborted our transaction at its timeout"
    GHOST = "a transaction that we never knew of timed out while we were idle"
    LATE_INIT = "a copy of our own init, sent twice on a bad network, came late and took the next epoch"
    ABORTED_EARLY = "our transaction was aborted before its timeout by our clock, and nobody took our place"
    NEWER = "a newer instance initialised this transactional.id"
    NOBODY = "the transactional.id expired"
    ASK_AGAIN = "the coordinator is still busy with it"


TO_ASK_THE_GROUP = (Owner.GHOST, Owner.LATE_INIT, Owner.ABORTED_EARLY)
"""What a newer instance that died young, or has not worked yet, leaves behind too."""


def judge(situation: Situation, answer: Described | None) -> Owner:
    """The owner by one answer. OWN_TIMEOUT and TO_ASK_THE_GROUP count only if a second answer 1.5 s later agrees; the
    latter only if the group does not know of somebody in our place either."""
    if answer is None:
        return Owner.NOBODY
    mine = situation.mine
    if (answer.producer_id, answer.epoch) == (mine.producer_id, mine.epoch):
        return Owner.ASK_AGAIN if answer.state in ABORTING else Owner.MINE
    if _is_behind(answer, mine):
        return Owner.ASK_AGAIN
    late = range(mine.epoch + 1, mine.epoch + situation.inits)
    if answer.producer_id == mine.producer_id and answer.epoch in late and answer.state == "Empty":
        return Owner.LATE_INIT
    if (answer.producer_id, answer.epoch) != (mine.producer_id, mine.epoch + 1):
        return Owner.NEWER
    # Our own timeout bumps the epoch by exactly one and ends in CompleteAbort; 3.9.2 passes through Ongoing.
    if answer.state in ABORTING or answer.state == "Ongoing":
        return Owner.ASK_AGAIN
    if answer.state != "CompleteAbort":
        return Owner.NEWER
    if situation.age_ms >= situation.timeout_ms and situation.reach is not Reach.NOTHING:
        return Owner.OWN_TIMEOUT
    # A newer instance that works leaves another state. What is left is one that died in its init, or is still in it and
    # has done no work, or a clock of ours that stood still: a virtual machine was paused.
    return Owner.ABORTED_EARLY if situation.reach is Reach.ACKNOWLEDGED else Owner.GHOST


def went_on(mine: Identity, answer: Described | None) -> bool:
    """Whether the coordinator left our epoch behind: a newer instance's init or our own timeout, `settle` tells."""
    if answer is None or _is_behind(answer, mine):
        return False
    return (answer.producer_id, answer.epoch) != (mine.producer_id, mine.epoch)


def _is_behind(answer: Described, mine: Identity) -> bool:
    """Nobody newer has an older epoch than ours: a broker that was cut off answers that does not know yet that it is no
    coordinator any more."""
    return answer.producer_id == mine.producer_id and answer.epoch < mine.epoch


def settle(
    situation: Situation,
    describe: Callable[[], Described | None],
    patience_s: float = 10.0,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Owner, Described | None]:
    """Asks until two answers at least 1.5 s apart agree; returns the owner and the last answer.

    While the coordinator aborts a transaction it is asked again for as long as that takes: the markers wait for the
    leaders of their partitions, on a cluster in trouble for minutes, and until then nobody can begin another one.
    After that a transactional.id that stays busy for `patience_s` is being used by somebody else: NEWER; one that stays
    behind our epoch so long is nobody's but ours: MINE. `describe` may raise: an unreachable coordinator is the
    caller's to wait for.
    """
    deadline: float | None = None
    first: tuple[Owner, float] | None = None
    while True:
        asked = clock()  # an answer may be slow to arrive; it is at least this young
        answer = describe()
        owner = judge(situation, answer)
        if deadline is None and (answer is None or answer.state not in ABORTING):
            deadline = asked + patience_s
        if owner in (Owner.NEWER, Owner.MINE, Owner.NOBODY):
            return owner, answer
        if owner is Owner.ASK_AGAIN:
            first = None
            if deadline is not None and clock() >= deadline:
                behind = answer is not None and _is_behind(answer, situation.mine)
                return (Owner.MINE if behind else Owner.NEWER), answer
        elif first is None or first[0] is not owner:
            first = (owner, clock())
        elif asked - first[1] >= AGREEMENT_INTERVAL_S:
            return owner, answer
        pause(0.25)
