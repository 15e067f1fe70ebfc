"""A function that is too slow for its transaction: once is survived and told, twice is one error with the setting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from eos import App, Record, Settings
from eos.app import Route
from eos.errors import ConfigurationError
from eos.slowness import Slowness

SETTINGS = {"transaction.timeout.ms": 2_000, "max.poll.interval.ms": 12_000}


def route(batch: bool = False, function: Callable[[Any], Any] = lambda record: None) -> Route:
    app = App("app")
    (app.process_batch if batch else app.process)("in")(function)
    return app.routes["in"]


async def one(record: Record) -> None: ...


def records(*offsets: int, partition: int = 0) -> list[Record]:
    return [Record("in", partition, offset) for offset in offsets]


def test_what_is_too_slow_is_measured_against_both_settings() -> None:
    slowness = Slowness(Settings(SETTINGS))
    assert not slowness.too_slow(1.9, 1.9)
    assert slowness.too_slow(2.1, 0.3), "the transaction is open for too long, whoever made it so"
    assert Slowness(Settings(SETTINGS | {"transaction.timeout.ms": 60_000})).too_slow(13, 13)
    assert not Slowness(Settings({})).too_slow(9.9, 9.9)


def test_the_same_record_twice_is_an_error_with_function_place_and_setting(caplog: pytest.LogCaptureFixture) -> None:
    slowness = Slowness(Settings(SETTINGS))
    with caplog.at_level(logging.WARNING, "eos"):
        slowness.strike(route(), records(7), 3.5, {"transactional_id": "app-1", "epoch": 3})
    assert "too slow: the transaction is lost, its records come again" in caplog.text
    assert caplog.text.endswith(" transactional_id=app-1 epoch=3\n")
    with pytest.raises(ConfigurationError) as e:
        slowness.strike(route(), records(7), 3.6)
    assert "took 3.6 s for in [0] offset 7, longer than transaction.timeout.ms=2000: raise it" in str(e.value)


def test_the_longest_names_both_settings() -> None:
    slowness = Slowness(Settings(SETTINGS))
    slowness.strike(route(), records(7), 20)
    with pytest.raises(
        ConfigurationError, match=r"max.poll.interval.ms=12000 and transaction.timeout.ms=2000: raise both"
    ):
        slowness.strike(route(), records(7), 20)


def test_other_records_are_a_first_time_of_their_own() -> None:
    slowness = Slowness(Settings(SETTINGS))
    for place in ((7, 0), (8, 0), (7, 1)):
        slowness.strike(route(), records(place[0], partition=place[1]), 3)


def test_many_records_of_a_function_of_one_prove_nothing_and_are_run_one_by_one_until_they_passed() -> None:
    slowness = Slowness(Settings(SETTINGS))
    owned = {("in", 0), ("in", 1)}
    many = [*records(5, 6, 7), *records(3, partition=1)]
    slowness.strike(route(), many, 3)
    slowness.strike(route(), many, 3)
    assert slowness.one_by_one
    for record in many:
        assert slowness.one_by_one
        slowness.passed(record, owned)
    assert not slowness.one_by_one


def test_partitions_that_the_group_took_away_are_not_waited_for() -> None:
    slowness = Slowness(Settings(SETTINGS))
    slowness.strike(route(), [*records(5, 6), *records(3, partition=1)], 3)
    slowness.passed(records(6)[0], {("in", 0)})
    assert not slowness.one_by_one


@pytest.mark.parametrize(("made", "setting"), [
    (route(batch=True), "eos.batch.max.records=250"), (route(function=one), "eos.async.max.records=100")
])  # fmt: skip
def test_a_batch_that_comes_again_and_is_slow_again_names_how_to_make_it_smaller(made: Route, setting: str) -> None:
    slowness = Slowness(Settings(SETTINGS))
    slowness.strike(made, [*records(5, 6), *records(3, 4, partition=1)], 3)
    assert not slowness.one_by_one
    with pytest.raises(ConfigurationError, match=f"or lower {setting}"):
        slowness.strike(made, [*records(2, 3, 4, partition=1)], 3)
