"""Transactions of the cluster, as its coordinators and as its partitions see them, and which of them hang.

Owns the rule `judge` (pure) and the asking around it, for the offsets of one group too: who waits for them is told why.
A partition says which producer has a transaction open on it (DescribeProducers), the coordinator says which transaction
that producer has (ListTransactions, DescribeTransactions; KIP-664). Only an open one that no coordinator will ever
end hangs: for those an abort marker may be written. This module writes nothing but that marker, and never for a
transaction that a coordinator still knows to be open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from eos.errors import ConfigurationError, EosError, Temporary
from eos.kafka.client.cluster import OFFSETS_LOG, ClusterAdmin, Listed, OpenProducer, Partition
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import place_of

_ASK_MS = 5_000
FIND = f"eos txn find-hanging --topic {OFFSETS_LOG}"

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
    """A transaction that is open on one partition; `transactional_id` None: no coordinator knows its producer id.

    `held_back`: offsets behind the last stable offset (records and markers) that read_committed readers wait for.
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


def judge(seen: OpenProducer, known: Listed | None, all_coordinators_answered: bool) -> tuple[Verdict, str]:
    """Whether a partition's open transaction will be ended by its coordinator. `known` was asked after `seen`, so a
    transaction that was added to the coordinator before it was written to the partition (always, KIP-98) is in it."""
    if known is None:
        if not all_coordinators_answered:
            return Verdict.UNKNOWN, "a part of the transaction log has no leader: its coordinator cannot be asked"
        return Verdict.HANGING, "no coordinator knows its producer id"
    if known.state in ENDED:
        return Verdict.HANGING, f"its coordinator says {known.state}: no marker will come"
    if seen.partition not in known.partitions:
        return Verdict.HANGING, f"its coordinator's transaction ({known.state}) is not open on this partition"
    if known.state in ENDING:
        return Verdict.ENDING, f"its coordinator is writing the markers ({known.state})"
    return Verdict.OPEN, "its producer has not ended it yet"


def find_open(admin: ClusterAdmin, topics: Iterable[str] | None = None) -> list[OpenTransaction]:
    """Every transaction that is open on a partition of these topics (None: of all, internal ones too).

    A partition that looks hanging is asked a second time after its coordinator was: what is still open at the same
    offset then was not ended in between.
    """
    partitions = admin.partitions(topics)
    seen = admin.open_producers(partitions)
    if not seen:
        return []
    known = {listed.producer_id: listed for listed in admin.transactions({s.producer_id for s in seen})}
    complete = admin.all_coordinators_there()
    judged = [(s, *judge(s, known.get(s.producer_id), complete)) for s in seen]
    doubtful = {s.partition for s, verdict, _ in judged if verdict is Verdict.HANGING}
    still = {(s.partition, s.producer_id, s.start_offset) for s in admin.open_producers(sorted(doubtful))}
    held = admin.held_back({s.partition for s in seen})
    found = []
    for producer, verdict, reason in judged:
        key = (producer.partition, producer.producer_id, producer.start_offset)
        if verdict is Verdict.HANGING and key not in still:
            continue  # ended while we asked
        listed = known.get(producer.producer_id)
        name, state = (listed.transactional_id, listed.state) if listed else (None, None)
        found.append(OpenTransaction(producer, name, state, verdict, reason, held.get(producer.partition, 0)))
    return sorted(found, key=lambda t: (t.verdict.name, t.partition, t.producer.start_offset))


def abort_hanging(admin: ClusterAdmin, hanging: OpenTransaction) -> None:
    """Writes the abort marker that nobody else will write. Asks once more first: a transaction that came back to life,
    or that was ended meanwhile, is left alone (Temporary). ConfigurationError: it does not hang."""
    if hanging.verdict is not Verdict.HANGING:
        raise ConfigurationError(f"{place_of(*hanging.partition)}: {hanging.reason}; it must not be aborted from here")
    again = [t for t in find_open(admin, [hanging.partition[0]]) if t.verdict is Verdict.HANGING]
    if hanging.producer.key not in {t.producer.key for t in again}:
        raise Temporary(
            f"{place_of(*hanging.partition)}: the transaction of producer {hanging.producer.producer_id} ended"
        )
    admin.write_abort_marker(hanging.producer)


def hanging_among(found: Sequence[OpenTransaction]) -> list[OpenTransaction]:
    return [t for t in found if t.verdict is Verdict.HANGING]


@dataclass(frozen=True)
class Cause:
    """In words, and the command to type."""

    because: str
    command: str


def why_unstable(settings: Settings, group: str, world: World = REAL) -> Cause:
    """The transaction that is open on the group's partition of the offsets log: a hanging one first."""
    try:
        with world.admin(settings, timeout_ms=_ASK_MS) as admin:
            count = len(admin.partitions([OFFSETS_LOG]))
            here = (OFFSETS_LOG, partition_of(group, count))
            found = [t for t in find_open(admin, [OFFSETS_LOG]) if t.partition == here]
    except EosError as error:
        return Cause(f"its transaction cannot be asked for ({error})", FIND)
    if not found:
        return Cause("no transaction is open on the group's offsets now; is its coordinator there?", "eos doctor")
    # Other groups share the partition; one that hangs is the likelier cause, for the others end by themselves.
    return _cause(min(found, key=lambda t: t.verdict is not Verdict.HANGING))


def _cause(t: OpenTransaction) -> Cause:
    who = t.transactional_id or f"producer id {t.producer.producer_id}"
    if t.verdict is Verdict.HANGING:
        return Cause(f"a transaction of {who} hangs on {OFFSETS_LOG}[{t.partition[1]}]: {t.reason}", FIND)
    if t.verdict is Verdict.OPEN:
        because = f"{who} has a transaction open ({t.reason}); it ends at its transaction.timeout.ms at the latest"
        return Cause(because, f"eos txn describe {who}")
    return Cause(f"{who}: {t.reason}", f"eos txn describe {who}")


def partition_of(name: str, partitions: int) -> int:
    """The partition of the offsets log that keeps a group, or of the transaction log that keeps a transactional.id: by
    Kafka's Utils.abs (the smallest int counts as 0) of Java's String.hashCode, which is over UTF-16 code units."""
    hashed = 0
    units = name.encode("utf-16-be")
    for i in range(0, len(units), 2):
        hashed = (31 * hashed + int.from_bytes(units[i : i + 2])) & 0xFFFFFFFF
    signed = hashed - (hashed >> 31 << 32)
    return (0 if signed == -(1 << 31) else abs(signed)) % partitions
