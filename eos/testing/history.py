"""Reads the contents of Kafka into the checker's arrays: topics, committed offsets, ends, and a reader's view.

Owns the reading and its completeness: a read either reaches the end of every partition or raises, and never silently
returns less. It must never judge (eos/testing/checker.py does), commit an offset, join a group or create a topic:
reading a history must not change it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec
from numpy.typing import NDArray

from eos.errors import Action, ConfigurationError, EosError, InputGone, NotAuthorised, Unavailable
from eos.kafka.admin import facts
from eos.kafka.client.failures import classify
from eos.kafka.client.headers import read_headers
from eos.kafka.client.librdkafka_names import CONSUMER_ONLY
from eos.records import read_metadata, readable_headers
from eos.testing.checker import Ends, Inputs, Outputs
from eos.testing.lineage import unstamp_many

Isolation = Literal["read_committed", "read_uncommitted"]
Partition = tuple[str, int]
T = TypeVar("T")

BATCH_RECORDS = 10_000
POLL_S = 0.1
NO_PROGRESS_S = 30.0
# A topic that one broker just created may be unknown to another one for a moment.
_NEW_TOPIC_S = 5.0
_NEW_TOPIC_CODES = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)

_EXCEPTIONS: dict[Action, type[EosError]] = {
    Action.UNAUTHORISED: NotAuthorised,
    Action.INPUT_GONE: InputGone,
    Action.DAMAGED: InputGone,
    Action.MISCONFIGURED: ConfigurationError,
}


@dataclass(frozen=True, eq=False)
class Log:
    """Holds records as they were read: per partition in offset order, partitions interleaved.

    `topic` (n,) int32 is an index into `topics`, `partition` (n,) int32, `offset` (n,) int64, `timestamp` (n,) int64 in
    ms since 1970 (-1: none). `keys` and `values` are lists of n (empty if contents were not kept). `headers` is such a
    list, or None if no header was requested.
    """

    topics: tuple[str, ...]
    topic: NDArray[np.int32]
    partition: NDArray[np.int32]
    offset: NDArray[np.int64]
    timestamp: NDArray[np.int64]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[bytes | None] | None = None

    def __len__(self) -> int:
        return len(self.offset)

    def inputs(self) -> Inputs:
        """Return the records as the checker's inputs."""
        return Inputs(topics=self.topics, topic=self.topic, partition=self.partition, offset=self.offset)

    def outputs(self) -> Outputs:
        """Return the records as the checker's outputs. The stamps are in the requested header or, without a header, at
        the start of the values.

        Raises ValueError naming the first record without a stamp.
        """
        stamped = self.values if self.headers is None else self.headers
        try:
            source = unstamp_many(stamped)
        except ValueError as error:
            where = next(i for i, value in enumerate(stamped) if value is None or len(value) < 20)
            partition = f"{self.topics[self.topic[where]]}[{self.partition[where]}]@{self.offset[where]}"
            raise ValueError(f"{partition} has no stamp that names its input record: {error}") from error
        return Outputs(
            topics=self.topics,
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            source_topic=source.topic,
            source_partition=source.partition,
            source_offset=source.offset,
            copy=source.copy,
        )


def read_topic(
    bootstrap: str,
    topics: str | Sequence[str],
    isolation: Isolation = "read_committed",
    config: Mapping[str, Any] | None = None,
    *,
    header: str | None = None,
    contents: bool = True,
    upto: Mapping[Partition, int] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    no_progress_s: float = NO_PROGRESS_S,
) -> Log:
    """Return every record of the topics from the beginning to the end, as of the start of the call.

    The end is the last stable offset for read_committed, the high watermark for read_uncommitted, or `upto`, which must
    not exceed those; partitions not in `upto` are not read. `header`: also keep the last value of that header.
    `contents` False: keys and values are not kept. `progress(done, total)` gets the offsets passed and their total.
    `config`: more settings of the consumer (TLS, SASL); settings that make the read complete cannot be overridden.
    Raises `Unavailable` with the unread partitions if nothing moves for `no_progress_s`.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    if upto is None:
        ends = end_offsets(bootstrap, names, config)
        upto = ends.stable if isolation == "read_committed" else ends.log_end
    reading = _Reading(names, header, upto, contents)
    consumer = Consumer(_reader_config(bootstrap, isolation, config))
    try:
        # A partition that ends at 0 needs no query for its beginning.
        unread = sorted(reading.unfinished())
        beginnings = _beginnings(_admin(bootstrap, config), unread) if unread else []
        reading.begin(beginnings)
        consumer.assign([at for at in beginnings if (at.topic, at.partition) in reading.unfinished()])
        deadline = time.monotonic() + no_progress_s
        while waiting := reading.unfinished():
            messages = consumer.consume(BATCH_RECORDS, POLL_S)
            if reading.add(messages):
                progress(*reading.progress())
                deadline = time.monotonic() + no_progress_s
                for partition in reading.newly_finished(waiting):
                    consumer.pause([TopicPartition(*partition)])
            elif time.monotonic() > deadline:
                raise Unavailable(f"reading {isolation}: no progress for {no_progress_s:g} s; {reading.missing()}")
    finally:
        consumer.close()
    return reading.log()


def committed_offsets(
    bootstrap: str,
    group: str,
    topics: str | Sequence[str],
    config: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = NO_PROGRESS_S,
) -> dict[Partition, int]:
    """Return the group's stable committed offsets without metadata; otherwise the same as `committed_with_metadata`."""
    found = committed_with_metadata(bootstrap, group, topics, config, timeout_s=timeout_s)
    return {partition: offset for partition, (offset, _) in found.items()}


def committed_with_metadata(
    bootstrap: str,
    group: str,
    topics: str | Sequence[str],
    config: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = NO_PROGRESS_S,
) -> dict[Partition, tuple[int, str | None]]:
    """Return the group's stable committed offsets with their metadata, without partitions that have none.

    Stable (KIP-447): while a transaction with offsets of this group is open, the broker answers UNSTABLE_OFFSET_COMMIT
    and the call waits, so it never returns an offset that is later aborted. It does not join the group. Raises
    `Unavailable` if the wait exceeds `timeout_s`.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    partitions = _partitions(_admin(bootstrap, config), names, timeout_s)
    settings = _reader_config(bootstrap, "read_committed", config) | {"group.id": group}
    consumer = Consumer(settings)

    def query_committed() -> list[TopicPartition]:
        answer = consumer.committed(
            [TopicPartition(*partition) for partition in partitions], timeout=min(timeout_s, 5.0)
        )
        for answered in answer:
            if answered.error is not None:
                raise KafkaException(answered.error)
        return answer

    try:
        found = _query_until(f"committed offsets of group {group}", timeout_s, query_committed)
    finally:
        consumer.close()
    return {
        (answered.topic, answered.partition): (answered.offset, read_metadata(answered))
        for answered in found
        if answered.offset >= 0
    }


def end_offsets(
    bootstrap: str,
    topics: str | Sequence[str],
    config: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = NO_PROGRESS_S,
) -> Ends:
    """Return (last stable offsets, log end offsets) of every partition; the log end is the high watermark."""
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    admin = _admin(bootstrap, config)
    partitions = _partitions(admin, names, timeout_s)

    # Query the stable ends first. Ends only grow, so the later result is never below the earlier one.
    stable = _offsets(admin, partitions, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED, timeout_s)  # type: ignore[no-untyped-call]
    log_end = _offsets(admin, partitions, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED, timeout_s)  # type: ignore[no-untyped-call]
    return Ends(stable, log_end)


class ConcurrentReader:
    """Reads topics on a thread from the beginning during a run, and keeps the delivered records in order.

    For use by one thread: `with ConcurrentReader(...) as reader: ...; reader.wait_for_ends(ends)`, and then
    `reader.collect_outputs()`. It reads the partitions that the topics have at the start. An error that a retry cannot
    fix ends the thread, and the next call raises it. Truncation below the reader's position is such an error
    (`InputGone`).
    """

    def __init__(
        self,
        bootstrap: str,
        topics: str | Sequence[str],
        config: Mapping[str, Any] | None = None,
        *,
        isolation: Isolation = "read_committed",
        header: str | None = None,
    ) -> None:
        self.topics = (topics,) if isinstance(topics, str) else tuple(topics)
        self._connect = (bootstrap, config)
        self._settings = _reader_config(bootstrap, isolation, config)
        self._reading = _Reading(self.topics, header, None)
        self._changed = threading.Condition()  # guards _reading and _error
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="concurrent-reader", daemon=True)

    def start(self) -> Self:
        """Start to read; the partitions and their beginnings are known on return."""
        admin = _admin(*self._connect)
        self._beginnings = _beginnings(admin, _partitions(admin, self.topics, NO_PROGRESS_S))
        self._thread.start()
        return self

    def stop(self) -> Log:
        """Stop the thread, and return the records delivered so far; a second call is allowed."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        return self.log()

    def log(self) -> Log:
        """Return the records delivered so far, in the order of delivery."""
        with self._changed:
            self._raise_error()
            return self._reading.log()

    def collect_outputs(self) -> Outputs:
        """Return `log()` with its lineage, in the form that the checker takes as `seen`."""
        return self.log().outputs()

    @property
    def records(self) -> int:
        """Return how many records were delivered so far."""
        with self._changed:
            return len(self._reading)

    @property
    def positions(self) -> dict[Partition, int]:
        """Return the next offset of each partition; it passes markers and aborted records at the end of a log."""
        with self._changed:
            return dict(self._reading.positions)

    def wait_for_records(self, count: int, timeout_s: float = NO_PROGRESS_S) -> None:
        """Wait until `count` records were delivered. Raise `Unavailable` after `timeout_s`."""
        self._wait(lambda: len(self._reading) >= count, f"{count} records", timeout_s)

    def wait_for_ends(self, ends: Mapping[Partition, int], timeout_s: float = NO_PROGRESS_S) -> None:
        """Wait until every partition is read up to its end in `ends`. Raise `Unavailable` after `timeout_s`."""
        at = self._reading.positions
        self._wait(lambda: all(at.get(p, 0) >= end for p, end in ends.items()), f"the ends {dict(ends)}", timeout_s)

    def _wait(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or done(), timeout_s)
            self._raise_error()
            if not done():
                found = f"{len(self._reading)} records, positions {self._reading.positions}"
                raise Unavailable(f"the concurrent reader waited {timeout_s:g} s for {what}, but has {found}")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        consumer = Consumer(self._settings)
        try:
            consumer.assign(self._beginnings)
            while not self._stopping.is_set():
                # consume() returns only when it has BATCH_RECORDS messages or the timeout has passed, so the timeout
                # is small.
                messages = consumer.consume(BATCH_RECORDS, POLL_S)
                with self._changed:
                    if self._reading.add(messages):
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the next caller gets it, not this thread
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            consumer.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()


class _Reading:
    """Collects messages into columns, and tracks how far each partition is read."""

    def __init__(
        self,
        topics: tuple[str, ...],
        header: str | None,
        targets: Mapping[Partition, int] | None,
        contents: bool = True,
    ) -> None:
        self.topics = topics
        self.positions: dict[Partition, int] = {}
        self._contents = contents
        self._total = 0
        self._header = header
        self._targets = targets
        self._partition_numbers: dict[Partition, int] = {}  # a number per partition, in the order of first appearance
        self._partition_column: list[int] = []
        self._offset: list[int] = []
        self._timestamp: list[int] = []
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._headers: list[bytes | None] = []
        self._last_error: KafkaError | None = None

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, messages: Sequence[Message]) -> bool:
        """Add the messages that the consumer returned; return whether a position moved.

        Raises the error of a message if no retry can fix it.
        """
        records = [message for message in messages if message.error() is None]
        moved = bool(records)
        if records:
            self._add_records(records)
        if len(records) < len(messages):
            # Add events after the records: the consumer reports the end of a partition after its last record, never
            # before it.
            for message in messages:
                if (error := message.error()) is not None:
                    moved |= self._add_event(message, error)
        return moved

    def _add_records(self, records: list[Message]) -> None:
        """Add records column by column, because a method call per record and column is the main cost of reading."""
        # The client's types allow None, which only an event without a partition returns.
        partitions = cast("list[Partition]", [(m.topic(), m.partition()) for m in records])
        offsets = cast("list[int]", [m.offset() for m in records])
        if self._targets is not None:
            inside = [offset < self._targets[partition] for partition, offset in zip(partitions, offsets, strict=True)]
            if not all(inside):
                # These records were written after the read began. They are not part of the result, but show that all
                # earlier records were read.
                self.positions |= {
                    partition: self._targets[partition] for partition in compress(partitions, map(not_, inside))
                }
                records, partitions = list(compress(records, inside)), list(compress(partitions, inside))
                offsets = list(compress(offsets, inside))
        # the last offset of each partition remains
        for partition, offset in dict(zip(partitions, offsets, strict=True)).items():
            self.positions[partition] = max(offset + 1, self.positions.get(partition, 0))
            self._partition_numbers.setdefault(partition, len(self._partition_numbers))
        self._partition_column.extend(map(self._partition_numbers.__getitem__, partitions))
        self._offset.extend(offsets)
        self._timestamp.extend([at if kind else -1 for kind, at in (m.timestamp() for m in records)])
        if self._contents:
            self._keys.extend([m.key() for m in records])
            self._values.extend([m.value() for m in records])
        if self._header is not None:
            self._headers.extend([_last_header(m, self._header) for m in records])

    def _add_event(self, message: Message, error: KafkaError) -> bool:
        if error.code() != KafkaError._PARTITION_EOF:
            self._raise_unless_temporary(error)
            return False
        # The consumer reached this end, so every earlier record was delivered, was aborted or is a marker.
        partition, end = cast("tuple[Partition, int]", ((message.topic(), message.partition()), message.offset()))
        before = self.positions.get(partition, -1)
        self.positions[partition] = max(end, before)
        return before < end

    def _raise_unless_temporary(self, error: KafkaError) -> None:
        action = classify("consume", error)
        if action is not Action.RETRY:
            raise _EXCEPTIONS.get(action, Unavailable)(f"reading failed: {error.str()}")
        self._last_error = error

    def begin(self, beginnings: Sequence[TopicPartition]) -> None:
        """Set the beginnings of the partitions: earlier records were removed, and are not missing."""
        self.positions |= {(at.topic, at.partition): at.offset for at in beginnings}
        self._total = self._remaining()

    def _remaining(self) -> int:
        return sum(max(0, end - self.positions.get(partition, 0)) for partition, end in (self._targets or {}).items())

    def progress(self) -> tuple[int, int]:
        """Return how many offsets have been read so far, and how many there are in total."""
        return self._total - self._remaining(), self._total

    def unfinished(self) -> set[Partition]:
        """Return the partitions that are not read up to their target; one that ends at 0 has nothing to read."""
        targets = self._targets or {}
        return {partition for partition, end in targets.items() if self.positions.get(partition, 0) < end}

    def newly_finished(self, waiting: set[Partition]) -> set[Partition]:
        return waiting - self.unfinished()

    def missing(self) -> str:
        targets = self._targets or {}
        left = ", ".join(
            f"{t}[{p}] at {self.positions.get((t, p), 0)} of {targets[t, p]}" for t, p in self.unfinished()
        )
        why = f"; last error: {self._last_error.str()}" if self._last_error else ""
        return f"unread: {left}{why}"

    def log(self) -> Log:
        column = np.array(self._partition_column, np.int64)
        index = {topic: i for i, topic in enumerate(self.topics)}
        return Log(
            topics=self.topics,
            topic=np.array([index[topic] for topic, _ in self._partition_numbers], np.int32)[column],
            partition=np.array([partition for _, partition in self._partition_numbers], np.int32)[column],
            offset=np.array(self._offset, np.int64),
            timestamp=np.array(self._timestamp, np.int64),
            keys=list(self._keys),
            values=list(self._values),
            headers=list(self._headers) if self._header is not None else None,
        )


def _last_header(message: Message, name: str) -> bytes | None:
    """Return the last value of that header, as Kafka's own `lastHeader` does."""
    given = readable_headers(read_headers(message))
    return next((value for found, value in reversed(given) if found == name), None)


def _reader_config(bootstrap: str, isolation: Isolation, config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "log_level": 0,  # the client's lines would mix with the user's; its errors are raised anyway
        # With librdkafka's default, fetching pauses for 1000 ms whenever the queue is full, and a backlog takes 3.7
        # times as long.
        "fetch.queue.backoff.ms": 5,
        # A partition at its end delays the response of its whole broker by this time (librdkafka's default is 500 ms).
        "fetch.wait.max.ms": 20,
        "reconnect.backoff.max.ms": 1_000,
        # librdkafka requires a group id even for assign(). The reader never joins the group, and never commits.
        "group.id": "eos-history-reader",
        **(config or {}),
        "bootstrap.servers": bootstrap,
        "isolation.level": isolation,
        "enable.partition.eof": True,
        "enable.auto.commit": False,
        "allow.auto.create.topics": False,
        # A jump over records that retention removed during the read would look like a loss, or hide one.
        "auto.offset.reset": "error",
        "check.crcs": True,
    }


def _admin(bootstrap: str, config: Mapping[str, Any] | None) -> AdminClient:
    given = {name: value for name, value in (config or {}).items() if name not in CONSUMER_ONLY}
    return AdminClient({"log_level": 0, "reconnect.backoff.max.ms": 1_000, **given, "bootstrap.servers": bootstrap})


def _partitions(admin: AdminClient, topics: tuple[str, ...], timeout_s: float) -> list[Partition]:
    """Return all partitions of the topics. It uses DescribeTopics, because a Metadata request may create a topic."""

    def query_partitions() -> list[Partition]:
        answer = admin.describe_topics(TopicCollection(list(topics)), request_timeout=min(timeout_s, 5.0))
        return [(topic, p.id) for topic, future in answer.items() for p in future.result().partitions]

    return _query_until(f"partitions of {', '.join(topics)}", timeout_s, query_partitions)


def _offsets(
    admin: AdminClient, partitions: Sequence[Partition], spec: Any, level: IsolationLevel, timeout_s: float
) -> dict[Partition, int]:
    def query_offsets() -> dict[Partition, int]:
        wanted = {TopicPartition(*partition): spec for partition in partitions}
        answer = admin.list_offsets(wanted, isolation_level=level, request_timeout=min(timeout_s, 5.0))
        return {(at.topic, at.partition): future.result().offset for at, future in answer.items()}

    return _query_until("offsets of the partitions", timeout_s, query_offsets)


def beginnings(
    bootstrap: str, topics: str | Sequence[str], config: Mapping[str, Any] | None = None
) -> dict[Partition, int]:
    """Return the first offset that each partition still holds."""
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    admin = _admin(bootstrap, config)
    found = _beginnings(admin, _partitions(admin, names, NO_PROGRESS_S))
    return {(at.topic, at.partition): at.offset for at in found}


def cleanup_policies(
    bootstrap: str, topics: str | Sequence[str], config: Mapping[str, Any] | None = None
) -> dict[str, str | None]:
    """Return each topic's cleanup.policy; None if it cannot be read, most likely for lack of permission."""
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    found = facts.describe_configs(_admin(bootstrap, config), names)
    return {name: found.get(("topic", name), {}).get("cleanup.policy") for name in names}


def _beginnings(admin: AdminClient, partitions: Sequence[Partition]) -> list[TopicPartition]:
    """Return the first offset of each partition as a number: the consumer's OFFSET_BEGINNING costs a wait of 500 ms."""
    spec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
    found = _offsets(admin, partitions, spec, IsolationLevel.READ_UNCOMMITTED, NO_PROGRESS_S)
    return [TopicPartition(topic, partition, offset) for (topic, partition), offset in found.items()]


def _query_until(what: str, timeout_s: float, query: Callable[[], T]) -> T:
    """Query until there is a response, since brokers may be down. Raise the error that `classify` says is permanent."""
    began = time.monotonic()
    while True:
        try:
            return query()
        except KafkaException as error:
            cause = error.args[0]
            action = classify("consume", cause)
            if cause.code() in _NEW_TOPIC_CODES:
                patience_s = min(timeout_s, _NEW_TOPIC_S)
            else:
                patience_s = timeout_s if action is Action.RETRY else 0.0
            if time.monotonic() - began >= patience_s:
                raise _EXCEPTIONS.get(action, Unavailable)(f"{what}: {cause.str()}") from error
        time.sleep(POLL_S)
