"""Dead letters come back: each is given to its function again, and its outputs and the replay's place are one commit.

Owns what a replay is. It runs the function itself rather than sending the record to its topic again: whoever else reads
that topic has handled the record already, and would get it twice. Letters are read in the order of the dead letters'
topic, up to its end as of the start. One that fails again is a dead letter again, in the same transaction, with the
number of its replays; it lies behind that end, so a run cannot meet it twice. A letter that is dropped is one that is
done without a function (`DROPPING`); it stays in its topic.

Which letters are done is eos/worker/letters.py's. Two replays of one App at once are kept apart by their
transactional.id, which has the group's name: the newer fences the older. But an older one whose producer is replaced
takes the id back, and no group guards these offsets: behind each init of its own the place is read again, and whoever
does not find its own there ends with 79. No transaction is open while the user's code runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from eos.app.definition import App
from eos.app.policies import dlq
from eos.app.routes import Route
from eos.encoding.dead_letters import dead_letter_topic, parts_of
from eos.errors import PoisonRecord, UsageError
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.plain import Transactions
from eos.records import Send
from eos.worker.handling import Handler, Kept
from eos.worker.hooks import Hooks
from eos.worker.letters import Letter, Place, Run, again, group_of, letters, offsets_of

_MOST = 100  # letters of one transaction


@dataclass(frozen=True)
class Settled:
    """What a letter led to: outputs; or, where `failed` is the class of an exception, the one dead letter again."""

    letter: Letter
    sends: list[Send]
    failed: str = ""


@dataclass
class Told:
    """What became of the letters of one topic."""

    handled: int = 0
    outputs: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """By exception: dead letters again."""
    strangers: dict[str, int] = field(default_factory=dict)
    """By App: the letters of others, left to their own replays."""


class Settler(Protocol):
    """What is done with a letter."""

    def settle(self, letter: Letter) -> Settled: ...

    def refused(self, letter: Letter, error: PoisonRecord) -> Settled:
        """Kafka takes no output of this letter."""

    def committed(self) -> None:
        """All that was settled until now is."""


class _Dropping:
    def settle(self, letter: Letter) -> Settled:
        return Settled(letter, [])

    def refused(self, letter: Letter, error: PoisonRecord) -> Settled:
        raise error  # there was none

    def committed(self) -> None: ...


DROPPING: Settler = _Dropping()

Choose = Callable[[Letter], Letter | None]
"""The letter to settle, which may be mended; None: it goes on waiting."""


def everyone(letter: Letter) -> Letter:
    return letter


def route_of(app: App, topic: str, function: str | None) -> Route:
    """The function that failed, or the one that is named. UsageError where there is none."""
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
    """A replay has no partition of the source, and so none of its state."""
    if route.stores:
        raise UsageError(
            f"{route.name} has state, which only the worker that has the partition may change",
            remedy="send the record to its topic again, or name a --function without state",
        )
    return route


def sources_of(app: App) -> list[str]:
    """The topics whose dead letters an App writes."""
    return [topic for topic, route in app.routes.items() if route.on_error.verdict == "dlq"]


class _Step(NamedTuple):
    """A letter that is settled, and the first offset behind the letter before it."""

    first: int
    settled: Settled


class Settling:
    """Settles dead letters, one transaction after the other: what came of each and that it is done are one commit.

    `whose`: the App's id. Letters that do not say whose they are belong to every App.
    """

    def __init__(self, whose: str, settings: Settings, world: World = REAL) -> None:
        self._whose, self._world = whose, world
        self._group = group_of(whose)
        self._settings = settings.with_values(**{"group.id": self._group, "transactional.id": self._group})
        self._transactions = Transactions(self._settings, offsets=True, world=world)
        self._interval_s = self._settings["eos.transaction.interval.ms"] / 1000

    def __enter__(self) -> Settling:
        # First: what a predecessor left open is aborted, and one that runs is fenced before its place is read.
        self._transactions.__enter__()
        try:
            self._place = Place(self._settings, self._group, self._world)
        except BaseException:
            self._transactions.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._place.close()
        self._transactions.__exit__()

    def topic(
        self,
        source: str,
        settler: Settler,
        choose: Choose = everyone,
        limit: int | None = None,
        from_earliest: bool = False,
        told: Told | None = None,
    ) -> Told:
        """Settles those dead letters of one source topic that are chosen, `limit` of them at most; what is committed is
        in `told` also where this raises.

        UsageError where letters may have been settled before and the place is forgotten, unless `from_earliest`.
        """

        def refuse(sentence: str) -> None:
            if not from_earliest:
                raise UsageError(sentence, remedy="`--from earliest` takes all that is there, once you know")

        told, topic = Told() if told is None else told, dead_letter_topic(source)
        waiting = letters(self._settings, topic, self._place, refuse)
        for batch in self._batches(waiting, settler, choose, limit, told):
            self._commit(topic, batch, settler, told)
            settler.committed()
        return told

    def _batches(
        self, waiting: Iterator[Letter], settler: Settler, choose: Choose, limit: int | None, told: Told
    ) -> Iterator[list[_Step]]:
        """What is made of the letters, for as long as a transaction's interval each; one batch at least, of no letter
        too: for each partition the brokers count the days from its last commit."""
        batch, passed, left = list[_Step](), dict[int, int](), limit
        behind: dict[int, Letter] = {}  # strangers, which a run of ours goes over
        until = self._world.now() + self._interval_s
        for letter in waiting:
            if not letter.is_of(self._whose):
                told.strangers[letter.app] = told.strangers.get(letter.app, 0) + 1
                behind[letter.partition] = letter
                continue
            first = passed.get(letter.partition, -1) + 1  # no letter of ours lies between
            passed[letter.partition] = letter.offset
            behind.pop(letter.partition, None)
            if (chosen := choose(letter)) is not None:
                batch.append(_Step(first, settler.settle(chosen)))
                left = None if left is None else left - 1
            if left == 0:
                yield batch
                return
            if len(batch) >= _MOST or (batch and self._world.now() >= until):
                yield batch
                batch, until = [], self._world.now() + self._interval_s
        for partition, stranger in behind.items():
            batch.append(_Step(passed.get(partition, -1) + 1, Settled(stranger, [])))
        yield batch

    def _commit(self, topic: str, batch: list[_Step], settler: Settler, told: Told) -> None:
        try:
            self._send(topic, batch)
        except PoisonRecord as refused:
            # Nothing of it was committed. Which one was it? It is a dead letter again then.
            if len(batch) > 1:
                for step in batch:
                    self._commit(topic, [step], settler, told)
                return
            ((first, one),) = batch
            if one.failed:
                raise  # its dead letter itself is refused
            batch = [_Step(first, settler.refused(one.letter, refused))]
            self._send(topic, batch)
        for one in (step.settled for step in batch):
            if one.failed:
                told.failed[one.failed] = told.failed.get(one.failed, 0) + 1
            elif one.letter.is_of(self._whose):
                told.handled += 1
                told.outputs += len(one.sends)

    def _send(self, topic: str, batch: list[_Step]) -> None:
        """One transaction: outputs, letters that failed again, and which are done."""
        settled: defaultdict[int, list[Run]] = defaultdict(list)
        for first, one in batch:
            settled[one.letter.partition].append((first, one.letter.offset))
        after = {partition: done.plus(*settled[partition]) for partition, done in self._place.done[topic].items()}
        offsets = offsets_of(topic, after)
        with self._transactions.begin() as txn:
            if txn.renewed:
                self._place.confirm(topic)
            for _, one in batch:
                for to, value, key, partition, timestamp_ms, headers in one.sends:
                    where = None if partition < 0 else partition
                    txn.send(to, value, key=key, partition=where, timestamp_ms=timestamp_ms, headers=headers or ())
            txn.send_offsets(offsets, self._place.metadata())
        self._place.moved(topic, after)


class Replay:
    """The replays of one App: `with Replay(app, settings) as replay: replay.topic("orders")`.

    `letters_of`: the letters of the App of this id, in place of its own, from where that one's replay stands.
    """

    def __init__(self, app: App, settings: Settings, letters_of: str | None = None, world: World = REAL) -> None:
        self._settling = Settling(letters_of or app.id, settings, world)
        self._app, self._hooks = app, Hooks(app)
        # The worker's own, but each letter is run once: what fails again waits for another replay.
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
        choose: Choose = everyone,
        limit: int | None = None,
        from_earliest: bool = False,
        told: Told | None = None,
    ) -> Told:
        """As Settling.topic: the function that failed, or the one that is named, runs on each."""
        running = _Running(self._handler, route_of(self._app, source, function))
        return self._settling.topic(source, running, choose, limit, from_earliest, told)


@dataclass
class _Running:
    """A function of the App runs on each letter, as a worker runs it."""

    handler: Handler
    route: Route

    def settle(self, letter: Letter) -> Settled:
        kept = Kept()
        halt = self.handler.handle_route(kept, self.route, [letter.record])
        if halt is not None and halt.error is not None:
            raise halt.error
        if not kept.dead_letters:
            return Settled(letter, kept.sends)
        failed = parts_of(kept.sends[0][-1] or [])[1]["exception"]
        return Settled(letter, [again(letter, kept.sends[0])], failed)

    def refused(self, letter: Letter, error: PoisonRecord) -> Settled:
        self.handler.refused(letter.record, error)
        return self.settle(letter)

    def committed(self) -> None:
        self.handler.ended((), {})  # nothing is kept of letters that are committed
