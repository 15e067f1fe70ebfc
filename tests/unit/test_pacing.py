"""Pacing: how many records a session polls and when it begins a transaction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.session.consumer.pacing import Pacing


def until(interval_s: float, gathered_s: float) -> float:
    """Return for how long a transaction hands out records after gathering them for `gathered_s` seconds."""
    pacing = Pacing(interval_s, 5)
    pacing.begin_gathering(1_000.0)
    return pacing.begin(1_000.0 + gathered_s) - (1_000.0 + gathered_s)


@given(interval_ms=st.integers(1, 10_000), gathered_ms=st.integers(0, 20_000))
def test_gathering_time_shortens_a_transaction_by_at_most_half(interval_ms: int, gathered_ms: int) -> None:
    room_s = until(interval_ms / 1000, gathered_ms / 1000)
    assert interval_ms / 2 <= round(room_s * 1000, 6) <= interval_ms
    if gathered_ms <= interval_ms / 2:
        assert round((room_s + gathered_ms / 1000) * 1000, 6) == interval_ms


def test_gathering_without_delay_leaves_the_whole_interval() -> None:
    assert round(until(0.1, 0.0), 9) == 0.1


def test_wait_for_a_new_producer_does_not_count_as_gathering() -> None:
    pacing = Pacing(0.1, 5)
    pacing.begin_gathering(1_000.0)
    pacing.exclude(3.0)
    assert round(pacing.begin(1_003.0), 6) == 1_003.1


@given(waiting=st.integers(0, 100_000), size=st.integers(0, 100 << 20))
def test_prefetch_is_bounded_in_records_and_bytes(waiting: int, size: int) -> None:
    most = after(100).most_to_prefetch(2_000, waiting, size)
    assert 0 <= most <= 1_000
    if most:
        assert waiting + most <= 20_000
        assert (waiting + most) * size <= 4 << 20


def after(size: int, handled_at_once: int = 1) -> Pacing:
    """Return a pacing that has observed a poll with values of `size` bytes."""
    pacing = Pacing(0.1, 100_000, handled_at_once)
    pacing.observe_size(size)
    return pacing


def test_prefetch_takes_whole_chunks_after_large_transactions() -> None:
    assert after(100).most_to_prefetch(2_000, 0, 100) == 1_000
    assert after(100).most_to_prefetch(2_000, 19_500, 100) == 500
    assert after(100).most_to_prefetch(1_999, 0, 100) == 0


def test_backlog_poll_takes_as_many_records_as_fit_the_cache() -> None:
    assert [after(size).most_to_add(0) for size in (0, 100, 256, 1_000, 100_000)] == [1_000, 1_000, 1_000, 256, 100]
    # For a batch function, polls take whole batches, at least one.
    assert [after(size, 250).most_to_add(0) for size in (100, 1_000, 100_000)] == [1_000, 250, 250]
    assert after(1_000, 5_000).most_to_add(0) == 5_000
    assert after(100).most_to_add(99_990) == 10, "no more than a transaction may take"


def test_poll_for_group_callbacks_continues_at_the_limit() -> None:
    assert [Pacing(0.1, 5).most_to_gather(waiting) for waiting in (0, 4, 5, 9)] == [5, 1, 1, 1]


def test_waiting_records_of_a_slow_function_do_not_pile_up() -> None:
    pacing, waiting = Pacing(0.1, 200_000), 0
    for _ in range(1_000):
        waiting += pacing.most_to_gather(waiting) - 5  # each transaction takes five records
    assert waiting == 995


def test_pause_after_aborts_grows_until_a_commit() -> None:
    pacing, pauses = Pacing(0.1, 5), []
    pacing.begin(0.0)
    for _ in range(9):
        pacing.aborted(0.0)
        pauses.append(pacing.pause_left_s(0.0))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert pacing.gather_s(0.05) == 0
    pacing.committed(5)
    assert round(pacing.gather_s(0.05), 6) == 0.05


def limits(pacing: Pacing, commits: int, open_s: float, sending_s: float) -> list[int]:
    """Return the limit after each of `commits` commits of full transactions."""
    found = []
    for _ in range(commits):
        pacing.committed(pacing.limit, open_s, sending_s)
        found.append(pacing.limit)
    return found


def test_limit_drops_to_half_the_delivered_records_and_grows_back() -> None:
    pacing = Pacing(0.1, 1_000, timeout_s=10.0)
    assert pacing.timed_out(800, delivered=0.25)
    assert pacing.limit == 100
    assert limits(pacing, 4, open_s=0.2, sending_s=0.1) == [126, 158, 198, 248]
    assert limits(pacing, 8, open_s=0.2, sending_s=0.1)[-2:] == [1_000, 1_000]


def test_limit_grows_below_half_and_shrinks_above_three_quarters() -> None:
    pacing = Pacing(0.1, 1_000, timeout_s=10.0)
    pacing.timed_out(800, delivered=1.0)
    assert limits(pacing, 2, open_s=6.0, sending_s=5.9) == [400, 400]
    assert limits(pacing, 2, open_s=9.0, sending_s=0.1) == [400, 400], "time of a slow function does not count"
    assert limits(pacing, 3, open_s=8.0, sending_s=7.9) == [300, 225, 168]
    assert limits(pacing, 2, open_s=4.0, sending_s=3.9) == [211, 264]


def test_small_limit_survives_the_first_timeout_of_a_slow_cluster() -> None:
    pacing = after(1_000)  # 64 KB hold 65 such records
    pacing.limit = 1_000
    pacing._timeout_s = 10.0
    pacing.timed_out(40, delivered=1.0)
    assert pacing.limit == 40
    assert limits(pacing, 1, open_s=9.0, sending_s=8.9) == [40], "fewer records would take as long"
    pacing.timed_out(40, delivered=1.0)
    assert pacing.limit == 40
    pacing.timed_out(40, delivered=1.0)
    assert pacing.limit == 20, "the second timeout in a row halves the limit"
    for delivered in (0.5, None):  # outputs far larger than their inputs; a slow function
        pacing.committed(20)
        pacing.timed_out(40, delivered)
        assert pacing.limit == (10 if delivered else 20)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "least"),
    [(3.5, 10**6, 100), (0.1, 200_000, 150), (8.0, 10**6, 5), (0.0, 5_000, 4), (1.0, 10**9, 900)],
    ids=["late answers", "a quota", "very late answers", "a thin line", "a far cluster"],
)
def test_transaction_size_adapts_to_a_slow_cluster(latency_s: float, bytes_per_s: float, least: int) -> None:
    """Commit at least `least` records per second in the end: records of 1 KB, a timeout of 10 s, a slow start."""
    pacing, records, seconds, size = Pacing(0.1, 10_000, timeout_s=10.0), 0, 0.0, 1_000
    pacing.observe_size(size)
    for turn in range(200):
        taken = pacing.limit
        sending_s = taken * size / bytes_per_s
        open_s = (latency_s if turn >= 12 else max(latency_s, 9.0)) + sending_s
        if open_s > 10.0:
            pacing.timed_out(taken, min(1.0, 10.0 / sending_s))
            taken, open_s = 0, 10.0
        else:
            pacing.committed(taken, open_s, open_s)
        if turn >= 150:
            records, seconds = records + taken, seconds + open_s
    assert records / seconds >= least


def test_limit_of_one_record_cannot_shrink() -> None:
    pacing = Pacing(0.1, 1_000, timeout_s=10.0)
    assert pacing.timed_out(2, delivered=0.0)
    assert pacing.limit == 1
    assert not pacing.timed_out(1, delivered=0.0)
    assert pacing.limit == 1
