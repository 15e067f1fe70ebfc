"""The recovery steps after each failed call, listed independently of the code."""

from __future__ import annotations

from typing import Any

import pytest

from eos.errors import Action, CallFailed, EosError, Temporary
from eos.session.recovery import PLAN, FailedTransaction, Step, carry_out

STEPS = {
    Action.ABORT: "abort rewind",
    Action.POISON: "abort rewind isolate",
    Action.REBUILD: "replace resolve",
    Action.CHECK_TOPICS: "check_topics replace resolve",
    Action.SETTLE: "ask_owner replace resolve",
    Action.REJOIN: "ask_owner rejoin",
    Action.INTERRUPTED: "rejoin",
}


def failed(action: Action) -> CallFailed:
    return CallFailed("commit", action, RuntimeError(action.name))


def taken(action: Action, fails: dict[Step, Action] | None = None) -> tuple[str, FailedTransaction]:
    """Return the steps taken if each step in `fails` fails once with the given action."""
    left, names = dict(fails or {}), []

    def take(step: Step) -> Any:
        def run(_: FailedTransaction) -> None:
            names.append(step.name.lower())
            if step in left:
                raise failed(left.pop(step))

        return run

    transaction = FailedTransaction(failed(action), 0, None, {})
    carry_out(transaction, {step: take(step) for step in Step})
    return " ".join(names), transaction


@pytest.mark.parametrize("action", Action)
def test_action_has_steps_or_stops_the_worker(action: Action) -> None:
    if action in STEPS:
        assert taken(action)[0] == STEPS[action]
    else:
        with pytest.raises(EosError) as stopped:
            taken(action)
        assert isinstance(stopped.value.__cause__, CallFailed)
    assert (action in PLAN) is (action in STEPS)


@pytest.mark.parametrize(
    ("action", "fails", "steps"),
    [
        (Action.ABORT, {Step.ABORT: Action.ABORT}, "abort replace resolve"),
        (Action.ABORT, {Step.ABORT: Action.REBUILD}, "abort replace resolve"),
        (Action.POISON, {Step.ABORT: Action.ABORT}, "abort replace resolve isolate"),
        (Action.POISON, {Step.ABORT: Action.SETTLE}, "abort ask_owner replace resolve isolate"),
        (Action.ABORT, {Step.REWIND: Action.REJOIN}, "abort rewind rejoin"),
        (Action.POISON, {Step.REWIND: Action.REJOIN}, "abort rewind rejoin isolate"),
        (Action.REBUILD, {Step.RESOLVE: Action.REJOIN}, "replace resolve rejoin"),
        (Action.SETTLE, {Step.RESOLVE: Action.REJOIN}, "ask_owner replace resolve rejoin"),
        (
            Action.ABORT,
            {Step.ABORT: Action.SETTLE, Step.RESOLVE: Action.REJOIN},
            "abort ask_owner replace resolve rejoin",
        ),
    ],
)
def test_failed_step_becomes_the_current_failure(action: Action, fails: Any, steps: str) -> None:
    names, transaction = taken(action, fails)
    assert names == steps
    assert (transaction.failure.action, transaction.first.action) == (list(fails.values())[-1], action)


def test_non_recoverable_abort_failure_stops() -> None:
    with pytest.raises(Temporary):
        taken(Action.ABORT, {Step.ABORT: Action.RETRY})
