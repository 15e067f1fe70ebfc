"""Replays dead letters: runs each through its function again, and commits its outputs together with its progress.

Owns the definition of a replay. It runs the function itself instead of sending the record to its topic again, because
other readers of that topic would get the record twice. It reads dead letters in the order of the dead-letter topic, up
to the topic's end at the start. A dead letter that fails again becomes a new dead letter in the same transaction, with
its number of replays. The new dead letter lies after that end, so a run cannot meet it twice. A dropped dead letter is
done without a call of a function (`DROPPING`); it stays in its topic.

eos/worker/dead_letters.py owns which dead letters are done. The transactional id, which equals the group's name,
separates two simultaneous replays of one App: the newer fences the older. But an older replay whose producer is
replaced takes the id back, and no group protects these offsets. So after each of its own initialisations a replay reads
the committed offsets again, and exits with 79 if another process has changed them. No transaction is open while the
user's code runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from eos.app.definition import App
from eos.app.policies import dlq
from eos.app.routes import Route
from eos.encoding.dead_letters import dead_letter_topic, split_headers
from eos.engine.handling import Collector, Handler
from eos.engine.hooks import Hooks
from eos.errors import PoisonRecord, UsageError
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.plain import Transactions
from eos.records import Send
from eos.worker.dead_letters import (
    DeadLetter,
    ReplayProgress,
    Run,
    failed_again,
    group_of,
    offsets_of,
    read_dead_letters,
)

_MOST = 100  # dead letters in one transaction


@dataclass(frozen=True)
class Settled:
    """Holds a settled dead letter and its outputs; if `failed` names an exception class, the only output is a new dead
    letter."""

    letter: DeadLetter
    sends: list[Send]
    failed: str = ""


@dataclass
class ReplayResult:
    """Holds the results for the settled dead letters of one topic."""

    handled: int = 0
    outputs: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """The number of new dead letters by exception."""
    of_other_apps: dict[str, int] = field(default_factory=dict)
    """The number of dead letters of other Apps, by App; their own replays process them."""


class Settler(Protocol):
    """Processes a single dead letter."""

    def settle(self, letter: DeadLetter) -> Settled: ...

    def on_refused(self, letter: DeadLetter, error: PoisonRecord) -> Settled:
        """Return the dead letter's new result after Kafka refused one of its outputs."""

    def committed(self) -> None:
        """Record that all dead letters settled until now are committed."""


class _Dropping:
    def settle(self, letter: DeadLetter) -> Settled:
        return Settled(letter, [])

    def on_refused(self, letter: DeadLetter, error: PoisonRecord) -> Settled:
        raise error  # a dropped dead letter has no outputs

    def committed(self) -> None: ...


DROPPING: Settler = _Dropping()

Choose = Callable[[DeadLetter], DeadLetter | None]
"""Returns the dead letter to settle, possibly with corrections, or None if the dead letter stays pending."""


def choose_all(letter: DeadLetter) -> DeadLetter:
    return letter


def route_of(app: App, topic: str, function: str | None) -> Route:
    """Return the function that failed, or the one that is named. Raise UsageError if there is none."""
    if function is None:
        if topic not in app.routes:
            raise UsageError(f"--topic {topic}: not a source of {app.id} ({', '.join(app.topics)})")
        return _without_state(app.routes[topic])
    found = [route for route in app.functions if route.name == function]
    if not found:
        there = ", ".join(route.name for route in app.functions)
        raise UsageError(f"--function {function}: {app.id} has no such function, it has {there}")
    return _without_state(found[0])


def _without_state(route: Route) -> Route:
    """Return the route, or raise UsageError if it has state or a database: a replay owns no partition."""
    if route.sink is not None:
        raise UsageError(
            f"{route.name} writes rows into a database, which has the offsets of the worker's partitions only",
            remedy="send the record to its topic again",
        )
    if route.has_state:
        raise UsageError(
            f"{route.name} has state, which only the worker that owns the partition may change",
            remedy="send the record to its topic again, or name a --function without state",
        )
    return route


def sources_of(app: App) -> list[str]:
    """Return the topics whose dead letters an App writes."""
    return [topic for topic, route in app.routes.items() if route.on_error.verdict == "dlq"]


class _Step(NamedTuple):
    """Holds a settled dead letter, and the first offset after the previous dead letter."""

    first: int
    settled: Settled


class Settling:
    """Settles dead letters in transactions, each of which commits outputs together with the offsets of settled dead
    letters.

    `app_id`: the App's id. Dead letters without an App's id belong to every App.
    """

    def __init__(self, app_id: str, settings: Settings, world: World = REAL) -> None:
        self._app_id, self._world = app_id, world
        self._group = group_of(app_id)
        self._settings = settings.with_values(**{"group.id": self._group, "transactional.id": self._group})
        self._transactions = Transactions(self._settings, offsets=True, world=world)
        self._interval_s = self._settings["eos.transaction.interval.ms"] / 1000

    def __enter__(self) -> Settling:
        # Initialise the producer first. The init aborts a predecessor's open transaction and fences a running one, so
        # that its offsets can be read.
        self._transactions.__enter__()
        try:
            self._progress = ReplayProgress(self._settings, self._group, self._world)
        except BaseException:
            self._transactions.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._transactions.__exit__()

    def topic(
        self,
        source: str,
        settler: Settler,
        choose: Choose = choose_all,
        limit: int | None = None,
        from_earliest: bool = False,
        result: ReplayResult | None = None,
    ) -> ReplayResult:
        """Settle the chosen dead letters of one source topic, at most `limit`.

        `result` has the committed results even if this raises. Raises UsageError if dead letters may have been settled
        before and the committed offset has expired, unless `from_earliest`.
        """

        def refuse(sentence: str) -> None:
            if not from_earliest:
                raise UsageError(sentence, remedy="`--from earliest` takes all of them, once you have checked")

        result, topic = ReplayResult() if result is None else result, dead_letter_topic(source)
        waiting = read_dead_letters(self._settings, topic, self._progress, refuse)
        for batch in self._batches(waiting, settler, choose, limit, result):
            self._commit(topic, batch, settler, result)
            settler.committed()
        return result

    def _batches(
        self, waiting: Iterator[DeadLetter], settler: Settler, choose: Choose, limit: int | None, result: ReplayResult
    ) -> Iterator[list[_Step]]:
        """Yield batches of settled dead letters, each for one transaction interval.

        There is at least one batch, even without dead letters, because brokers keep each partition's offset for some
        days after its last commit.
        """
        batch, passed, left = list[_Step](), dict[int, int](), limit
        skipped: dict[int, DeadLetter] = {}  # other Apps' dead letters, which this run skips
        until = self._world.now() + self._interval_s
        for letter in waiting:
            if not letter.is_of(self._app_id):
                result.of_other_apps[letter.app] = result.of_other_apps.get(letter.app, 0) + 1
                skipped[letter.partition] = letter
                continue
            first = passed.get(letter.partition, -1) + 1  # no dead letter of this App lies between
            passed[letter.partition] = letter.offset
            skipped.pop(letter.partition, None)
            if (chosen := choose(letter)) is not None:
                batch.append(_Step(first, settler.settle(chosen)))
                left = None if left is None else left - 1
            if left == 0:
                yield batch
                return
            if len(batch) >= _MOST or (batch and self._world.now() >= until):
                yield batch
                batch, until = [], self._world.now() + self._interval_s
        for partition, letter in skipped.items():
            batch.append(_Step(passed.get(partition, -1) + 1, Settled(letter, [])))
        yield batch

    def _commit(self, topic: str, batch: list[_Step], settler: Settler, result: ReplayResult) -> None:
        try:
            self._send(topic, batch)
        except PoisonRecord as refused:
            # Nothing was committed. Settle the dead letters one by one: the refused one becomes a dead letter again.
            if len(batch) > 1:
                for step in batch:
                    self._commit(topic, [step], settler, result)
                return
            ((first, one),) = batch
            if one.failed:
                raise  # its replay failed, and the new dead letter was refused as well
            batch = [_Step(first, settler.on_refused(one.letter, refused))]
            self._send(topic, batch)
        for one in (step.settled for step in batch):
            if one.failed:
                result.failed[one.failed] = result.failed.get(one.failed, 0) + 1
            elif one.letter.is_of(self._app_id):
                result.handled += 1
                result.outputs += len(one.sends)

    def _send(self, topic: str, batch: list[_Step]) -> None:
        """Send outputs, new dead letters and the offsets of settled dead letters in one transaction."""
        settled: defaultdict[int, list[Run]] = defaultdict(list)
        for first, one in batch:
            settled[one.letter.partition].append((first, one.letter.offset))
        after = {partition: done.add(*settled[partition]) for partition, done in self._progress.settled[topic].items()}
        offsets = offsets_of(topic, after)
        with self._transactions.begin() as txn:
            if txn.producer_reinitialised:
                self._progress.confirm(topic)
            for _, one in batch:
                for to, value, key, partition, timestamp_ms, headers in one.sends:
                    where = None if partition < 0 else partition
                    txn.send(to, value, key=key, partition=where, timestamp_ms=timestamp_ms, headers=headers or ())
            txn.send_offsets(offsets, self._progress.metadata())
        self._progress.note_committed(topic, after)


class Replay:
    """Replays the dead letters of one App: `with Replay(app, settings) as replay: replay.topic("orders")`.

    `letters_of`: another App's id; its dead letters are replayed in place of this App's, from that App's committed
    offsets.
    """

    def __init__(self, app: App, settings: Settings, letters_of: str | None = None, world: World = REAL) -> None:
        self._settling = Settling(letters_of or app.id, settings, world)
        self._app, self._hooks = app, Hooks(app)
        # Like the worker's handler, but each dead letter runs once: a dead letter that fails again waits for another
        # replay.
        self._handler = Handler(app, passing=settings.passed_headers, policy=dlq, now=world.now)

    def __enter__(self) -> Replay:
        self._settling.__enter__()
        try:
            self._hooks.start()
        except BaseException:
            self._settling.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._handler.end()
            self._hooks.stop(failed=kind is not None)
        finally:
            self._settling.__exit__()

    def topic(
        self,
        source: str,
        function: str | None = None,
        choose: Choose = choose_all,
        limit: int | None = None,
        from_earliest: bool = False,
        result: ReplayResult | None = None,
    ) -> ReplayResult:
        """Replay dead letters as Settling.topic does, with the function that failed or the one that is named."""
        running = _Running(self._handler, route_of(self._app, source, function))
        return self._settling.topic(source, running, choose, limit, from_earliest, result)


@dataclass
class _Running:
    """Settles dead letters by running a function of the App, as a worker does."""

    handler: Handler
    route: Route

    def settle(self, letter: DeadLetter) -> Settled:
        kept = Collector()
        halt = self.handler.handle_route(kept, self.route, [letter.record])
        if halt is not None and halt.error is not None:
            raise halt.error
        if not kept.dead_letters:
            return Settled(letter, kept.sends)
        failed = split_headers(kept.sends[0][-1] or [])[1]["exception"]
        return Settled(letter, [failed_again(letter, kept.sends[0])], failed)

    def on_refused(self, letter: DeadLetter, error: PoisonRecord) -> Settled:
        self.handler.note_refused(letter.record, error)
        return self.settle(letter)

    def committed(self) -> None:
        self.handler.note_end((), {})  # forget the failures of committed dead letters
