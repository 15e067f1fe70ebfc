"""How much a session polls and when it begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eos.session.pacing import Pacing


def until(interval_s: float, gathered_s: float) -> float:
    """How long a transaction hands records out that were gathered for so long."""
    pacing = Pacing(interval_s, 5)
    pacing.gathers(1_000.0)
    return pacing.began(1_000.0 + gathered_s) - (1_000.0 + gathered_s)


@given(interval_ms=st.integers(1, 10_000), gathered_ms=st.integers(0, 20_000))
def test_a_record_waits_for_one_interval_and_a_slow_function_still_gets_half_of_one(
    interval_ms: int, gathered_ms: int
) -> None:
    room_s = until(interval_ms / 1000, gathered_ms / 1000)
    assert interval_ms / 2 <= round(room_s * 1000, 6) <= interval_ms
    if gathered_ms <= interval_ms / 2:
        assert round((room_s + gathered_ms / 1000) * 1000, 6) == interval_ms


def test_what_was_just_gathered_leaves_the_whole_interval() -> None:
    assert round(until(0.1, 0.0), 9) == 0.1


def test_what_waits_for_a_new_producer_is_not_gathering() -> None:
    pacing = Pacing(0.1, 5)
    pacing.gathers(1_000.0)
    pacing.delayed(3.0)
    assert round(pacing.began(1_003.0), 6) == 1_003.1


@given(waiting=st.integers(0, 100_000), size=st.integers(0, 100 << 20))
def test_what_is_fetched_ahead_has_an_end_in_records_and_in_bytes(waiting: int, size: int) -> None:
    most = after(100).ahead(2_000, waiting, size)
    assert 0 <= most <= 1_000
    if most:
        assert waiting + most <= 20_000
        assert (waiting + most) * size <= 4 << 20


def after(size: int, together: int = 1) -> Pacing:
    """Behind a poll that brought a value of so many bytes."""
    pacing = Pacing(0.1, 100_000, together)
    pacing.saw(size)
    return pacing


def test_small_records_are_fetched_ahead_in_whole_chunks_behind_a_transaction_that_is_worth_it() -> None:
    assert after(100).ahead(2_000, 0, 100) == 1_000
    assert after(100).ahead(2_000, 19_500, 100) == 500
    assert after(100).ahead(1_999, 0, 100) == 0


def test_a_poll_of_a_backlog_takes_what_a_cache_holds() -> None:
    assert [after(size).more(0) for size in (0, 100, 256, 1_000, 100_000)] == [1_000, 1_000, 1_000, 256, 100]
    # In whole batches, where a function gets batches: one at least.
    assert [after(size, 250).more(0) for size in (100, 1_000, 100_000)] == [1_000, 250, 250]
    assert after(1_000, 5_000).more(0) == 5_000
    assert after(100).more(99_990) == 10, "and no more than a transaction may take"


def test_the_groups_callbacks_are_served_though_there_is_no_room() -> None:
    assert [Pacing(0.1, 5).first(waiting) for waiting in (0, 4, 5, 9)] == [5, 1, 1, 1]


def test_the_pause_behind_aborts_grows_until_a_commit_and_records_that_come_again_are_not_waited_for() -> None:
    pacing, pauses = Pacing(0.1, 5), []
    pacing.began(0.0)
    for _ in range(9):
        pacing.aborted(0.0)
        pauses.append(pacing.pause_left_s(0.0))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert pacing.gather_s(0.05) == 0
    pacing.committed(5)
    assert round(pacing.gather_s(0.05), 6) == 0.05


def limits(pacing: Pacing, commits: int, open_s: float, sending_s: float) -> list[int]:
    """The most records of the transactions after each of so many commits that took what they could."""
    found = []
    for _ in range(commits):
        pacing.committed(pacing.limit, open_s, sending_s)
        found.append(pacing.limit)
    return found


def test_limit_is_half_of_what_was_delivered_in_time_and_grows_back() -> None:
    pacing = Pacing(0.1, 1_000, timeout_s=10.0)
    assert pacing.timed_out(800, delivered=0.25)
    assert pacing.limit == 100
    assert limits(pacing, 4, open_s=0.2, sending_s=0.1) == [126, 158, 198, 248]
    assert limits(pacing, 8, open_s=0.2, sending_s=0.1)[-2:] == [1_000, 1_000]


def test_limit_neither_grows_nor_shrinks_while_half_of_the_time_is_enough() -> None:
    pacing = Pacing(0.1, 1_000, timeout_s=10.0)
    pacing.timed_out(800, delivered=1.0)
    assert limits(pacing, 2, open_s=4.0, sending_s=3.9) == [400, 400]
    assert limits(pacing, 2, open_s=6.0, sending_s=0.1) == [400, 400], "a slow function's time is its own"
    assert limits(pacing, 3, open_s=6.0, sending_s=5.9) == [200, 100, 50]


def test_limit_of_one_record_cannot_shrink() -> None:
    pacing = Pacing(0.1, 1_000, timeout_s=10.0)
    assert pacing.timed_out(2, delivered=0.0)
    assert pacing.limit == 1
    assert not pacing.timed_out(1, delivered=0.0)
    assert pacing.limit == 1
