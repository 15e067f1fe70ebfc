"""The outcomes of transactions: who is notified of them, and in which order.

Owns a session's counters. It never decides how a transaction ends (eos/session/loop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eos.kafka.client.world import World
from eos.session.committer import Commit
from eos.session.observe import COMMIT_BOUNDS_S, END_TO_END_BOUNDS_S, Histogram
from eos.session.participants import Listener, Outcome, Participant
from eos.session.transaction import Phase, Transaction


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


class Outcomes:
    """The one place from which a session's parts, participants and listener learn how a transaction ended."""

    def __init__(self, participants: Sequence[Participant], listener: Listener, world: World) -> None:
        self.counters = Counters()
        self._participants, self._listener, self._world = participants, listener, world
        self._parts: list[Callable[[Commit], None]] = []
        self._begun: Transaction | None = None  # its outcome was not told yet

    def follow(self, committed: Callable[[Commit], None]) -> None:
        """Call `committed` with each commit that succeeded, before the participants learn of it. A call that was
        interrupted is repeated."""
        self._parts.append(committed)

    def begun(self, transaction: Transaction) -> None:
        self._begun = transaction

    def committed(self, commit: Commit) -> None:
        """Tell everyone that this commit succeeded, and count it."""
        for committed in self._parts:
            committed(commit)
        if self.ended(Outcome.COMMITTED):
            self._count(commit)

    def ended(self, outcome: Outcome) -> bool:
        """Tell the outcome of the last transaction; return False if it was told before. A transaction whose commit was
        not started is aborted, whatever `outcome` says."""
        transaction, self._begun = self._begun, None
        if transaction is None:
            return False
        outcome = outcome if transaction.phase is Phase.COMMITTING else Outcome.ABORTED
        for participant in self._participants:
            (participant.committed if outcome is Outcome.COMMITTED else participant.undone)()
        self._listener.ended(transaction, outcome)
        return True

    def _count(self, commit: Commit) -> None:
        transaction, counters = commit.transaction, self.counters
        counters.transactions += 1
        counters.records_in += commit.taken
        counters.records_out += transaction.sent
        counters.skipped += transaction.skipped
        counters.dead_letters += transaction.dead_letters
        ended_at: float = commit.job.result
        counters.commit_seconds.observe(ended_at - commit.started_at)
        if commit.taken and transaction.first_timestamp_ms > 0:
            ended_ms = (self._world.unix() - self._world.now() + ended_at) * 1000
            # Clocks differ: a record from the future has no negative age.
            counters.end_to_end_seconds.observe(max(0.0, (ended_ms - transaction.first_timestamp_ms) / 1000))
