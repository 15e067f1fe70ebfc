"""The states of a partition in a consumer: every entry of the table, listed independently of the code."""

from __future__ import annotations

import itertools

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from eos.errors import IllegalState
from eos.session.consumer.assignment import TABLE, Assignment, Event, Phase

PHASES = dict(zip(["None", "Assd", "Rest", "Read"], Phase, strict=True))
# A dot is an illegal event; the columns are in the order of Event.
MATRIX = """
          assign locate read  revoke
    None  Assd   .      .     None
    Assd  Assd   Rest   .     None
    Rest  Assd   .      Read  None
    Read  Assd   .      .     None
"""
ZERO, ONE, TWO = ("in", 0), ("in", 1), ("in", 2)


def entries() -> list[tuple[Phase, Event, Phase | None]]:
    rows = [line.split() for line in MATRIX.strip().splitlines()[1:]]
    return [
        (PHASES[before], event, None if after == "." else PHASES[after])
        for before, *afters in rows
        for event, after in zip(Event, afters, strict=True)
    ]


def start(partition: tuple[str, int], offset: int = 7) -> dict[tuple[str, int], TopicPartition]:
    return {partition: TopicPartition(*partition, offset)}


def assignment_in(phase: Phase) -> Assignment:
    assignment = Assignment()
    if phase is not Phase.NOT_OURS:
        assignment.assign([ZERO])
    if phase in (Phase.RESTORING, Phase.READING):
        assignment.locate(start(ZERO))
    if phase is Phase.READING:
        assignment.read([ZERO])
    return assignment


def fire(assignment: Assignment, event: Event) -> None:
    {
        Event.ASSIGN: lambda: assignment.assign([ZERO]),
        Event.LOCATE: lambda: assignment.locate(start(ZERO)),
        Event.READ: lambda: assignment.read([ZERO]),
        Event.REVOKE: lambda: assignment.revoke([ZERO]),
    }[event]()


def seen_of(assignment: Assignment) -> tuple[object, ...]:
    known = assignment.unlocated, dict(assignment.restoring), assignment.reading, assignment.located
    return (*known, set(assignment.all), set(assignment.revoked))


def test_matrix_contains_every_phase_and_event_once() -> None:
    assert {entry[:2] for entry in entries()} == set(itertools.product(Phase, Event))
    assert {entry[:2] for entry in entries() if entry[2]} == TABLE.keys()
    assert len(entries()) == len(Phase) * len(Event) == 16


@pytest.mark.parametrize(("before", "event", "after"), [entry for entry in entries() if entry[2]])
def test_legal_event_changes_the_state_of_its_partition(before: Phase, event: Event, after: Phase) -> None:
    assignment = assignment_in(before)
    assert assignment.phase(ZERO) is before
    fire(assignment, event)
    assert assignment.phase(ZERO) is after
    assert (ZERO in assignment.unlocated) == (after is Phase.ASSIGNED)
    assert (ZERO in assignment.restoring) == (after is Phase.RESTORING)
    assert (ZERO in assignment.reading) == (after is Phase.READING)
    assert (ZERO in assignment.located) == (after in (Phase.RESTORING, Phase.READING))
    assert (ZERO in assignment.all) == (after is not Phase.NOT_OURS)
    assert (ZERO in assignment.revoked) == (event is Event.REVOKE)


@pytest.mark.parametrize(("before", "event"), [entry[:2] for entry in entries() if not entry[2]])
def test_illegal_event_raises_and_changes_nothing(before: Phase, event: Event) -> None:
    assignment = assignment_in(before)
    seen = seen_of(assignment)
    with pytest.raises(IllegalState, match=event.value):
        fire(assignment, event)
    assert seen_of(assignment) == seen


def test_illegal_event_of_one_partition_changes_no_other_partition() -> None:
    assignment = assignment_in(Phase.RESTORING)
    assignment.assign([ONE])
    with pytest.raises(IllegalState):
        assignment.read([ZERO, ONE])
    assert (assignment.phase(ZERO), assignment.phase(ONE)) == (Phase.RESTORING, Phase.ASSIGNED)


def test_revocation_is_reported_although_the_partition_is_assigned_again() -> None:
    assignment = assignment_in(Phase.READING)
    assignment.revoke([ZERO, ONE])
    assignment.assign([ZERO])
    assert assignment.revoked == {ZERO, ONE}
    assignment.revoke([TWO])
    assignment.note_reported([ZERO, ONE])
    assert assignment.revoked == {TWO}, "revoked during the report"


def test_partition_assigned_again_forgets_its_start() -> None:
    assignment = assignment_in(Phase.READING)
    assignment.assign([ZERO])
    assert (dict(assignment.restoring), assignment.located) == ({}, set())
    assignment.locate(start(ZERO, 9))
    assert assignment.start_of(ZERO) == 9


def test_fetch_offsets_continue_after_fetched_records_or_at_the_start() -> None:
    """OFFSET_BEGINNING is not an offset: a partition without fetched records is fetched from its beginning."""
    assignment = assignment_in(Phase.READING)
    assignment.assign([ONE, TWO])
    assignment.locate(start(ONE, OFFSET_BEGINNING) | start(TWO))
    assignment.read([ONE])
    assert assignment.fetch_offsets({ZERO: 12, ONE: 0, TWO: 7}) == {ZERO: 12, ONE: OFFSET_BEGINNING}
    assert assignment.fetch_offsets({ZERO: 7, ONE: 3}) == {ZERO: 7, ONE: 3}
