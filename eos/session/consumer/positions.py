"""Track which input records wait, were taken and were committed: the session's memory, no I/O.

Taken records are not kept. Keeping a transaction's worth of them (tens of thousands) cost a fifth of the speed and up
to `eos.transaction.max.records` records of memory. This module keeps the offset at which the open transaction began in
each partition, and `rewind` returns the offsets to which the consumer must go back.

Guarantees for any order of deliveries (librdkafka has delivered an offset twice: its issues 4637 and 4686): per
partition, records are taken in offset order, none is skipped, and none is taken twice except after a rewind. The
offsets of a transaction are exactly those after its taken records. If you change this module, read Loop._end,
Recovery._resolve and GroupConsumer.seek.
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
    """Holds the fetched records that wait, and the offsets of the records that the open transaction took."""

    def __init__(self) -> None:
        self._waiting_records: list[R] = []
        self._last_batch: list[R] = []  # the last batch taken; a part of it may still be given back
        self._taken_before = 0  # records taken before the last batch
        self._begin_offsets: dict[
            TopicPartition, int
        ] = {}  # first offset that the transaction took before the last batch
        # The offset after the last record that the transaction took before the last batch.
        self._next_offsets: dict[TopicPartition, int] = {}
        self._lost_partitions: set[TopicPartition] = (
            set()
        )  # partitions lost after the open transaction took records of them
        self._next_fetch: dict[TopicPartition, int] = {}  # the lowest offset that may arrive next
        self.repeated = 0
        """Records that the consumer delivered again; they are dropped."""
        # End of the partition as seen after all fetched records, control markers included.
        self._ends: dict[TopicPartition, int] = {}
        self.committed: dict[TopicPartition, int] = {}
        """Next offset of each owned partition, as far as this member committed or resolved it."""

    def __len__(self) -> int:
        """Return the number of waiting records."""
        return len(self._waiting_records)

    @property
    def taken(self) -> int:
        """Return the number of records that the open transaction took."""
        return self._taken_before + len(self._last_batch)

    @property
    def last_taken(self) -> R | None:
        """Return the last record that the open transaction took."""
        return self._last_batch[-1] if self._last_batch else None

    @property
    def newest(self) -> R | None:
        """Return the record that was fetched last, if it still waits."""
        return self._waiting_records[-1] if self._waiting_records else None

    @property
    def first_timestamp_ms(self) -> int:
        """Return the timestamp of the first waiting record; -1 if none waits."""
        return getattr(self._waiting_records[0], "timestamp", -1) if self._waiting_records else -1

    # ---- records ----------------------------------------------------------------------------------------------

    def add_fetched(self, records: list[R]) -> None:
        """Append fetched records to the waiting ones. The list belongs to this object from now on."""
        next_fetch = self._drop_repeated(records)
        if self._waiting_records:
            self._waiting_records += records
        else:
            self._waiting_records = records
        self._next_fetch |= next_fetch

    def _drop_repeated(self, records: list[R]) -> dict[TopicPartition, int]:
        """Remove records that the consumer delivered before; return the lowest offset that may follow the remaining
        records.
        """
        next_fetch: dict[TopicPartition, int] = {}
        repeated: list[slice] = []
        for start, stop in hotloop.spans_of(records):
            partition = _partition_of(records[start])
            lowest, fresh = next_fetch.get(partition, self._next_fetch.get(partition, 0)), start
            while fresh < stop and records[fresh].offset < lowest:
                fresh += 1
            if fresh > start:
                repeated.append(slice(start, fresh))
            if fresh < stop:
                next_fetch[partition] = records[stop - 1].offset + 1
        for run in reversed(repeated):
            self.repeated += run.stop - run.start
            del records[run]
        return next_fetch

    def holds(self, partition: TopicPartition) -> bool:
        """Return whether records of this partition wait, or the open transaction took some."""
        return partition in self._begin_offsets or partition in map(
            _partition_of, [*self._last_batch, *self._waiting_records]
        )

    def has_passed(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether the record at this offset, or a later one, was fetched."""
        return self._next_fetch.get(partition, 0) > offset

    def reach_end(self, partition: TopicPartition, offset: int) -> None:
        """Record that the consumer is at the end of a partition, so no further readable record lies before `offset`."""
        self._ends[partition] = offset

    def find_end(self, partition: TopicPartition) -> int | None:
        """Return the end of a partition whose records are all taken; None if it has more, or if its end is unknown."""
        end = self._ends.get(partition)
        if end is None or self._next_fetch.get(partition, 0) > end:
            return None
        return None if partition in map(_partition_of, self._waiting_records) else end

    def take(self, most: int) -> list[R]:
        """Return at most `most` waiting records, which belong to the open transaction from now on."""
        waiting = self._waiting_records
        if not waiting or most <= 0:
            return []
        self._reduce_last_batch()
        if most >= len(waiting):
            self._last_batch, self._waiting_records = waiting, []
        else:
            self._last_batch = waiting[:most]
            del waiting[:most]
        return self._last_batch.copy()  # user code may change the caller's list

    def _reduce_last_batch(self) -> None:
        """Reduce the last batch, which can no longer be given back, to the offsets at which it began and ended."""
        begins, nexts = _span(self._last_batch)
        self._taken_before += len(self._last_batch)
        self._begin_offsets = begins | self._begin_offsets
        self._next_offsets |= nexts
        self._last_batch = []

    def give_back(self, count: int) -> None:
        """Put the last `count` records of the last batch back, because they were not handled; they are taken next."""
        if not 0 <= count <= len(self._last_batch):
            raise ValueError(f"cannot give back {count} of the {len(self._last_batch)} records taken last")
        if count == 0:
            return
        kept, back = self._last_batch[:-count], self._last_batch[-count:]
        self._last_batch = kept
        # Records of a lost partition belong to another member now.
        self._waiting_records[:0] = [r for r in back if (r.topic, r.partition) not in self._lost_partitions]

    # ---- offsets ----------------------------------------------------------------------------------------------

    def offsets(self) -> dict[TopicPartition, int]:
        """Return the next offset per partition of the taken records, which the transaction must commit."""
        offsets = self._next_offsets | _span(self._last_batch)[1]
        return offsets | self._finished_ends(offsets)

    def _finished_ends(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return the end offset of each partition whose records are all taken.

        Committing it skips trailing markers and aborted records.
        """
        if not self._ends:
            return {}
        waiting = set(map(_partition_of, self._waiting_records))
        return {
            partition: end
            for partition, end in self._ends.items()
            if partition not in waiting and end > max(offsets.get(partition, 0), self.committed.get(partition, 0))
        }

    def committed_offsets(self) -> dict[TopicPartition, int]:
        """Return the committed offset of each owned partition that has one. (A partition that starts at its beginning,
        wherever that is, has 0.)"""
        return {partition: offset for partition, offset in self.committed.items() if offset > 0}

    def rebuild_next_fetch(self) -> dict[TopicPartition, int]:
        """Return the offset that the consumer must fetch next in each owned partition: after all records fetched so
        far. Replaces the stored offsets, because an exception in a signal handler may have interrupted their last
        update."""
        self._next_fetch = (
            self.committed | self._next_offsets | _span(self._last_batch)[1] | _span(self._waiting_records)[1]
        )
        return self._next_fetch.copy()

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Record that the open transaction was committed with these offsets. A partition that was revoked meanwhile is
        left out. An interrupted call can be repeated."""
        self.committed |= {p: offset for p, offset in offsets.items() if p in self.committed}
        self._reset()

    def _reset(self) -> None:
        self._last_batch, self._taken_before = [], 0
        self._begin_offsets, self._next_offsets, self._lost_partitions = {}, {}, set()

    def rewind(self) -> dict[TopicPartition, int]:
        """Go back to the start of an aborted transaction. Return the offsets from which the consumer must fetch again:
        for each partition that is still owned, the offset of the first record taken. Waiting records of these
        partitions are dropped."""
        self._reduce_last_batch()
        targets = {p: offset for p, offset in self._begin_offsets.items() if p not in self._lost_partitions}
        # Forget the known ends of these partitions. The records before an end will be fetched again, and a commit of
        # the end would skip them.
        self._drop(targets)
        self._reset()
        self._next_fetch |= targets
        return targets

    def _drop(self, partitions: Collection[TopicPartition]) -> None:
        """Drop waiting records and known ends of these partitions."""
        self._waiting_records = [r for r in self._waiting_records if (r.topic, r.partition) not in partitions]
        for partition in partitions:
            self._ends.pop(partition, None)

    def resolve(self, stable: Mapping[TopicPartition, int | None]) -> dict[TopicPartition, int]:
        """Continue after a commit whose outcome was unknown. `stable`: the group's committed offsets now; None for a
        partition without one. Return the offsets from which the consumer must fetch again, as `rewind` does: for each
        partition the first uncommitted one.

        If the group's offset is below one that this member saw committed, the consumer does not go back, because the
        outputs of the records between the two are visible. (On old brokers a late TxnOffsetCommit can move the group
        back; the next commit repairs it.) A partition without a committed offset starts again where the transaction
        started, because the transaction did not commit.
        """
        for partition, offset in stable.items():
            if offset is not None and partition in self.committed:
                self.committed[partition] = max(offset, self.committed[partition])
        targets = {p: max(offset, self.committed.get(p, 0)) for p, offset in self.rewind().items()}
        self._next_fetch |= targets
        return targets

    # ---- the assignment ---------------------------------------------------------------------------------------

    def assign(self, starts: Mapping[TopicPartition, int]) -> None:
        """Add partitions with their start offsets; drop everything known from an earlier assignment of them."""
        self.forget(starts)
        self.committed |= starts
        self._next_fetch |= starts

    def forget(self, partitions: Collection[TopicPartition]) -> bool:
        """Drop partitions that are no longer owned. Return True if the open transaction took records of them, so that
        it must abort. A rewind leaves such partitions alone; if one is assigned again, it starts at its committed
        offset."""
        gone = set(partitions)
        self._drop(gone)
        touched = gone & (self._begin_offsets.keys() | set(map(_partition_of, self._last_batch)))
        self._lost_partitions |= touched
        for partition in gone:
            self.committed.pop(partition, None)
            self._next_fetch.pop(partition, None)
        return bool(touched)

    def clear(self) -> None:
        """Drop everything: the consumer is replaced, and its fetched records are outdated."""
        self._waiting_records, self._ends, self.committed, self._next_fetch = [], {}, {}, {}
        self._reset()


def _span(batch: list[R]) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return, per partition of an ordered batch, the first offset and one after the last."""
    begins: dict[TopicPartition, int] = {}
    nexts: dict[TopicPartition, int] = {}
    for start, stop in hotloop.spans_of(batch):
        partition = _partition_of(batch[start])
        begins.setdefault(partition, batch[start].offset)
        nexts[partition] = batch[stop - 1].offset + 1
    return begins, nexts


def names_of(partitions: Iterable[TopicPartition]) -> str:
    return ",".join(format_position(topic, partition) for topic, partition in sorted(partitions))
