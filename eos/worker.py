"""Runs an App on a session: slices of records through its functions, the error policy, signals, the live line.

It never decides commit or abort (eos/session.py does) and never touches a Kafka client. What it adds to the session's
loop: a record's outputs are sent only after its function returned; the first record that fails ends the transaction
just before it, so all earlier ones are committed and nothing of it is visible.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from eos import log
from eos.app import App, Record, Route, Send
from eos.errors import EosError, PoisonRecord, Temporary
from eos.session import Transaction, TransactSession
from eos.settings import Settings

_SLICE_TARGET_S = 0.005
_LARGEST_SLICE = 2_000


class ShutdownExpired(BaseException):
    """Raised by a signal handler into whatever runs: the stop took too long, or was asked for twice.

    A BaseException, so that no `except Exception` of a user's function swallows it.
    """


class Worker:
    """One App on one session, in the calling thread.

    `run()` returns when stopped by a signal or, with `until_end`, when the group has handled everything that was
    readable at the start. Raises EosError's subclasses.
    """

    def __init__(self, app: App, settings: Settings, *, until_end: bool = False) -> None:
        app.check()
        self.app = app
        self.settings = settings.with_values(
            **{"group.id": app.id, "transactional.id": f"{app.id}-{settings.instance}"}
        )
        self.session = TransactSession(
            self.settings, app.topics, until_end=until_end, destinations=sorted(app.destinations)
        )
        self._slice = 1
        self._batch_most: int = self.settings["eos.batch.max.records"]
        routes = set(app.routes.values())
        self._single_route: Route | None = routes.pop() if len(routes) == 1 else None
        self.on_tick: Callable[[], None] = lambda: None

    def run(self) -> None:
        session = self.session
        began = time.monotonic()
        finished = False
        try:
            session.start()
            with _rare_garbage_collection():
                for txn in session:
                    poison = self._handle(txn)
                    if poison is not None:
                        self._stop_at(txn, poison)
                    self.on_tick()
            finished = True
        except ShutdownExpired as expired:
            raise Temporary(f"the stop took too long ({expired}): the open transaction was given up") from expired
        finally:
            # A process that is done takes its partitions out of the group; one that failed is expected back soon.
            session.close(leave_group=finished)
        self._log_totals(time.monotonic() - began)

    def _log_totals(self, seconds: float) -> None:
        counters = self.session.counters
        log.info(
            "stopped",
            records_in=counters.records_in,
            records_out=counters.records_out,
            transactions=counters.transactions,
            aborts=counters.aborts,
            replaced=sum(counters.replacements.values()),
            seconds=round(seconds, 1),
        )

    # ---- one transaction --------------------------------------------------------------------------------------

    def _handle(self, txn: Transaction) -> PoisonRecord | None:
        """Handles records until the transaction's interval is over; returns the first that failed, given back."""
        while True:
            batch = txn.take(self._slice_size())
            if not batch:
                return None
            began = time.monotonic()
            poison = self._handle_batch(txn, batch)
            if poison is not None:
                return poison
            self._adapt(time.monotonic() - began, len(batch))

    def _slice_size(self) -> int:
        route = self._single_route
        return self._batch_most if route is not None and route.batch else self._slice

    def _adapt(self, took_s: float, size: int) -> None:
        """Slices of about 5 ms, so that a slow function still ends its transaction in time."""
        if took_s < _SLICE_TARGET_S and size >= self._slice:
            self._slice = min(_LARGEST_SLICE, self._slice * 2)
        elif took_s > 2 * _SLICE_TARGET_S:
            self._slice = max(1, self._slice // 2)

    def _handle_batch(self, txn: Transaction, batch: list[Record]) -> PoisonRecord | None:
        if self._single_route is not None:
            return self._run_route(txn, self._single_route, batch, len(batch))
        left = len(batch)
        for route, records in _by_route(self.app, batch):
            poison = self._run_route(txn, route, records, left)
            if poison is not None:
                return poison
            left -= len(records)
        return None

    def _run_route(self, txn: Transaction, route: Route, records: list[Record], left: int) -> PoisonRecord | None:
        """Sends the outputs of `records`; `left` of the taken records, these first, are not handled yet."""
        if route.batch:
            try:
                outputs_of_all = route.outputs_batch(records)
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it stops the worker
                txn.give_back(left)
                return _poison_batch(route, records, error)
            txn.send_all(outputs_of_all)
            return None
        sends: list[Send] = []
        outputs, coming = route.outputs, iter(records)
        poison: PoisonRecord | None = None
        try:
            for record in coming:
                sends += outputs(record)
        except Exception as error:  # noqa: BLE001 - see above
            poison = _poison(route, record, error)
        txn.send_all(sends)
        if poison is not None:
            txn.give_back(left - len(records) + operator.length_hint(coming) + 1)
        return poison

    def _stop_at(self, txn: Transaction, poison: PoisonRecord) -> None:
        """Commits what came before the poison record, then stops. After an abort those records come again first."""
        if isinstance(poison.__cause__, EosError):
            # Not about the record: the App is wrong (a destination that was not named, ...).
            txn.commit()
            raise poison.__cause__
        if txn.commit():
            raise poison


def _by_route(app: App, batch: list[Record]) -> Iterator[tuple[Route, list[Record]]]:
    """Consecutive records of one route, in order."""
    run: list[Record] = []
    current: Route | None = None
    for record in batch:
        route = app.routes[record.topic]
        if route is not current and run:
            assert current is not None
            yield current, run
            run = []
        current = route
        run.append(record)
    if current is not None:
        yield current, run


def _poison(route: Route, record: Record, error: Exception) -> PoisonRecord:
    poison = PoisonRecord(
        f"{route.name} failed on {record.topic} [{record.partition}] offset {record.offset}: "
        f"{type(error).__name__}: {error}",
        record.topic,
        record.partition,
        record.offset,
    )
    poison.__cause__ = error
    return poison


def _poison_batch(route: Route, records: list[Record], error: Exception) -> PoisonRecord:
    """A batch function fails for a range: policy stop does not run it again to find which record it was."""
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for record in records:
        first, _ = spans.get((record.topic, record.partition), (record.offset, 0))
        spans[record.topic, record.partition] = (first, record.offset)
    where = ", ".join(f"{t} [{p}] offsets {first} to {last}" for (t, p), (first, last) in spans.items())
    head = records[0]
    poison = PoisonRecord(
        f"{route.name} failed on one of {len(records)} records ({where}): {type(error).__name__}: {error}",
        head.topic,
        head.partition,
        head.offset,
    )
    poison.__cause__ = error
    return poison


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """The hot loop makes no cycles; the default thresholds cost 3 to 18 % of it."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class StopSignals:
    """SIGTERM and SIGINT: the first asks for a stop after the batch, the second or the deadline gives up."""

    def __init__(self, session: TransactSession) -> None:
        self._session = session
        self._timeout_s: float = session.settings["eos.shutdown.timeout.ms"] / 1000
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._asked)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._expired)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _: Any) -> None:
        if self._session.stop_requested:
            raise ShutdownExpired("asked a second time")
        self._session.stop_requested = True
        log.info("stopping", signal=signal.Signals(number).name)
        # setitimer(0) would switch the timer off instead of firing it.
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._timeout_s))

    def _expired(self, *_: Any) -> None:
        raise ShutdownExpired(f"eos.shutdown.timeout.ms={round(self._timeout_s * 1000)} is over")
