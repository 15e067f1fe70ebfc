"""Change frames of the transaction protocol: replace identities, translate EndTxn to v5 and back, refuse requests.

The module owns these layouts, in the versions of `VERSIONS`. Replaced fields keep their size, so all other bytes stay
the same, and records are never read. Functions raise Malformed for a frame that does not match its layout.
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
from eos.shim.wire import api, messages
from eos.shim.wire.batches import HEADER, LENGTH_COUNTS_FROM, MAGIC, TRANSACTIONAL
from eos.shim.wire.cursor import string
from eos.shim.wire.frames import Piece
from eos.shim.wire.headers import REQUEST_HEAD, request_body, response_body

# The versions of clients without KIP-890 part 2. Only clients with it, or brokers, send later versions.
VERSIONS: Mapping[int, range] = {
    api.PRODUCE: range(3, 12),
    api.INIT_PRODUCER_ID: range(7),
    api.ADD_PARTITIONS_TO_TXN: range(4),
    api.ADD_OFFSETS_TO_TXN: range(5),
    api.END_TXN: range(5),
    api.TXN_OFFSET_COMMIT: range(5),
}
NAMED_SINCE = 3  # ApiVersions requests name the client's software since this version
END_TXN_VERSION = 5
DESCRIBED_VERSION = 0  # the only version of DescribeTransactions

NONE = Identity(-1, -1)
_IDENTITY = struct.Struct(">qh")
_PRODUCER_FENCED, _INVALID_PRODUCER_EPOCH = 90, 47
_FENCED_KNOWN_SINCE = 2  # since this version, EndTxn may answer PRODUCER_FENCED

# Positions in a record batch.
_CRC_AT, _IDENTITY_AT, _SEQUENCE_AT, _CHANGED_END = 17, 43, 53, 57
# The maximum number of batches per partition of a Produce. Brokers accept only one.
_MOST_BATCHES = 1_000


class TransactionalRequest(NamedTuple):
    """Hold the fields of a request for a transactional.id. `at` is the position of its identity, or -1 without one."""

    name: str | None
    identity: Identity
    at: int
    body: bytes
    group: str = ""
    committed: bool = False


def read_transactional_request(frame: bytes, api_key: int, version: int) -> TransactionalRequest:
    """Read the fields of any transactional request except Produce."""
    _, cursor = request_body(frame, api_key, version)
    body = frame[cursor.pos :]
    name = cursor.string()
    group = (cursor.string() or "") if api_key == api.TXN_OFFSET_COMMIT else ""
    if api_key == api.INIT_PRODUCER_ID:
        cursor.skip(4)  # transaction_timeout_ms
        if version < 3:
            return TransactionalRequest(name, NONE, -1, body)
    at = cursor.pos
    identity = Identity(cursor.int64(), cursor.int16())
    committed = bool(cursor.int8()) if api_key == api.END_TXN else False
    return TransactionalRequest(name, identity, at, body, group, committed)


def replace_identity(frame: bytes, at: int, identity: Identity) -> bytes:
    return frame[:at] + _IDENTITY.pack(*identity) + frame[at + _IDENTITY.size :]


def end_txn_v5(
    frame: bytes, version: int, name: str, identity: Identity, committed: bool, api_key: int = api.END_TXN
) -> bytes:
    """Return an EndTxn v5 with `identity`, in place of the EndTxn or other request in `frame`."""
    client_id, _ = request_body(frame, api_key, version)
    correlation_id = REQUEST_HEAD.unpack_from(frame)[3]
    head = struct.pack(">hhi", api.END_TXN, END_TXN_VERSION, correlation_id)
    whose = struct.pack(">h", -1) if client_id is None else string(client_id, False)
    body = string(name, True) + _IDENTITY.pack(*identity) + bytes([committed])
    return _with_size(head + whose + b"\0" + body + b"\0")


def read_end_txn_response(frame: bytes) -> tuple[int, int, Identity]:
    """Return throttle time, error code and following identity of an EndTxn response v5."""
    cursor = response_body(frame, api.END_TXN, END_TXN_VERSION)
    return cursor.int32(), cursor.int16(), Identity(cursor.int64(), cursor.int16())


def end_txn_response(correlation_id: int, version: int, throttle_ms: int, error: int) -> bytes:
    if error == _PRODUCER_FENCED and version < _FENCED_KNOWN_SINCE:
        error = _INVALID_PRODUCER_EPOCH
    tags = _tags(api.END_TXN, version)
    return _with_size(struct.pack(">i", correlation_id) + tags + struct.pack(">ih", throttle_ms, error) + tags)


def replace_described_identities(frame: bytes, identity_to_show: Callable[[str, Identity, str], Identity]) -> bytes:
    """Replace the identities in a DescribeTransactions response: `identity_to_show` gets id, identity and state."""
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
        frame = replace_identity(frame, at, identity_to_show(name, identity, state))
    cursor.skip_tags()
    return frame


def read_init_response(frame: bytes, version: int) -> tuple[int, Identity]:
    """Return error code and identity of an InitProducerId response."""
    cursor = response_body(frame, api.INIT_PRODUCER_ID, version)
    cursor.skip(4)  # throttle_time_ms
    return cursor.int16(), Identity(cursor.int64(), cursor.int16())


def read_add_offsets_error(frame: bytes, version: int) -> int:
    """Return the error code of an AddOffsetsToTxn response."""
    cursor = response_body(frame, api.ADD_OFFSETS_TO_TXN, version)
    cursor.skip(4)  # throttle_time_ms
    return cursor.int16()


def read_partition_errors(frame: bytes, api_key: int, version: int) -> list[tuple[Partition, int]]:
    """Return the error code of each partition in a response to Produce, AddPartitionsToTxn or TxnOffsetCommit."""
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


def init_response(correlation_id: int, version: int, identity: Identity, error: int = 0) -> bytes:
    """Return an InitProducerId response with `identity`, or with an error."""
    producer_id, epoch = identity
    fields = {"error_code": error, "producer_id": producer_id, "producer_epoch": epoch}
    return messages.encode_response(api.INIT_PRODUCER_ID, version, correlation_id, **fields)


# "librdkafka" "2.16.0"; "confluent-kafka-python" "2.16.1-rdkafka-2.16.0"; "confluent-kafka-go" "...-librdkafka-2..."
_LIBRDKAFKA = re.compile(r"rdkafka[-/ ]v?(\d+)\.")


def renews_after_abort(frame: bytes, version: int) -> bool:
    """Return whether the client of this ApiVersions request (v3 and later) requests its next identity after an abort.

    librdkafka since 2.0 does so after UNKNOWN_PRODUCER_ID, inside the same call (`rd_kafka_txn_handle_EndTxn`).
    """
    try:
        _, cursor = request_body(frame, api.API_VERSIONS, version)
        found = _LIBRDKAFKA.findall(f"{cursor.string()}-{cursor.string()}")
    except Malformed:
        return False  # the broker will reject it
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
    """Hold the fields of a Produce. `partitions` are in the request's order; `batches` are those with an identity."""

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


def read_produce(frame: Piece, version: int, size: int) -> Produce:
    """Read a Produce of `size` bytes. A request without a transactional.id has no partitions in the result.

    `frame` may be the beginning of the request. The beginning is enough if there is no transactional.id. It is also
    enough if the sizes before the first batch's header show that this is the only batch, as in every Produce of
    librdkafka. Otherwise raises Malformed.
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
                batch = _read_batch(frame, start, start + records, partition)
                tags = 3 if cursor.flexible else 0  # at least one byte each for partition, topic and request
                if batch.size == records and start + records + tags <= size:
                    return Produce(name, (partition,), (batch,))
            if records > 0:
                cursor.skip(records)
                found = _read_batches(frame, start, cursor.pos, partition)
                cursor.count_elements(len(found))
                batches += found
            elif records < -1:
                raise Malformed(f"{records} bytes")
            cursor.skip_tags()
        cursor.skip_tags()
    return Produce(name, partitions, batches)


def _read_batches(frame: Piece, at: int, end: int, partition: Partition) -> list[_Batch]:
    found = list[_Batch]()
    while at < end:
        if len(found) == _MOST_BATCHES:
            raise Malformed(f"more than {_MOST_BATCHES} record batches in one partition")
        found.append(_read_batch(frame, at, end, partition))
        at += found[-1].size
    return found


def _read_batch(frame: Piece, at: int, end: int, partition: Partition) -> _Batch:
    if min(end, len(frame)) - at < HEADER.size:
        raise Malformed("a record batch ends within its header")
    fields = HEADER.unpack_from(frame, at)
    size, last_delta = fields[1] + LENGTH_COUNTS_FROM, fields[6]
    if fields[3] != MAGIC or size < HEADER.size or size > end - at or last_delta < 0:
        raise Malformed("a record batch has an invalid header")
    identity, sequence = Identity(fields[9], fields[10]), fields[11]
    return _Batch(at, size, identity, Written(partition, sequence, last_delta + 1), bool(fields[5] & TRANSACTIONAL))


def rewrite_produce(frame: Piece, request: Produce, identity: Identity, bases: Mapping[Partition, int]) -> Piece:
    """Return the request with `identity`, with sequences relative to their partition's base, and with new checksums.

    `frame` may end after the last batch's header. A writable view is changed in place.
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
        new = crc.update(old, before, after, batch.size - _CHANGED_END)
        made[at + _CRC_AT : at + _CRC_AT + 4] = new.to_bytes(4, "big")
    return made


def refusal_response(frame: bytes, api_key: int, version: int, correlation_id: int, code: int) -> bytes:
    """Return a broker's response with this error, for any request except Produce."""
    per_partition = api_key in (api.ADD_PARTITIONS_TO_TXN, api.TXN_OFFSET_COMMIT)
    named = _partitions(frame, api_key, version) if per_partition else ()
    return messages.refusal_response(api_key, version, correlation_id, code, named)


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
    """Return an empty section of tagged fields if this version has them, for the header or the body."""
    return b"\0" if api.is_flexible(api_key, version) else b""


def _with_size(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload
