"""The stamp that names the input of an output: one writer and a bulk reader."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.testing.lineage import WIDTH_BYTES, payload, stamp, unstamp, unstamp_many

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
STAMPS = st.lists(st.tuples(INT32, INT32, INT64, INT32), max_size=30)


@given(STAMPS, st.binary(max_size=40))
def test_unstamp_many_finds_stamps_before_any_payload(sources, behind):
    lineage = unstamp_many([stamp(*source) + behind for source in sources])
    found = list(zip(lineage.topic, lineage.partition, lineage.offset, lineage.copy, strict=True))
    assert found == sources
    assert len(lineage) == len(sources)


@given(st.tuples(INT32, INT32, INT64, INT32), st.binary(max_size=40))
def test_stamp_and_payload_can_be_split(source, behind):
    value = stamp(*source) + behind
    assert unstamp(value) == source
    assert payload(value) == behind


def test_stamp_is_twenty_bytes_little_endian():
    assert stamp(1, 2, 3, 4) == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0])
    assert WIDTH_BYTES == 20


def test_payload_lengths_do_not_shift_the_next_stamp():
    lineage = unstamp_many([stamp(0, 1, 2) + b"a", stamp(3, 4, 5) + b"b" * 99, stamp(6, 7, 8)])
    assert lineage.offset.tolist() == [2, 5, 8]


def test_no_stamps_give_empty_arrays_of_the_right_types():
    lineage = unstamp_many([])
    assert len(lineage) == 0
    assert (lineage.topic.dtype, lineage.offset.dtype) == (np.int32, np.int64)


@pytest.mark.parametrize(("odd", "said"), [(None, "no bytes"), (b"", "0 bytes"), (b"x" * 19, "19 bytes")])
def test_error_names_the_value_that_is_too_short_for_a_stamp(odd, said):
    with pytest.raises(ValueError, match=f"element 2 of 4 has {said}"):
        unstamp_many([stamp(0, 0, 0), stamp(0, 0, 1), odd, stamp(0, 0, 2)])


def test_long_value_does_not_hide_a_short_one():
    with pytest.raises(ValueError, match="element 0 of 2"):
        unstamp_many([b"x" * 10, stamp(0, 0, 1) + b"x" * 10])


def test_single_short_value_is_an_error():
    with pytest.raises(ValueError, match="cannot hold a stamp"):
        unstamp(b"short")


def test_number_too_large_for_a_stamp_is_refused():
    with pytest.raises(struct.error):
        stamp(2**31, 0, 0)
