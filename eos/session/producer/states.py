"""Defines the states of a transactional producer, and the legal calls in each: a table, no I/O.

The vocabulary is Kafka's (TransactionManager.java). A call fires an event. An event without a row is illegal: it
raises and changes nothing. If you change a row, read producer.py, which fires the events, and
tests/unit/test_states.py, which repeats every entry.
"""

from __future__ import annotations

from enum import Enum

from eos.errors import IllegalState


class State(Enum):
    UNINITIALISED = "Uninitialised"  # no producer id yet, or the producer was just replaced
    READY = "Ready"
    IN_TRANSACTION = "InTransaction"
    COMMITTING = (
        "Committing"  # EndTxn(commit) may have been sent; only its own answer or a successor's init resolves it
    )
    ABORTING = "Aborting"
    ABORTABLE_ERROR = "AbortableError"
    FENCED = "Fenced"  # fenced by a newer instance or by our own timeout; the state does not distinguish the two
    FATAL = "Fatal"


class Event(Enum):
    INITIALISED = "initialised"
    BEGIN = "begin"
    SEND = "send"
    SEND_OFFSETS = "send_offsets"
    COMMIT = "commit"
    ABORT = "abort"
    ENDED = "ended"
    FAIL_ABORTABLE = "fail (abortable)"
    FENCE = "fence"
    FAIL = "fail (fatal)"
    REPLACE = "replace"


_S, _E = State, Event
TABLE: dict[tuple[State, Event], State] = {
    (_S.UNINITIALISED, _E.INITIALISED): _S.READY,
    (_S.READY, _E.BEGIN): _S.IN_TRANSACTION,
    (_S.IN_TRANSACTION, _E.SEND): _S.IN_TRANSACTION,
    (_S.IN_TRANSACTION, _E.SEND_OFFSETS): _S.IN_TRANSACTION,
    (_S.IN_TRANSACTION, _E.COMMIT): _S.COMMITTING,
    (_S.IN_TRANSACTION, _E.ABORT): _S.ABORTING,
    (_S.IN_TRANSACTION, _E.FAIL_ABORTABLE): _S.ABORTABLE_ERROR,
    (_S.COMMITTING, _E.COMMIT): _S.COMMITTING,  # the same call again after a retriable timeout
    (_S.COMMITTING, _E.ENDED): _S.READY,
    (_S.COMMITTING, _E.FAIL_ABORTABLE): _S.ABORTABLE_ERROR,
    (_S.ABORTABLE_ERROR, _E.ABORT): _S.ABORTING,
    (_S.ABORTABLE_ERROR, _E.FAIL_ABORTABLE): _S.ABORTABLE_ERROR,
    (_S.ABORTING, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.ENDED): _S.READY,
    # A replacement bumps the epoch, so late requests of the old producer are refused. No replacement is possible while
    # a call that may still be answered is open: that call must fail first.
    (_S.READY, _E.REPLACE): _S.UNINITIALISED,
    (_S.FENCED, _E.REPLACE): _S.UNINITIALISED,
    (_S.FATAL, _E.REPLACE): _S.UNINITIALISED,
}
# A producer can be found fenced or broken in any state, and repeatedly.
TABLE |= {(state, _E.FENCE): _S.FENCED for state in State}
TABLE |= {(state, _E.FAIL): _S.FATAL for state in State if state is not _S.FENCED}

OPEN = frozenset({_S.IN_TRANSACTION, _S.COMMITTING, _S.ABORTABLE_ERROR, _S.ABORTING})


class Machine:
    """Holds the present state; `fire` changes it by the table, or raises IllegalState and leaves it unchanged."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.UNINITIALISED

    def fire(self, event: Event) -> None:
        after = TABLE.get((self.state, event))
        if after is None:
            raise IllegalState(f"{event.value} is not possible in state {self.state.value}")
        self.state = after
