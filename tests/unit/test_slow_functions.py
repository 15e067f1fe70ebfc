"""Slow functions: a warning while a loss is possible, another after the first loss, and an error that names the setting
after the second."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from eos import App, Record, Settings
from eos.app.routes import Route
from eos.engine.slow_functions import SlowFunctions
from eos.errors import ConfigurationError
from eos.session.outcomes import Outcome

SETTINGS = {"transaction.timeout.ms": 2_000, "max.poll.interval.ms": 12_000}
MAY_BE = "transaction may exceed its timeout"
WAS = "transaction exceeded its timeout"
OWNED = {("in", 0), ("in", 1)}


def route(batch: bool = False, function: Callable[[Any], Any] = lambda record: None) -> Route:
    app = App("app")
    (app.process_batch if batch else app.process)("in")(function)
    return app.routes["in"]


async def one(record: Record) -> None: ...


def records(*offsets: int, partition: int = 0) -> list[Record]:
    return [Record("in", partition, offset) for offset in offsets]


class Session:
    """Reports to SlowFunctions what a session would report, one transaction at a time."""

    def __init__(self, **settings: int) -> None:
        self.slow_functions = SlowFunctions(Settings(SETTINGS | settings))

    def slow(self, given: list[Record], made: Route | None = None, took_s: float = 3.5) -> None:
        who = {"transactional_id": "app-1", "epoch": 3}
        self.slow_functions.note_slow(who, made or route(), given, took_s)

    def lost(self, outcome: Outcome = Outcome.ABORTED) -> None:
        self.slow_functions.ended(outcome is Outcome.COMMITTED, {})
        self.slow_functions.check()

    def kept(self) -> None:
        self.lost(Outcome.COMMITTED)


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "eos")


def test_slow_function_is_judged_by_both_timeouts() -> None:
    slow_functions = SlowFunctions(Settings(SETTINGS))
    assert not slow_functions.is_too_slow(1.9, 11.9), "a long call before the first output loses nothing"
    assert slow_functions.is_too_slow(2.1, 0.3), "the transaction is open for too long"
    assert slow_functions.is_too_slow(0.0, 12.1), "the group has removed this member"
    assert not SlowFunctions(Settings({})).is_too_slow(9.9, 9.9)


def test_possible_and_actual_loss_are_logged_differently(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    session.slow(records(7))
    (line,) = caplog.messages
    assert line.startswith(MAY_BE)
    assert line.endswith(" transactional_id=app-1 epoch=3")
    session.lost()
    assert [line.partition(" why=")[0] for line in caplog.messages] == [MAY_BE, WAS]


@pytest.mark.parametrize("offsets", [range(7, 27), [7] * 3], ids=["other records", "one retried record"])
def test_slow_function_without_a_loss_is_never_stopped(
    offsets: Iterable[int], caplog: pytest.LogCaptureFixture
) -> None:
    session = Session()
    for offset in offsets:
        session.slow(records(offset))
        session.kept()
    session.lost()  # the next transaction is lost, without a slow function
    assert not any(line.startswith(WAS) for line in caplog.messages)
    assert not session.slow_functions.runs_one_by_one


@pytest.mark.parametrize(
    ("took_s", "longer_than"),
    [
        (3.6, "transaction.timeout.ms=2000: raise it"),
        (20.0, "max.poll.interval.ms=12000 and transaction.timeout.ms=2000: raise both"),
    ],
)
def test_record_lost_twice_is_an_error_with_the_setting(took_s: float, longer_than: str) -> None:
    session = Session()
    session.slow(records(7))
    session.lost()
    session.slow(records(7), took_s=took_s)
    with pytest.raises(ConfigurationError) as e:
        session.lost()
    assert f"took {took_s} s for in[0]@7, longer than {longer_than}" in str(e.value)


def test_slow_record_is_remembered_until_its_commit() -> None:
    session = Session()
    session.slow(records(6, 7, 8))
    session.lost()
    assert session.slow_functions.find_slow(records(6, 7, 8), OWNED) is None, (
        "the slow one of the three is not known yet"
    )
    session.slow(records(7))
    session.lost(Outcome.UNKNOWN)
    assert session.slow_functions.find_slow([*records(7, partition=1), *records(6, 7)], OWNED) == 2
    session.slow_functions.ended(True, {("in", 0): 7, ("in", 1): 9})
    assert session.slow_functions.find_slow(records(7), OWNED) == 0, "only records before it are committed"
    session.slow_functions.ended(True, {("in", 0): 8})
    assert not session.slow_functions.has_slow_records


def test_record_lost_once_and_then_committed_does_not_stop_a_worker() -> None:
    session = Session()
    session.slow(records(7))
    session.lost()
    session.slow(records(7))
    session.kept()
    session.lost()


def test_first_loss_of_each_record_is_survived() -> None:
    session = Session()
    for offset, partition in ((7, 0), (8, 0), (7, 1)):
        session.slow(records(offset, partition=partition))
        session.lost()


def test_records_of_a_slow_slice_are_run_one_by_one() -> None:
    session = Session()
    many = [*records(5, 6, 7), *records(3, partition=1)]
    session.slow(many)
    assert not session.slow_functions.runs_one_by_one
    session.lost()
    session.slow(many)
    session.lost()
    assert session.slow_functions.runs_one_by_one
    for record in many:
        assert session.slow_functions.runs_one_by_one
        session.slow_functions.note_in_time(record, OWNED)
    assert not session.slow_functions.runs_one_by_one


def test_revoked_partitions_do_not_keep_records_running_one_by_one() -> None:
    session = Session()
    session.slow([*records(5, 6), *records(3, partition=1)])
    session.lost()
    session.slow_functions.note_in_time(records(6)[0], {("in", 0)})
    assert not session.slow_functions.runs_one_by_one


@pytest.mark.parametrize(("made", "setting"), [
    (route(batch=True), "eos.batch.max.records=1000"), (route(function=one), "eos.async.max.records=100")
])  # fmt: skip
def test_batch_lost_twice_names_the_batch_size_setting(made: Route, setting: str) -> None:
    session = Session()
    session.slow([*records(5, 6), *records(3, 4, partition=1)], made)
    session.lost()
    assert not session.slow_functions.runs_one_by_one
    session.slow([*records(2, 3, 4, partition=1)], made)
    with pytest.raises(ConfigurationError, match=f"or lower {setting}"):
        session.lost()
