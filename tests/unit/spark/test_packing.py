"""Packed values in the shuffle: every row once, in order, in values of bounded size."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record import MemoryRecords

from eos.kafka.admin.ownership import Identity
from spark_connector import packing
from spark_connector.packing import (
    ORDER,
    ROWS,
    SHARE,
    numbers,
    pack_partition,
    pack_rows,
    slices,
    split,
    unpack,
)
from spark_connector.placing import REFUSAL, TARGET
from spark_connector.recordbatch import encode

KIND = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def rows(targets: list[int], size: int = 3) -> pa.RecordBatch:
    """Return rows whose value is the row number and incompressible bytes.

    Every fifth value is null, every third key is null, every fourth row has headers and every second a timestamp.
    """
    count, noise = len(targets), random.Random(1).randbytes
    columns: dict[str, Any] = {
        TARGET: pa.array(targets, pa.int32()),
        "key": pa.array([None if i % 3 == 0 else b"k%d" % i for i in range(count)], pa.binary()),
        "value": pa.array([None if i % 5 == 4 else b"%d %b" % (i, noise(size)) for i in range(count)], pa.binary()),
        "timestamp": pa.array([1_700_000_000_000 + i if i % 2 else None for i in range(count)], pa.int64()),
        "headers": pa.array([[("h", b"%d" % i), ("n", None)] if i % 4 == 0 else None for i in range(count)], KIND),
    }
    return pa.record_batch(columns)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_packed_rows_are_unpacked_once_in_order_in_their_share(targets: list[int], shares: int, start: int) -> None:
    given_rows = rows(targets).slice(min(start, len(targets) - 1))
    packed = pack_rows(given_rows, shares, 7)
    assert packed.column(ORDER).to_pylist() == list(range(7, 7 + packed.num_rows))
    out: dict[int, list[Any]] = {}
    for i in range(packed.num_rows):
        for unpacked in unpack(packed.slice(i, 1)):
            out.setdefault(packed.column(SHARE)[i].as_py(), []).extend(unpacked.to_pylist())
    expected: dict[int, list[Any]] = {}
    for row in given_rows.to_pylist():
        expected.setdefault(row[TARGET] % shares, []).append(row)
    assert out == expected


def test_large_batch_becomes_values_of_at_most_half_a_megabyte() -> None:
    packed = pack_rows(rows([i % 4 for i in range(20_000)], size=100), 2, 0)
    sizes = [len(value.as_buffer()) for value in packed.column(ROWS)]
    assert 250_000 < max(sizes) < 500_000
    pieces = list(unpack(packed))
    assert sum(piece.num_rows for piece in pieces) == 20_000
    # A target with many rows has values of its own, and each value has the share of its target.
    assert [set(numbers(piece, TARGET)) for piece in pieces] == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}]
    assert packed.column(SHARE).to_pylist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_large_batch_is_packed_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SLICE_BYTES", 100_000)
    whole = rows([i % 7 for i in range(9_000)], size=100)
    before, most, found = pa.total_allocated_bytes(), 0, []
    for packed in pack_partition(iter([whole]), 3, 1):
        most = max(most, pa.total_allocated_bytes() - before)
        found += [
            row for i in range(packed.num_rows) for piece in unpack(packed.slice(i, 1)) for row in piece.to_pylist()
        ]
        del packed
    assert len(found) == 9_000
    assert whole.nbytes > 1_000_000
    # Twice the size of a slice, because the output buffer grows by doubling.
    assert 100_000 < most < 300_000
    for target in range(7):
        assert [row for row in found if row[TARGET] == target] == whole.to_pylist()[target::7]


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8), st.integers(1, 3_000))
@settings(max_examples=200, deadline=None)
def test_small_batches_are_joined_and_large_ones_are_split(lengths: list[tuple[int, bool]], slice_bytes: int) -> None:
    batches = []
    for number, (length, nowhere) in enumerate(lengths):
        batch = rows([number] * length)
        batches.append(batch.append_column(REFUSAL, pa.array(["b-7"] * length)) if nowhere else batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "SLICE_BYTES", slice_bytes)
        parts = list(slices(iter(batches)))
    assert [row for part in parts for row in part.to_pylist()] == [row for b in batches for row in b.to_pylist()]
    assert all(part.num_rows <= 1 or part.slice(1).nbytes <= 2 * slice_bytes for part in parts)


def test_small_batches_are_collected_into_one() -> None:
    small = rows([0] * 20)
    assert [part.num_rows for part in slices(iter([small] * 50))] == [1_000]


def test_compressible_rows_are_packed_into_fewer_values() -> None:
    same = pa.record_batch(
        {
            TARGET: pa.array([0] * 30_000, pa.int32()),
            "key": pa.nulls(30_000, pa.binary()),
            "value": pa.array([b"v" * 100] * 30_000, pa.binary()),
        }
    )
    first, *others = [packed.num_rows for packed in pack_partition(iter([same] * 3), 1, 0)]
    assert first > 5
    assert others == [1, 1]
    # For one slice, incompressible rows are packed by the ratio of the previous rows.
    noise = rows([0] * 20_000, size=150)
    counts = [packed.num_rows for packed in pack_partition(iter([same, noise, noise]), 1, 0)]
    assert counts[:2] == [first, 1]
    assert counts[2] > 5


def test_packed_rows_are_written_with_nulls_and_timestamps() -> None:
    whole, now_ms = rows([0] * 50), 1_800_000_000_000
    packed = pack_rows(whole, 1, 0)
    (batch,) = encode(next(unpack(packed)), Identity(1, 0), 0, now_ms=now_ms)
    read = list(MemoryRecords(batch.data).next_batch())
    assert [(record.key, record.value) for record in read] == [(row["key"], row["value"]) for row in whole.to_pylist()]
    assert [record.value for record in read].count(None) == 10
    assert [record.timestamp for record in read[:4]] == [now_ms, 1_700_000_000_001, now_ms, 1_700_000_000_003]
    assert len(read) == 50


def test_order_numbers_continue_across_batches_and_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SLICE_BYTES", 1)
    batches = [rows([0, 1, 2]), rows([0]).slice(1), rows([2, 1]), rows([1])]
    orders = [
        place
        for number in (0, 1, 40_000)
        for packed in pack_partition(iter(batches), 3, number)
        for place in packed.column(ORDER).to_pylist()
    ]
    assert len(orders) == 3 * 6
    assert orders == sorted(set(orders))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_rows_are_split_by_target_and_keep_their_order(targets: list[int]) -> None:
    whole = rows(targets)
    found = dict(split(whole, numbers(whole, TARGET)))
    assert list(found) == sorted(set(targets))
    for target, held in found.items():
        assert held.to_pylist() == [row for row in whole.to_pylist() if row[TARGET] == target]
