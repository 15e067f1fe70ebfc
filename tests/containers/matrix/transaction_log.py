"""Read and decode the records of the transaction coordinators in `__transaction_state`.

Owns the record format (TransactionLogKey 0, TransactionLogValue 0 and 1 of Kafka's schemas). Works on every backend
without the broker's tools. The topic is compacted, but a run ends before its active segment is.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eos.testing.checker import Verdict, verdict
from eos.testing.history import read_topic

TOPIC = "__transaction_state"
STATES = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)


@dataclass(frozen=True)
class Written:
    """Hold one record: the state of a transactional.id from then on. `began_ms` is -1 before its first transaction."""

    at_ms: int
    transactional_id: str
    producer_id: int
    epoch: int
    state: str
    began_ms: int
    partitions: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        on = f" on {' '.join(self.partitions)}" if self.partitions else ""
        who = f"{self.transactional_id} producer {self.producer_id} epoch {self.epoch}"
        return f"{clock(self.at_ms)} {who}: {self.state}{on} ({self.where})"


def clock(at_ms: int) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at_ms / 1000))}.{at_ms % 1000:03}"


def read_transaction_log(servers: str) -> list[Written]:
    """Return every record in the order of time."""
    log = read_topic(servers, TOPIC, "read_uncommitted")
    found = []
    for row, (key, value) in enumerate(zip(log.keys, log.values, strict=True)):
        if key is not None and value is not None:
            found.append(decode(key, value, f"{TOPIC}[{log.partition[row]}]@{log.offset[row]}"))
    return sorted(found, key=lambda written: written.at_ms)


def fenced_state(log: Sequence[Written]) -> Verdict:
    """Judge that every committed transaction that wrote to a changelog committed offsets too.

    Only then does the group refuse such a transaction when another member owns the partition.
    """
    wrote = [
        written for written in log if written.state == "PrepareCommit" and any(map(_is_changelog, written.partitions))
    ]
    examples = [str(written) for written in wrote if not any(map(_is_offsets, written.partitions))]
    what, good = "committed transactions with state", "each committed offsets"
    return verdict("fenced_state", len(wrote), what, len(examples), examples, good)


def _is_changelog(partition: str) -> bool:
    return partition.rpartition("[")[0].endswith("-changelog")


def _is_offsets(partition: str) -> bool:
    return partition.startswith("__consumer_offsets[")


def decode(key: bytes, value: bytes, where: str) -> Written:
    """Decode a record; raise ValueError for an unknown version."""
    version, length = struct.unpack_from(">hh", key)
    if version != 0:
        raise ValueError(f"{where}: a key of version {version}")
    fields = _Fields(value)
    version = fields.take("h")
    if version not in (0, 1):
        raise ValueError(f"{where}: a value of version {version}")
    fields.compact = version == 1
    producer_id, epoch, _timeout_ms, state = (fields.take(kind) for kind in "qhib")
    partitions = []
    for _ in range(fields.length("i")):
        topic = fields.text()
        partitions += [f"{topic}[{fields.take('i')}]" for _ in range(fields.length("i"))]
        fields.skip_tags()
    updated_ms, began_ms = fields.take("q"), fields.take("q")
    name = key[4 : 4 + length].decode()
    return Written(updated_ms, name, producer_id, epoch, STATES[state], began_ms, tuple(partitions), where)


class _Fields:
    """Read the fields of a value one after the other; `compact`: lengths are varints, plus one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.compact = False

    def take(self, kind: str) -> int:
        (found,) = struct.unpack_from(f">{kind}", self._data, self._at)
        self._at += struct.calcsize(f">{kind}")
        return int(found)

    def _varint(self) -> int:
        found = shift = 0
        while True:
            byte = self.take("B")
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return found

    def length(self, kind: str) -> int:
        """Read the length of an array or string; a null one has none."""
        return max(0, self._varint() - 1 if self.compact else self.take(kind))

    def text(self) -> str:
        length = self.length("h")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def skip_tags(self) -> None:
        """Skip the number of tagged fields, which is written although no known element has any."""
        if self.compact:
            for _ in range(self._varint()):
                self._varint()
                self._at += self._varint()
