"""Record batches: kafka-python's reader returns exactly the encoded rows."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2
from kafka.record import MemoryRecords

from eos.kafka.admin.ownership import Identity
from spark_connector import recordbatch
from spark_connector.placing import murmur2_column
from spark_connector.recordbatch import COMPRESSIONS, HEADER, Batch, RecordTooLarge, encode

NOW_MS = 1_700_000_000_000
IDENTITY = Identity(9_000_000_001, 7)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

some_bytes = st.none() | st.binary(max_size=40) | st.binary(min_size=60, max_size=300)
headers = st.none() | st.lists(st.tuples(st.text(max_size=9), st.none() | st.binary(max_size=9)), max_size=3)
stamps = st.none() | st.integers(0, 2**42)
records = st.lists(st.tuples(some_bytes, some_bytes, headers, stamps), min_size=1, max_size=60)


def columns(rows: list[tuple[Any, Any, Any, Any]]) -> pa.RecordBatch:
    keys, values, heads, times = zip(*rows, strict=True)
    heads = [h if h is None else [{"key": k, "value": v} for k, v in h] for h in heads]
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array(heads, HEADERS),
            "timestamp": pa.array(times, pa.int64()),
        }
    )


def decoded(batches: list[Batch]) -> list[tuple[Any, Any, Any, Any]]:
    rows = []
    for batch in batches:
        (read,) = iter(MemoryRecords(batch.data).next_batch, None)
        assert read.validate_crc()
        assert (read.producer_id, read.producer_epoch, read.is_transactional) == (*IDENTITY, True)
        assert (read.base_sequence, read.records_count) == (batch.base_sequence, batch.records)
        assert [record.offset for record in read] == list(range(batch.records))
        again = MemoryRecords(batch.data).next_batch()
        rows += [(record.key, record.value, record.headers, record.timestamp) for record in again]
        assert again.max_timestamp == max(row[3] for row in rows[-batch.records :])
    return rows


@given(records, st.integers(400, 5_000), st.sampled_from(["none", "gzip"]))
@settings(max_examples=150, deadline=None)
def test_encoded_rows_round_trip(rows: list[Any], target_bytes: int, compression: str) -> None:
    batches = list(
        encode(columns(rows), IDENTITY, 5, compression=compression, target_bytes=target_bytes, now_ms=NOW_MS)
    )
    expected = [(key, value, head or [], NOW_MS if at is None else at) for key, value, head, at in rows]
    assert decoded(batches) == expected
    sequences = [batch.base_sequence for batch in batches]
    assert sequences == list(5 + np.cumsum([0, *(batch.records for batch in batches[:-1])]))


@given(records, st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_slice_of_a_column_is_encoded_like_its_copy(rows: list[Any], start: int) -> None:
    start = min(start, len(rows) - 1)
    whole = columns(rows)
    assert list(encode(whole.slice(start), IDENTITY, 0)) == list(encode(columns(rows[start:]), IDENTITY, 0))


@given(st.lists(records, min_size=1, max_size=4), st.sampled_from(["none", "gzip"]), st.integers(400, 5_000))
@settings(max_examples=100, deadline=None)
def test_rows_in_several_chunks_are_encoded_like_one_chunk(
    parts: list[list[Any]], compression: str, target_bytes: int
) -> None:
    table = pa.Table.from_batches([columns(part) for part in parts])
    pieces = list(encode(table, IDENTITY, 0, compression=compression, target_bytes=target_bytes, now_ms=NOW_MS))
    whole = columns([row for part in parts for row in part])
    expected = list(encode(whole, IDENTITY, 0, compression=compression, target_bytes=target_bytes, now_ms=NOW_MS))
    assert [batch.data for batch in pieces] == [batch.data for batch in expected]
    assert decoded(pieces) == decoded(expected)


def test_batch_larger_than_the_offset_table_is_encoded() -> None:
    count = 3 * len(recordbatch._OFFSETS.sizes)
    rows = pa.record_batch({"key": pa.nulls(count, pa.binary()), "value": pa.array([b""] * count, pa.binary())})
    (batch,) = encode(rows, IDENTITY, 0, max_bytes=4_000_000, target_bytes=4_000_000, now_ms=NOW_MS)
    assert decoded([batch]) == [(None, b"", [], NOW_MS)] * count


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("length", [100, 5_000])
def test_batch_size_is_within_the_limit(compression: str, length: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (3_000, length), np.uint8)
    rows = pa.record_batch(
        {"key": pa.array([None] * 3_000, pa.binary()), "value": pa.array([row.tobytes() for row in noise], pa.binary())}
    )
    batches = list(encode(rows, IDENTITY, 0, compression=compression, max_bytes=100_000))
    assert max(len(batch.data) for batch in batches) <= 100_000
    assert sum(batch.records for batch in batches) == 3_000
    # Batches are also well filled: one batch per record would pass the checks above.
    assert len(batches) < 3_000 * (length + 60) / 60_000 + 2


def test_oversized_record_is_refused_unless_it_fits_compressed() -> None:
    zeros = columns([(None, bytes(50_000), None, None)])
    with pytest.raises(RecordTooLarge, match=r"max\.message\.bytes=10000"):
        list(encode(zeros, IDENTITY, 0, max_bytes=10_000))
    (batch,) = encode(zeros, IDENTITY, 0, max_bytes=10_000, compression="zstd")
    assert len(batch.data) < 10_000


def test_checksum_covers_all_bytes_after_it() -> None:
    (batch,) = encode(columns([(b"k", b"v", None, 1)]), IDENTITY, 0, compression="lz4")
    (stored,) = struct.unpack_from(">I", batch.data, 17)
    assert stored == crc32c(batch.data[21:])
    assert struct.unpack_from(">i", batch.data, 8)[0] == len(batch.data) - 12
    assert len(batch.data) > HEADER.size


def test_encoding_is_deterministic() -> None:
    rows = columns([(b"%d" % i, b"v" * i, None, i) for i in range(100)])
    for compression in COMPRESSIONS:
        first, second = (list(encode(rows, IDENTITY, 0, compression=compression)) for _ in range(2))
        assert first == second


@given(st.lists(st.none() | st.binary(max_size=50), max_size=50))
@settings(max_examples=200, deadline=None)
def test_key_hash_equals_that_of_the_java_client(keys: list[bytes | None]) -> None:
    expected = [None if key is None else murmur2(key) & 0xFFFFFFFF for key in keys]
    found = murmur2_column(pa.array(keys, pa.binary())).to_pylist()
    assert [None if number is None else number & 0xFFFFFFFF for number in found] == expected


def test_sequence_wraps_to_0_after_the_largest() -> None:
    rows = columns([(None, b"v", None, 1)] * 3)
    for first, expected in [(2**31 - 1, 2**31 - 1), (2**31, 0), (2**31 + 5, 5)]:
        (batch,) = encode(rows, IDENTITY, first)
        assert MemoryRecords(batch.data).next_batch().base_sequence == expected
        assert batch.base_sequence == first
