"""Runs records through an App's functions and applies each function's error policy, inside one transaction.

Owns the decision about a failed record: hand it out again, skip it, send it to its dead-letter topic, or end the run.
It must never begin, commit or abort a transaction, and never call a client. It feeds a transaction: a worker's, or the
one of eos.testing without a broker.

A failed record has sent nothing (eos/app/routes/). Its replacement is sent in the same transaction: a dead letter
counts as one output, a skipped record has none, and lineage counts them the same way. If the client or the broker
refuses an output, the transaction aborts first. The session then calls `note_refused`, and hands all records out again.
This time the record fails without a call of its function.
"""

from __future__ import annotations

import errno
import itertools
import math
import operator
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, NamedTuple, Protocol

from eos import log
from eos.app.definition import App
from eos.app.lineage import Ledger, check_route, with_lineage
from eos.app.policies import Policy, stop
from eos.app.routes import Route, feed_from
from eos.app.routes.sink import Writer
from eos.app.routes.timed import window_finder
from eos.app.state import TaskCells
from eos.app.stores import CellsOf
from eos.app.timers import TimerQueue, TimersDue, describe, due_of, record_of
from eos.encoding.dead_letters import class_name, make_dead_letter, short_message
from eos.encoding.frames import Frame, format_frames, frames_of
from eos.encoding.serde import DecodeError
from eos.engine.slices import Partition, SliceSizes, by_route, spans_of
from eos.errors import ConfigurationError, EosError, PoisonRecord, Temporary, causes, safe_str
from eos.records import Each, Feed, FeedResult, Header, Record, Send, format_position
from eos.sql.outbox import TableRow

Position = tuple[str, int, int]  # topic, partition and offset of a record

_TIMERS_AT_ONCE = 500
_LINES, _LINES_INTERVAL_S = 10, 10.0  # maximum number of log lines about single records per interval
# A failure is logged with a traceback the first time that its line of the user's code fails, for at most this many
# lines. The limit bounds memory, because a program may create a function for each record.
_MOST_TRACES = 100
# Errors in which the operating system reports its own state, not the request: no handles, memory, disk space or
# processes left; a disk that cannot be read or written.
_MACHINE_ERRNOS = frozenset(
    (
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOBUFS),
        *(errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO),
    )
)
_timer_name = operator.attrgetter("headers.due.name")  # of a record that stands for a timer
_NO_THREAD = "can't start new thread"  # the message of a RuntimeError without a class of its own


class RecordRefused(Exception):
    """Reports that the client or the broker permanently refused an output of the record."""


class DeadLetterRefused(Exception):
    """Reports that the client or the broker refused the record's dead letter too. The record has no other
    destination."""


class Feeds(Protocol):
    """Defines the part of a transaction that a handler uses.

    `waited_s`: seconds that sends have waited for room in the client's queue, in this transaction and earlier ones.
    `is_over`: the transaction should end soon.
    """

    @property
    def waited_s(self) -> float: ...

    @property
    def is_over(self) -> bool: ...

    def count(self, *, skipped: int = 0, dead_letters: int = 0, late: int = 0, duplicates: int = 0) -> None:
        """Count skipped records, dead letters, late records and duplicates. The counts take effect if the transaction
        commits."""

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult: ...


class Collector:
    """Collects outputs in order, in place of a worker's transaction and its sink, where no Kafka client exists.

    `most`: due timers stop firing once there are this many outputs.
    """

    waited_s = 0.0

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self.sends: list[Send] = []
        self.skipped = self.dead_letters = self.late = self.duplicates = 0

    @property
    def is_over(self) -> bool:
        return len(self.sends) >= self._most

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        return feed(records, self)

    def count(self, *, skipped: int = 0, dead_letters: int = 0, late: int = 0, duplicates: int = 0) -> None:
        self.skipped += skipped
        self.dead_letters += dead_letters
        self.late += late
        self.duplicates += duplicates

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int = -1,
        _before: None = None,
        _after: None = None,
        timestamp_ms: int = 0,
        headers: list[Header] | None = None,
    ) -> None:
        kept = None if headers is None else headers.copy()  # see Sink.produce
        self.sends.append((topic, value, key, partition, timestamp_ms, kept))

    def on_produce_error(self, error: Exception, send: Send) -> None:
        raise error  # appending to a list does not fail


class Halt(NamedTuple):
    """Ends a transaction's records early: only the first `handled` records are done.

    `error`: the run ends with this error once those records are committed. None: the next record is handed out in
    another transaction, after `pause_s` seconds if it failed.
    """

    handled: int
    error: EosError | None = None
    pause_s: float | None = None


_EARLIER_TIMER: Final = Halt(0)
"""Stands for a stop before a due timer that is no longer the first, because a timer function has set an earlier
timer."""


class TimedCall(NamedTuple):
    """Holds one call of a route's function, or successive calls on single records, with the duration."""

    route: Route
    records: list[Record]
    seconds: float


class Handler:
    """Handles records with the routes and policies of one App; a worker has one handler.

    An `async def` runs on at most `concurrent_most` records at once, a batch function gets at most `batch_most`.
    `passing`: names of headers, see Route. `policy`: applies to all functions in place of their own. `cells_of`:
    returns where the state of a function is kept. `tasks_of`: returns the tasks of a function, by partition.
    `silent_until_ms` returns the time up to which a partition's event time follows the clock, given how long the
    partition must have been silent; 0: it does not follow the clock. `watermark_ms` returns the event time that a
    partition has reached, for a function that reads the output of another function of the App.
    """

    def __init__(
        self,
        app: App,
        ledger: Ledger | None = None,
        concurrent_most: int = 100,
        batch_most: int = 5_000,
        passing: Collection[str] = (),
        policy: Policy | None = None,
        now: Callable[[], float] = time.monotonic,
        cells_of: Callable[[Route], CellsOf] | None = None,
        tasks_of: Callable[[Route], Mapping[Partition, TaskCells]] | None = None,
        silent_until_ms: Callable[[Partition, int], int] = lambda *_: 0,
        watermark_ms: Callable[[Partition], int] = lambda _: 0,
        writer_of: Callable[[Route], Writer | None] = lambda _: None,
    ) -> None:
        self._silent_until_ms, self._watermark_ms = silent_until_ms, watermark_ms
        self._now = now
        self._app, self._ledger, self._policy = app, ledger, policy
        self._slice_sizes = SliceSizes(batch_most, concurrent_most)
        self._feeds: dict[Route, Feed] = {}
        self._timed: dict[Route, Route] = {}  # functions that use time, with their timer functions and tasks
        self._last_fired: list[Record] = []  # the last timers that fired in the open transaction
        self._fires_one_at_a_time = False  # each transaction fires only one timer
        self._downstream: set[Route] = set()  # routes whose event time is not that of their own records
        self._tasks_of: Callable[[Route], Mapping[Partition, TaskCells]] = tasks_of or (lambda _: {})
        for route in app.functions:
            if ledger is not None:
                check_route(route)
            cells = cells_of(route) if route.has_state and cells_of is not None else None
            writer = writer_of(route)
            is_bound = bool(passing) or cells is not None or writer is not None
            made = route.bind(passing, cells, writer) if is_bound else route
            self._feeds[route] = made.feed if ledger is None or route.sink is not None else self._feed_of(made.each)
            if route.uses_time:
                self._timed[route] = made
                if app.follows(route):
                    self._downstream.add(made)
                self._feeds |= {handler: handler.feed for handler in made.handlers.values()}
        # The number of failures of each record. A number is kept until the record's offset is committed, because an
        # abort hands the record out again.
        self._failures: dict[Position, int] = {}
        # Records that run alone when they are handed out again, until their offsets are committed. The value of a
        # refused record is its error, so that two refused records in one transaction are both remembered. The value of
        # a retried record is None. While there are any, all records take the slower path.
        self._isolated: dict[Position, BaseException | None] = {}
        self._dead_lettered: set[Position] = set()  # records whose dead letters the last call of `handle` sent
        self._record_log = _RecordLog(now)
        # A lower bound of the time at which the open transaction's first output was sent, and its `waited_s` then.
        self._first_sent: tuple[float, float] | None = None
        self.longest: TimedCall | None = None
        """The longest call since the last call of `note_begin`."""

    def open_time_s(self, txn: Feeds, now: float) -> float:
        """Return the longest time for which the broker may have known the open transaction, in seconds. Waits for room
        in the client's queue do not count.

        The broker's clock starts with the first output; the result is 0 before it.
        """
        if self._first_sent is None:
            return 0.0
        since, waited_s = self._first_sent
        return now - since - (txn.waited_s - waited_s)

    def _feed_of(self, each: Each) -> Feed:
        return feed_from(each if self._ledger is None else with_lineage(each, self._ledger))

    def _feed(self, txn: Feeds, feed: Feed, route: Route, records: list[Record]) -> FeedResult:
        """Feed the transaction and measure the time it takes."""
        began, waited_s = self._now(), txn.waited_s
        fed = txn.feed(feed, records)
        ended = self._now()
        if self._first_sent is None and fed.sent:
            # A single call sends nothing before it ends.
            single = route.batch or route.concurrent or len(records) == 1
            self._first_sent = (ended, txn.waited_s) if single else (began, waited_s)
        is_longest = self.longest is None or ended - began > self.longest.seconds
        if is_longest and route.gives is None:  # a slow timer function cannot be split into single records
            self.longest = TimedCall(route, records, ended - began)
        return fed

    # ---- notifications from the session -------------------------------------------------------------------------

    def note_begin(self) -> None:
        """Record that a transaction begins, which has no outputs yet."""
        self.longest = self._first_sent = None
        self._last_fired = []

    def note_end(self, owned: Collection[Partition], committed: Mapping[Partition, int]) -> None:
        """Forget the failures of records that are now committed or assigned to another member."""
        if self._isolated or self._failures:
            self._isolated = {p: error for p, error in self._isolated.items() if _is_due(p, owned, committed)}
            self._failures = {p: times for p, times in self._failures.items() if _is_due(p, owned, committed)}

    def note_unreadable(self, position: Position, why: str) -> None:
        """Mark a fetched record as unreadable, so that its function does not get it."""
        self._isolated[position] = DecodeError(why)

    def note_refused(self, record: Record, failure: Exception) -> None:
        """Mark the record as having a refused output. The transaction aborts, and all of its records are handed out
        again."""
        position = _position(record)
        error: Exception = (DeadLetterRefused if position in self._dead_lettered else RecordRefused)(str(failure))
        error.__cause__ = failure
        self._isolated[position] = error

    def isolate_timers(self) -> None:
        """Fire each of the next timers in its own transaction, to find the timer with the refused output."""
        self._fires_one_at_a_time = True

    def note_refused_timers(self, failure: Exception) -> bool:
        """Record that an output of timers was refused in the aborted transaction, and return whether it had fired
        timers."""
        if self._last_fired and self._fires_one_at_a_time:
            self._fires_one_at_a_time = False
            self.note_refused(self._last_fired[-1], failure)
        elif self._last_fired:
            self._fires_one_at_a_time = True
        return self.has_fired

    @property
    def has_fired(self) -> bool:
        """Return whether timers fired in the open transaction, or in the last aborted transaction."""
        return bool(self._last_fired)

    def tick(self) -> None:
        """Log a summary of the suppressed lines once the interval is over. Called even when there are no records."""
        self._record_log.tick()

    def end(self) -> None:
        """Log a summary of the suppressed lines at the end of the run."""
        self._record_log.log_rest()

    # ---- handling -----------------------------------------------------------------------------------------------

    def handle(self, txn: Feeds, records: list[Record]) -> Halt | None:
        """Send the outputs of the records; return None if all of them are handled."""
        done = 0
        for route, run in by_route(self._app, records):
            halt = self.handle_route(txn, route, run)
            if halt is not None:
                return halt._replace(handled=done + halt.handled)
            done += len(run)
        return None

    def handle_route(self, txn: Feeds, route: Route, records: list[Record]) -> Halt | None:
        """Handle the records of one route, as `handle` does."""
        self._dead_lettered.clear()
        halt = self._run(txn, route, records)
        if (timed := self._timed.get(route)) is None:
            return halt
        assert timed.tally is not None
        late, duplicates = timed.tally.take()
        if late or duplicates:
            txn.count(late=late, duplicates=duplicates)
        return halt or self._fire_overdue(txn, timed, records)

    def _run(self, txn: Feeds, route: Route, records: list[Record]) -> Halt | None:
        """Run a route on records or on due timers. The hot path takes one iteration of the loop."""
        feed = self._feeds[route]
        at, most = 0, self._slice_sizes.size_for_route(route, len(records))
        while at < len(records):
            size = self._run_length(records, at, most)
            part = records[at : at + size] if at or size < len(records) else records
            error = self._isolated.get(_position(part[0])) if self._isolated else None
            if error is None:
                fed = self._feed(txn, feed, route, part)
                if isinstance(fed.error, TimersDue) and route.gives is not None:
                    return _EARLIER_TIMER
                if isinstance(fed.error, TimersDue):
                    at += fed.handled
                    halt = self._fire_before(txn, route, records[at], fed.error.now_ms)
                    if halt is not None:
                        return halt._replace(handled=at)
                    continue
                at, error = at + fed.handled, fed.error and self._classify(route, records[at + fed.handled], fed.error)
                if error is None:
                    if self._isolated:
                        self._isolated.pop(_position(part[0]), None)
                    continue
                if len(part) > 1 and route.batch and not isinstance(error, EosError):
                    if self._policy_of(route) == stop:
                        return Halt(at, _poison_batch(route, part, error))
                    most = 1  # handle the records one by one, to find the one that failed
                    continue
            halt = self._apply_policy(txn, route, records[at], error)
            if halt is not None:
                return halt._replace(handled=at)
            at += 1
        return None

    def _run_length(self, records: list[Record], at: int, most: int) -> int:
        """Return how many records from `at` on run together; isolated records run alone."""
        if self._isolated:
            for number, record in enumerate(records[at : at + most]):
                if _position(record) in self._isolated:
                    return max(1, number)
        return most

    # ---- timers ---------------------------------------------------------------------------------------------------

    def has_due_timers(self) -> bool:
        """Return whether timers are due while no record waits."""
        return any(True for _ in self._find_due_tasks())

    def fire_waiting(self, txn: Feeds) -> Halt | None:
        """Fire the timers that are due although no record arrives: timers of the wall clock, timers that a transaction
        left over, and timers of silent partitions.
        """
        for timed in self._downstream:
            for partition, task in self._tasks_of(timed).items():
                task.time_ms = max(task.time_ms, self._watermark_ms(partition))
        for timed, partition, task, timers, until_ms in self._find_due_tasks():
            if (halt := self._fire(txn, timed, partition, task, timers, until_ms)) is not None:
                return halt
        return None

    def advance(self, txn: Feeds, to_ms: int, only_downstream: bool = False) -> Halt | None:
        """Move the time of all tasks to `to_ms`, as records of that time would, and fire all timers that are due.

        `only_downstream`: leave out functions whose time is that of their own records.
        """
        for timed in self._downstream if only_downstream else self._timed.values():
            for partition, task in list(self._tasks_of(timed).items()):
                task.time_ms = max(task.time_ms, to_ms)
                if (halt := self._fire(txn, timed, partition, task, task.timers, task.time_ms)) is not None:
                    return halt
        return self.fire_waiting(txn)

    def _find_due_tasks(self) -> Iterator[tuple[Route, Partition, TaskCells, TimerQueue, int]]:
        """Yield each function and task whose timers are due although no record arrived, with the time up to which they
        fire."""
        for timed in self._timed.values():
            idle_ms = timed.timing.idle_ms
            for partition, task in list(self._tasks_of(timed).items()):
                clock_ms = task.clock_ms()
                if task.clock_timers.due(clock_ms, 1):
                    yield timed, partition, task, task.clock_timers, clock_ms
                now_ms = max(task.time_ms, self._watermark_ms(partition) if timed in self._downstream else 0)
                if task.timers.due(now_ms, 1):
                    yield timed, partition, task, task.timers, now_ms
                if idle_ms is None or not task.timers.due(clock_ms - idle_ms, 1):
                    continue
                if task.timers.due(until_ms := self._silent_until_ms(partition, idle_ms), 1):
                    yield timed, partition, task, task.timers, until_ms

    def _fire_before(self, txn: Feeds, route: Route, record: Record, now_ms: int) -> Halt | None:
        """Fire the timers that are due before a record that moves the time of its task to `now_ms`."""
        timed, place = self._timed[route], (record.topic, record.partition)
        task = self._tasks_of(timed)[place]
        # First fire the timers that were set to a past time, because their functions must not see the time of this
        # record.
        if (halt := self._fire(txn, timed, place, task, task.timers, task.time_ms)) is not None:
            return halt
        task.time_ms = now_ms
        return self._fire(txn, timed, place, task, task.timers, now_ms)

    def _fire_overdue(self, txn: Feeds, timed: Route, records: list[Record]) -> Halt | None:
        """Fire the timers that functions of these records set to a time already past."""
        for place, task in list(self._tasks_of(timed).items()):
            if task.timers.next_due > task.time_ms:
                continue
            if (halt := self._fire(txn, timed, place, task, task.timers, task.time_ms)) is not None:
                return halt._replace(handled=len(records))
        return None

    def _fire(
        self, txn: Feeds, timed: Route, partition: Partition, task: TaskCells, timers: TimerQueue, until_ms: int
    ) -> Halt | None:
        """Fire the timers of a task that are due, in order. Halt if the transaction is over before all have fired."""
        find_window = window_finder(timed.timing, task)
        while due := timers.due(until_ms, 1 if self._fires_one_at_a_time else _TIMERS_AT_ONCE):
            if timers is task.timers:
                task.time_ms = max(task.time_ms, due[-1][0])
            fired = [record_of(*partition, cell, due_ms, find_window) for due_ms, cell in due]
            self._last_fired = fired
            for name, group in itertools.groupby(fired, key=_timer_name):
                if (handler := timed.handlers.get(name)) is None:
                    return Halt(0, _unknown_timer_error(timed, name))
                halt = self._run(txn, handler, list(group))
                if halt is _EARLIER_TIMER:
                    break
                if halt is not None:
                    return halt._replace(handled=0)
            if txn.is_over or self._fires_one_at_a_time:
                return Halt(0)
        return None

    # ---- a record that failed -----------------------------------------------------------------------------------

    def _apply_policy(self, txn: Feeds, route: Route, record: Record, error: BaseException) -> Halt | None:
        """Apply the route's policy to a record whose outputs cannot be sent. None means to continue with the next
        record."""
        if isinstance(error, EosError):
            return Halt(0, error)  # the App is wrong, not the record (an undeclared destination, ...)
        position = _position(record)
        failures = self._failures[position] = self._failures.get(position, 0) + 1
        last, policy = isinstance(error, DeadLetterRefused), self._policy_of(route)
        wait_s = policy.wait_s(failures) if not last and _is_retried(policy, error) else None
        if wait_s is not None:
            self._isolated[position] = None
            self._record_log.line(
                "record failed, retry scheduled", record, error, frames_of(error), after_s=wait_s, failures=failures
            )
            return Halt(0, None, wait_s)
        verdict = "stop" if last else policy.verdict
        if verdict == "stop":
            return Halt(0, _poison(route, record, error))
        sends: list[Send] = []
        frames = frames_of(error)
        if verdict == "skip":
            txn.count(skipped=1)
            self._record_log.line("record skipped", record, error, frames)
        else:
            sends.append(make_dead_letter(record, error, frames, self._app.id, route.name))
            self._dead_lettered.add(position)
            txn.count(dead_letters=1)
            self._record_log.line("dead letter", record, error, frames, to=sends[0][0])
        self._feed(txn, self._feed_of(lambda _: iter([sends])), route, [record])
        if route.discard is not None:
            route.discard(record)
        if route.discard is not None or route.source is not None:  # no commit removes its entries
            self._failures.pop(position, None)
            self._isolated.pop(position, None)
        return None

    def _policy_of(self, route: Route) -> Policy:
        return route.on_error if self._policy is None else self._policy

    def _classify(self, route: Route, record: Record, error: BaseException) -> BaseException:
        """Return Temporary for an error that shows a lack of memory, files, threads or disk on this machine.

        Such an error is not a failure of the record: a policy would skip it, and then the next one. The error stays as
        it is if the policy names it or the exception that wraps it.
        """
        cause = next((one for one in causes(error) if _is_machine_error(one)), None)
        named = self._policy_of(route).on
        if cause is None or isinstance(error, named) or isinstance(cause, named):
            return error
        where = _describe_position(record)
        temporary = Temporary(
            f"{route.name} ran out of resources on {where}: {_describe_failure(class_name(error), error)}",
            remedy="the record counts as unread; give the process more of the resource that the error names "
            "(memory, files, threads, disk)",
        )
        temporary.__cause__ = error
        return temporary


def _is_machine_error(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _MACHINE_ERRNOS
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and safe_str(error) == _NO_THREAD)


def _is_retried(policy: Policy, error: BaseException) -> bool:
    """Return whether the policy retries this error.

    Bytes that do not decode will not decode the next time, but a user's decoder may have called a service that failed.
    """
    if isinstance(error, DecodeError):
        return _is_or_holds(error, policy.on) or _is_or_holds(error.__cause__, policy.on)
    return not policy.on or _is_or_holds(error, policy.on)


def _is_or_holds(error: BaseException | None, kinds: tuple[type[Exception], ...]) -> bool:
    """Return whether an exception is one of `kinds`, or a group that contains one."""
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return isinstance(error, kinds) or any(_is_or_holds(one, kinds) for one in group)


def _position(record: Record) -> Position:
    return record.topic, record.partition, record.offset


def _describe_position(record: Record) -> str:
    """Return the position of a record for messages. If the record stands for a timer or a row, describe the timer or
    row.
    """
    if isinstance(record.value, TableRow):
        return str(record.value)
    due = due_of(record)
    return format_position(*_position(record)) if due is None else describe(due)


def _unknown_timer_error(timed: Route, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"the timer {name!r} of {timed.name} is due, but no function runs for it: the code had one when it was set",
        remedy=f'add it again with @app.on_timer({timed.name}, "{name}")',
    )


def _is_due(position: Position, owned: Collection[Partition], committed: Mapping[Partition, int]) -> bool:
    topic, partition, offset = position
    is_timer = offset < 0
    return (topic, partition) in owned and (is_timer or offset >= committed.get((topic, partition), 0))


def _poison(route: Route, record: Record, error: BaseException) -> PoisonRecord:
    where = _describe_position(record)
    sentence = f"{route.name} failed on {where}: {_describe_failure(type(error).__name__, error)}"
    return _with_cause(PoisonRecord(sentence, record.topic, record.partition, record.offset), error)


def _poison_batch(route: Route, records: list[Record], error: BaseException) -> PoisonRecord:
    """Return the error of a failed batch; policy stop does not run the batch again to find the record."""
    spans = spans_of(records).items()
    where = ", ".join(f"{topic}[{partition}]@{first}..{last}" for (topic, partition), (first, last) in spans)
    failure = _describe_failure(type(error).__name__, error)
    sentence = f"{route.name} failed on one of {len(records)} records ({where}): {failure}"
    head = records[0]
    poison = PoisonRecord(sentence, head.topic, head.partition, head.offset)
    poison.remedy = "an on_error= policy finds out which record it is (docs/howto/failures.md)"
    return _with_cause(poison, error)


def _describe_failure(name: str, error: BaseException) -> str:
    """Return the class name of an exception, with its message if it has one."""
    return f"{name}: {message}" if (message := short_message(error)) else name


def _with_cause(poison: PoisonRecord, error: BaseException) -> PoisonRecord:
    poison.__cause__ = error
    return poison


class _RecordLog:
    """Limits the number of log lines about single records.

    A topic full of failing records must not fill the disk with its log, but every kind of failure must appear in it. So
    the first failure at each line of the user's code is always logged with its frames. Lines above the limit are
    suppressed and summarised at the end of the interval and of the run.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._interval_began, self._lines = 0.0, 0
        self._traced: set[tuple[object, ...]] = set()
        self._suppressed_counts: dict[str, int] = {}  # number of suppressed log lines by event
        self._last_suppressed: tuple[Record, str] | None = None  # the last record that was not logged, and its error

    def line(self, event: str, record: Record, error: BaseException, frames: list[Frame], **more: object) -> None:
        self.tick()
        first = self._is_first((type(error), *frames[-1:]))
        self._lines += 1
        if not first and self._lines > _LINES:
            self._suppressed_counts[event] = self._suppressed_counts.get(event, 0) + 1
            self._last_suppressed = record, _describe_failure(class_name(error), error)
            return
        if first and frames:
            more["trace"] = format_frames(frames, " > ")
        elif frames:
            more["at"] = f"{frames[-1].file}:{frames[-1].line}"
        where: dict[str, object] = {"topic": record.topic, "partition": record.partition}
        if isinstance(record.value, TableRow):
            where = {"table": record.value.table, "id": record.value["id"]}
        else:
            where |= {"offset": record.offset} if (due := due_of(record)) is None else {"timer": describe(due)}
        log.warning(event, **where, error=_describe_failure(class_name(error), error), **more)

    def _is_first(self, line: tuple[object, ...]) -> bool:
        """Return whether a failure at this line of code is logged for the first time."""
        if line in self._traced or len(self._traced) >= _MOST_TRACES:
            return False
        self._traced.add(line)
        return True

    def tick(self) -> None:
        """Log a summary of the suppressed lines once the interval is over."""
        now = self._now()
        if now - self._interval_began >= _LINES_INTERVAL_S:
            self.log_rest()
            self._interval_began, self._lines = now, 0

    def log_rest(self) -> None:
        if self._last_suppressed is None:
            return
        record, error = self._last_suppressed
        last = _describe_position(record)
        each = ", ".join(f"{event}: {count}" for event, count in self._suppressed_counts.items())
        log.warning(
            "more records failed", unlogged=sum(self._suppressed_counts.values()), of=each, last=last, error=error
        )
        self._suppressed_counts, self._last_suppressed = {}, None
