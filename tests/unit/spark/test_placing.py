"""Placing of rows: by topic, partition, key or value, as the Java client places them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from spark_connector.placing import REFUSAL, TARGET, Places

ONE = Places((("a", 5),))
TWO = Places((("a", 5), ("b", 3)))
KINDS = {"key": pa.binary(), "value": pa.binary(), "topic": pa.string(), "partition": pa.int16()}
some_bytes = st.none() | st.binary(max_size=70)
some_rows = st.lists(
    st.tuples(some_bytes, some_bytes, st.sampled_from(["a", "b", "c", None]), st.none() | st.integers(-1, 5)),
    min_size=1,
    max_size=40,
)


def batch(rows: Sequence[tuple[Any, ...]], *names: str) -> pa.RecordBatch:
    columns = [pa.array(column, KINDS[name]) for name, column in zip(names, zip(*rows, strict=True), strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def expected(places: Places, key: bytes | None, topic: str | None, partition: int | None) -> int | None:
    """Return the expected target, or None if any partition of the topic is right."""
    counts, first = dict(places.topics), 0
    for name, count in places.topics:
        if name == topic:
            break
        first += count
    if topic not in counts or (partition is not None and not 0 <= partition < counts[topic]):
        return sum(counts.values())
    if partition is not None:
        return first + partition
    return None if key is None else first + (murmur2(key) & 0x7FFFFFFF) % counts[topic]


@given(some_rows, st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_row_is_placed_by_its_columns(rows: list[Any], start: int) -> None:
    start = min(start, len(rows) - 1)
    whole = batch(rows, "key", "value", "topic", "partition").slice(start)
    found = [row for part in TWO.place(whole) for row in part.to_pylist()]
    wanted = [(expected(TWO, key, topic, at), key, value, topic, at) for key, value, topic, at in rows[start:]]
    wanted.sort(key=lambda row: row[0] == 8)  # refused rows come last
    assert len(found) == len(wanted)
    for row, (target, key, value, topic, at) in zip(found, wanted, strict=True):
        assert (row["key"], row["value"]) == (key, value)
        if target is None:
            assert row[TARGET] in (range(5) if topic == "a" else range(5, 8))
        else:
            assert row[TARGET] == target
        if target == 8:
            assert row[REFUSAL] == f"{topic or 'null'}-{'null' if at is None else at}"
        else:
            assert set(row) == {TARGET, "key", "value"}


@given(st.lists(some_bytes, min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_row_without_a_key_is_placed_by_its_value(values: list[bytes | None]) -> None:
    once, again = (list(ONE.place(batch([(value,) for value in order], "value"))) for order in (values, values[::-1]))
    assert [row["key"] for row in once[0].to_pylist()] == [None] * len(values)
    assert once[0].column(TARGET).to_pylist() == again[0].column(TARGET).to_pylist()[::-1]


def test_rows_without_a_key_are_spread() -> None:
    (placed,) = ONE.place(batch([(b"%d" % n,) for n in range(5_000)], "value"))
    counts = [placed.column(TARGET).to_pylist().count(target) for target in range(5)]
    assert min(counts) > 800


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.binary()])
def test_key_hash_is_the_same_for_every_arrow_type(kind: Any) -> None:
    keys = [b"key-%d" % n for n in range(100)]
    columns = {"key": pa.array(keys, kind), "value": pa.array([b"v"] * 100, kind)}
    (placed,) = ONE.place(pa.record_batch(columns))
    assert placed.column(TARGET).to_pylist() == [(murmur2(key) & 0x7FFFFFFF) % 5 for key in keys]


def test_placement_does_not_change_other_columns() -> None:
    stamps = pa.array([1, None], pa.int64())
    whole = batch([(b"k", b"v", 9), (None, None, 2)], "key", "value", "partition").append_column("timestamp", stamps)
    good, refused = ONE.place(whole)
    assert good.to_pylist() == [{TARGET: 2, "key": None, "value": None, "timestamp": None}]
    assert refused.to_pylist() == [{TARGET: 5, "key": b"k", "value": b"v", "timestamp": 1, REFUSAL: "9"}]
