"""How transactions ended: counted, and told to who takes part in them and to who listens (eos/session/participants.py).

Owns a session's counters and the order in which ends are told. It never decides how one ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eos import log
from eos.kafka.client.world import World
from eos.session.lanes import UnderWay
from eos.session.observe import COMMIT_BOUNDS_S, END_TO_END_BOUNDS_S, Histogram
from eos.session.participants import Listener, Outcome, Participant

if TYPE_CHECKING:
    from eos.session.transaction import Transaction


@dataclass
class Counters:
    """What a session did so far; plain numbers, written per transaction, read by eos.health and by tests."""

    records_in: int = 0
    records_out: int = 0
    skipped: int = 0
    dead_letters: int = 0
    retries: int = 0
    repeated: int = 0
    """Input records that the client delivered a second time: dropped."""
    transactions: int = 0
    aborts: int = 0
    rebuilds: int = 0
    replacements: Mapping[str, int] = field(default_factory=dict)
    aborts_by_cause: dict[str, int] = field(default_factory=dict)
    """`application`, `rebalance`, `refused` (a record), or the call that failed (eos.errors.Call)."""
    rebuilds_by_cause: dict[str, int] = field(default_factory=dict)
    """`timeout`, `group`, or the call whose outcome was unknown."""
    rebalances: dict[str, int] = field(default_factory=dict)
    """`assigned`, `revoked` and `lost`: how often the group gave or took partitions."""
    commit_seconds: Histogram = field(default_factory=lambda: Histogram(COMMIT_BOUNDS_S))
    """From sending the offsets until the commit was answered."""
    end_to_end_seconds: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BOUNDS_S))
    """Once per transaction: the age of its first input record (by the record's timestamp) when it was committed."""


class Endings:
    def __init__(self, participants: Sequence[Participant], listener: Listener, world: World) -> None:
        self.counters = Counters()
        self._participants, self._listener, self._world = participants, listener, world
        self._untold: list[Transaction] = []  # of their ends: the one whose commit is under way, the open one

    def begun(self, transaction: Transaction, behind: Transaction | None) -> None:
        """It is open; the commit of the one `behind` which it began is on its way."""
        self._untold = [transaction] if behind is None else [behind, transaction]

    def ended(self, outcome: Outcome, last: Transaction | None = None) -> None:
        """Of all that are not told, up to `last`: the first ended so. What was begun behind a transaction that did not
        commit was given up with it, and what did not set out for its commit cannot have come to pass."""
        until = len(self._untold) if last is None else self._untold.index(last) + 1
        ended, self._untold = self._untold[:until], self._untold[until:]
        for transaction in ended:
            outcome = outcome if transaction.set_out else Outcome.ABORTED
            for participant in self._participants:
                (participant.committed if outcome is Outcome.COMMITTED else participant.undone)()
            self._listener.ended(transaction, outcome)
            outcome = Outcome.ABORTED

    def committed(self, done: UnderWay) -> None:
        transaction, counters = done.transaction, self.counters
        self.ended(Outcome.COMMITTED, transaction)
        counters.transactions += 1
        counters.records_in += done.taken
        counters.records_out += transaction.sent
        counters.skipped += transaction.skipped
        counters.dead_letters += transaction.dead_letters
        ended_at: float = done.job.result
        counters.commit_seconds.observe(ended_at - done.set_out_at)
        if done.taken and transaction.first_timestamp_ms > 0:
            ended_ms = (self._world.unix() - self._world.now() + ended_at) * 1000
            # Clocks differ: a record from the future is no age below zero.
            counters.end_to_end_seconds.observe(max(0.0, (ended_ms - transaction.first_timestamp_ms) / 1000))
        ms = round((ended_at - transaction.began_at) * 1000)
        log.debug("committed", taken=done.taken, sent=transaction.sent, ms=ms, **done.producer.who())
