"""Legal calls in each state: every cell of the table, listed independently of the code."""

from __future__ import annotations

import itertools

import pytest

from eos.errors import IllegalState
from eos.session.producer.states import OPEN, TABLE, Event, Machine, State

STATES = dict(zip(["Unin", "Redy", "InTx", "Comm", "Abrt", "AErr", "Fncd", "Fatl"], State, strict=True))
# A dot is an illegal call; the columns are in the order of Event.
MATRIX = """
          init begin send  offs  comm  abort ended failA fence fail  replace
    Unin  Redy .     .     .     .     .     .     .     Fncd  Fatl  .
    Redy  .    InTx  .     .     .     .     .     .     Fncd  Fatl  Unin
    InTx  .    .     InTx  InTx  Comm  Abrt  .     AErr  Fncd  Fatl  .
    Comm  .    .     .     .     Comm  .     Redy  AErr  Fncd  Fatl  .
    Abrt  .    .     .     .     .     Abrt  Redy  .     Fncd  Fatl  .
    AErr  .    .     .     .     .     Abrt  .     AErr  Fncd  Fatl  .
    Fncd  .    .     .     .     .     .     .     .     Fncd  .     Unin
    Fatl  .    .     .     .     .     .     .     .     Fncd  Fatl  Unin
"""


def cells() -> list[tuple[State, Event, State | None]]:
    rows = [line.split() for line in MATRIX.strip().splitlines()[1:]]
    return [
        (STATES[before], event, None if after == "." else STATES[after])
        for before, *afters in rows
        for event, after in zip(Event, afters, strict=True)
    ]


def machine_in(state: State) -> Machine:
    machine = Machine()
    machine.state = state
    return machine


def test_matrix_contains_every_state_and_event_once() -> None:
    assert {cell[:2] for cell in cells()} == set(itertools.product(State, Event))
    assert len(cells()) == len(State) * len(Event) == 88


@pytest.mark.parametrize(("before", "event", "after"), [cell for cell in cells() if cell[2]])
def test_legal_call_changes_the_state(before: State, event: Event, after: State) -> None:
    machine = machine_in(before)
    machine.fire(event)
    assert machine.state is after


@pytest.mark.parametrize(("before", "event"), [cell[:2] for cell in cells() if not cell[2]])
def test_illegal_call_raises_and_changes_nothing(before: State, event: Event) -> None:
    machine = machine_in(before)
    with pytest.raises(IllegalState) as raised:
        machine.fire(event)
    assert machine.state is before
    assert event.value in str(raised.value)
    assert before.value in str(raised.value)


def reachable_from(start: State) -> set[State]:
    seen, todo = {start}, [start]
    while todo:
        here = todo.pop()
        for (before, _), after in TABLE.items():
            if before is here and after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


def test_new_machine_is_uninitialised_and_can_reach_every_state() -> None:
    start = Machine().state
    assert start is State.UNINITIALISED
    assert reachable_from(start) == set(State)


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_ready_is_reachable_from_every_state(state: State) -> None:
    assert State.READY in reachable_from(state)


def test_open_commit_ends_only_by_an_answer_or_a_failure() -> None:
    leaving = {event for (before, event), after in TABLE.items() if before is State.COMMITTING and after is not before}
    assert leaving == {Event.ENDED, Event.FAIL_ABORTABLE, Event.FENCE, Event.FAIL}


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_producer_is_replaceable_unless_a_transaction_is_open(state: State) -> None:
    may_be_replaced = (state, Event.REPLACE) in TABLE
    assert may_be_replaced == (state not in OPEN and state is not State.UNINITIALISED)
    assert len(OPEN) == 4
