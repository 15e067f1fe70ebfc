"""Tests that the order of times in memory (eos/state/time_order.py) is the sorted one after any changes."""

from __future__ import annotations

import random

import pytest

from eos.state.time_order import Entry, TimeOrder


def entry(time_ms: int) -> Entry:
    return time_ms, b"cell %d" % (time_ms % 7)


@pytest.mark.parametrize("seed", range(20))
def test_time_order_is_sorted_after_any_changes(seed: int) -> None:
    rng = random.Random(seed)
    held = {entry(time_ms) for time_ms in rng.sample(range(50), 5)}
    order, now, checked = TimeOrder(held), 50, 0
    for _ in range(200):
        now += rng.randrange(4)
        new = {entry(now - rng.choice((0, 0, 0, 30))) for _ in range(rng.randrange(4))} - held
        order.add_all(list(new))
        held |= new
        for gone in rng.sample(sorted(held), min(len(held), rng.randrange(3))):
            order.remove(gone)
            held.remove(gone)
        assert list(order) == sorted(held)
        checked += len(held)
    assert checked > 100


def test_time_order_forgets_removed_entries() -> None:
    order = TimeOrder([])
    order.add_all([entry(0)])
    for time_ms in range(1, 1_000):  # one value that is written again and again, after an older one
        order.add_all([entry(time_ms)])
        if time_ms > 1:
            order.remove(entry(time_ms - 1))
    assert list(order) == [entry(0), entry(999)]
    assert len(order._appended) < 10
