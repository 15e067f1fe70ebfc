"""Which call is legal in which state: every cell of the table, written here a second time."""

from __future__ import annotations

import itertools

import pytest

from eos.errors import IllegalState
from eos.session.states import OPEN, TABLE, Event, Machine, State

EVENTS = {
    "initialised": Event.INITIALISED,
    "begin": Event.BEGIN,
    "send": Event.SEND,
    "send_offsets": Event.SEND_OFFSETS,
    "commit": Event.COMMIT,
    "abort": Event.ABORT,
    "ended": Event.ENDED,
    "fail-abortable": Event.FAIL_ABORTABLE,
    "fence": Event.FENCE,
    "fail": Event.FAIL,
    "replace": Event.REPLACE,
}
STATES = {
    "Unin": State.UNINITIALISED,
    "Redy": State.READY,
    "InTx": State.IN_TRANSACTION,
    "Comm": State.COMMITTING,
    "Abrt": State.ABORTING,
    "AErr": State.ABORTABLE_ERROR,
    "Fncd": State.FENCED,
    "Fatl": State.FATAL,
}
# A dot is an illegal call; the columns are in the order of EVENTS.
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


def cells() -> list[tuple[str, str, str]]:
    found = []
    for line in MATRIX.strip().splitlines()[1:]:
        before, *afters = line.split()
        found += [(before, event, after) for event, after in zip(EVENTS, afters, strict=True)]
    return found


def machine_in(state: State) -> Machine:
    machine = Machine()
    machine.state = state
    return machine


def test_the_matrix_holds_every_state_and_every_event_once() -> None:
    pairs = {(STATES[before], EVENTS[event]) for before, event, _ in cells()}
    assert pairs == set(itertools.product(State, Event))
    assert len(cells()) == len(State) * len(Event) == 88


@pytest.mark.parametrize(("before", "event", "after"), [c for c in cells() if c[2] != "."])
def test_a_legal_call_moves(before: str, event: str, after: str) -> None:
    machine = machine_in(STATES[before])
    machine.fire(EVENTS[event])
    assert machine.state is STATES[after]


@pytest.mark.parametrize(("before", "event"), [c[:2] for c in cells() if c[2] == "."])
def test_an_illegal_call_raises_and_changes_nothing(before: str, event: str) -> None:
    machine = machine_in(STATES[before])
    with pytest.raises(IllegalState) as raised:
        machine.fire(EVENTS[event])
    assert machine.state is STATES[before]
    assert EVENTS[event].value in str(raised.value)
    assert STATES[before].value in str(raised.value)


def reachable_from(start: State) -> set[State]:
    seen, todo = {start}, [start]
    while todo:
        here = todo.pop()
        for (before, _), after in TABLE.items():
            if before is here and after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


def test_a_new_machine_is_uninitialised_and_reaches_every_state() -> None:
    start = Machine().state
    assert start is State.UNINITIALISED
    assert reachable_from(start) == set(State)


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_from_every_state_there_is_a_way_back_to_ready(state: State) -> None:
    assert State.READY in reachable_from(state)


def test_only_the_clusters_own_answer_or_a_failure_leaves_an_open_commit() -> None:
    leaving = {event for (before, event), after in TABLE.items() if before is State.COMMITTING and after is not before}
    assert leaving == {Event.ENDED, Event.FAIL_ABORTABLE, Event.FENCE, Event.FAIL}


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_a_producer_is_replaced_in_any_state_but_an_open_transaction(state: State) -> None:
    may_be_replaced = (state, Event.REPLACE) in TABLE
    assert may_be_replaced == (state not in OPEN and state is not State.UNINITIALISED)
    assert len(OPEN) == 4


def test_a_whole_life_commit_abort_fence_and_replacement() -> None:
    machine = Machine()
    life = "initialised begin send send_offsets commit commit ended begin fail-abortable abort ended replace "
    life += "initialised begin send fence replace initialised"
    for event in life.split():
        machine.fire(EVENTS[event])
    assert machine.state is State.READY
