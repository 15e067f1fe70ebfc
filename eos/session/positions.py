"""Which input records wait, were handed out and were committed: the session's memory, no I/O.

Handed-out records are not kept: keeping a transaction's worth of them (tens of thousands) cost a fifth of the speed
and up to `eos.transaction.max.records` records of memory. What is kept is where the open transaction began in each
partition, and a rewind says where the consumer must go back to. What this module guarantees: per partition records
are handed out in offset order, none is skipped, none is handed out a second time but by a rewind, whatever the consumer
delivers (librdkafka has delivered an offset twice: its issues 4637 and 4686); the offsets of a transaction are exactly
those after its handed-out records. If you change it, read TransactSession.end and _resolve, and Membership.go_back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from eos import hotloop
from eos.records import format_position

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
    """Fetched records that wait, and what the open transaction took of those before them."""

    def __init__(self) -> None:
        self._waiting: list[R] = []
        self._last: list[R] = []  # the last batch taken; a part of it may still be given back
        self._taken_before = 0  # records taken before the last batch
        self._begins: dict[TopicPartition, int] = {}  # first offset that the transaction took, without the last batch
        self._nexts: dict[TopicPartition, int] = {}  # one after the last offset it took, without the last batch
        self._lost: set[TopicPartition] = set()  # of what the open transaction took
        self._behind: dict[TopicPartition, int] = {}  # the lowest offset that may come next
        self.repeated = 0
        """Records that the consumer delivered again: dropped."""
        # End of the partition as seen behind all fetched records (control markers included).
        self._ends: dict[TopicPartition, int] = {}
        self.committed: dict[TopicPartition, int] = {}
        """Next offset of each partition of ours, as far as this member committed or resolved it."""

    def __len__(self) -> int:
        """Records that wait to be handed out."""
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Records that the open transaction took."""
        return self._taken_before + len(self._last)

    @property
    def last_taken(self) -> R | None:
        """The record handed out last, if the open transaction took any."""
        return self._last[-1] if self._last else None

    @property
    def newest(self) -> R | None:
        """The record that was fetched last, if it still waits."""
        return self._waiting[-1] if self._waiting else None

    @property
    def first_timestamp_ms(self) -> int:
        """Timestamp of the record that is handed out next; -1 without one."""
        return getattr(self._waiting[0], "timestamp", -1) if self._waiting else -1

    def fetched(self, records: list[R]) -> None:
        """More records, behind all that wait. The list is the positions' from now on."""
        behind = self._drop_repeated(records)
        if self._waiting:
            self._waiting += records
        else:
            self._waiting = records
        self._behind |= behind

    def _drop_repeated(self, records: list[R]) -> dict[TopicPartition, int]:
        """Takes out what the consumer delivered before; returns the lowest offset that may come behind the rest."""
        behind: dict[TopicPartition, int] = {}
        repeated: list[slice] = []
        for start, stop in _runs(records):
            partition = _partition_of(records[start])
            lowest, fresh = behind.get(partition, self._behind.get(partition, 0)), start
            while fresh < stop and records[fresh].offset < lowest:
                fresh += 1
            if fresh > start:
                repeated.append(slice(start, fresh))
            if fresh < stop:
                behind[partition] = records[stop - 1].offset + 1
        for run in reversed(repeated):
            self.repeated += run.stop - run.start
            del records[run]
        return behind

    def holds(self, partition: TopicPartition) -> bool:
        """Records of it wait, or the open transaction took some."""
        return partition in self._begins or partition in map(_partition_of, [*self._last, *self._waiting])

    def passed(self, partition: TopicPartition, offset: int) -> bool:
        """The record at this offset, or one behind it, was fetched."""
        return self._behind.get(partition, 0) > offset

    def reached_end(self, partition: TopicPartition, offset: int) -> None:
        """The consumer stands at the end of a partition: nothing readable lies between its last record and `offset`."""
        self._ends[partition] = offset

    def take(self, most: int) -> list[R]:
        """The next records, at most `most`; they belong to the open transaction from now on."""
        waiting = self._waiting
        if not waiting or most <= 0:
            return []
        self._count_last()
        if most >= len(waiting):
            self._last, self._waiting = waiting, []
        else:
            self._last = waiting[:most]
            del waiting[:most]
        return self._last.copy()  # the caller's list is a user's to change

    def _count_last(self) -> None:
        """The last batch is handled for good: what matters of it from now on is where it began and ended."""
        begins, nexts = _span(self._last)
        self._taken_before += len(self._last)
        self._begins = begins | self._begins
        self._nexts |= nexts
        self._last = []

    def give_back(self, count: int) -> None:
        """The last `count` records of the last batch were not handled after all; they are handed out next."""
        if not 0 <= count <= len(self._last):
            raise ValueError(f"cannot give back {count} of the {len(self._last)} records taken last")
        if count == 0:
            return
        kept, back = self._last[:-count], self._last[-count:]
        self._last = kept
        # Those of a lost partition are another member's now.
        self._waiting[:0] = [r for r in back if (r.topic, r.partition) not in self._lost]

    def offsets(self) -> dict[TopicPartition, int]:
        """Next offset per partition of what was taken, which the transaction must commit with its outputs."""
        offsets = self._nexts | _span(self._last)[1]
        return offsets | self._finished_ends(offsets)

    def _finished_ends(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Ends of partitions all of whose records are taken: the markers and aborted records before them are passed."""
        if not self._ends:
            return {}
        waiting = set(map(_partition_of, self._waiting))
        return {
            partition: end
            for partition, end in self._ends.items()
            if partition not in waiting and end > max(offsets.get(partition, 0), self.committed.get(partition, 0))
        }

    def places(self) -> dict[TopicPartition, int]:
        """Where each partition of ours is committed, as far as anything of it is. (One that begins at its beginning,
        wherever that is, stands at 0.)"""
        return {partition: offset for partition, offset in self.committed.items() if offset > 0}

    def expected(self) -> dict[TopicPartition, int]:
        """Where the consumer must stand in each partition of ours: behind all that it fetched of it. Noted anew, for an
        exception (a signal's) may have ended the last noting half way."""
        self._behind = self.committed | self._nexts | _span(self._last)[1] | _span(self._waiting)[1]
        return self._behind.copy()

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that the open transaction was committed with these offsets. A partition that was revoked meanwhile is
        left out. An interrupted call can be repeated."""
        self.committed |= {p: offset for p, offset in offsets.items() if p in self.committed}
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._last, self._taken_before = [], 0
        self._begins, self._nexts, self._lost = {}, {}, set()

    def rewind(self) -> dict[TopicPartition, int]:
        """The transaction is known to be aborted. Returns where the consumer must fetch again: per partition that it
        took records of and that is still ours, the first of their offsets. What waited of those is dropped."""
        self._count_last()
        targets = {p: offset for p, offset in self._begins.items() if p not in self._lost}
        # An end that was seen lies behind records that come again: committing it now would skip them.
        self._drop(targets)
        self._begin_anew()
        self._behind |= targets
        return targets

    def _drop(self, partitions: Collection[TopicPartition]) -> None:
        """What waits of these partitions will be fetched again, or is not ours any more."""
        self._waiting = [r for r in self._waiting if (r.topic, r.partition) not in partitions]
        for partition in partitions:
            self._ends.pop(partition, None)

    def assigned(self, starts: Mapping[TopicPartition, int]) -> None:
        """New partitions and the offsets they begin at; whatever was known of them belongs to an earlier assignment."""
        self.forget(starts)
        self.committed |= starts
        self._behind |= starts

    def forget(self, partitions: Collection[TopicPartition]) -> bool:
        """Partitions that are not ours any more. True: the open transaction took records of them, so it must abort.

        A rewind leaves those alone; a partition that is assigned again before it begins at its committed offset.
        """
        gone = set(partitions)
        self._drop(gone)
        touched = gone & (self._begins.keys() | set(map(_partition_of, self._last)))
        self._lost |= touched
        for partition in gone:
            self.committed.pop(partition, None)
            self._behind.pop(partition, None)
        return bool(touched)

    def clear(self) -> None:
        """Nothing is ours any more: the consumer is given up, and with it all it fetched."""
        self._waiting, self._ends, self.committed, self._behind = [], {}, {}, {}
        self._begin_anew()

    def resolve(self, stable: Mapping[TopicPartition, int | None]) -> dict[TopicPartition, int]:
        """The transaction's outcome was unknown; `stable` are the group's stable committed offsets now. Returns where
        the consumer must fetch again, as `rewind` does: behind what turned out to be committed.

        An offset below one that this member saw committed is no reason to go back: those outputs are visible (a late
        TxnOffsetCommit can move the group back on old brokers; the next commit repairs it). None (no committed
        offset): the transaction did not commit, so the partition begins again where the transaction did.
        """
        for partition, offset in stable.items():
            if offset is not None and partition in self.committed:
                self.committed[partition] = max(offset, self.committed[partition])
        targets = {p: max(offset, self.committed.get(p, 0)) for p, offset in self.rewind().items()}
        self._behind |= targets
        return targets


def _runs(batch: list[R]) -> list[tuple[int, int]]:
    """Where in a batch the records of one partition with rising offsets begin and end. The client delivers such runs:
    what costs something happens once per run."""
    begins = hotloop.runs_of(batch)
    return list(zip(begins, [*begins[1:], len(batch)], strict=False))  # none in an empty batch


def _span(batch: list[R]) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """First offset, and one after the last, of each partition in a batch in order."""
    begins: dict[TopicPartition, int] = {}
    nexts: dict[TopicPartition, int] = {}
    for start, stop in _runs(batch):
        partition = _partition_of(batch[start])
        begins.setdefault(partition, batch[start].offset)
        nexts[partition] = batch[stop - 1].offset + 1
    return begins, nexts


def names_of(partitions: Iterable[TopicPartition]) -> str:
    return ",".join(format_position(topic, partition) for topic, partition in sorted(partitions))
