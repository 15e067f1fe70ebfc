"""Define a step of the transaction protocol, and group steps into transactions.

The module owns the rule for the begin and end of a transaction on the wire: the first request that needs a transaction
opens it, an EndTxn with a successful response ends it, and an InitProducerId abandons it. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eos.codes import RETRIABLE

# The numbers of KIP-98. Step 3 (begin) has no request, and step 5.3 (the last record in the transaction log) is not
# sent to clients.
STEP_NUMBERS = {
    "FindCoordinator": "1",
    "InitProducerId": "2",
    "AddPartitionsToTxn": "4.1",
    "Produce": "4.2",
    "AddOffsetsToTxn": "4.3",
    "TxnOffsetCommit": "4.4",
    "EndTxn": "5.1",
    "Marker": "5.2",
}
_OPENING = {"AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"}
NO_ANSWER = "NO_ANSWER"  # the connection closed before the response


@dataclass
class Step:
    """Describe one request and its response, or a marker in a Fetch response.

    `time` is in seconds since the epoch, `ms` in milliseconds. `partitions` have the form `topic-0`. `offsets` by
    partition: the committed offset of a TxnOffsetCommit, the first offset of a Produce, or the offset of a marker.
    `errors` are the protocol's names, empty after a success.
    """

    transactional_id: str
    name: str
    time: float
    version: int = 0
    connection: int = 0
    client: str = ""
    broker: str = ""
    transaction: int = 0
    producer_id: int | None = None
    epoch: int | None = None
    partitions: list[str] = field(default_factory=list)
    records: int | None = None
    bytes: int | None = None
    first_sequence: int | None = None
    group: str | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    outcome: str | None = None  # commit or abort
    coordinator: str | None = None
    new_producer_id: int | None = None
    new_epoch: int | None = None
    errors: list[str] = field(default_factory=list)
    ms: float | None = None

    @property
    def number(self) -> str:
        return STEP_NUMBERS[self.name]

    @property
    def failed(self) -> bool:
        return bool(self.errors)

    @property
    def is_retriable(self) -> bool:
        """Return whether clients retry after this error, such as CONCURRENT_TRANSACTIONS."""
        return self.failed and all(name in RETRIABLE for name in self.errors)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that have a value, for JSON."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, [], {}, "")}
        return {"step": self.number} | known


@dataclass(eq=False)
class Transaction:
    """Hold the steps and the state of one transaction. Number 0 holds the steps before the first transaction."""

    transactional_id: str
    number: int
    steps: list[Step] = field(default_factory=list)
    state: str = "open"  # open, committed, aborted, abandoned
    producer_id: int | None = None
    epoch: int | None = None

    @property
    def started_at(self) -> float:
        return self.steps[0].time

    @property
    def is_opened(self) -> bool:
        """Return whether a request has opened the transaction, rather than only prepared it."""
        return any(step.name in _OPENING for step in self.steps)


class History:
    """Keep the last `keep` transactions of all transactional.ids, and the counts since the start."""

    def __init__(self, keep: int = 200, steps_per_transaction: int = 400) -> None:
        self.transactions: deque[Transaction] = deque(maxlen=keep)
        self.counts = {"committed": 0, "aborted": 0, "abandoned": 0, "steps": 0, "errors": 0}
        self._current: dict[str, Transaction] = {}
        self._by_producer_id: dict[int, list[Transaction]] = {}
        self._last_of_identity: dict[tuple[str, int | None, int | None], Transaction] = {}
        self._steps_kept = steps_per_transaction

    def snapshot(self) -> History:
        """Return a copy for a reader on another thread. Recorded steps no longer change."""
        made = History(self.transactions.maxlen or 0, self._steps_kept)
        made.transactions.extend(replace(each, steps=list(each.steps)) for each in self.transactions)
        made.counts |= self.counts
        return made

    def add(self, step: Step) -> Step:
        """Add a finished step to its transaction, and set the step's transaction number."""
        self.counts["steps"] += 1
        self.counts["errors"] += step.failed and not step.is_retriable
        transaction = self._earlier_transaction_of(step) or self._transaction_of(step)
        step.transaction = transaction.number
        if len(transaction.steps) < self._steps_kept:
            transaction.steps.append(step)
        if step.producer_id is not None and step.name != "InitProducerId":
            transaction.producer_id, transaction.epoch = step.producer_id, step.epoch
            known = self._by_producer_id.setdefault(step.producer_id, [])
            if transaction not in known:
                known.append(transaction)
            self._last_of_identity[step.transactional_id, step.producer_id, step.epoch] = transaction
        if step.name == "InitProducerId" and not step.failed:
            transaction.producer_id, transaction.epoch = step.new_producer_id, step.new_epoch
        if step.name == "EndTxn" and not step.failed:
            self._end(transaction, "committed" if step.outcome == "commit" else "aborted")
        return step

    def add_marker(self, step: Step) -> bool:
        """Add a marker to the transaction that it ended. Return False if that transaction is not kept, or has the
        marker already.

        Before KIP-890 the transactions of a producer share an epoch, so the last records before the marker decide.
        """
        assert step.producer_id is not None
        ((partition, offset),) = step.offsets.items()
        before = [
            (old.offsets[partition], number)
            for number, kept in enumerate(self._by_producer_id.get(step.producer_id, []))
            for old in kept.steps
            if old.name == "Produce" and old.offsets.get(partition, offset) < offset
        ]
        if not before:
            return False
        transaction = self._by_producer_id[step.producer_id][max(before)[1]]
        if any(old.name == "Marker" and partition in old.offsets for old in transaction.steps):
            return False
        step.transaction, step.transactional_id = transaction.number, transaction.transactional_id
        transaction.steps.append(step)
        self.counts["steps"] += 1
        return True

    def _earlier_transaction_of(self, step: Step) -> Transaction | None:
        """Return the earlier transaction of a fenced producer that this step belongs to, if any."""
        current = self._current.get(step.transactional_id)
        if current is None or step.producer_id is None or step.name == "InitProducerId":
            return None
        identity = (step.producer_id, step.epoch)
        has_restarted = any(old.name == "InitProducerId" and not old.failed for old in current.steps)
        if not has_restarted or identity == (current.producer_id, current.epoch):
            return None
        return self._last_of_identity.get((step.transactional_id, *identity))

    def _transaction_of(self, step: Step) -> Transaction:
        current = self._current.get(step.transactional_id)
        restarts = step.name == "InitProducerId"
        ended = current is not None and current.state != "open"
        late_end = step.name == "EndTxn" and ended  # a late copy, or an abort of an ended transaction
        if current is not None and restarts and current.is_opened and current.state == "open":
            self._end(current, "abandoned")
            ended = True
        if current is None or (ended and not late_end and (step.name in _OPENING or restarts)):
            number = 1 if current is None else current.number + 1
            current = Transaction(step.transactional_id, number)
            self._current[step.transactional_id] = current
            if len(self.transactions) == self.transactions.maxlen:
                self._forget(self.transactions[0])
            self.transactions.append(current)
        return current

    def _forget(self, oldest: Transaction) -> None:
        """Remove all references to a transaction that is no longer kept. With KIP-890 each one has its own identity."""
        if self._current.get(oldest.transactional_id) is oldest:
            del self._current[oldest.transactional_id]
        for step in oldest.steps:
            if step.producer_id is None:
                continue
            known = self._by_producer_id.get(step.producer_id, [])
            if oldest in known:
                known.remove(oldest)
            if not known:
                self._by_producer_id.pop(step.producer_id, None)
            identity = (oldest.transactional_id, step.producer_id, step.epoch)
            if self._last_of_identity.get(identity) is oldest:
                del self._last_of_identity[identity]

    def _end(self, transaction: Transaction, state: str) -> None:
        if transaction.state == "open":
            transaction.state = state
            self.counts[state] += 1
