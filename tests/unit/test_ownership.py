"""Ownership of a transactional.id: every row that was measured on brokers, and the queries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest

from eos.kafka.admin.ownership import AGREEMENT_INTERVAL_S, Identity, Owner, Progress, Situation, judge, settle
from eos.kafka.client.cluster import TransactionalIdState

TIMEOUT_MS = 10_000
E = 7
PRODUCER = 4007
# The situation at the first fenced call: a transaction with acknowledged records, older or younger than its timeout;
# and no transaction, or one without acknowledged records.
LATE = Situation(Identity(PRODUCER, E), Progress.ACKNOWLEDGED, age_ms=10_500, timeout_ms=TIMEOUT_MS)
YOUNG = Situation(Identity(PRODUCER, E), Progress.ACKNOWLEDGED, age_ms=400, timeout_ms=TIMEOUT_MS)
IDLE = Situation(Identity(PRODUCER, E), Progress.NOTHING, age_ms=60_000, timeout_ms=TIMEOUT_MS)
# Records were sent, but the broker that should answer hangs.
UNANSWERED = Situation(Identity(PRODUCER, E), Progress.SENT, age_ms=10_500, timeout_ms=TIMEOUT_MS)
YOUNG_UNANSWERED = Situation(Identity(PRODUCER, E), Progress.SENT, age_ms=400, timeout_ms=TIMEOUT_MS)

# The first copy of the client's init was cut, and the client sent the init again.
TWICE = Situation(Identity(PRODUCER, E), Progress.SENT, age_ms=10_500, timeout_ms=TIMEOUT_MS, inits=2)


class Row(NamedTuple):
    what: str
    mine: Situation
    bumps: int  # epochs above ours
    state: str
    owner: Owner


ROWS = [
    Row("idle after a commit", IDLE, 0, "CompleteCommit", Owner.MINE),
    Row("idle after a commit, markers not written yet", IDLE, 0, "PrepareCommit", Owner.MINE),
    Row("idle after an abort", IDLE, 0, "CompleteAbort", Owner.MINE),
    Row("idle after an abort, markers not written yet", IDLE, 0, "PrepareAbort", Owner.ASK_AGAIN),
    Row("begin and commit with nothing sent", IDLE, 0, "Empty", Owner.MINE),
    Row("my transaction is still open", YOUNG, 0, "Ongoing", Owner.MINE),
    Row("own timeout", LATE, 1, "CompleteAbort", Owner.OWN_TIMEOUT),
    Row("own timeout, just before", LATE, 1, "PrepareAbort", Owner.ASK_AGAIN),
    Row("own timeout on 3.9.2, briefly", LATE, 1, "Ongoing", Owner.ASK_AGAIN),
    Row("a second one initialised while mine was open, at first", YOUNG, 1, "PrepareAbort", Owner.ASK_AGAIN),
    Row("the same, a moment later: asked twice, and the group", YOUNG, 1, "CompleteAbort", Owner.ABORTED_EARLY),
    Row("a second one initialised while mine was open", YOUNG, 2, "Empty", Owner.NEWER),
    Row("a second one initialised while mine was open, and works", YOUNG, 2, "Ongoing", Owner.NEWER),
    Row("the same, of a late transaction", LATE, 2, "Empty", Owner.NEWER),
    Row("the second died inside its init: the group is asked", YOUNG, 1, "CompleteAbort", Owner.ABORTED_EARLY),
    Row("own timeout of which our clock knows nothing: likewise", YOUNG, 1, "CompleteAbort", Owner.ABORTED_EARLY),
    Row("a second one initialised while mine was idle", IDLE, 1, "Empty", Owner.NEWER),
    Row("a second one initialised while mine was idle, works", IDLE, 1, "Ongoing", Owner.ASK_AGAIN),
    Row("a second one initialised while mine was idle, committed", IDLE, 1, "CompleteCommit", Owner.NEWER),
    Row("a second one initialised while mine was idle, commits", IDLE, 1, "PrepareCommit", Owner.NEWER),
    Row("the same, seen with a late transaction of mine", LATE, 1, "Empty", Owner.NEWER),
    Row(
        "a second one aborted something while mine was idle: the group is asked",
        IDLE,
        1,
        "CompleteAbort",
        Owner.UNKNOWN_TIMEOUT,
    ),
    Row("a second one timed out while mine was idle", IDLE, 2, "CompleteAbort", Owner.NEWER),
    Row("mine timed out, then a second one initialised", LATE, 2, "Empty", Owner.NEWER),
    Row("mine timed out, then a second one works", LATE, 2, "Ongoing", Owner.NEWER),
    Row("mine timed out, then a second one aborted", LATE, 2, "CompleteAbort", Owner.NEWER),
    Row("mine timed out, then a second one timed out", LATE, 3, "CompleteAbort", Owner.NEWER),
    Row("own ghost timed out while I was idle", IDLE, 1, "CompleteAbort", Owner.UNKNOWN_TIMEOUT),
    Row(
        "own timeout of a transaction whose requests were not answered",
        UNANSWERED,
        1,
        "CompleteAbort",
        Owner.OWN_TIMEOUT,
    ),
    Row(
        "the same, younger than its timeout: the group is asked",
        YOUNG_UNANSWERED,
        1,
        "CompleteAbort",
        Owner.UNKNOWN_TIMEOUT,
    ),
    Row("a late copy of my own init: the group is asked", TWICE, 1, "Empty", Owner.LATE_INIT),
    Row("more than copies of my own init", TWICE, 2, "Empty", Owner.NEWER),
    Row("a second one initialised and commits, whatever became of my init", TWICE, 1, "CompleteCommit", Owner.NEWER),
    Row("a broker that was cut off answers of an epoch before mine", YOUNG, -1, "Empty", Owner.ASK_AGAIN),
    Row("the same, of a transaction that it thinks is over", LATE, -2, "CompleteAbort", Owner.ASK_AGAIN),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what}: E+{row.bumps} {row.state} {row.owner.name}")
def test_coordinator_answers_measured_on_kafka_map_to_owners(row: Row) -> None:
    assert judge(row.mine, TransactionalIdState(row.state, PRODUCER, E + row.bumps)) is row.owner


STATES = [  # Kafka's TransactionState
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
]


@pytest.mark.parametrize("age_ms", [0, TIMEOUT_MS - 1, TIMEOUT_MS, 10 * TIMEOUT_MS])
@pytest.mark.parametrize("reach", Progress)
def test_our_timeout_needs_every_condition(reach: Progress, age_ms: float) -> None:
    situation = Situation(Identity(PRODUCER, E), reach, age_ms, TIMEOUT_MS)
    examined = 0
    for producer, epoch, state in itertools.product((PRODUCER, 9), range(E - 1, E + 5), STATES):
        all_hold = reach is not Progress.NOTHING and age_ms >= TIMEOUT_MS
        all_hold = all_hold and (producer, epoch, state) == (PRODUCER, E + 1, "CompleteAbort")
        answer = judge(situation, TransactionalIdState(state, producer, epoch))
        assert (answer is Owner.OWN_TIMEOUT) == all_hold
        examined += 1
    assert examined == 96


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("situation", [LATE, YOUNG, IDLE], ids=["late", "young", "idle"])
def test_other_producer_id_is_newer_at_any_epoch(situation: Situation, state: str) -> None:
    for epoch in (0, E, E + 1, E + 2):
        assert judge(situation, TransactionalIdState(state, PRODUCER + 1, epoch)) is Owner.NEWER


def test_expired_transactional_id_has_no_owner() -> None:
    assert judge(LATE, None) is Owner.EXPIRED


# ---- asking ------------------------------------------------------------------------------------------------


class Coordinator:
    """A coordinator with a manual clock: `script` maps a time in seconds to the answer from then on."""

    def __init__(
        self, script: dict[float, TransactionalIdState | None], answer_takes_s: Callable[[int], float] = lambda n: 0.01
    ):
        self.now = 100.0
        self._began = self.now
        self._script = script
        self._takes = answer_takes_s
        self.asked_at: list[float] = []

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def describe(self) -> TransactionalIdState | None:
        since = self.now - self._began
        self.asked_at.append(since)
        answer = [answer for moment, answer in sorted(self._script.items()) if moment <= since][-1]
        self.now += self._takes(len(self.asked_at))  # the answer is on its way
        return answer

    def settle(self, situation: Situation, patience_s: float = 10.0) -> tuple[Owner, TransactionalIdState | None]:
        return settle(situation, self.describe, patience_s, self.pause, self.clock)


TIMED_OUT = TransactionalIdState("CompleteAbort", PRODUCER, E + 1)
BUSY = TransactionalIdState("PrepareAbort", PRODUCER, E + 1)
FENCING = TransactionalIdState("PrepareEpochFence", PRODUCER, E + 1)
SUCCESSOR = TransactionalIdState("Empty", PRODUCER, E + 2)


@pytest.mark.parametrize(("situation", "owner"), [(LATE, Owner.OWN_TIMEOUT), (IDLE, Owner.UNKNOWN_TIMEOUT)])
def test_settle_needs_two_answers_one_and_a_half_seconds_apart(situation: Situation, owner: Owner) -> None:
    coordinator = Coordinator({0: TIMED_OUT})
    assert coordinator.settle(situation) == (owner, TIMED_OUT)
    assert coordinator.asked_at[-1] - coordinator.asked_at[0] >= AGREEMENT_INTERVAL_S == 1.5
    assert coordinator.asked_at[-1] < 2.5, "the query ended no later than needed"


@pytest.mark.parametrize(
    ("script", "owner", "asked_until_s"),
    [
        # A successor inside its init passes through the own timeout's state for 0.6 to 1.05 s.
        pytest.param({0: TIMED_OUT, 0.3: SUCCESSOR}, Owner.NEWER, 0, id="a successor inside its init, 0.3 s"),
        pytest.param({0: TIMED_OUT, 0.6: SUCCESSOR}, Owner.NEWER, 0, id="a successor inside its init, 0.6 s"),
        pytest.param({0: TIMED_OUT, 1.05: SUCCESSOR}, Owner.NEWER, 0, id="a successor inside its init, 1.05 s"),
        pytest.param({0: TIMED_OUT, 1.4: SUCCESSOR}, Owner.NEWER, 0, id="a successor inside its init, 1.4 s"),
        pytest.param({0: BUSY, 2.0: TIMED_OUT}, Owner.OWN_TIMEOUT, 3.5, id="busy at first"),
        pytest.param({0: TIMED_OUT, 1.0: BUSY, 1.3: TIMED_OUT}, Owner.OWN_TIMEOUT, 2.8, id="busy in between"),
        # Found by the failure matrix: after ten seconds of PrepareAbort a worker took its own timeout for a newer one.
        pytest.param({0: FENCING, 5.0: BUSY, 300.0: TIMED_OUT}, Owner.OWN_TIMEOUT, 300, id="busy for minutes"),
        pytest.param({0: BUSY, 300.0: SUCCESSOR}, Owner.NEWER, 300, id="busy for minutes with a successor's abort"),
    ],
)
def test_settle_queries_until_two_answers_agree(
    script: dict[float, TransactionalIdState | None], owner: Owner, asked_until_s: float
) -> None:
    """The time counts from the first answer that was not busy: without leaders, an end may take minutes."""
    coordinator = Coordinator(script)
    assert coordinator.settle(LATE) == (owner, list(script.values())[-1])
    assert coordinator.asked_at[-1] >= asked_until_s


def test_settle_accepts_slow_second_answer() -> None:
    """An answer is as of its query and not its arrival: a successor may have started since."""
    coordinator = Coordinator({0: TIMED_OUT, 1.0: SUCCESSOR}, answer_takes_s=lambda n: 3.0 if n == 2 else 0.01)
    assert coordinator.settle(LATE) == (Owner.NEWER, SUCCESSOR)


@pytest.mark.parametrize(
    ("answer", "owner"),
    [
        (SUCCESSOR, Owner.NEWER),
        (TransactionalIdState("Ongoing", PRODUCER + 1, 0), Owner.NEWER),
        (TransactionalIdState("CompleteCommit", PRODUCER, E), Owner.MINE),
        (None, Owner.EXPIRED),
    ],
    ids=["a newer epoch", "a newer producer id", "still ours", "expired"],
)
def test_settle_returns_at_once_on_certain_answer(answer: TransactionalIdState | None, owner: Owner) -> None:
    coordinator = Coordinator({0: answer})
    assert coordinator.settle(LATE) == (owner, answer)
    assert coordinator.asked_at == [0.0]


def test_early_abort_waits_for_a_possible_newer_init() -> None:
    coordinator = Coordinator({0: TIMED_OUT})
    assert coordinator.settle(YOUNG) == (Owner.ABORTED_EARLY, TIMED_OUT)
    assert coordinator.asked_at[-1] >= AGREEMENT_INTERVAL_S
    assert Coordinator({0: TIMED_OUT, 1.0: SUCCESSOR}).settle(YOUNG) == (Owner.NEWER, SUCCESSOR)


def test_alternating_coordinator_answers_mean_a_newer_instance() -> None:
    flips = {moment: BUSY if int(moment) % 2 else TIMED_OUT for moment in range(40)}
    coordinator = Coordinator({float(moment): answer for moment, answer in flips.items()})
    owner, answer = coordinator.settle(LATE)
    assert (owner, answer) == (Owner.NEWER, BUSY)
    assert 10.0 <= coordinator.asked_at[-1] < 12.0


@pytest.mark.parametrize("patience_s", [1.0, 10.0])
def test_busy_coordinator_means_newer_instance(patience_s: float) -> None:
    coordinator = Coordinator({0: TransactionalIdState("Ongoing", PRODUCER, E + 1)})
    owner, answer = coordinator.settle(IDLE, patience_s)
    assert (owner, answer) == (Owner.NEWER, TransactionalIdState("Ongoing", PRODUCER, E + 1))
    assert patience_s <= coordinator.asked_at[-1] < patience_s + 0.5


BEHIND = TransactionalIdState("Empty", PRODUCER, E - 1)
MINE = TransactionalIdState("Empty", PRODUCER, E)


@pytest.mark.parametrize(("then", "owner"), [(MINE, Owner.MINE), (SUCCESSOR, Owner.NEWER)])
def test_outdated_coordinator_is_queried_until_the_current_one_answers(
    then: TransactionalIdState, owner: Owner
) -> None:
    """Found by the failure matrix, transaction coordinator cut off: a worker took an epoch before its own for a newer
    instance's."""
    assert Coordinator({0: BEHIND, 4.0: then}).settle(YOUNG) == (owner, then)


def test_producer_owns_the_id_if_the_coordinator_has_an_older_epoch() -> None:
    coordinator = Coordinator({0: BEHIND})
    assert coordinator.settle(YOUNG) == (Owner.MINE, BEHIND)
    assert 10.0 <= coordinator.asked_at[-1] < 10.5


def test_coordinator_error_is_raised_to_the_caller() -> None:
    def unreachable() -> TransactionalIdState | None:
        raise ConnectionError("down")

    with pytest.raises(ConnectionError, match="down"):
        settle(LATE, unreachable, pause=lambda _: None)
