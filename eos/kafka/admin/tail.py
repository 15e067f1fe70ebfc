"""Reads the records of a topic: only committed ones, or all of them with the state of their transactions.

Owns the readers and the rule for a record's mark. It joins no group, commits nothing and creates no topic. Two readers
together show whether a record is committed, aborted or open. A record that the read_uncommitted reader returned and the
read_committed one skipped is aborted. A record at or after the last stable offset is open (or follows an open record).
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from eos import hotloop, log
from eos.errors import Action, CallFailed, InputGone, Unavailable, describe_error, stop_error
from eos.kafka.admin import facts
from eos.kafka.client.client_calls import call_client
from eos.kafka.client.failures import classify, explain_denied
from eos.kafka.client.headers import read_damaged_headers
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import Record, format_position

T = TypeVar("T")
_REQUEST_TIMEOUT_S = 5.0
_POLL_S = 0.1
_MAX_RECORDS = 1_000
_QUEUE_BYTES = 16 << 20
_NO_PROGRESS_S = 30.0
_LEADER_TIMEOUT_S = 15.0  # a new leader is elected 9 s after a broker is lost (broker.session.timeout.ms)
_LEADER_NOT_READY_CODES = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)


class Mark(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"


class MarkedRecord(msgspec.Struct, frozen=True, gc=False):  # a Struct, because a restore makes one per record
    """Holds a record and the state of its transaction."""

    record: Record
    mark: Mark = Mark.COMMITTED


@dataclass(frozen=True)
class OffsetRange:
    """Holds the offsets of a partition: the first (`low`), the last stable one (`stable`) and the exclusive `end`."""

    low: int
    stable: int
    end: int


def topic_offsets(settings: Settings, topic: str, timeout_s: float, world: World = REAL) -> dict[int, OffsetRange]:
    """Return the offset range of each partition of a topic.

    Raise Unavailable if the cluster cannot be reached, the topic does not exist or a partition has no leader."""
    client = facts.connect(settings, timeout_s, world)
    since = world.now()
    while True:
        try:
            return topic_offsets_with(client, settings, topic)
        except _TopicNotReady as error:
            if world.now() > since + error.patience_s:
                raise
        world.sleep(0.05)


class _TopicNotReady(Unavailable):
    """Reports a missing topic, which may also be a new one that the broker does not know yet."""

    patience_s = facts.NEW_TOPIC_S


class _LeaderNotReady(_TopicNotReady):
    """Reports a partition whose leader is lost or does not know yet that it leads."""

    patience_s = _LEADER_TIMEOUT_S


def topic_offsets_with(client: Any, settings: Settings, topic: str) -> dict[int, OffsetRange]:
    """Return the same as `topic_offsets` from one query with a client of `facts.connect`."""
    found = facts.describe_topic(client, topic)
    if found.exists is None:
        raise stop_error(CallFailed("consume", Action.UNAUTHORISED, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    if not found.exists:
        raise _TopicNotReady(
            f"topic {topic} does not exist at {settings.bootstrap_servers}",
            remedy=f"`eos topic create {topic}` creates it",
        )
    return partition_offsets(client, topic, range(found.partitions))


def partition_offsets(client: Any, topic: str, partitions: Iterable[int]) -> dict[int, OffsetRange]:
    """Return the offset ranges of some partitions of an existing topic. `client`: from `facts.connect`."""
    return _require_all(partition_offsets_or_errors(client, topic, partitions))


def partition_offsets_or_errors(
    client: Any, topic: str, partitions: Iterable[int]
) -> dict[int, OffsetRange | Unavailable]:
    """Return the offset range of each partition, or why it is unavailable.

    A client that is asked about a partition without a leader waits for that leader before it answers at all."""
    topic_partitions = [TopicPartition(topic, partition) for partition in partitions]
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    low = _list_readable_offsets(client, topic_partitions, OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)  # type: ignore[no-untyped-call]
    # Query the last stable offsets first. Ends only grow, so an end that is queried later is never below the last
    # stable offset.
    stable = _list_readable_offsets(client, topic_partitions, latest, IsolationLevel.READ_COMMITTED)
    end = _list_readable_offsets(client, topic_partitions, latest, IsolationLevel.READ_UNCOMMITTED)
    found: dict[int, OffsetRange | Unavailable] = {}
    for partition in low:
        try:
            found[partition] = OffsetRange(*(_require(ends[partition]) for ends in (low, stable, end)))
        except Unavailable as error:
            found[partition] = error
    return found


def stable_offsets(client: Any, topic: str, partitions: Iterable[int]) -> dict[int, int]:
    """Return only the last stable offsets. `client`: from `facts.connect`."""
    topic_partitions = [TopicPartition(topic, partition) for partition in partitions]
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    return _require_all(_list_readable_offsets(client, topic_partitions, latest, IsolationLevel.READ_COMMITTED))


def partitions_older_than(client: Any, topic: str, low: Mapping[int, int], before_ms: int) -> set[int]:
    """Return the partitions whose first record, at offset `low`, has a timestamp before `before_ms`.

    `client`: from `facts.connect`."""
    topic_partitions = [TopicPartition(topic, partition) for partition in low]
    since = _require_all(
        _list_offsets(client, topic_partitions, OffsetSpec.for_timestamp(before_ms), IsolationLevel.READ_UNCOMMITTED)
    )
    return {partition for partition in low if since[partition] != low[partition]}  # -1 means that all records are older


def _list_offsets(
    client: Any, topic_partitions: list[TopicPartition], spec: Any, level: IsolationLevel
) -> dict[int, int | Unavailable]:
    asked = client.list_offsets(
        dict.fromkeys(topic_partitions, spec), isolation_level=level, request_timeout=_REQUEST_TIMEOUT_S
    )
    found: dict[int, int | Unavailable] = {}
    for at, future in asked.items():
        try:
            found[at.partition] = future.result(_REQUEST_TIMEOUT_S * 2).offset
        except (KafkaException, TimeoutError) as error:
            new = isinstance(error, KafkaException) and error.args[0].code() in _LEADER_NOT_READY_CODES
            kind = _LeaderNotReady if new else Unavailable
            why = kind(
                f"the offsets of {format_position(at.topic, at.partition)} are unavailable: {describe_error(error)}"
            )
            why.__cause__ = error
            found[at.partition] = why
    return found


def _list_readable_offsets(
    client: Any, topic_partitions: list[TopicPartition], spec: Any, level: IsolationLevel
) -> dict[int, int | Unavailable]:
    """Return first or end offsets; Unavailable replaces a negative one, because nothing could be read up to it."""
    found = _list_offsets(client, topic_partitions, spec, level)
    for partition, offset in found.items():
        if isinstance(offset, int) and offset < 0:
            where = format_position(topic_partitions[0].topic, partition)
            found[partition] = Unavailable(f"the offsets of {where} are unavailable: a broker answered {offset}")
    return found


def _require_all(found: Mapping[int, T | Unavailable]) -> dict[int, T]:
    """Return the answer for every partition. Raise the first Unavailable."""
    return {partition: _require(answer) for partition, answer in found.items()}


def _require(answer: T | Unavailable) -> T:
    if isinstance(answer, Unavailable):
        raise answer
    return answer


@dataclass
class _PartitionReader:
    """Holds each reader's position in one partition, and the records that have no mark yet."""

    committed_at: int
    all_at: int
    waiting: deque[Record] = field(default_factory=deque)
    visible: set[int] = field(default_factory=set)  # offsets that the committed reader returned

    def marked(self, stable: Callable[[], int]) -> Iterator[MarkedRecord]:
        """Yield the records whose mark is known, in order. `stable` returns the last stable offset. It is called only
        if the committed reader has not passed all records."""
        while self.waiting and self.waiting[0].offset < self.committed_at:
            record = self.waiting.popleft()
            mark = Mark.COMMITTED if record.offset in self.visible else Mark.ABORTED
            self.visible.discard(record.offset)
            yield MarkedRecord(record, mark)
        if self.waiting:
            # This query comes after the read. So the transaction of each record at or after the answered offset was
            # open during the read.
            first_open = max(stable(), self.committed_at)
            while self.waiting and self.waiting[0].offset >= first_open:
                yield MarkedRecord(self.waiting.popleft(), Mark.OPEN)


class TopicReader:
    """Reads the partitions of `starts` from these offsets on; with `uncommitted`, all records with marks."""

    def __init__(
        self, settings: Settings, topic: str, starts: Mapping[int, int], uncommitted: bool, world: World = REAL
    ) -> None:
        self._topic, self._uncommitted, self._world, self.now = topic, uncommitted, world, world.now
        self.most = _MAX_RECORDS
        """The maximum number of records of one read: large records take memory."""
        self._partitions = {partition: _PartitionReader(start, start) for partition, start in starts.items()}
        topic_partitions = [TopicPartition(topic, partition, start) for partition, start in starts.items()]
        self._committed = _consumer(settings, "read_committed", topic_partitions, world)
        self._all_reader = _consumer(settings, "read_uncommitted", topic_partitions, world) if uncommitted else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._committed.close()
        if self._all_reader is not None:
            self._all_reader.close()

    def at(self, partition: int) -> int:
        """Return the offset before which every record was returned or is invisible to this reader."""
        state = self._partitions[partition]
        if not self._uncommitted:
            return state.committed_at
        return state.waiting[0].offset if state.waiting else state.all_at

    def read(self) -> list[MarkedRecord]:
        """Return the records that arrive within 0.1 s, in order per partition."""
        if self._all_reader is None:
            return [MarkedRecord(record) for record in self._poll(self._committed, "committed_at", _POLL_S)]
        for record in self._poll(self._all_reader, "all_at", _POLL_S):
            self._partitions[record.partition].waiting.append(record)
        for record in self._poll(self._committed, "committed_at", _POLL_S / 10):
            self._partitions[record.partition].visible.add(record.offset)
        partitions = self._partitions.items()
        return [
            seen
            for partition, state in partitions
            for seen in state.marked(functools.partial(self._last_stable_offset, partition))
        ]

    def _poll(self, consumer: Consumer, position: str, timeout_s: float) -> list[Record]:
        messages = call_client(consumer.consume, self.most, timeout_s)
        records: list[Record] = hotloop.records_of(messages, Record, read_damaged_headers)
        for _, stop in hotloop.spans_of(records):
            last = records[stop - 1]
            setattr(self._partitions[last.partition], position, last.offset + 1)
        again = False
        for message in messages if len(records) < len(messages) else ():
            if (error := message.error()) is not None:
                again |= self._must_reassign(message, error, position)
        if again:
            self._world.sleep(_POLL_S)
            partitions = self._partitions.items()
            consumer.assign(
                [TopicPartition(self._topic, number, getattr(state, position)) for number, state in partitions]
            )
        return records

    def _must_reassign(self, message: Message, error: KafkaError, position: str) -> bool:
        """Handle a message that is an error. Return True if the client has stopped fetching from its partition."""
        if error.code() == KafkaError._PARTITION_EOF:
            # The end may be after aborted records and markers, which are not returned.
            state, end = self._partitions[message.partition() or 0], message.offset() or 0
            setattr(state, position, max(end, getattr(state, position)))
            return False
        action = classify("consume", error)
        if action is Action.INPUT_GONE:
            partition = message.partition() or 0
            if self._watermarks(partition)[0] > getattr(self._partitions[partition], position):
                raise InputGone(f"{self._topic}: retention removed records before they were read ({error.str()})")
            # A broker that has just restarted perhaps lacks these records, or does not know that it no longer leads.
            log.debug("topic reader retries", error=describe_error(error))
            return True
        if action is Action.DAMAGED:
            where = f"{self._topic}[{message.partition()}]@{message.offset()} cannot be read"
            raise InputGone(f"{where}: the stored data is damaged ({error.str()})")
        if action is not Action.RETRY:
            raise stop_error(CallFailed("consume", action, error, explain_denied(error, topic=self._topic)))
        log.debug("topic reader error", error=describe_error(error))
        return False

    def _last_stable_offset(self, partition: int) -> int:
        return self._watermarks(partition)[1]

    def _watermarks(self, partition: int) -> tuple[int, int]:
        """Return the first offset and the last stable one. If they are unknown, return values under which no record
        counts as removed or open."""
        try:
            low, stable = self._committed.get_watermark_offsets(
                TopicPartition(self._topic, partition), timeout=_REQUEST_TIMEOUT_S
            )
        except KafkaException as error:
            log.debug("partition offsets unavailable", error=describe_error(error))
            return 0, 1 << 62
        return low, stable


def _consumer(settings: Settings, isolation: str, topic_partitions: list[TopicPartition], world: World) -> Consumer:
    consumer = world.consumer(
        {
            **settings.admin(),
            "logger": log.client_logger,
            "group.id": "eos-topic-reader",  # librdkafka requires a group id, but the reader never joins the group
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.queue.backoff.ms": 5,
            "fetch.wait.max.ms": 50,
            # Limits the memory of prefetched records for any number of partitions.
            "queued.max.messages.kbytes": _QUEUE_BYTES >> 10,
            "fetch.max.bytes": _QUEUE_BYTES,
        }
    )
    consumer.assign(topic_partitions)
    return consumer


def read_until(reader: TopicReader, ends: Mapping[int, int]) -> Iterator[MarkedRecord]:
    """Yield the records before these offsets. Raise Unavailable after 30 s without progress."""
    for got in read_batches_until(reader, ends):
        yield from got


def read_batches_until(reader: TopicReader, ends: Mapping[int, int]) -> Iterator[list[MarkedRecord]]:
    """Yield the same records in one list per read; a list may be empty. The caller may remove partitions from
    `ends`."""
    deadline, begun = reader.now() + _NO_PROGRESS_S, len(ends)
    while left := {partition: end for partition, end in ends.items() if reader.at(partition) < end}:
        before = {partition: reader.at(partition) for partition in left}
        got = reader.read()
        # A check of each record costs 0.2 µs. So check records only if some of them may lie at or after an end.
        whole = len(ends) == begun and all(reader.at(partition) <= end for partition, end in ends.items())
        yield got if whole else [seen for seen in got if seen.record.offset < ends.get(seen.record.partition, 0)]
        if got or any(reader.at(partition) > at for partition, at in before.items()):
            deadline = reader.now() + _NO_PROGRESS_S
        elif reader.now() > deadline:
            partition, end = next(iter(left.items()))
            where = f"partition {partition} at {reader.at(partition)} of {end}"
            raise Unavailable(f"reading made no progress for {_NO_PROGRESS_S:.0f} s: {where}")


def read_last(
    settings: Settings, topic: str, offsets: Mapping[int, OffsetRange], count: int, uncommitted: bool
) -> list[MarkedRecord]:
    """Return the last `count` records of the topic by timestamp, in order per partition.

    Reads further back until there are enough, because markers and aborted records use offsets too."""
    ends = end_offsets(offsets, uncommitted)
    width = 2 * count + 10
    while True:
        starts = {partition: max(offsets[partition].low, end - width) for partition, end in ends.items()}
        with TopicReader(settings, topic, starts, uncommitted) as reader:
            found = list(read_until(reader, ends))
        by_partition = {partition: [s for s in found if s.record.partition == partition] for partition in ends}
        if all(len(by_partition[p]) >= count or starts[p] == offsets[p].low for p in by_partition):
            return (
                list(_merge_by_timestamp(found[-count:] for found in by_partition.values()))[-count:] if count else []
            )
        width *= 4


def end_offsets(offsets: Mapping[int, OffsetRange], uncommitted: bool) -> dict[int, int]:
    return {
        partition: offset_range.end if uncommitted else offset_range.stable
        for partition, offset_range in offsets.items()
    }


def _merge_by_timestamp(by_partition: Iterator[list[MarkedRecord]]) -> Iterator[MarkedRecord]:
    """Merge the partitions' records by timestamp, keeping each partition's order even if its timestamps do not."""

    def keyed(part: list[MarkedRecord]) -> Iterator[tuple[int, int, int, MarkedRecord]]:
        latest = -1
        for seen in part:
            latest = max(latest, seen.record.timestamp)
            yield latest, seen.record.partition, seen.record.offset, seen

    return (keys[3] for keys in heapq.merge(*(keyed(part) for part in by_partition), key=lambda keys: keys[:3]))
