"""Tests of the worker that need no Kafka: which function is blamed for a slow slice."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import eos.engine.handling
import eos.worker.worker
from eos import App, Out, Record
from eos.engine.handling import Collector
from eos.errors import ConfigurationError
from eos.kafka.client.world import World
from eos.session.outcomes import Outcome
from eos.worker.worker import Worker

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "transaction.timeout.ms": 2_000} | {
    "max.poll.interval.ms": 60_000,
    "eos.batch.max.records": 3,
}


class Clock:
    """Advances only when a function sets how long it takes."""

    def __init__(self) -> None:
        self.now = 0.0


class Txn(Collector):
    """A transaction of 100 ms that hands out these records as the worker takes them."""

    def __init__(self, clock: Clock, records: list[Record]) -> None:
        super().__init__()
        self._clock, self._until, self.waiting = clock, clock.now + 0.1, records

    def take(self, most: int) -> list[Record]:
        if self._clock.now >= self._until:
            return []
        self._taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return self._taken

    def give_back(self, count: int) -> None:
        self.waiting = self._taken[len(self._taken) - count :] + self.waiting


@pytest.fixture
def clock() -> Clock:
    return Clock()


def worker_of(clock: Clock, seconds: Mapping[str, float]) -> Worker:
    """Return a worker with `quick` (single records of a) and `batches` (batches of b); a call lasts `seconds[name]`."""
    app = App("app")

    @app.process("a", to="out")
    def quick(value: bytes) -> bytes:
        clock.now += seconds["quick"]
        return value

    @app.process_batch("b", to="out")
    def batches(batch: list[Record]) -> list[Out]:
        clock.now += seconds["batches"]
        return [record.out(record.value) for record in batch]

    worker = Worker(app, eos.Settings(SETTINGS), world=World(now=lambda: clock.now))
    session: Any = worker.session
    session._parts.fetcher._group_consumer = SimpleNamespace(
        assignment=SimpleNamespace(reading=frozenset({("a", 0), ("b", 0)}))
    )
    session._parts.producer = SimpleNamespace(who=dict)
    session._parts.positions.committed = {("a", 0): 0, ("b", 0): 0}
    worker._slice_sizes._slice_size = 100
    return worker


def records(topic: str, count: int) -> list[Record]:
    return [Record(topic, 0, offset, value=b"v") for offset in range(count)]


def attempt(worker: Worker, clock: Clock, given: list[Record], outcome: Outcome = Outcome.ABORTED) -> list[Record]:
    """Handle the records in a transaction with this outcome, and return the records that were not taken."""
    txn: Any = Txn(clock, given)
    worker._handle(txn)
    if outcome is Outcome.COMMITTED:
        at: Any = worker.session._parts.positions.committed
        handled = given[: len(given) - len(txn.waiting)]
        at |= {(record.topic, record.partition): record.offset + 1 for record in handled}
    worker.on_end(txn, outcome)
    return list(txn.waiting)


def test_batch_that_was_slow_before_gets_its_own_transaction(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    worker = worker_of(clock, {"quick": 0.001, "batches": 3.0})
    given = [*records("a", 2), *records("b", 5)]
    attempt(worker, clock, given)
    caplog.clear()
    left = attempt(worker, clock, given, Outcome.COMMITTED)
    assert left == given[2:]
    left = attempt(worker, clock, left, Outcome.COMMITTED)
    assert left == given[5:], "the transaction ends after one call"
    assert caplog.messages == [], "time before the first output costs nothing"
    assert not worker._slow_functions.has_slow_records


def test_record_that_was_slow_before_runs_alone_although_it_is_fast(clock: Clock) -> None:
    worker = worker_of(clock, {"quick": 0.001, "batches": 0.001})
    given = [*records("b", 3), *records("a", 3)]
    worker._slow_functions._slow = {("a", 0): 1}
    left = attempt(worker, clock, given, Outcome.COMMITTED)
    assert left == given[4:]
    assert attempt(worker, clock, left, Outcome.COMMITTED) == given[5:]


def test_slower_of_two_functions_is_blamed_with_its_setting(clock: Clock) -> None:
    worker = worker_of(clock, {"quick": 0.001, "batches": 61.0})
    given = [*records("a", 2), *records("b", 3)]
    attempt(worker, clock, given)
    left = attempt(worker, clock, given, Outcome.COMMITTED)
    attempt(worker, clock, left)
    with pytest.raises(ConfigurationError, match=r"^batches took 61\.0 s for 3 records from b\[0\]@0 on") as e:
        attempt(worker, clock, left)
    assert "or lower eos.batch.max.records=3" in str(e.value)


def test_slower_of_two_functions_is_found_by_single_records(clock: Clock) -> None:
    worker = worker_of(clock, {"quick": 61.0, "batches": 0.001})
    given = [*records("b", 3), *records("a", 2)]
    attempt(worker, clock, given)  # all at once
    attempt(worker, clock, given)  # one by one
    left = attempt(worker, clock, given, Outcome.COMMITTED)
    assert left == given[3:]
    attempt(worker, clock, left)
    with pytest.raises(ConfigurationError, match=r"^quick took 61\.0 s for a\[0\]@0,"):
        attempt(worker, clock, left)


def test_slow_slice_without_a_slow_call_runs_one_by_one(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    seconds = {"quick": 0.6, "batches": 0.6}
    worker = worker_of(clock, seconds)
    given = [*records("b", 9), *records("a", 2)]
    with caplog.at_level(logging.WARNING, "eos"):
        attempt(worker, clock, given)
    assert "batches, quick took 3.0 s for 11 records from b[0]@0 on" in caplog.text
    assert "eos.batch.max.records" not in caplog.text
    assert worker._slow_functions.runs_one_by_one
    seconds |= {"quick": 0.001, "batches": 0.001}  # a service that was slow for a moment recovers
    attempt(worker, clock, given)
    assert not worker._slow_functions.runs_one_by_one


def test_fast_batch_is_not_blamed_for_a_slow_slice(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    worker = worker_of(clock, {"batches": 0.6})
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "eos"):
            attempt(worker, clock, records("b", 15))
    assert "batches took 3.0 s for 15 records" in caplog.text


def test_slow_first_record_is_neither_lost_nor_logged(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The broker's timeout starts with the first output."""
    worker = worker_of(clock, {"quick": 3.0, "batches": 3.0})
    worker._slice_sizes._slice_size = 1
    with caplog.at_level(logging.WARNING, "eos"):
        for number in range(20):
            worker._handle(Txn(clock, records("a", 1)))  # type: ignore[arg-type]
            worker._handle(Txn(clock, records("b", 3)))  # type: ignore[arg-type]
            worker.session._parts.positions.committed = {("a", 0): number + 1, ("b", 0): number + 1}
    assert caplog.messages == []


def test_slow_record_after_a_sent_one_is_logged(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    seconds = {"quick": 0.001, "batches": 3.0}
    worker = worker_of(clock, seconds)
    given = [*records("a", 2), *records("b", 3)]
    with caplog.at_level(logging.WARNING, "eos"):
        for _ in range(20):
            worker._handle(Txn(clock, given))  # type: ignore[arg-type]
            worker.session._parts.positions.committed = {("a", 0): 2, ("b", 0): 3}
            given = [Record(r.topic, 0, r.offset, value=b"v") for r in given]
    assert {line.partition(" why=")[0] for line in caplog.messages} == {"transaction may exceed its timeout"}


def of_value(value: bytes) -> bytes:
    return value


def of_json(value: dict[str, int]) -> dict[str, int]:
    return value


def of_record(record: Record) -> Out:
    return record.out(record.value)


def of_typed_record(record: Record[dict[str, int]]) -> Out:
    return record.out(record.value)


def of_value_and_record(value: bytes, record: Record) -> Out:
    return record.out(value)


async def later(value: bytes) -> bytes:
    return value


@pytest.mark.parametrize(
    ("functions", "needs_records"),
    [
        ([of_value], False),
        ([of_value, of_json], False),
        ([of_record], True),
        ([of_typed_record], True),
        ([of_value_and_record], True),
        ([later], True),
        ([of_value, of_record], True),
    ],
)
def test_records_are_made_if_any_function_needs_them(functions: list[Any], needs_records: bool) -> None:
    app = App("app")
    for number, function in enumerate(functions):
        app.process(f"in-{number}", to="out")(function)
    assert Worker(app, eos.Settings(SETTINGS)).needs_records is needs_records


def test_records_are_made_for_batches_and_state() -> None:
    batches, counts = App("batches"), App("counts")

    @batches.process_batch("in", to="out")
    def copy(records: list[Record]) -> list[Out]:
        return [record.out(record.value) for record in records]

    @counts.process("in", to="out")
    def count(value: bytes, total: eos.State[int]) -> None:
        total.set(total.get(0) + 1)

    for app in (batches, counts):
        assert Worker(app, eos.Settings(SETTINGS)).needs_records
