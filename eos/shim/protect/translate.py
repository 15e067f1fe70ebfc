"""The frames of the transaction protocol: identities read and replaced, EndTxn as v5 and back, refusals.

Owns these layouts, in the versions of `VERSIONS`. Replaced fields keep their size, so everything else stays byte for
byte what it was, and records are never looked at. Raises Malformed for a frame that does not fit its layout.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eos.shim.errors import Malformed
from eos.shim.protect import crc
from eos.shim.protect.machine import Identity, Partition, Written
from eos.shim.wire import answers, api
from eos.shim.wire.batches import HEADER, LENGTH_COUNTS_FROM, MAGIC, TRANSACTIONAL
from eos.shim.wire.cursor import string
from eos.shim.wire.frames import Piece
from eos.shim.wire.headers import REQUEST_HEAD, request_body, response_body

# What clients that do not speak KIP-890 part 2 send; later versions are sent only by those that do, or by brokers.
VERSIONS: Mapping[int, range] = {
    api.PRODUCE: range(3, 12),
    api.INIT_PRODUCER_ID: range(7),
    api.ADD_PARTITIONS_TO_TXN: range(4),
    api.ADD_OFFSETS_TO_TXN: range(5),
    api.END_TXN: range(5),
    api.TXN_OFFSET_COMMIT: range(5),
}
NAMED_SINCE = 3  # ApiVersions says which software it is
END_TXN_VERSION = 5
DESCRIBED_VERSION = 0  # DescribeTransactions has no other

NONE = Identity(-1, -1)
_IDENTITY = struct.Struct(">qh")
_PRODUCER_FENCED, _INVALID_PRODUCER_EPOCH = 90, 47
_FENCED_KNOWN_SINCE = 2  # EndTxn

# Of a record batch.
_CRC_AT, _IDENTITY_AT, _SEQUENCE_AT, _CHANGED_END = 17, 43, 53, 57
# Of one partition in one Produce; brokers take a single one.
_MOST_BATCHES = 1_000


class Identified(NamedTuple):
    """A request for a transactional.id; its identity stands at `at`, -1 when this version has none."""

    name: str | None
    identity: Identity
    at: int
    body: bytes
    group: str = ""
    committed: bool = False


def identified(frame: bytes, api_key: int, version: int) -> Identified:
    """What any of the requests but Produce says of itself."""
    _, cursor = request_body(frame, api_key, version)
    body = frame[cursor.pos :]
    name = cursor.string()
    group = (cursor.string() or "") if api_key == api.TXN_OFFSET_COMMIT else ""
    if api_key == api.INIT_PRODUCER_ID:
        cursor.skip(4)  # transaction_timeout_ms
        if version < 3:
            return Identified(name, NONE, -1, body)
    at = cursor.pos
    identity = Identity(cursor.int64(), cursor.int16())
    committed = bool(cursor.int8()) if api_key == api.END_TXN else False
    return Identified(name, identity, at, body, group, committed)


def with_identity(frame: bytes, at: int, identity: Identity) -> bytes:
    return frame[:at] + _IDENTITY.pack(*identity) + frame[at + _IDENTITY.size :]


def end_txn(
    frame: bytes, version: int, name: str, identity: Identity, committed: bool, api_key: int = api.END_TXN
) -> bytes:
    """The same EndTxn as v5, for `identity`; or one in the place of the request that `frame` is."""
    client_id, _ = request_body(frame, api_key, version)
    correlation_id = REQUEST_HEAD.unpack_from(frame)[3]
    head = struct.pack(">hhi", api.END_TXN, END_TXN_VERSION, correlation_id)
    whose = struct.pack(">h", -1) if client_id is None else string(client_id, False)
    body = string(name, True) + _IDENTITY.pack(*identity) + bytes([committed])
    return _framed(head + whose + b"\0" + body + b"\0")


def ended(frame: bytes) -> tuple[int, int, Identity]:
    """Throttle time, error code and following identity of an EndTxn answer v5."""
    cursor = response_body(frame, api.END_TXN, END_TXN_VERSION)
    return cursor.int32(), cursor.int16(), Identity(cursor.int64(), cursor.int16())


def end_txn_answer(correlation_id: int, version: int, throttle_ms: int, error: int) -> bytes:
    if error == _PRODUCER_FENCED and version < _FENCED_KNOWN_SINCE:
        error = _INVALID_PRODUCER_EPOCH
    tags = _tags(api.END_TXN, version)
    return _framed(struct.pack(">i", correlation_id) + tags + struct.pack(">ih", throttle_ms, error) + tags)


def described(frame: bytes, shown: Callable[[str, Identity, str], Identity]) -> bytes:
    """An answer to DescribeTransactions with each identity as `shown` (by transactional.id, identity, state) has it."""
    cursor = response_body(frame, api.DESCRIBE_TRANSACTIONS, DESCRIBED_VERSION)
    cursor.skip(4)  # throttle_time_ms
    for _ in range(cursor.count()):
        cursor.skip(2)  # error_code
        name, state = cursor.string() or "", cursor.string() or ""
        cursor.skip(12)  # timeout, start time
        at = cursor.pos
        identity = Identity(cursor.int64(), cursor.int16())
        for _ in range(cursor.count()):
            cursor.skip_string()
            cursor.skip(4 * max(0, cursor.count()))
            cursor.skip_tags()
        cursor.skip_tags()
        frame = with_identity(frame, at, shown(name, identity, state))
    cursor.skip_tags()
    return frame


def initialised(frame: bytes, version: int) -> tuple[int, Identity]:
    """Error code and identity of an InitProducerId answer."""
    cursor = response_body(frame, api.INIT_PRODUCER_ID, version)
    cursor.skip(4)  # throttle_time_ms
    return cursor.int16(), Identity(cursor.int64(), cursor.int16())


def added_offsets(frame: bytes, version: int) -> int:
    """Error code of an AddOffsetsToTxn answer."""
    cursor = response_body(frame, api.ADD_OFFSETS_TO_TXN, version)
    cursor.skip(4)  # throttle_time_ms
    return cursor.int16()


def results(frame: bytes, api_key: int, version: int) -> list[tuple[Partition, int]]:
    """Error code by partition of an answer to Produce, AddPartitionsToTxn or TxnOffsetCommit."""
    cursor = response_body(frame, api_key, version)
    if api_key != api.PRODUCE:
        cursor.skip(4)  # throttle_time_ms
    found: list[tuple[Partition, int]] = []
    for _ in range(cursor.count()):
        topic = cursor.string() or ""
        for _ in range(cursor.count()):
            found.append(((topic, cursor.int32()), cursor.int16()))
            if api_key == api.PRODUCE:
                cursor.skip(16 + (8 if version >= 5 else 0))  # base_offset, log_append_time, log_start_offset
                if version >= 8:
                    for _ in range(cursor.count()):  # record_errors
                        cursor.skip(4)
                        cursor.skip_string()
                        cursor.skip_tags()
                    cursor.skip_string()  # error_message
            cursor.skip_tags()
        cursor.skip_tags()
    return found


def init_answer(correlation_id: int, version: int, identity: Identity, error: int = 0) -> bytes:
    """The answer of a broker that gives out `identity`, or none."""
    producer_id, epoch = identity
    fields = {"error_code": error, "producer_id": producer_id, "producer_epoch": epoch}
    return answers.encoded(api.INIT_PRODUCER_ID, version, correlation_id, **fields)


# "librdkafka" "2.16.0"; "confluent-kafka-python" "2.16.1-rdkafka-2.16.0"; "confluent-kafka-go" "...-librdkafka-2..."
_LIBRDKAFKA = re.compile(r"rdkafka[-/ ]v?(\d+)\.")


def renews(frame: bytes, version: int) -> bool:
    """Whether the client that sends this ApiVersions (v3 and later) answers an UNKNOWN_PRODUCER_ID of its abort with a
    question for its next identity, inside the same call: librdkafka since 2.0 does (`rd_kafka_txn_handle_EndTxn`).
    """
    try:
        _, cursor = request_body(frame, api.API_VERSIONS, version)
        found = _LIBRDKAFKA.findall(f"{cursor.string()}-{cursor.string()}")
    except Malformed:
        return False  # the broker judges it
    return bool(found) and int(found[-1]) >= 2


@dataclass(frozen=True)
class _Batch:
    at: int
    size: int
    identity: Identity
    written: Written
    transactional: bool


@dataclass(frozen=True)
class Produce:
    """A Produce request; `partitions` in the request's order, `batches` only those with an identity."""

    name: str | None
    partitions: Sequence[Partition]
    batches: Sequence[_Batch]

    @property
    def identities(self) -> set[Identity]:
        return {batch.identity for batch in self.batches}

    @property
    def transactional(self) -> bool:
        return all(batch.transactional for batch in self.batches)

    @property
    def written(self) -> list[Written]:
        return [batch.written for batch in self.batches]


def produce(frame: Piece, version: int, size: int) -> Produce:
    """What a Produce of `size` bytes says; empty of partitions when it is not transactional.

    `frame` may be its beginning. That is enough when it has no transactional.id, or one batch in all, as every Produce
    of librdkafka has: the sizes around the batch's header leave no place for another one. Else Malformed.
    """
    _, cursor = request_body(frame, api.PRODUCE, version)
    name = cursor.string()
    if name is None:
        return Produce(None, (), ())
    cursor.skip(6)  # acks, timeout_ms
    partitions, batches = list[Partition](), list[_Batch]()
    topics = cursor.count()
    for _ in range(topics):
        topic, indexes = cursor.string() or "", cursor.count()
        for _ in range(indexes):
            partition = (topic, cursor.int32())
            partitions.append(partition)
            records = cursor.uvarint() - 1 if cursor.flexible else cursor.int32()
            start = cursor.pos
            if topics == indexes == 1 and records > 0:
                batch = _batch(frame, start, start + records, partition)
                tags = 3 if cursor.flexible else 0  # the shortest three sections of them: partition, topic, request
                if batch.size == records and start + records + tags <= size:
                    return Produce(name, (partition,), (batch,))
            if records > 0:
                cursor.skip(records)
                found = _batches(frame, start, cursor.pos, partition)
                cursor.took(len(found))
                batches += found
            elif records < -1:
                raise Malformed(f"{records} bytes")
            cursor.skip_tags()
        cursor.skip_tags()
    return Produce(name, partitions, batches)


def _batches(frame: Piece, at: int, end: int, partition: Partition) -> list[_Batch]:
    found = list[_Batch]()
    while at < end:
        if len(found) == _MOST_BATCHES:
            raise Malformed(f"more than {_MOST_BATCHES} record batches in one partition")
        found.append(_batch(frame, at, end, partition))
        at += found[-1].size
    return found


def _batch(frame: Piece, at: int, end: int, partition: Partition) -> _Batch:
    if min(end, len(frame)) - at < HEADER.size:
        raise Malformed("a record batch ends within its header")
    fields = HEADER.unpack_from(frame, at)
    size, last_delta = fields[1] + LENGTH_COUNTS_FROM, fields[6]
    if fields[3] != MAGIC or size < HEADER.size or size > end - at or last_delta < 0:
        raise Malformed("a record batch of a transaction that cannot be followed")
    identity, sequence = Identity(fields[9], fields[10]), fields[11]
    return _Batch(at, size, identity, Written(partition, sequence, last_delta + 1), bool(fields[5] & TRANSACTIONAL))


def produce_as(frame: Piece, request: Produce, identity: Identity, bases: Mapping[Partition, int]) -> Piece:
    """The request with `identity`, sequences counted from their partition's base, and checksums to match.

    `frame` may be its beginning, as far as the last batch's header. A writable view is changed in place.
    """
    in_place = isinstance(frame, memoryview) and not frame.readonly
    made = frame if in_place else memoryview(bytearray(frame))
    assert isinstance(made, memoryview)
    for batch in request.batches:
        at = batch.at
        before = bytes(frame[at + _IDENTITY_AT : at + _CHANGED_END])
        sequence = (batch.written.first - bases[batch.written.partition]) % (1 << 31)
        after = _IDENTITY.pack(*identity) + struct.pack(">i", sequence)
        old = int.from_bytes(frame[at + _CRC_AT : at + _CRC_AT + 4], "big")
        made[at + _IDENTITY_AT : at + _CHANGED_END] = after
        new = crc.changed(old, before, after, batch.size - _CHANGED_END)
        made[at + _CRC_AT : at + _CRC_AT + 4] = new.to_bytes(4, "big")
    return made


def refusal(frame: bytes, api_key: int, version: int, correlation_id: int, code: int) -> bytes:
    """The answer a broker would give with this error; for all but Produce."""
    per_partition = api_key in (api.ADD_PARTITIONS_TO_TXN, api.TXN_OFFSET_COMMIT)
    named = _partitions(frame, api_key, version) if per_partition else ()
    return answers.refusal(api_key, version, correlation_id, code, named)


def _partitions(frame: bytes, api_key: int, version: int) -> list[Partition]:
    _, cursor = request_body(frame, api_key, version)
    cursor.skip_string()  # transactional_id
    offsets = api_key == api.TXN_OFFSET_COMMIT
    if offsets:
        cursor.skip_string()  # group_id
    cursor.skip(_IDENTITY.size)
    if offsets and version >= 3:
        cursor.skip(4)  # generation_id
        cursor.skip_string()  # member_id
        cursor.skip_string()  # group_instance_id
    found = []
    for _ in range(cursor.count()):
        topic = cursor.string() or ""
        for _ in range(cursor.count()):
            found.append((topic, cursor.int32()))
            if offsets:
                cursor.skip(12 if version >= 2 else 8)  # committed_offset, committed_leader_epoch
                cursor.skip_string()  # committed_metadata
                cursor.skip_tags()
        cursor.skip_tags()
    return found


def _tags(api_key: int, version: int) -> bytes:
    """An empty section of tagged fields, where this version has them; header and body alike."""
    return b"\0" if api.is_flexible(api_key, version) else b""


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload
