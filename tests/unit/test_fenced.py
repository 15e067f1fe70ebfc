"""Who was fenced by a newer instance stays so, whatever its caller does next: a begin would take the id back."""

from __future__ import annotations

import contextlib
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from eos.errors import Action, Call, CallFailed, CommitOutcomeUnknown, Fenced, Temporary
from eos.kafka.admin import ownership
from eos.kafka.admin.ownership import Identity, Owner, Progress, Situation
from eos.kafka.client.cluster import TransactionalIdState
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.plain import Transactions
from eos.session.producer.ownership import TransactionalIdOwnership
from eos.session.producer.producer import TransactionalProducer
from eos.session.producer.retry_evidence import RetryEvidence
from eos.session.producer.states import Event
from eos.session.recovery import Step
from eos.session.session import TransactSession

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t"}
SITUATION = Situation(Identity(1, 1), Progress.SENT, 1.0, 10_000)
AnyPatch = pytest.MonkeyPatch


class Silent:
    """An admin that knows nothing."""

    def describe(self, transactional_id: str) -> None:
        return None

    def committed_metadata(self, group: str) -> list[str]:
        return []


NOW = 1_790_000_000.0
WORLD = World(admin=lambda settings: contextlib.nullcontext(Silent()), unix=lambda: NOW)


class Asked:
    """A producer without a client whose calls are fenced, the answer who owns its id, and its replacements."""

    def __init__(self, patch: AnyPatch, producer: TransactionalProducer, owner: Owner, fenced: Call) -> None:
        self.producer = producer
        self.replacements: list[str] = []
        self.questions = 0
        machine = producer._machine
        silent: Any = SimpleNamespace(evidence=RetryEvidence(), identity=None)
        producer._client = silent
        machine.fire(Event.INITIALISED)

        def fail(call: Call) -> None:
            if call == fenced:
                raise producer._fail(call, Action.SETTLE, RuntimeError("fenced"))

        def replace(reason: str) -> None:
            machine.fire(Event.REPLACE)
            machine.fire(Event.INITIALISED)
            self.replacements.append(reason)

        def settle(*_: object) -> tuple[Owner, TransactionalIdState | None]:
            self.questions += 1
            return owner, None

        patch.setattr(producer, "begin", lambda: (fail("begin"), machine.fire(Event.BEGIN)))
        patch.setattr(producer, "flush", lambda: fail("flush"))
        patch.setattr(producer, "commit", lambda: fail("commit"))
        patch.setattr(producer, "replace", replace)
        patch.setattr(producer, "poll_situation", lambda: SITUATION, raising=False)
        patch.setattr(producer, "poll_identity", lambda **_: SITUATION.mine)
        patch.setattr(ownership, "settle", settle)


@pytest.mark.parametrize("call", ["begin", "flush", "commit"])
# Without a group nothing tells a ghost from a newer instance whose last transaction was aborted.
@pytest.mark.parametrize("owner", [Owner.NEWER, Owner.UNKNOWN_TIMEOUT])
def test_transactions_that_a_newer_instance_fenced_do_not_begin_again(
    owner: Owner, call: Call, monkeypatch: AnyPatch
) -> None:
    transactions = Transactions(SETTINGS, world=WORLD)
    asked = Asked(monkeypatch, transactions._producer, owner, call)
    with pytest.raises(Fenced, match=r"--workers N .*--instance\). \[") as first, transactions.begin():
        pass
    for _ in range(2):
        with pytest.raises(Fenced) as again, transactions.begin():
            pass
        assert str(again.value) == str(first.value)
    assert asked.replacements == []
    assert asked.questions == 1


@pytest.mark.parametrize(
    ("owner", "call", "kind"),
    [
        (Owner.OWN_TIMEOUT, "flush", Temporary),
        (Owner.OWN_TIMEOUT, "commit", Temporary),
        (Owner.EXPIRED, "flush", Temporary),
        (Owner.MINE, "flush", Temporary),
        (Owner.MINE, "commit", CommitOutcomeUnknown),
    ],
)
def test_a_transaction_that_nobody_took_over_may_be_tried_again(
    owner: Owner, call: Call, kind: type[Temporary], monkeypatch: AnyPatch
) -> None:
    transactions = Transactions(SETTINGS | {"transaction.timeout.ms": 10_000}, world=WORLD)
    asked = Asked(monkeypatch, transactions._producer, owner, call)
    with pytest.raises(Temporary, match=r"transaction\.timeout\.ms=10000") as failed, transactions.begin():
        pass
    assert type(failed.value) is kind
    with contextlib.suppress(Temporary), transactions.begin():
        pass
    assert len(asked.replacements) == 1


@pytest.mark.parametrize("owner", [Owner.NEWER, Owner.OWN_TIMEOUT])
def test_interrupted_ownership_query_is_repeated_before_the_next_begin(owner: Owner, monkeypatch: AnyPatch) -> None:
    transactions = Transactions(SETTINGS, world=WORLD)
    asked = Asked(monkeypatch, transactions._producer, owner, "flush")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    answered = ownership.settle
    monkeypatch.setattr(ownership, "settle", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), transactions.begin():
            pass
    assert asked.replacements == []
    monkeypatch.setattr(ownership, "settle", answered)
    with pytest.raises(Fenced if owner is Owner.NEWER else Temporary), transactions.begin():
        pass  # who goes on is fenced once more here: each flush is
    assert len(asked.replacements) == (0 if owner is Owner.NEWER else 1)


@pytest.mark.parametrize("half_way", [False, True])
def test_a_session_that_a_newer_instance_fenced_never_begins_again(half_way: bool, monkeypatch: AnyPatch) -> None:
    """Nor where the loop was left half way, and a client of ours may have taken an epoch that nobody heard of."""
    one = TransactSession(SETTINGS, ["in"], world=WORLD)
    producer = one.producer
    producer.epoch_may_have_advanced = one._loop._is_in_turn = half_way
    asked = Asked(monkeypatch, producer, Owner.NEWER, "flush")
    with pytest.raises(Fenced) as first:
        one._loop._carry_out(CallFailed("flush", Action.SETTLE, RuntimeError("fenced")), {}, None)
    for _ in range(7):
        with pytest.raises(Fenced) as again:
            for _txn in one:
                pass
        assert str(again.value) == str(first.value)
    assert (asked.replacements, one.counters.rebuilds) == ([], 0)


def fenced_at_start_ms(monkeypatch: AnyPatch, start_ms: int, metadata: list[str]) -> str:
    one = TransactSession(SETTINGS, ["in"], world=WORLD)
    producer = one.producer
    Asked(monkeypatch, producer, Owner.NEWER, "flush")
    monkeypatch.setattr(Silent, "committed_metadata", lambda self, group: metadata)
    state = "Ongoing" if start_ms > 0 else "Empty"
    return " | ".join(one._parts.owner_info.describe_loss(producer, TransactionalIdState(state, 1, 3, start_ms)))


def committed_by(instance: str, since: int) -> str:
    return json.dumps({"instance": instance, "host": "h", "since": since, "epoch": 1})


def test_a_fenced_session_says_since_when(monkeypatch: AnyPatch) -> None:
    when = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    ours, mine = int(NOW * 1000), SETTINGS["transactional.id"]
    others = [committed_by(mine, ours), committed_by(mine, ours - 9_000), committed_by("another", ours + 9_000), "{}"]
    told = fenced_at_start_ms(monkeypatch, ours, others)
    assert re.search(rf"in state Ongoing since {when}$", told), told
    told = fenced_at_start_ms(monkeypatch, -1, others)
    assert re.search(rf"^; initialised after {when} \(our start\) \| ours: .* in state Empty$", told), told
    told = fenced_at_start_ms(monkeypatch, -1, [*others, committed_by(mine, ours + 5_000)])
    assert re.search(rf"^; the last commit is by {mine} on h, started {when} \| ours: ", told), told


def test_a_session_that_timed_out_goes_on(monkeypatch: AnyPatch) -> None:
    one = TransactSession(SETTINGS, ["in"], world=WORLD)
    producer = one.producer
    Asked(monkeypatch, producer, Owner.OWN_TIMEOUT, "flush")
    rebuilt: list[str] = []
    counts = one._loop._recovery._count_rebuild
    one._loop._recovery.steps |= {Step.REPLACE: counts, Step.RESOLVE: lambda why: rebuilt.append(why.owner)}
    one._loop._carry_out(CallFailed("flush", Action.SETTLE, RuntimeError("fenced")), {}, None)
    assert (rebuilt, one.counters.rebuilds_by_cause) == ([Owner.OWN_TIMEOUT.value], {"timeout": 1})
    one._parts.ownership.raise_if_lost()


def claimed(
    monkeypatch: AnyPatch,
    answer: TransactionalIdState | None,
    owner: Owner = Owner.NEWER,
    fresh: Identity = SITUATION.mine,
    epoch_may_have_advanced: bool = False,
    **more: Any,
) -> tuple[TransactionalIdOwnership, Asked]:
    """A claim whose coordinator gives this answer, with a producer of epoch 1, or of `fresh` once it is asked again."""
    producer = TransactionalProducer(Settings(SETTINGS), "t")
    producer.epoch_may_have_advanced = epoch_may_have_advanced
    asked = Asked(monkeypatch, producer, owner, "flush")
    monkeypatch.setattr(producer, "poll_identity", lambda **how: fresh if how else SITUATION.mine)
    monkeypatch.setattr(Silent, "describe", lambda self, name: answer)
    return TransactionalIdOwnership(
        producer._settings, lambda producer, answer: ("; lost", "7"), **more, world=WORLD
    ), asked


# Of whom the next epoch is, this answer does not tell.
NEXT_EPOCH = TransactionalIdState("Empty", 1, 2)


@pytest.mark.parametrize(
    ("answer", "known", "reason", "questions"),
    [
        pytest.param(TransactionalIdState("CompleteCommit", 1, 1), {}, "retry: something", 0, id="the epoch is ours"),
        pytest.param(
            TransactionalIdState("Ongoing", 1, 0), {}, "retry: something", 0, id="the broker is no coordinator any more"
        ),
        pytest.param(None, {}, "retry: something", 0, id="the broker knows no such id"),
        pytest.param(
            TransactionalIdState("CompleteAbort", 1, 2),
            {"owner": Owner.OWN_TIMEOUT},
            "failure: hung",
            1,
            id="it timed out",
        ),
        pytest.param(NEXT_EPOCH, {"fresh": Identity(1, 2)}, "abort", 0, id="our client took the epoch by itself"),
        pytest.param(
            NEXT_EPOCH,
            {"epoch_may_have_advanced": True},
            "failure: abort raised",
            0,
            id="an abort may have taken the epoch",
        ),
    ],
)
def test_a_producer_is_replaced_while_the_id_is_ours(
    answer: TransactionalIdState | None, known: dict[str, Any], reason: str, questions: int, monkeypatch: AnyPatch
) -> None:
    ours, asked = claimed(monkeypatch, answer, **known)
    ours.replace(asked.producer, reason)
    assert (asked.replacements, asked.questions) == ([reason], questions)
    ours.raise_if_lost()


@pytest.mark.parametrize("reason", ["retry: something", "abort", "failure: hung"])
def test_a_replacement_does_not_take_the_id_from_a_newer_instance(reason: str, monkeypatch: AnyPatch) -> None:
    ours, asked = claimed(monkeypatch, NEXT_EPOCH)
    with pytest.raises(Fenced, match=rf"; lost: this one stops.*\[7; {reason}\]$"):
        ours.replace(asked.producer, reason)
    with pytest.raises(Fenced, match=rf"; lost: this one stops.*\[7; {reason}\]$"):
        ours.raise_if_lost()
    assert asked.replacements == []


@pytest.mark.parametrize(
    ("owner", "group", "ours"),
    [
        (Owner.UNKNOWN_TIMEOUT, None, True),
        (Owner.UNKNOWN_TIMEOUT, True, True),
        (Owner.UNKNOWN_TIMEOUT, False, False),
        (Owner.ABORTED_EARLY, None, False),
        (Owner.ABORTED_EARLY, True, True),
        (Owner.ABORTED_EARLY, False, False),
    ],
)
@pytest.mark.parametrize("reason", ["retry: something", "failure: fenced"])
def test_group_decides_unclear_ownership_if_there_is_one(
    owner: Owner, group: bool | None, ours: bool, reason: str, monkeypatch: AnyPatch
) -> None:
    """A paused virtual machine has no clock that went on; without a group a newer instance cannot be ruled out."""
    more = {} if group is None else {"query_group": lambda: group}
    one, asked = claimed(monkeypatch, TransactionalIdState("CompleteAbort", 1, 2), owner, **more)
    with contextlib.nullcontext() if ours else pytest.raises(Fenced):
        one.replace(asked.producer, reason)
    assert asked.replacements == ([reason] if ours else [])


def test_who_was_fenced_is_asked_since_when_the_id_is_another_ones(monkeypatch: AnyPatch) -> None:
    """A transaction timed out, its caller waits before the next one, and meanwhile a newer instance starts."""
    ours, asked = claimed(monkeypatch, None, Owner.OWN_TIMEOUT)
    timed_out = TransactionalIdState("CompleteAbort", 1, 2)
    monkeypatch.setattr(ownership, "settle", lambda *_: (Owner.OWN_TIMEOUT, timed_out))
    asked.producer._machine.fire(Event.FENCE)
    assert ours.settle(asked.producer, "fenced") is Owner.OWN_TIMEOUT
    monkeypatch.setattr(ownership, "settle", lambda *_: (Owner.NEWER, None))
    monkeypatch.setattr(Silent, "describe", lambda self, name: timed_out)
    ours.confirm(asked.producer, "failure: flush raised")
    monkeypatch.setattr(Silent, "describe", lambda self, name: TransactionalIdState("Empty", 1, 3))
    with pytest.raises(Fenced):
        ours.replace(asked.producer, "failure: flush raised")
    assert asked.replacements == []
