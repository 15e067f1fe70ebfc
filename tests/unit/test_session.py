"""What of the session can be said without Kafka."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eos.session import room_ahead, room_of


@given(interval_ms=st.integers(1, 10_000), gathered_ms=st.integers(0, 20_000))
def test_a_record_waits_for_one_interval_and_a_slow_function_still_gets_half_of_one(
    interval_ms: int, gathered_ms: int
) -> None:
    room_s = room_of(interval_ms / 1000, gathered_ms / 1000)
    assert interval_ms / 2 <= round(room_s * 1000, 6) <= interval_ms
    if gathered_ms <= interval_ms / 2:
        assert round((room_s + gathered_ms / 1000) * 1000, 6) == interval_ms


def test_what_was_just_gathered_leaves_the_whole_interval() -> None:
    assert room_of(0.1, 0.0) == 0.1


@given(waiting=st.integers(0, 100_000), size=st.integers(0, 100 << 20))
def test_what_is_fetched_ahead_has_an_end_in_records_and_in_bytes(waiting: int, size: int) -> None:
    most = room_ahead(waiting, size)
    assert 0 <= most <= 2_000
    if most:
        assert waiting + most <= 20_000
        assert (waiting + most) * size <= 32 << 20


def test_small_records_are_fetched_ahead_in_whole_chunks() -> None:
    assert room_ahead(0, 1_000) == 2_000
    assert room_ahead(18_500, 100) == 1_500
