"""Which input records were fetched, handed out and committed: the session's memory, no I/O.

Records stay here until their transaction committed, so a rewind after an abort hands the same objects out again;
the consumer is never sought back, which would race with its prefetch. What this module guarantees: per partition
records are handed out in offset order, none is skipped, none is handed out again after its commit; the offsets of a
transaction are exactly those after its handed-out records. If you change it, read Session._end and _rebuild.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

TopicPartition = tuple[str, int]


class Positioned(Protocol):
    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...


R = TypeVar("R", bound=Positioned)
_partition_of: Callable[[Any], TopicPartition] = operator.attrgetter("topic", "partition")


class Positions(Generic[R]):
    """A queue of fetched records with a cursor: before it what the open transaction took, behind it what waits."""

    def __init__(self) -> None:
        self._records: list[R] = []
        self._cursor = 0
        self._lost: set[TopicPartition] = set()  # of what the open transaction took
        self._ends: dict[
            TopicPartition, int
        ] = {}  # end of partition seen behind all fetched records (markers included)
        self.committed: dict[TopicPartition, int] = {}  # next offset, as far as this member committed or resolved it

    def __len__(self) -> int:
        """Records that wait to be handed out."""
        return len(self._records) - self._cursor

    @property
    def taken(self) -> int:
        return self._cursor

    def fetched(self, records: Iterable[R]) -> None:
        self._records.extend(records)

    def reached_end(self, partition: TopicPartition, offset: int) -> None:
        """The consumer stands at the end of a partition: nothing readable lies between its last record and `offset`."""
        self._ends[partition] = offset

    def take(self, most: int) -> list[R]:
        """The next records, at most `most`; they belong to the open transaction from now on."""
        batch = self._records[self._cursor : self._cursor + most]
        self._cursor += len(batch)
        return batch

    def give_back(self, count: int) -> None:
        """The last `count` taken records were not handled after all."""
        if not 0 <= count <= self._cursor:
            raise ValueError(f"cannot give back {count} of {self._cursor} taken records")
        end = self._cursor
        self._cursor -= count
        if self._lost:  # those of a lost partition are another's now; behind the cursor they would be handed out again
            back = self._records[self._cursor : end]
            self._records[self._cursor : end] = [r for r in back if (r.topic, r.partition) not in self._lost]

    def offsets(self) -> dict[TopicPartition, int]:
        """Next offset per partition of what was taken, which the transaction must commit with its outputs."""
        taken = self._records if self._cursor == len(self._records) else self._records[: self._cursor]
        # A later record of a partition overwrites an earlier one, so the last remains; all of it runs in C.
        last = dict(zip(map(_partition_of, taken), taken, strict=True))
        offsets = {partition: r.offset + 1 for partition, r in last.items()}
        return offsets | self._finished_ends(offsets)

    def _finished_ends(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Ends of partitions all of whose records are taken: the markers and aborted records before them are passed."""
        if not self._ends:
            return {}
        waiting = {(r.topic, r.partition) for r in self._records[self._cursor :]}
        return {
            partition: end
            for partition, end in self._ends.items()
            if partition not in waiting and end > max(offsets.get(partition, 0), self.committed.get(partition, 0))
        }

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """The transaction that took the records before the cursor, with these offsets, is committed."""
        assert not self._lost, "a transaction with records of a lost partition cannot commit"
        self.committed |= offsets
        if self._cursor == len(self._records):
            self._records = []
        else:
            del self._records[: self._cursor]
        self._cursor = 0

    def rewind(self) -> None:
        """The transaction is known to be aborted: what it took is handed out again, in the same order."""
        if self._lost:
            taken, waiting = self._records[: self._cursor], self._records[self._cursor :]
            self._records = [r for r in taken if (r.topic, r.partition) not in self._lost] + waiting
            self._lost = set()
        self._cursor = 0

    def assigned(self, starts: Mapping[TopicPartition, int]) -> None:
        """New partitions and the offsets they begin at; whatever was known of them belongs to an earlier assignment."""
        self.forget(starts)
        self.committed |= starts

    def forget(self, partitions: Collection[TopicPartition]) -> bool:
        """Partitions that are not ours any more. True: the open transaction took records of them, so it must abort.

        Those are dropped at the rewind; a partition that is assigned again before it begins at its committed offset.
        """
        gone = set(partitions)
        taken, waiting = self._records[: self._cursor], self._records[self._cursor :]
        self._records[self._cursor :] = [r for r in waiting if (r.topic, r.partition) not in gone]
        touched = gone & {(r.topic, r.partition) for r in taken}
        self._lost |= touched
        for partition in gone:
            self._ends.pop(partition, None)
            self.committed.pop(partition, None)
        return bool(touched)

    def clear(self) -> None:
        """Nothing is ours any more: the consumer is given up, and with it all it fetched."""
        self._records, self._cursor = [], 0
        self._lost, self._ends, self.committed = set(), {}, {}

    def resolve(self, stable: Mapping[TopicPartition, int | None]) -> int:
        """The transaction's outcome was unknown; `stable` are the group's stable committed offsets now.

        Drops what turned out to be committed, hands the rest out again; returns how many records were dropped. An
        offset below one that this member saw committed is no reason to go back: those outputs are visible (a late
        TxnOffsetCommit can move the group back on old brokers; the next commit repairs it). None (no committed
        offset): the transaction did not commit, so the partition begins again where the transaction did.
        """
        for partition, offset in stable.items():
            if offset is not None:
                self.committed[partition] = max(offset, self.committed.get(partition, 0))
        self.rewind()
        before = len(self._records)
        floor = self.committed
        self._records = [r for r in self._records if r.offset >= floor.get((r.topic, r.partition), 0)]
        return before - len(self._records)
