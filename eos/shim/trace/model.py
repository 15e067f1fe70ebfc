"""A step of the transaction protocol, and the transactions steps make up.

Owns the rule where one transaction ends and the next begins, as seen on the wire: the first request that needs a
transaction opens it, an EndTxn that is answered without error ends it, an InitProducerId begins a new life. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eos.codes import RETRIABLE

# KIP-98's numbers. 3 (begin) is no request, and 5.3 (the final record in the transaction log) is on no client's wire.
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
NO_ANSWER = "NO_ANSWER"  # the connection ended first


@dataclass
class Step:
    """One request and its answer, or a marker that a fetch brought. Times: seconds since the epoch, milliseconds.

    `partitions` as `topic-0`; `offsets` per partition: those committed by TxnOffsetCommit, the first one of a Produce,
    that of a marker; `errors` are the protocol's names, empty when all is well.
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
    def to_be_retried(self) -> bool:
        """Refused in a way that clients answer by asking again, such as CONCURRENT_TRANSACTIONS."""
        return self.failed and all(name in RETRIABLE for name in self.errors)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is known and no more."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, [], {}, "")}
        return {"step": self.number} | known


@dataclass(eq=False)
class Transaction:
    """What happened to one transaction; number 0 holds the steps before the first one."""

    transactional_id: str
    number: int
    steps: list[Step] = field(default_factory=list)
    state: str = "open"  # open, committed, aborted, abandoned
    producer_id: int | None = None
    epoch: int | None = None

    @property
    def began(self) -> float:
        return self.steps[0].time

    @property
    def begun(self) -> bool:
        """Whether a request passed that needs a transaction, not only those that prepare one."""
        return any(step.name in _OPENING for step in self.steps)


class History:
    """The last `keep` transactions of all transactional.ids, and counts over all time."""

    def __init__(self, keep: int = 200, steps_per_transaction: int = 400) -> None:
        self.transactions: deque[Transaction] = deque(maxlen=keep)
        self.counts = {"committed": 0, "aborted": 0, "abandoned": 0, "steps": 0, "errors": 0}
        self._current: dict[str, Transaction] = {}
        self._of_producer: dict[int, list[Transaction]] = {}
        self._last_of_identity: dict[tuple[str, int | None, int | None], Transaction] = {}
        self._steps_kept = steps_per_transaction

    def snapshot(self) -> History:
        """What is kept now, for a reader on another thread: steps that are filed do not change any more."""
        made = History(self.transactions.maxlen or 0, self._steps_kept)
        made.transactions.extend(replace(each, steps=list(each.steps)) for each in self.transactions)
        made.counts |= self.counts
        return made

    def add(self, step: Step) -> Step:
        """Files a finished step; sets its transaction's number."""
        self.counts["steps"] += 1
        self.counts["errors"] += step.failed and not step.to_be_retried
        transaction = self._late_for(step) or self._transaction_of(step)
        step.transaction = transaction.number
        if len(transaction.steps) < self._steps_kept:
            transaction.steps.append(step)
        if step.producer_id is not None and step.name != "InitProducerId":
            transaction.producer_id, transaction.epoch = step.producer_id, step.epoch
            known = self._of_producer.setdefault(step.producer_id, [])
            if transaction not in known:
                known.append(transaction)
            self._last_of_identity[step.transactional_id, step.producer_id, step.epoch] = transaction
        if step.name == "InitProducerId" and not step.failed:
            transaction.producer_id, transaction.epoch = step.new_producer_id, step.new_epoch
        if step.name == "EndTxn" and not step.failed:
            self._end(transaction, "committed" if step.outcome == "commit" else "aborted")
        return step

    def add_marker(self, step: Step) -> bool:
        """Files a marker with the transaction it ended; False when that is not kept here, or the marker is known.

        The epoch does not tell transactions of one producer apart before KIP-890: the last records in front of the
        marker do.
        """
        assert step.producer_id is not None
        ((partition, offset),) = step.offsets.items()
        before = [
            (old.offsets[partition], number)
            for number, kept in enumerate(self._of_producer.get(step.producer_id, []))
            for old in kept.steps
            if old.name == "Produce" and old.offsets.get(partition, offset) < offset
        ]
        if not before:
            return False
        transaction = self._of_producer[step.producer_id][max(before)[1]]
        if any(old.name == "Marker" and partition in old.offsets for old in transaction.steps):
            return False
        step.transaction, step.transactional_id = transaction.number, transaction.transactional_id
        transaction.steps.append(step)
        self.counts["steps"] += 1
        return True

    def _late_for(self, step: Step) -> Transaction | None:
        """The earlier transaction a fenced producer still talks about, if this step is one of its own."""
        current = self._current.get(step.transactional_id)
        if current is None or step.producer_id is None or step.name == "InitProducerId":
            return None
        identity = (step.producer_id, step.epoch)
        began_anew = any(old.name == "InitProducerId" and not old.failed for old in current.steps)
        if not began_anew or identity == (current.producer_id, current.epoch):
            return None
        return self._last_of_identity.get((step.transactional_id, *identity))

    def _transaction_of(self, step: Step) -> Transaction:
        current = self._current.get(step.transactional_id)
        begins_anew = step.name == "InitProducerId"
        ended = current is not None and current.state != "open"
        late_end = step.name == "EndTxn" and ended  # a copy, or an abort of what was ended: belongs to the last one
        if current is not None and begins_anew and current.begun and current.state == "open":
            self._end(current, "abandoned")
            ended = True
        if current is None or (ended and not late_end and (step.name in _OPENING or begins_anew)):
            number = 1 if current is None else current.number + 1
            current = Transaction(step.transactional_id, number)
            self._current[step.transactional_id] = current
            if len(self.transactions) == self.transactions.maxlen:
                self._forget(self.transactions[0])
            self.transactions.append(current)
        return current

    def _forget(self, oldest: Transaction) -> None:
        """With KIP-890 each transaction has an identity of its own: nothing may lead to those that are not kept."""
        if self._current.get(oldest.transactional_id) is oldest:
            del self._current[oldest.transactional_id]
        for step in oldest.steps:
            if step.producer_id is None:
                continue
            known = self._of_producer.get(step.producer_id, [])
            if oldest in known:
                known.remove(oldest)
            if not known:
                self._of_producer.pop(step.producer_id, None)
            identity = (oldest.transactional_id, step.producer_id, step.epoch)
            if self._last_of_identity.get(identity) is oldest:
                del self._last_of_identity[identity]

    def _end(self, transaction: Transaction, state: str) -> None:
        if transaction.state == "open":
            transaction.state = state
            self.counts[state] += 1
