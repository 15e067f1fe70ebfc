"""How transactions ended: counted, and told to who takes part in them and to who listens (eos/session/participants.py).

Owns a session's counters and the order in which ends are told. It never decides how one ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eos import log
from eos.kafka.client.world import World
from eos.session.committer import Commit
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
        self._begun: Transaction | None = None  # nobody was told of its end yet

    def begun(self, transaction: Transaction) -> None:
        self._begun = transaction

    def ended(self, outcome: Outcome) -> None:
        """Tell how the last transaction ended, if that was not told yet. One whose commit was not started is aborted,
        whatever `outcome` says."""
        transaction, self._begun = self._begun, None
        if transaction is None:
            return
        outcome = outcome if transaction.commit_started else Outcome.ABORTED
        for participant in self._participants:
            (participant.committed if outcome is Outcome.COMMITTED else participant.undone)()
        self._listener.ended(transaction, outcome)

    def committed(self, done: Commit, who: Mapping[str, object]) -> None:
        """Tell that this commit succeeded, and count it. `who` is the producer's, for the log."""
        transaction, counters = done.transaction, self.counters
        self.ended(Outcome.COMMITTED)
        counters.transactions += 1
        counters.records_in += done.taken
        counters.records_out += transaction.sent
        counters.skipped += transaction.skipped
        counters.dead_letters += transaction.dead_letters
        ended_at: float = done.job.result
        counters.commit_seconds.observe(ended_at - done.started_at)
        if done.taken and transaction.first_timestamp_ms > 0:
            ended_ms = (self._world.unix() - self._world.now() + ended_at) * 1000
            # Clocks differ: a record from the future is no age below zero.
            counters.end_to_end_seconds.observe(max(0.0, (ended_ms - transaction.first_timestamp_ms) / 1000))
        ms = round((ended_at - transaction.began_at) * 1000)
        log.debug("committed", taken=done.taken, sent=transaction.sent, ms=ms, **who)
