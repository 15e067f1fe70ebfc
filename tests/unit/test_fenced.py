"""A producer fenced by a newer instance stays fenced whatever its caller does: a begin would take the id back."""

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


class EmptyAdmin:
    """Stands for an admin client that knows no id and no group."""

    def describe(self, transactional_id: str) -> None:
        return None

    def committed_metadata(self, group: str) -> list[str]:
        return []


NOW = 1_790_000_000.0
WORLD = World(admin=lambda settings: contextlib.nullcontext(EmptyAdmin()), unix=lambda: NOW)


class FencedProducer:
    """A producer without a client: one of its calls is fenced, and the ownership query has a fixed answer."""

    def __init__(self, patch: AnyPatch, producer: TransactionalProducer, owner: Owner, fenced_call: Call) -> None:
        self.producer = producer
        self.replacements: list[str] = []
        self.queries = 0
        machine = producer._machine
        client: Any = SimpleNamespace(evidence=RetryEvidence(), identity=None)
        producer._client = client
        machine.fire(Event.INITIALISED)

        def fail(call: Call) -> None:
            if call == fenced_call:
                raise producer._fail(call, Action.SETTLE, RuntimeError("fenced"))

        def replace(reason: str) -> None:
            machine.fire(Event.REPLACE)
            machine.fire(Event.INITIALISED)
            self.replacements.append(reason)

        def settle(*_: object) -> tuple[Owner, TransactionalIdState | None]:
            self.queries += 1
            return owner, None

        patch.setattr(producer, "begin", lambda: (fail("begin"), machine.fire(Event.BEGIN)))
        patch.setattr(producer, "flush", lambda: fail("flush"))
        patch.setattr(producer, "commit", lambda: fail("commit"))
        patch.setattr(producer, "replace", replace)
        patch.setattr(producer, "describe_fenced", lambda: SITUATION, raising=False)
        patch.setattr(producer, "poll_identity", lambda **_: SITUATION.mine)
        patch.setattr(ownership, "settle", settle)


@pytest.mark.parametrize("call", ["begin", "flush", "commit"])
# Without a group, one of our old requests looks like a newer instance whose last transaction was aborted.
@pytest.mark.parametrize("owner", [Owner.NEWER, Owner.UNKNOWN_TIMEOUT])
def test_transactions_fenced_by_a_newer_instance_stay_fenced(owner: Owner, call: Call, monkeypatch: AnyPatch) -> None:
    transactions = Transactions(SETTINGS, world=WORLD)
    fenced = FencedProducer(monkeypatch, transactions._producer, owner, call)
    with pytest.raises(Fenced, match=r"--workers N .*--instance\). \[") as first, transactions.begin():
        pass
    for _ in range(2):
        with pytest.raises(Fenced) as again, transactions.begin():
            pass
        assert str(again.value) == str(first.value)
    assert fenced.replacements == []
    assert fenced.queries == 1


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
def test_transactions_may_begin_again_if_the_id_is_still_ours(
    owner: Owner, call: Call, kind: type[Temporary], monkeypatch: AnyPatch
) -> None:
    transactions = Transactions(SETTINGS | {"transaction.timeout.ms": 10_000}, world=WORLD)
    fenced = FencedProducer(monkeypatch, transactions._producer, owner, call)
    with pytest.raises(Temporary, match=r"transaction\.timeout\.ms=10000") as failed, transactions.begin():
        pass
    assert type(failed.value) is kind
    with contextlib.suppress(Temporary), transactions.begin():
        pass
    assert len(fenced.replacements) == 1


@pytest.mark.parametrize("owner", [Owner.NEWER, Owner.OWN_TIMEOUT])
def test_interrupted_ownership_query_is_repeated_before_the_next_begin(owner: Owner, monkeypatch: AnyPatch) -> None:
    transactions = Transactions(SETTINGS, world=WORLD)
    fenced = FencedProducer(monkeypatch, transactions._producer, owner, "flush")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    answered = ownership.settle
    monkeypatch.setattr(ownership, "settle", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), transactions.begin():
            pass
    assert fenced.replacements == []
    monkeypatch.setattr(ownership, "settle", answered)
    with pytest.raises(Fenced if owner is Owner.NEWER else Temporary), transactions.begin():
        pass  # every flush of the scripted producer is fenced
    assert len(fenced.replacements) == (0 if owner is Owner.NEWER else 1)


@pytest.mark.parametrize("interrupted_before", [False, True])
def test_session_fenced_by_a_newer_instance_stays_fenced(interrupted_before: bool, monkeypatch: AnyPatch) -> None:
    """The same holds if the loop was interrupted and our own client may have advanced the epoch unnoticed."""
    one = TransactSession(SETTINGS, ["in"], world=WORLD)
    producer = one.producer
    producer.epoch_may_have_advanced = one._loop._is_turn_running = interrupted_before
    fenced = FencedProducer(monkeypatch, producer, Owner.NEWER, "flush")
    with pytest.raises(Fenced) as first:
        one._loop._carry_out(CallFailed("flush", Action.SETTLE, RuntimeError("fenced")), {}, None)
    for _ in range(7):
        with pytest.raises(Fenced) as again:
            for _txn in one:
                pass
        assert str(again.value) == str(first.value)
    assert (fenced.replacements, one.counters.rebuilds) == ([], 0)


def fenced_at_start_ms(monkeypatch: AnyPatch, start_ms: int, metadata: list[str]) -> str:
    one = TransactSession(SETTINGS, ["in"], world=WORLD)
    producer = one.producer
    FencedProducer(monkeypatch, producer, Owner.NEWER, "flush")
    monkeypatch.setattr(EmptyAdmin, "committed_metadata", lambda self, group: metadata)
    state = "Ongoing" if start_ms > 0 else "Empty"
    return " | ".join(one._parts.owner_info.describe_loss(producer, TransactionalIdState(state, 1, 3, start_ms)))


def committed_by(instance: str, since: int) -> str:
    return json.dumps({"instance": instance, "host": "h", "since": since, "epoch": 1})


def test_fenced_session_reports_when_it_lost_the_id(monkeypatch: AnyPatch) -> None:
    when = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    ours, mine = int(NOW * 1000), SETTINGS["transactional.id"]
    others = [committed_by(mine, ours), committed_by(mine, ours - 9_000), committed_by("another", ours + 9_000), "{}"]
    message = fenced_at_start_ms(monkeypatch, ours, others)
    assert re.search(rf"in state Ongoing since {when}$", message), message
    message = fenced_at_start_ms(monkeypatch, -1, others)
    assert re.search(rf"^; initialised after {when} \(our start\) \| ours: .* in state Empty$", message), message
    message = fenced_at_start_ms(monkeypatch, -1, [*others, committed_by(mine, ours + 5_000)])
    assert re.search(rf"^; the last commit is by {mine} on h, started {when} \| ours: ", message), message


def test_session_continues_after_its_own_timeout(monkeypatch: AnyPatch) -> None:
    one = TransactSession(SETTINGS, ["in"], world=WORLD)
    producer = one.producer
    FencedProducer(monkeypatch, producer, Owner.OWN_TIMEOUT, "flush")
    rebuilt: list[str] = []
    counts = one._loop._recovery._count_rebuild
    one._loop._recovery.steps |= {Step.REPLACE: counts, Step.RESOLVE: lambda why: rebuilt.append(why.owner)}
    one._loop._carry_out(CallFailed("flush", Action.SETTLE, RuntimeError("fenced")), {}, None)
    assert (rebuilt, one.counters.rebuilds_by_cause) == ([Owner.OWN_TIMEOUT.value], {"timeout": 1})
    one._parts.ownership.raise_if_lost()


def ownership_of(
    monkeypatch: AnyPatch,
    answer: TransactionalIdState | None,
    owner: Owner = Owner.NEWER,
    fresh: Identity = SITUATION.mine,
    epoch_may_have_advanced: bool = False,
    **more: Any,
) -> tuple[TransactionalIdOwnership, FencedProducer]:
    """Return an ownership whose coordinator gives this answer, and its producer, of epoch 1 and later of `fresh`."""
    producer = TransactionalProducer(Settings(SETTINGS), "t")
    producer.epoch_may_have_advanced = epoch_may_have_advanced
    fenced = FencedProducer(monkeypatch, producer, owner, "flush")
    monkeypatch.setattr(producer, "poll_identity", lambda **how: fresh if how else SITUATION.mine)
    monkeypatch.setattr(EmptyAdmin, "describe", lambda self, name: answer)
    return TransactionalIdOwnership(
        producer._settings, lambda producer, answer: ("; lost", "7"), **more, world=WORLD
    ), fenced


# This state does not show which instance has the next epoch.
NEXT_EPOCH = TransactionalIdState("Empty", 1, 2)


@pytest.mark.parametrize(
    ("answer", "known", "reason", "queries"),
    [
        pytest.param(TransactionalIdState("CompleteCommit", 1, 1), {}, "retry: something", 0, id="the epoch is ours"),
        pytest.param(
            TransactionalIdState("Ongoing", 1, 0),
            {},
            "retry: something",
            0,
            id="the broker is no longer the coordinator",
        ),
        pytest.param(None, {}, "retry: something", 0, id="the broker does not know the id"),
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
def test_producer_is_replaced_while_the_id_is_ours(
    answer: TransactionalIdState | None, known: dict[str, Any], reason: str, queries: int, monkeypatch: AnyPatch
) -> None:
    ours, fenced = ownership_of(monkeypatch, answer, **known)
    ours.replace(fenced.producer, reason)
    assert (fenced.replacements, fenced.queries) == ([reason], queries)
    ours.raise_if_lost()


@pytest.mark.parametrize("reason", ["retry: something", "abort", "failure: hung"])
def test_replacement_does_not_take_the_id_from_a_newer_instance(reason: str, monkeypatch: AnyPatch) -> None:
    ours, fenced = ownership_of(monkeypatch, NEXT_EPOCH)
    with pytest.raises(Fenced, match=rf"; lost: this one stops.*\[7; {reason}\]$"):
        ours.replace(fenced.producer, reason)
    with pytest.raises(Fenced, match=rf"; lost: this one stops.*\[7; {reason}\]$"):
        ours.raise_if_lost()
    assert fenced.replacements == []


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
def test_group_decides_unclear_ownership_if_a_group_exists(
    owner: Owner, group: bool | None, ours: bool, reason: str, monkeypatch: AnyPatch
) -> None:
    """A paused virtual machine's clock stands still; without a group a newer instance cannot be ruled out."""
    more = {} if group is None else {"query_group": lambda: group}
    one, fenced = ownership_of(monkeypatch, TransactionalIdState("CompleteAbort", 1, 2), owner, **more)
    with contextlib.nullcontext() if ours else pytest.raises(Fenced):
        one.replace(fenced.producer, reason)
    assert fenced.replacements == ([reason] if ours else [])


def test_newer_instance_started_after_a_timeout_keeps_the_id(monkeypatch: AnyPatch) -> None:
    """A transaction times out, its caller waits before the next one, and meanwhile a newer instance starts."""
    ours, fenced = ownership_of(monkeypatch, None, Owner.OWN_TIMEOUT)
    timed_out = TransactionalIdState("CompleteAbort", 1, 2)
    monkeypatch.setattr(ownership, "settle", lambda *_: (Owner.OWN_TIMEOUT, timed_out))
    fenced.producer._machine.fire(Event.FENCE)
    assert ours.settle(fenced.producer, "fenced") is Owner.OWN_TIMEOUT
    monkeypatch.setattr(ownership, "settle", lambda *_: (Owner.NEWER, None))
    monkeypatch.setattr(EmptyAdmin, "describe", lambda self, name: timed_out)
    ours.confirm(fenced.producer, "failure: flush raised")
    monkeypatch.setattr(EmptyAdmin, "describe", lambda self, name: TransactionalIdState("Empty", 1, 3))
    with pytest.raises(Fenced):
        ours.replace(fenced.producer, "failure: flush raised")
    assert fenced.replacements == []
