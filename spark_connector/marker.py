"""Defines the progress marker, by which Kafka itself records which batch of a sink is committed.

Owns the marker's record, the rule that compares a batch with it (`decide`, a pure function), and the reading of the
compacted topic `__eos_sinks`. The marker is written in the same transaction as the batch's rows, so it exists exactly
when they do. It must never treat a record of an open or aborted transaction as a marker.

The reader goes to the high watermark, not only to the last stable offset. A hanging transaction of another producer in
the same partition holds the last stable offset back. A reader that stopped there could miss its own newest marker and
write a batch twice. Below the last stable offset the broker's list of aborted transactions decides; above it the
control records do. No record of this sink can be undecided there, because InitProducerId has returned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.consumer.offsets import ListOffsetsRequest
from kafka.record import MemoryRecords

from eos.codes import error_name
from spark_connector.answers import Answer, Stopped, judge
from spark_connector.wire import Broken, Wire

TOPIC = "__eos_sinks"
PARTITIONS = 8
CONFIG = {
    "cleanup.policy": "compact",
    # Small segments and frequent cleaning, because a sink's first read covers the whole partition.
    "segment.bytes": str(4 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
}

_VERSION = 2  # version of a marker's value: docs/reference/formats.md
_FETCH_MAX_VERSION = 12  # requests by topic name
# Since version 5 a new leader reports that it does not know its high watermark yet (KIP-207).
_LIST_OFFSETS_MIN_VERSION, _LIST_OFFSETS_MAX_VERSION = 5, 7
_LATEST, _EARLIEST = -1, -2
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
_FETCH_BYTES = 4 * 1024 * 1024
_FETCH_WAIT_MS = 100


@dataclass(frozen=True)
class Marker:
    """Describes the last batch of a sink that is in Kafka.

    `query`: the id of the streaming query (stored in its checkpoint), or "" for a batch write. `batch`: the number of
    the micro-batch, or the caller's batch_id. `rows`: the number of rows. `offsets`: a digest of the batch's source
    offsets. `adopted`: the last adopt_at that was used. `topics`: the topics that the batch was written to, None in a
    marker of version 1. `run`: the id of the query's run, then `/` and the id of the call of the sink. A restart
    changes the run's id.
    """

    query: str
    batch: int | str
    rows: int
    offsets: str
    adopted: int | None = None
    topics: tuple[str, ...] | None = None
    run: str = ""

    def encode(self) -> bytes:
        return json.dumps({"version": _VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Marker:
        """Return the marker in a value. Raise ValueError unless its version is known (docs/reference/formats.md)."""
        found = json.loads(value)
        version = found.get("version") if isinstance(found, dict) else None
        if version not in range(1, _VERSION + 1):
            raise ValueError(
                f"marker version {version} is not supported: this eos reads versions up to {_VERSION}: {value[:80]!r}"
            )
        names = {each.name for each in fields(cls)}
        known = {name: value for name, value in found.items() if name in names}
        if known.get("topics") is not None:
            known["topics"] = tuple(known["topics"])
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(f"not a marker: {value[:80]!r}") from error

    def went_elsewhere(self, topics: Sequence[str]) -> str:
        """Return the topics of this batch that the sink no longer writes to, as text, or "" if there are none."""
        return ", ".join(sorted(set(self.topics or ()) - set(topics)))


def sink_key(transactional_id: str, batch_id: str | None = None) -> bytes:
    """Return the marker's key: the transactional id, and for a batch write also its batch_id."""
    name = {"sink": transactional_id} if batch_id is None else {"sink": transactional_id, "batch": batch_id}
    return json.dumps(name, sort_keys=True).encode()


def is_of(key: bytes, transactional_id: str) -> bool:
    """Return whether this is a marker's key of the sink: that of its stream, or of one of its batch writes."""
    try:
        return bool(json.loads(key)["sink"] == transactional_id)
    except (ValueError, KeyError, TypeError):
        return False  # another program's key


def is_of_a_write(key: bytes) -> bool:
    return "batch" in json.loads(key)


class Decision(Enum):
    WRITE = "the batch is not in Kafka"
    ADOPT = "the batch is not in Kafka, as far as adopt_at says"
    ALREADY = "the batch is in Kafka"


class WrongProgress(Exception):
    """Reports a marker and a checkpoint that do not belong together; `args[0]` is a sentence with the remedy."""


def decide(
    marker: Marker | None, query: str, batch: int, offsets: str, adopt_at: int | None = None, topics: Sequence[str] = ()
) -> Decision:
    """Return what to do with micro-batch `batch` of `query`, given the marker of the last batch in Kafka.

    `offsets`: the digest of the batch's source offsets. `adopt_at`: the batch to accept although the marker refuses
    it, once per query. `topics`: the topics that the sink writes to. Raises WrongProgress if the marker refuses the
    batch.
    """
    refusal = _refusal(marker, query, batch, offsets, topics)
    if refusal is None:
        return Decision.ALREADY if marker is not None and marker.batch == batch else Decision.WRITE
    used_up = marker is not None and marker.query == query and marker.adopted == adopt_at
    if adopt_at == batch and not used_up:
        return Decision.ADOPT
    advice = f"adopt_at={adopt_at} was used already" if adopt_at == batch else f"or pass adopt_at={batch}"
    meaning = f"this asserts that the target holds the batches before {batch}, and only those"
    raise WrongProgress(f"{refusal}; {advice}: {meaning}")


def _refusal(marker: Marker | None, query: str, batch: int, offsets: str, topics: Sequence[str]) -> str | None:
    if marker is None:
        if batch == 0:
            return None
        return (
            f"the query is at batch {batch} and Kafka has no marker of this sink: another sink wrote the batches "
            f"before, or {TOPIC} was lost; to start over, give the query an empty checkpoint"
        )
    if marker.query != query:
        return (
            f"this sink belongs to query {marker.query}, which wrote batch {marker.batch} last, not to query {query}"
            ": two queries have one transactional.id, or a query has a new checkpoint; give each a transactional.id"
        )
    done = int(marker.batch)
    if batch == done + 1:
        return None
    if batch == done:
        if marker.offsets == offsets and (elsewhere := marker.went_elsewhere(topics)):
            return (
                f"batch {batch} of this sink went to {elsewhere}, and not to {', '.join(topics)}: two sinks have one "
                "transactional.id, or its topic was changed while a batch was between Kafka and the checkpoint"
            )
        if marker.offsets == offsets:
            return None
        return (
            f"batch {batch} is in Kafka with other source offsets than the checkpoint's: the checkpoint is an older "
            "copy, which went on differently; restore the newest one"
        )
    where = "behind" if batch < done else "ahead of"
    return (
        f"the query is at batch {batch}, {where} Kafka, whose last batch is {done}: the checkpoint was restored from "
        "another time; restore the newest one"
    )


_Written = tuple[bytes | None, int]  # a marker, or None after its tombstone; and its time in Unix milliseconds


class MarkerReader:
    """Reads the markers of one sink from one partition of the topic, and keeps them as of the last `read`.

    Each read continues at the position of the last one. Markers of other sinks are not kept.
    """

    def __init__(self, wire: Wire, partition: int, timeout_s: float, transactional_id: str) -> None:
        self._wire, self.partition, self._timeout_s = wire, partition, timeout_s
        self._transactional_id = transactional_id
        self._next = -1
        self._markers: dict[bytes, _Written] = {}

    @property
    def write_times(self) -> dict[bytes, int]:
        """Return the write time of each of the sink's markers, in Unix milliseconds."""
        return {key: at_ms for key, (value, at_ms) in self._markers.items() if value is not None}

    def read(self, key: bytes) -> Marker | None:
        """Return the marker of `key`, after InitProducerId has returned. Raise Unreachable, Stopped, ValueError."""
        stable = self._offset(_LATEST, _READ_COMMITTED)
        end = self._offset(_LATEST, _READ_UNCOMMITTED)
        if not 0 <= self._next <= end:  # the first read, or the topic was recreated
            self._next, self._markers = self._offset(_EARLIEST, _READ_UNCOMMITTED), {}
        while self._next < stable:
            self._next = self._below_stable(self._next, stable)
        # Above the last stable offset not everything is decided, so the next read starts there again.
        value, _ = (self._markers | self._above_stable(self._next, end, key)).get(key, (None, 0))
        return None if value is None else Marker.decode(value)

    def _records(self, batch: Any) -> dict[bytes, _Written]:
        keyed = ((bytes(record.key or b""), record) for record in batch)
        return {k: (record.value, record.timestamp) for k, record in keyed if is_of(k, self._transactional_id)}

    def _below_stable(self, position: int, stable: int) -> int:
        answer = self._fetch(position, _READ_COMMITTED)
        if not answer.records:
            # Compaction has removed the records here, or a new leader does not know its end yet.
            first = next(iter(_batches(self._fetch(position, _READ_UNCOMMITTED, some=True).records)))
            return stable if first.base_offset >= stable else position
        aborted = sorted((t.first_offset, t.producer_id) for t in answer.aborted_transactions or [])
        gone: set[int] = set()
        for batch in _batches(answer.records):
            while aborted and aborted[0][0] <= batch.last_offset:
                gone.add(aborted.pop(0)[1])
            if batch.last_offset < position:
                continue
            if batch.is_control_batch:
                gone.discard(batch.producer_id)
            elif not (batch.is_transactional and batch.producer_id in gone):
                self._markers |= self._records(batch)
            position = batch.next_offset
        return position

    def _above_stable(self, position: int, end: int, key: bytes) -> dict[bytes, _Written]:
        """Return the markers committed above the last stable offset, by their control records."""
        decided: dict[bytes, _Written] = {}
        undecided: dict[int, dict[bytes, _Written]] = {}
        while position < end:
            for batch in _batches(self._fetch(position, _READ_UNCOMMITTED, some=True).records):
                if batch.last_offset < position:
                    continue
                if batch.is_control_batch:
                    records = undecided.pop(batch.producer_id, {})
                    if next(iter(batch)).commit:
                        decided |= records
                elif batch.is_transactional:
                    undecided.setdefault(batch.producer_id, {}).update(self._records(batch))
                else:
                    decided |= self._records(batch)
                position = batch.next_offset
        if any(key in records for records in undecided.values()):
            raise Stopped(Answer.RESTART, f"a marker of {key.decode()} is in a transaction that is still open")
        return decided

    def _offset(self, timestamp: int, isolation: int) -> int:
        def attempt() -> int | None:
            answer = self._ask(
                ListOffsetsRequest(
                    replica_id=-1,
                    isolation_level=isolation,
                    topics=[
                        ListOffsetsRequest.ListOffsetsTopic(
                            name=TOPIC,
                            partitions=[
                                ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
                                    partition_index=self.partition, current_leader_epoch=-1, timestamp=timestamp
                                )
                            ],
                        )
                    ],
                    min_version=_LIST_OFFSETS_MIN_VERSION,
                    max_version=_LIST_OFFSETS_MAX_VERSION,
                )
            )
            partition = answer.topics[0].partitions[0]
            return int(partition.offset) if self._is_done(partition.error_code, "ListOffsets") else None

        return self._wire.retry_until_answered(f"offsets of {TOPIC}-{self.partition}", attempt, self._timeout_s)

    def _fetch(self, position: int, isolation: int, some: bool = False) -> Any:
        """Fetch from the partition; with `some` retry until records arrive: they exist, but the leader may change."""

        def attempt() -> Any:
            answer = self._ask(
                FetchRequest(
                    replica_id=-1,
                    max_wait_ms=_FETCH_WAIT_MS,
                    min_bytes=1,
                    max_bytes=_FETCH_BYTES,
                    isolation_level=isolation,
                    session_id=0,
                    session_epoch=-1,
                    topics=[
                        FetchRequest.FetchTopic(
                            topic=TOPIC,
                            partitions=[
                                FetchRequest.FetchTopic.FetchPartition(
                                    partition=self.partition,
                                    current_leader_epoch=-1,
                                    fetch_offset=position,
                                    last_fetched_epoch=-1,
                                    log_start_offset=-1,
                                    partition_max_bytes=_FETCH_BYTES,
                                )
                            ],
                        )
                    ],
                    forgotten_topics_data=[],
                    rack_id="",
                    max_version=_FETCH_MAX_VERSION,
                )
            )
            if not self._is_done(answer.error_code, "Fetch"):
                return None
            partition = answer.responses[0].partitions[0]
            done = self._is_done(partition.error_code, "Fetch") and (partition.records or not some)
            return partition if done else None

        return self._wire.retry_until_answered(f"records of {TOPIC}-{self.partition}", attempt, self._timeout_s)

    def _ask(self, request: Any) -> Any:
        try:
            return self._wire.ask(request, self._wire.leader(TOPIC, self.partition))
        except Broken:
            self._wire.refresh_leader(TOPIC, self.partition)
            raise

    def _is_done(self, code: int, what: str) -> bool:
        verdict = judge(code)
        if verdict is Answer.RETRY:
            self._wire.refresh_leader(TOPIC, self.partition)
        elif verdict is not Answer.DONE:
            raise Stopped(verdict, f"{what} on {TOPIC}-{self.partition} was answered with {error_name(code)}")
        return verdict is Answer.DONE


def _batches(data: Any) -> Iterable[Any]:
    if not data:
        return
    records = MemoryRecords(bytes(data))
    while (batch := records.next_batch()) is not None:
        yield batch
