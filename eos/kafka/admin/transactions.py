"""Finds open transactions on partitions, and decides which of them hang.

Owns the rule `judge` (pure) and the queries for it, and explains why a group's offsets are unstable. A partition's
leader knows which producers have a transaction open on it (DescribeProducers), and the coordinator knows each
producer's transaction (ListTransactions, DescribeTransactions; KIP-664). An open transaction hangs if no coordinator
will ever end it: only then may an abort marker be written. This module writes nothing but that marker, and never for a
transaction that a coordinator still considers open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from eos.errors import ConfigurationError, EosError, Temporary
from eos.kafka.client.cluster import OFFSETS_LOG, ClusterAdmin, ListedTransaction, OpenProducer, Partition
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import format_position

_REQUEST_TIMEOUT_MS = 5_000
FIND_HANGING = f"eos txn find-hanging --topic {OFFSETS_LOG}"

ENDED = frozenset({"Empty", "CompleteCommit", "CompleteAbort", "Dead"})
ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
STATES = ENDED | ENDING | {"Ongoing"}


class Verdict(Enum):
    OPEN = "open"
    ENDING = "ending"
    HANGING = "hanging"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class OpenTransaction:
    """Describes a transaction that is open on one partition.

    `transactional_id` is None if no coordinator knows the producer id. `held_back`: the number of offsets (records
    and markers) after the last stable offset, which read_committed readers cannot read yet.
    """

    producer: OpenProducer
    transactional_id: str | None
    state: str | None
    verdict: Verdict
    reason: str
    held_back: int = 0

    @property
    def partition(self) -> Partition:
        return self.producer.partition


def judge(seen: OpenProducer, known: ListedTransaction | None, all_coordinators_answered: bool) -> tuple[Verdict, str]:
    """Return whether the coordinator will end a partition's open transaction, and the reason.

    `known` must be queried after `seen`: a transaction is added to the coordinator before it writes to the partition
    (KIP-98), so `known` then contains it."""
    if known is None:
        if not all_coordinators_answered:
            return Verdict.UNKNOWN, "some partitions of the transaction log have no leader, so a coordinator is missing"
        return Verdict.HANGING, "no coordinator knows its producer id"
    if known.state in ENDED:
        return Verdict.HANGING, f"its coordinator reports {known.state} and will write no marker"
    if seen.partition not in known.partitions:
        return Verdict.HANGING, f"its coordinator's transaction ({known.state}) is not open on this partition"
    if known.state in ENDING:
        return Verdict.ENDING, f"its coordinator is writing the markers ({known.state})"
    return Verdict.OPEN, "its producer has not ended it yet"


def find_open(admin: ClusterAdmin, topics: Iterable[str] | None = None) -> list[OpenTransaction]:
    """Return every transaction that is open on a partition of these topics (None: of all topics, internal ones too).

    If a transaction seems to hang, its partition is queried again after its coordinator has answered: a transaction
    that is still open there at the same offset has not ended in the meantime.
    """
    partitions = admin.partitions(topics)
    seen = admin.open_producers(partitions)
    if not seen:
        return []
    known = {listed.producer_id: listed for listed in admin.transactions({s.producer_id for s in seen})}
    complete = admin.has_all_coordinators()
    judged = [(s, *judge(s, known.get(s.producer_id), complete)) for s in seen]
    doubtful = {s.partition for s, verdict, _ in judged if verdict is Verdict.HANGING}
    still = {(s.partition, s.producer_id, s.start_offset) for s in admin.open_producers(sorted(doubtful))}
    held = admin.count_unstable_offsets({s.partition for s in seen})
    found = []
    for producer, verdict, reason in judged:
        key = (producer.partition, producer.producer_id, producer.start_offset)
        if verdict is Verdict.HANGING and key not in still:
            continue  # the transaction ended between the two queries
        listed = known.get(producer.producer_id)
        name, state = (listed.transactional_id, listed.state) if listed else (None, None)
        found.append(OpenTransaction(producer, name, state, verdict, reason, held.get(producer.partition, 0)))
    return sorted(found, key=lambda t: (t.verdict.name, t.partition, t.producer.start_offset))


def abort_hanging(admin: ClusterAdmin, hanging: OpenTransaction) -> None:
    """Write the abort marker of a hanging transaction, after checking once more that it hangs.

    Raise Temporary if it no longer hangs, and ConfigurationError if it did not hang at the first check."""
    if hanging.verdict is not Verdict.HANGING:
        raise ConfigurationError(
            f"{format_position(*hanging.partition)}: {hanging.reason}; it must not be aborted from here"
        )
    again = [t for t in find_open(admin, [hanging.partition[0]]) if t.verdict is Verdict.HANGING]
    if hanging.producer.key not in {t.producer.key for t in again}:
        raise Temporary(
            f"{format_position(*hanging.partition)}: the transaction of producer {hanging.producer.producer_id} ended"
        )
    admin.write_abort_marker(hanging.producer)


def only_hanging(found: Sequence[OpenTransaction]) -> list[OpenTransaction]:
    """Return the hanging ones of these transactions."""
    return [t for t in found if t.verdict is Verdict.HANGING]


@dataclass(frozen=True)
class Cause:
    """Explains a waiting commit or reset in a phrase, with the command to type."""

    reason: str
    command: str


def explain_unstable_offsets(settings: Settings, group: str, world: World = REAL) -> Cause:
    """Describe the transaction that is open on the group's partition of the offsets log, a hanging one first."""
    try:
        with world.admin(settings, timeout_ms=_REQUEST_TIMEOUT_MS) as admin:
            count = len(admin.partitions([OFFSETS_LOG]))
            here = (OFFSETS_LOG, log_partition_of(group, count))
            found = [t for t in find_open(admin, [OFFSETS_LOG]) if t.partition == here]
    except EosError as error:
        return Cause(f"its transaction cannot be queried ({error})", FIND_HANGING)
    if not found:
        return Cause("no transaction is open on the group's offsets now; is its coordinator running?", "eos doctor")
    # Several groups share this partition. Prefer a hanging transaction as the cause: every other transaction ends by
    # itself.
    return _describe_cause(min(found, key=lambda t: t.verdict is not Verdict.HANGING))


def _describe_cause(t: OpenTransaction) -> Cause:
    who = t.transactional_id or f"producer id {t.producer.producer_id}"
    if t.verdict is Verdict.HANGING:
        return Cause(f"a transaction of {who} hangs on {OFFSETS_LOG}[{t.partition[1]}]: {t.reason}", FIND_HANGING)
    if t.verdict is Verdict.OPEN:
        reason = f"{who} has a transaction open ({t.reason}); it ends at its transaction.timeout.ms at the latest"
        return Cause(reason, f"eos txn describe {who}")
    return Cause(f"{who}: {t.reason}", f"eos txn describe {who}")


def log_partition_of(name: str, partitions: int) -> int:
    """Return the partition of the offsets log for a group, or of the transaction log for a transactional.id.

    It is Kafka's Utils.abs (the smallest int counts as 0) of Java's String.hashCode over UTF-16 code units."""
    hashed = 0
    units = name.encode("utf-16-be")
    for i in range(0, len(units), 2):
        hashed = (31 * hashed + int.from_bytes(units[i : i + 2])) & 0xFFFFFFFF
    signed = hashed - (hashed >> 31 << 32)
    return (0 if signed == -(1 << 31) else abs(signed)) % partitions
