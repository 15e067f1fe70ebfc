"""Reads a topic for people: committed records, or all of them with what became of their transactions.

Owns the readers and the rule for a record's mark. It joins no group, commits nothing and creates no topic. What is read
may be aborted, open or committed; only the broker's two views together tell: a record that the uncommitted reader got
and the committed one passed by is aborted, and one at or behind the last stable offset is open (or waits behind one
that is).
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
from eos.kafka.client.failures import classify, denied
from eos.kafka.client.headers import unreadable
from eos.kafka.client.raising import raising
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import Record, place_of

T = TypeVar("T")
_ASK_S = 5.0
_POLL_S = 0.1
_MOST = 1_000
_QUEUE_BYTES = 16 << 20
_NO_PROGRESS_S = 30.0
_LEADER_S = 15.0  # a lost broker is given up after 9 s (broker.session.timeout.ms), then another leads
_NO_LEADER_YET = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)


class Mark(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"


class Seen(msgspec.Struct, frozen=True, gc=False):  # one for each record of a restore
    record: Record
    mark: Mark = Mark.COMMITTED


@dataclass(frozen=True)
class Span:
    """What a partition holds: from `low` to before `end`; committed readers get to before `stable`."""

    low: int
    stable: int
    end: int


def spans(settings: Settings, topic: str, timeout_s: float, world: World = REAL) -> dict[int, Span]:
    """Of each partition of a topic. Unavailable for an unreachable cluster, a topic that does not exist or a partition
    that finds no leader."""
    client = facts.connect(settings, timeout_s, world)
    since = world.now()
    while True:
        try:
            return spans_by(client, settings, topic)
        except _NotYet as error:
            if world.now() > since + error.patience_s:
                raise
        world.sleep(0.05)


class _NotYet(Unavailable):
    """What a topic that was just created looks like too, to a broker that has not heard of it."""

    patience_s = facts.NEW_TOPIC_S


class _NoLeaderYet(_NotYet):
    """The topic is there: one of its brokers is new to it, or one was lost."""

    patience_s = _LEADER_S


def spans_by(client: Any, settings: Settings, topic: str) -> dict[int, Span]:
    """The same, asked once by a client that is there, as facts.connect gives it."""
    found = facts.describe_topic(client, topic)
    if found.exists is None:
        raise stop_error(CallFailed("consume", Action.UNAUTHORISED, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    if not found.exists:
        raise _NotYet(
            f"topic {topic} does not exist at {settings.bootstrap_servers}",
            remedy=f"`eos topic create {topic}` makes it",
        )
    return held(client, topic, range(found.partitions))


def held(client: Any, topic: str, partitions: Iterable[int]) -> dict[int, Span]:
    """The same of some partitions of a topic that is there; `client` as facts.connect gives it."""
    return _all(each_held(client, topic, partitions))


def each_held(client: Any, topic: str, partitions: Iterable[int]) -> dict[int, Span | Unavailable]:
    """Return the same of each partition by itself, or why it is not known. A client that is asked about one without a
    leader waits for that leader, and answers about none meanwhile."""
    places = [TopicPartition(topic, partition) for partition in partitions]
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    low = _ends(client, places, OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)  # type: ignore[no-untyped-call]
    # In this order: ends only grow, so the later answer can never lie below the earlier one.
    stable = _ends(client, places, latest, IsolationLevel.READ_COMMITTED)
    end = _ends(client, places, latest, IsolationLevel.READ_UNCOMMITTED)
    found: dict[int, Span | Unavailable] = {}
    for partition in low:
        try:
            found[partition] = Span(*(_known(ends[partition]) for ends in (low, stable, end)))
        except Unavailable as error:
            found[partition] = error
    return found


def stable_ends(client: Any, topic: str, partitions: Iterable[int]) -> dict[int, int]:
    """The last stable offsets alone; `client` as facts.connect gives it."""
    places = [TopicPartition(topic, partition) for partition in partitions]
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    return _all(_ends(client, places, latest, IsolationLevel.READ_COMMITTED))


def older(client: Any, topic: str, low: Mapping[int, int], before_ms: int) -> set[int]:
    """Those of these partitions whose first record, at the offset `low`, was written before this moment by the records'
    timestamps. `client` as facts.connect gives it."""
    places = [TopicPartition(topic, partition) for partition in low]
    since = _all(_offsets(client, places, OffsetSpec.for_timestamp(before_ms), IsolationLevel.READ_UNCOMMITTED))
    return {partition for partition in low if since[partition] != low[partition]}  # -1: there is none so young


def _offsets(
    client: Any, places: list[TopicPartition], spec: Any, level: IsolationLevel
) -> dict[int, int | Unavailable]:
    asked = client.list_offsets(dict.fromkeys(places, spec), isolation_level=level, request_timeout=_ASK_S)
    found: dict[int, int | Unavailable] = {}
    for at, future in asked.items():
        try:
            found[at.partition] = future.result(_ASK_S * 2).offset
        except (KafkaException, TimeoutError) as error:
            new = isinstance(error, KafkaException) and error.args[0].code() in _NO_LEADER_YET
            kind = _NoLeaderYet if new else Unavailable
            why = kind(f"the offsets of {place_of(at.topic, at.partition)} are unavailable: {describe_error(error)}")
            why.__cause__ = error
            found[at.partition] = why
    return found


def _ends(client: Any, places: list[TopicPartition], spec: Any, level: IsolationLevel) -> dict[int, int | Unavailable]:
    """Return beginnings or ends: a negative offset is none that can be read to."""
    found = _offsets(client, places, spec, level)
    for partition, offset in found.items():
        if isinstance(offset, int) and offset < 0:
            where = place_of(places[0].topic, partition)
            found[partition] = Unavailable(f"the offsets of {where} are unavailable: a broker says {offset}")
    return found


def _all(found: Mapping[int, T | Unavailable]) -> dict[int, T]:
    """Return what is known of every partition. Raises the first Unavailable."""
    return {partition: _known(answer) for partition, answer in found.items()}


def _known(answer: T | Unavailable) -> T:
    if isinstance(answer, Unavailable):
        raise answer
    return answer


@dataclass
class _Lane:
    """One partition: how far each reader is, and what was read and has no mark yet."""

    committed_at: int
    all_at: int
    waiting: deque[Record] = field(default_factory=deque)
    visible: set[int] = field(default_factory=set)  # offsets that the committed reader got

    def marked(self, stable: Callable[[], int]) -> Iterator[Seen]:
        """What can be told now, in order. `stable` is asked only for what the committed reader has not passed."""
        while self.waiting and self.waiting[0].offset < self.committed_at:
            record = self.waiting.popleft()
            mark = Mark.COMMITTED if record.offset in self.visible else Mark.ABORTED
            self.visible.discard(record.offset)
            yield Seen(record, mark)
        if self.waiting:
            # Asked behind the reading: what lies behind the answer was open when it was read.
            first_open = max(stable(), self.committed_at)
            while self.waiting and self.waiting[0].offset >= first_open:
                yield Seen(self.waiting.popleft(), Mark.OPEN)


class TopicReader:
    """Reads the partitions of `starts` from these offsets on; `uncommitted`: all records, marked."""

    def __init__(
        self, settings: Settings, topic: str, starts: Mapping[int, int], uncommitted: bool, world: World = REAL
    ) -> None:
        self._topic, self._uncommitted, self._world, self.now = topic, uncommitted, world, world.now
        self.most = _MOST
        """How many records a read returns at the most: large ones take memory."""
        self._lanes = {partition: _Lane(start, start) for partition, start in starts.items()}
        places = [TopicPartition(topic, partition, start) for partition, start in starts.items()]
        self._committed = _consumer(settings, "read_committed", places, world)
        self._all = _consumer(settings, "read_uncommitted", places, world) if uncommitted else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._committed.close()
        if self._all is not None:
            self._all.close()

    def at(self, partition: int) -> int:
        """Everything before it was handed out, or is not for this reader."""
        lane = self._lanes[partition]
        if not self._uncommitted:
            return lane.committed_at
        return lane.waiting[0].offset if lane.waiting else lane.all_at

    def read(self) -> list[Seen]:
        """What came within a moment, in order per partition."""
        if self._all is None:
            return [Seen(record) for record in self._poll(self._committed, "committed_at", _POLL_S)]
        for record in self._poll(self._all, "all_at", _POLL_S):
            self._lanes[record.partition].waiting.append(record)
        for record in self._poll(self._committed, "committed_at", _POLL_S / 10):
            self._lanes[record.partition].visible.add(record.offset)
        lanes = self._lanes.items()
        return [seen for partition, lane in lanes for seen in lane.marked(functools.partial(self._stable, partition))]

    def _poll(self, consumer: Consumer, position: str, timeout_s: float) -> list[Record]:
        messages = raising(consumer.consume, self.most, timeout_s)
        records: list[Record] = hotloop.records_of(messages, Record, unreadable)
        for partition, offset in {record.partition: record.offset for record in records}.items():  # the last of each
            setattr(self._lanes[partition], position, offset + 1)
        again = False
        for message in messages if len(records) < len(messages) else ():
            if (error := message.error()) is not None:
                again |= self._stands_still(message, error, position)
        if again:
            self._world.sleep(_POLL_S)
            lanes = self._lanes.items()
            consumer.assign([TopicPartition(self._topic, number, getattr(lane, position)) for number, lane in lanes])
        return records

    def _stands_still(self, message: Message, error: KafkaError, position: str) -> bool:
        """Takes what is no record; says whether the client fetches no more of this partition."""
        if error.code() == KafkaError._PARTITION_EOF:
            # Behind aborted records and markers, which are not handed out.
            lane, end = self._lanes[message.partition() or 0], message.offset() or 0
            setattr(lane, position, max(end, getattr(lane, position)))
            return False
        action = classify("consume", error)
        if action is Action.INPUT_GONE:
            partition = message.partition() or 0
            if self._watermarks(partition)[0] > getattr(self._lanes[partition], position):
                raise InputGone(f"{self._topic}: what was to be read was removed meanwhile ({error.str()})")
            # A broker that has just come back may not have so much yet, or not know that it leads no more.
            log.debug("the reader asks again", error=describe_error(error))
            return True
        if action is Action.DAMAGED:
            where = f"{self._topic}[{message.partition()}]@{message.offset()} cannot be read"
            raise InputGone(f"{where}: what is stored there is damaged ({error.str()})")
        if action is not Action.RETRY:
            raise stop_error(CallFailed("consume", action, error, denied(error, topic=self._topic)))
        log.debug("the reader reports", error=describe_error(error))
        return False

    def _stable(self, partition: int) -> int:
        return self._watermarks(partition)[1]

    def _watermarks(self, partition: int) -> tuple[int, int]:
        """The first offset and the last stable one. Not known: nothing is called removed, and nothing open."""
        try:
            low, stable = self._committed.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=_ASK_S)
        except KafkaException as error:
            log.debug("where a partition begins and ends cannot be had", error=describe_error(error))
            return 0, 1 << 62
        return low, stable


def _consumer(settings: Settings, isolation: str, places: list[TopicPartition], world: World) -> Consumer:
    consumer = world.consumer(
        {
            **settings.admin(),
            "logger": log.client_logger,
            "group.id": "eos-topic-reader",  # librdkafka wants one; it is never joined
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.queue.backoff.ms": 5,
            "fetch.wait.max.ms": 50,
            # What is fetched and not yet read takes this much memory, whatever the number of partitions.
            "queued.max.messages.kbytes": _QUEUE_BYTES >> 10,
            "fetch.max.bytes": _QUEUE_BYTES,
        }
    )
    consumer.assign(places)
    return consumer


def read_until(reader: TopicReader, ends: Mapping[int, int]) -> Iterator[Seen]:
    """What is before these offsets; ends when all of it was read. Unavailable when nothing moves for long."""
    for got in reads_until(reader, ends):
        yield from got


def reads_until(reader: TopicReader, ends: Mapping[int, int]) -> Iterator[list[Seen]]:
    """The same, read by read: what came within a moment, which may be nothing. `ends` may lose some meanwhile."""
    deadline, begun = reader.now() + _NO_PROGRESS_S, len(ends)
    while left := {partition: end for partition, end in ends.items() if reader.at(partition) < end}:
        before = {partition: reader.at(partition) for partition in left}
        got = reader.read()
        # A look at each record costs 0.2 µs, of a million of them: only once some may lie behind an end.
        whole = len(ends) == begun and all(reader.at(partition) <= end for partition, end in ends.items())
        yield got if whole else [seen for seen in got if seen.record.offset < ends.get(seen.record.partition, 0)]
        if got or any(reader.at(partition) > at for partition, at in before.items()):
            deadline = reader.now() + _NO_PROGRESS_S
        elif reader.now() > deadline:
            partition, end = next(iter(left.items()))
            where = f"partition {partition} at {reader.at(partition)} of {end}"
            raise Unavailable(f"reading stands still for {_NO_PROGRESS_S:.0f} s: {where}")


def last(settings: Settings, topic: str, held: Mapping[int, Span], count: int, uncommitted: bool) -> list[Seen]:
    """The last `count` records of the topic by their timestamps, in order per partition. How far back they begin is
    not known: markers and aborted records take offsets too."""
    ends = ends_of(held, uncommitted)
    width = 2 * count + 10
    while True:
        starts = {partition: max(held[partition].low, end - width) for partition, end in ends.items()}
        with TopicReader(settings, topic, starts, uncommitted) as reader:
            found = list(read_until(reader, ends))
        lanes = {partition: [s for s in found if s.record.partition == partition] for partition in ends}
        if all(len(lanes[p]) >= count or starts[p] == held[p].low for p in lanes):
            return list(_merged(lane[-count:] for lane in lanes.values()))[-count:] if count else []
        width *= 4


def ends_of(held: Mapping[int, Span], uncommitted: bool) -> dict[int, int]:
    return {partition: span.end if uncommitted else span.stable for partition, span in held.items()}


def _merged(lanes: Iterator[list[Seen]]) -> Iterator[Seen]:
    """By timestamp, and never against a partition's own order, which its timestamps need not follow."""

    def keyed(lane: list[Seen]) -> Iterator[tuple[int, int, int, Seen]]:
        latest = -1
        for seen in lane:
            latest = max(latest, seen.record.timestamp)
            yield latest, seen.record.partition, seen.record.offset, seen

    return (keys[3] for keys in heapq.merge(*(keyed(lane) for lane in lanes), key=lambda keys: keys[:3]))
