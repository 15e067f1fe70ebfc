"""Run an App on a session: slices of records, hooks, slow functions and spans.

It never decides whether to commit or abort (eos/session/loop.py does), never touches a Kafka client, and leaves failed
records to eos/engine/handling.py. It adds one rule to the session's loop: where the handler stops, the transaction ends
just before that record. So all earlier records are committed, and nothing of that record is visible.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from eos import log
from eos.app.definition import App
from eos.app.lineage import Ledger
from eos.app.routes import Route
from eos.engine.handling import Halt, Handler
from eos.engine.hooks import Hooks
from eos.engine.slices import SliceSizes, by_route
from eos.engine.slow_functions import SlowFunctions
from eos.errors import CallFailed, PoisonRecord
from eos.kafka.client.settings import FUNCTION_OPTIONS, Settings
from eos.kafka.client.world import REAL, World
from eos.records import Record
from eos.session.outcomes import Listener, Outcome
from eos.session.session import TransactSession
from eos.session.transaction import Transaction
from eos.signals import ShutdownExpired, stop_timeout_error
from eos.worker.idle import IdlePartitions
from eos.worker.new_topics import NewTopics
from eos.worker.partitioners import InputPartitioners
from eos.worker.retention import Retention
from eos.worker.sources import RowSource, make_sources
from eos.worker.spans import Spans
from eos.worker.watermarks import ReachedTimes, Watermarks, upstream_of
from eos.worker.writers import DatabaseWriter, make_writers, prepare_writers

if TYPE_CHECKING:
    from eos.kafka.admin.facts import Topic
    from eos.state.keeper import Keeper


class Worker(Listener):
    """Runs one App on one session, in the calling thread; the session reports the outcome of each transaction to it.

    `run()` returns when stopped by a signal or, with `until_end`, when the group has handled everything that was
    readable at the start. It raises subclasses of EosError. `session.counters` has its counts so far.
    """

    def __init__(self, app: App, settings: Settings, *, until_end: bool = False, world: World = REAL) -> None:
        app.check()
        self._world = world
        self.app = app = copy.copy(app)  # a copy, because the worker adds topics to it
        self.settings = settings.with_values(
            **{"group.id": app.id, "transactional.id": f"{app.id}-{settings.instance}"}
        )
        # All members of the group must use the same assignment strategy, so it must not depend on how many topics a
        # pattern matches now.
        if app.reads_several_topics:
            self.settings = self.settings.with_multi_topic_assignment()
        ledger = Ledger() if self.settings["eos.lineage"] else None
        self._state_keeper: Keeper | None = None
        if app.stateful:
            from eos.state.keeper import Keeper  # a late import: most Apps have no state, and start without LMDB

            if "allow.auto.create.topics" not in self.settings.values:
                # A producer that finds its topic missing would recreate the changelog empty.
                self.settings = self.settings.with_values(**{"allow.auto.create.topics": False})
            self._state_keeper = Keeper(app, self.settings, world)
        cells_of = None if self._state_keeper is None else self._state_keeper.cells_of
        tasks_of = None if self._state_keeper is None else self._state_keeper.tasks_of
        concurrent_most: int = self.settings["eos.async.max.records"]
        batch_most: int = self.settings["eos.batch.max.records"]
        self._slice_sizes = SliceSizes(batch_most, concurrent_most)
        passing = self.settings.passed_headers
        upstream = {source for sources in upstream_of(app).values() for source in sources}
        self._reached_times = ReachedTimes(upstream, self._task_time_ms) if upstream else None
        self._watermarks = Watermarks(self.settings, app, self._position_of, world)
        self._idle_partitions = IdlePartitions(self.settings, lambda partition: self.session.find_end(partition), world)
        self._writers = make_writers(app, self.settings, world)
        self._sources = make_sources(app, settings, world)
        self._databases: list[DatabaseWriter | RowSource] = [*self._writers.values(), *self._sources.values()]
        self._handler = Handler(
            app,
            ledger,
            concurrent_most,
            batch_most,
            passing,
            now=world.now,
            cells_of=cells_of,
            tasks_of=tasks_of,
            silent_until_ms=self._idle_partitions.silent_until_ms,
            watermark_ms=self._watermarks.time_ms,
            writer_of=lambda route: None if route.sink is None else self._writers[route.sink.database],
        )
        self._new_topics = NewTopics(self.settings, app, world) if app.patterns else None
        self._found_topics = False
        self.session = TransactSession(
            self.settings.without(*FUNCTION_OPTIONS),
            app.topics,
            until_end=until_end,
            destinations=sorted(app.destinations),
            participants=[
                *(one for one in (ledger, self._state_keeper, self._reached_times) if one is not None),
                *self._databases,
            ],
            listener=self,
            handled_at_once=batch_most if any(function.batch for function in app.functions) else 1,
            with_ends=bool(upstream) or any(function.timing.idle_ms is not None for function in app.functions),
            world=world,
        )
        functions = app.functions
        self._uses_time = any(function.uses_time for function in functions)
        self._single_route: Route | None = functions[0] if len(functions) == 1 else None
        self._slow_functions = SlowFunctions(self.settings)
        self._at_end_since = math.inf  # World.now() from which on all partitions are read to their ends
        self._retry_at = 0.0  # World.now() at which a failed record may be retried
        self.on_tick: Callable[[], None] = lambda: None
        """Called after each transaction, and about every 100 ms without records."""
        self._retention: Retention | None = None
        self._partitioners: InputPartitioners | None = None
        self._spans: Spans | None = None
        if self.settings["eos.otel.spans"]:
            whose = {"eos.transactional_id": self.session.transactional_id, "messaging.consumer.group.name": app.id}
            self._spans = Spans(whose)

    def find_topics(self) -> None:
        """Add the topics that match the App's patterns now; `run` calls this unless it was called before.

        Raises Unavailable if there is nothing to read, ConfigurationError, NotAuthorised.
        """
        if self._new_topics is None or self._found_topics:
            return
        names = self.app.add_topics(self._new_topics.now())
        self._found_topics = True
        self.session.set_topics(self.app.topics, sorted(self.app.destinations), names)

    def warn_of_input(self, topics: Mapping[str, Topic]) -> None:
        """Log one warning if input is older than the retention of its outputs, and one for each input topic that was
        written with another partitioner; `topics` come from the preflight."""
        self._retention = Retention(self.app, topics)
        self._partitioners = InputPartitioners(self.app, self.settings, topics)

    def run(self) -> None:
        session = self.session
        began = self._world.now()
        finished = False
        hooks = Hooks(self.app)
        try:
            self.find_topics()
            if self._state_keeper is not None:
                self._state_keeper.prepare()
            prepare_writers(self.app, self._writers, self.settings, self._world)
            for source in self._sources.values():
                source.prepare()
            hooks.start()
            session.start()
            if self._uses_time:
                self._idle_partitions.start(session.watcher)
            if self._reached_times is not None:
                self._watermarks.start(session.watcher)
            if self._new_topics is not None and not session.until_end:
                self._new_topics.watch(session.watcher)
            with _collecting_garbage_rarely():
                for txn in session:
                    with self._span():
                        halt = self._handle(txn)
                    if halt is not None:
                        self._end_at(txn, halt)
                    self._tick()
            finished = True
        except ShutdownExpired as expired:
            hooks.abandon()
            raise stop_timeout_error(expired) from expired
        finally:
            self._handler.end()
            try:
                # A finished process leaves the group. A failed one stays a member, because it is expected back soon.
                session.close(leave_group=finished)
            except ShutdownExpired as expired:
                log.warning("clients abandoned: the stop took too long", reason=str(expired))
            finally:
                if self._state_keeper is not None:
                    self._state_keeper.close()
                for database in self._databases:
                    database.close()
                if self._spans is not None:
                    self._spans.close()
                hooks.stop(failed=not finished)
        self._log_totals(self._world.now() - began)

    def states(self) -> list[tuple[str, int, int, int]]:
        """Return the name, values, bytes on disk and changes left to restore of each stateful function."""
        return [] if self._state_keeper is None else self._state_keeper.sizes()

    def times(self) -> list[tuple[str, int, int, int]]:
        """Return the name, event time in ms, number of timers and number of due timers of each time-based function."""
        return [] if self._state_keeper is None else self._state_keeper.times()

    # ---- notifications from the session -----------------------------------------------------------------------

    @property
    def needs_records(self) -> bool:
        return not all(function.takes_values for function in self.app.functions)

    def on_idle(self) -> None:
        self._tick()

    def has_work(self) -> bool:
        if self._world.now() < self._retry_at:
            return False
        has_rows = any(source.has_rows() for source in self._sources.values())
        return has_rows or (self._uses_time and self._handler.has_due_timers())

    def _tick(self) -> None:
        self._handler.tick()
        self.on_tick()

    def may_finish(self) -> bool:
        """Return whether the run may finish: functions that read topics of other functions have closed all windows that
        the whole input closes."""
        if not all(database.has_caught_up() for database in self._databases):
            return False
        if self._reached_times is None:
            return True
        if any(self.session.find_end(partition) is None for partition in self.session.assignment):
            self._at_end_since = math.inf
            return False
        self._at_end_since = min(self._at_end_since, self._world.now())
        return self._watermarks.is_current(self._at_end_since) and not self._handler.has_due_timers()

    def _task_time_ms(self, partition: tuple[str, int]) -> int | None:
        return None if self._state_keeper is None else self._state_keeper.time_ms(partition)

    def _position_of(self, partition: tuple[str, int]) -> int:
        """Return the offset up to which a partition was handled and committed, markers at its end included."""
        end = self.session.find_end(partition)
        return max(self.session.committed.get(partition, 0), end[0] if end is not None else 0)

    def find_new_topics(self) -> list[str]:
        names = [] if self._new_topics is None else self._new_topics.arrived()
        if names:
            self.app.add_topics(names)
        for name in names:
            log.info("topic taken in", topic=name, function=self.app.routes[name].name)
        return names

    def on_end(self, transaction: Transaction, outcome: Outcome) -> None:
        self._handler.note_end(self.session.assignment, self.session.committed)
        self._slow_functions.ended(outcome is Outcome.COMMITTED, self.session.committed)
        if self._spans is not None:
            self._spans.ended(outcome)

    def on_unreadable(self, topic: str, partition: int, offset: int, why: str) -> None:
        self._handler.note_unreadable((topic, partition, offset), why)

    def on_refused(self, record: Record, failure: CallFailed) -> None:
        if record.topic in self._sources and record.offset >= 0:
            # The only record of this transaction is that of a position, so the refused output belongs to an unknown
            # row.
            self.on_refused_without_record(failure)
        elif failure.record is None and self._handler.has_fired:
            self._handler.isolate_timers()  # the refused output may be that of a timer that fired before the record
        else:
            self._handler.note_refused(record, failure)

    def on_refused_without_record(self, failure: CallFailed) -> None:
        if not self._handler.note_refused_timers(failure):
            super().on_refused_without_record(failure)

    # ---- the end ----------------------------------------------------------------------------------------------

    def _log_totals(self, seconds: float) -> None:
        counters = self.session.counters
        log.info(
            "stopped",
            records_in=counters.records_in,
            records_out=counters.records_out,
            skipped=counters.skipped,
            dead_letters=counters.dead_letters,
            retries=counters.retries,
            transactions=counters.transactions,
            aborts=counters.aborts,
            replaced=sum(counters.replacements.values()),
            seconds=round(seconds, 1),
        )

    def _span(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._spans is None else self._spans.handling()

    # ---- one transaction --------------------------------------------------------------------------------------

    def _handle(self, txn: Transaction) -> Halt | None:
        """Handle records until the transaction's interval is over, or until the handler stops."""
        if self._world.now() < self._retry_at:
            self._resume_pause()
            return None
        if wait_s := max((writer.wait_s() for writer in self._writers.values()), default=0.0):
            self.session.pause(wait_s)
            return None
        self._slow_functions.check()
        self._handler.note_begin()
        if self._uses_time and (halt := self._handler.fire_waiting(txn)) is not None:
            return halt
        handled = 0
        while True:
            batch = txn.take(
                1 if self._slow_functions.runs_one_by_one else self._slice_sizes.next_size(self._single_route)
            )
            if not batch:
                return self._handle_rows(txn)
            if self._sources and not (batch := self._before_position(txn, batch)):
                continue
            known = (
                self._slow_functions.find_slow(batch, self.session.assignment)
                if self._slow_functions.has_slow_records
                else None
            )
            if known is not None:
                size = self._isolate_slow(batch, known, first=not handled)
                txn.give_back(len(batch) - size)
                batch = batch[:size]
                if not batch:
                    return Halt(0)
            if self._retention is not None and self._retention.is_exceeded(batch[0], self._world.unix()):
                self._retention = None
            if self._partitioners is not None and self._partitioners.note(batch):
                self._partitioners = None
            if self._spans is not None:
                self._spans.took(batch)
            began = self._world.now()
            halt = self._handle_batch(txn, batch)
            if self._reached_times is not None:
                self._reached_times.note(batch if halt is None else batch[: halt.handled])
            ended = self._world.now()
            open_s = self._handler.open_time_s(txn, ended)
            if self._slow_functions.is_too_slow(open_s, ended - began):
                self._note_slow(batch, open_s, ended - began)
            elif self._slow_functions.runs_one_by_one:
                self._slow_functions.note_in_time(batch[-1], self.session.assignment)
            if halt is not None:
                return halt
            if known is not None:
                return Halt(len(batch))
            handled += len(batch)
            self._slice_sizes.adapt(ended - began, len(batch))

    def _before_position(self, txn: Transaction, batch: list[Record]) -> list[Record]:
        """Return the records before the first record of a position topic, and give back the rest.

        If the first record of all is that of a position, it counts as taken: the source has read its position by
        itself.
        """
        at = next((at for at, record in enumerate(batch) if record.topic in self._sources), len(batch))
        txn.give_back(len(batch) - max(at, 1))
        return batch[:at]

    def _handle_rows(self, txn: Transaction) -> Halt | None:
        """Handle rows of tables until the transaction's interval is over, or until the handler stops.

        Each table gets a slice at least: records that wait must not keep its rows waiting.
        """
        for source in self._sources.values():
            left: int = self.settings["eos.transaction.max.records"]
            while rows := source.take(min(left, self._slice_sizes.next_size(source.route))):
                left -= len(rows)
                began = self._world.now()
                halt = self._handler.handle_route(txn, source.route, rows)
                if halt is not None:
                    source.give_back(rows, halt.handled)
                    if isinstance(halt.error, PoisonRecord):
                        halt.error.remedy = "correct the row in its table or delete it; on_error=eos.skip leaves it out"
                    return halt
                self._slice_sizes.adapt(self._world.now() - began, len(rows))
                if txn.is_over:
                    break
        return None

    def _isolate_slow(self, batch: list[Record], known: int, first: bool) -> int:
        """Return how many of these records to handle in this transaction: all records before the known slow one. The
        slow record is then handled alone in a transaction of its own, in which nothing was sent before.
        """
        if known or not first:
            return known
        route, run = next(by_route(self.app, batch))
        return min(len(run), self._slice_sizes.size_for_route(route, 1))

    def _resume_pause(self) -> None:
        """Wait until the failed record may be retried, if an abort ended the pause early. Return at once after a stop
        request."""
        if not self.session.stop_requested:
            self.session.pause(self._retry_at - self._world.now())

    def _note_slow(self, batch: list[Record], open_s: float, took_s: float) -> None:
        """Report a call that was too slow. Of several calls in a slice, report the longest one if it alone was too
        slow."""
        who, longest = self.session.who(), self._handler.longest
        routes = {self.app.routes[record.topic] for record in batch}
        if self._single_route is not None or len(batch) == 1:
            self._slow_functions.note_slow(who, routes.pop(), batch, took_s)
        elif longest and self._slow_functions.is_too_slow(open_s - took_s + longest.seconds, longest.seconds):
            self._slow_functions.note_slow(who, longest.route, longest.records, longest.seconds)
        else:
            self._slow_functions.note_slow_together(who, sorted(route.name for route in routes), batch, took_s)

    def _handle_batch(self, txn: Transaction, batch: list[Record]) -> Halt | None:
        if self._single_route is not None:
            halt = self._handler.handle_route(txn, self._single_route, batch)
        else:
            halt = self._handler.handle(txn, batch)
        if halt is not None:
            txn.give_back(len(batch) - halt.handled)
        return halt

    def _end_at(self, txn: Transaction, halt: Halt) -> None:
        """Commit the records before the one that stops the handler, then raise its error or schedule its retry. After
        an abort the records are handed out again."""
        committed = txn.commit()
        if halt.error is not None and (committed or not isinstance(halt.error, PoisonRecord)):
            raise halt.error
        if halt.pause_s is not None:
            self.session.counters.count_retry()
            self._retry_at = self._world.now() + halt.pause_s
            self.session.pause(halt.pause_s)


@contextlib.contextmanager
def _collecting_garbage_rarely() -> Iterator[None]:
    """Collect garbage rarely: the hot loop makes no cycles, and the default thresholds cost 3 to 18 % of its time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
