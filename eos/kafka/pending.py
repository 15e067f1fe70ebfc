"""Why a group's committed offsets are not stable: whose transaction pends on them, and the command that ends it.

Owns the question for one group; eos.kafka.transactions judges. It only reads, and is asked while something waits: what
it cannot find out it says, and never raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from eos.errors import EosError
from eos.kafka.cluster import OFFSETS_LOG
from eos.kafka.settings import Settings
from eos.kafka.transactions import OpenTransaction, Verdict, find_open
from eos.kafka.world import REAL, World

_ASK_MS = 5_000
FIND = f"eos txn find-hanging --topic {OFFSETS_LOG}"


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
        return Cause(f"a transaction of {who} hangs on {OFFSETS_LOG} [{t.partition[1]}]: {t.reason}", FIND)
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
