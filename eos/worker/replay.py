"""Dead letters come back: each is given to its function again, and its outputs and the replay's place are one commit.

Owns what a replay is. It runs the function itself rather than sending the record to its topic again: whoever else reads
that topic has handled the record already, and would get it twice. Letters are read in the order of the dead letters'
topic, up to its end as of the start. One that fails again is a dead letter again, in the same transaction, with the
number of its replays; it lies behind that end, so a run cannot meet it twice.

The place is the committed offset of the group `{app}-dlq-replay`, of which nobody is a member. The brokers forget it
some days after its last commit, so each run commits it for all partitions, and where letters are old enough that it may
have been forgotten nobody replays them unasked. Two replays of one App
at once are kept apart by their transactional.id, which has the same name: the newer fences the older. But an older one
whose producer is replaced takes the id back, and no group guards these offsets: behind each init of its own the place
is read again, and whoever does not find its own there ends with 79. No transaction is open while the user's code runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from eos import log
from eos.app.definition import App
from eos.app.policies import DEAD_LETTER_SUFFIX, dead_letter_topic, dlq
from eos.app.routes import Route
from eos.errors import Action, CallFailed, Fenced, PoisonRecord, Unavailable, UsageError, describe_error, stop_error
from eos.kafka import facts, tail
from eos.kafka.failures import classify
from eos.kafka.settings import Settings
from eos.kafka.world import REAL, World
from eos.plain import Transactions
from eos.records import Header, Record, Send, place_of
from eos.worker.dead_letters import PREFIX, parts_of
from eos.worker.handling import Handler, Kept
from eos.worker.hooks import Hooks

_REPLAYS = "replays"
_MOST = 100  # letters of one transaction
_CONNECT_S = 10.0
_ASK_S = 5.0
_COMMITTED_S = 30.0  # a predecessor that was killed may have offsets pending


@dataclass(frozen=True)
class Letter:
    """A dead letter: where it lies, the record as its function got it, whose it is ("": not told), why it is here."""

    partition: int
    offset: int
    record: Record
    app: str
    exception: str
    message: str
    replays: int

    def is_of(self, app_id: str) -> bool:
        return self.app in ("", app_id)


@dataclass(frozen=True)
class Handled:
    """What a letter led to: outputs; or, where `failed` is the class of an exception, the one dead letter again."""

    letter: Letter
    sends: list[Send]
    failed: str = ""


@dataclass
class Told:
    """What a replay of one topic did."""

    handled: int = 0
    outputs: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """By exception: dead letters again."""
    strangers: dict[str, int] = field(default_factory=dict)
    """By App: the letters of others, left to their own replays."""


def group_of(app_id: str) -> str:
    return f"{app_id}-dlq-replay"


def letter_of(read: Record) -> Letter:
    """What a worker wrote there, undone. A record that no worker wrote is taken as it is.

    It goes back to the topic that it was dead-lettered from, whatever its headers say: they are who wrote the record's.
    """
    headers, told = parts_of(read.headers)
    record = Record(
        read.topic.removesuffix(DEAD_LETTER_SUFFIX),
        _number(told, "partition", read.partition),
        _number(told, "offset", read.offset),
        _number(told, "timestamp", read.timestamp),
        read.key,
        read.value,
        headers or (),
    )
    why = told.get("app", ""), told.get("exception", "-"), told.get("message", "-")
    return Letter(read.partition, read.offset, record, *why, _number(told, _REPLAYS, 0))


def _number(told: Mapping[str, str], name: str, default: int) -> int:
    text = told.get(name, "")
    number = int(text) if len(text) < 20 and text.isascii() and text.removeprefix("-").isdecimal() else default
    return number if -1 <= number < 1 << 63 else default


def again(letter: Letter, send: Send) -> Send:
    """The dead letter of one that failed again: it says how often."""
    topic, value, key, partition, timestamp, headers = send
    count: Header = (PREFIX + _REPLAYS, str(letter.replays + 1).encode())
    return topic, value, key, partition, timestamp, [*(headers or []), count]


def route_of(app: App, topic: str, function: str | None) -> Route:
    """The function that failed, or the one that is named. UsageError where there is none."""
    if function is None:
        if topic not in app.routes:
            raise UsageError(f"--topic {topic}: not a source of {app.id} ({', '.join(app.topics)})")
        return app.routes[topic]
    found = [route for route in app.functions if route.name == function]
    if not found:
        there = ", ".join(route.name for route in app.functions)
        raise UsageError(f"--function {function}: {app.id} has no such function, it has {there}")
    return found[0]


def sources_of(app: App) -> list[str]:
    """The topics whose dead letters an App writes."""
    return [topic for topic, route in app.routes.items() if route.on_error.verdict == "dlq"]


# ---- reading --------------------------------------------------------------------------------------------------


class Place:
    """Up to where dead letters were replayed: a group's committed offsets, without being in the group."""

    def __init__(self, settings: Settings, group: str, world: World = REAL) -> None:
        self._group, self._world = group, world
        self._settings = settings
        self._left: dict[str, dict[int, int]] = {}  # topic -> partition -> the offset where we left it, -1: none
        self.stands: dict[str, dict[int, int]] = {}
        """By topic, where each partition's replay stands."""
        self._consumer = world.consumer(
            {
                **settings.admin(),
                "logger": log.client_logger,
                "group.id": group,
                "isolation.level": "read_committed",  # so that pending offsets are waited for (KIP-447)
                "enable.auto.commit": False,
                "allow.auto.create.topics": False,
            }
        )

    def close(self) -> None:
        self._consumer.close()

    def metadata(self) -> Any:
        return self._consumer.consumer_group_metadata()

    def of(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Where the replay of a topic begins: the offsets of those partitions that have one."""
        found = self.committed(topic, partitions)
        self._left[topic] = dict.fromkeys(partitions, -1) | found
        return found

    def moved(self, topic: str, offsets: Mapping[int, int]) -> None:
        """They are committed now."""
        self._left[topic].update(offsets)
        self.stands[topic].update(offsets)

    def forgotten(self, topic: str, low: Mapping[int, int]) -> tuple[list[int], float]:
        """Those of these partitions, which have letters from `low` on and no place, that may have had one: the brokers
        forget it so many days after its last commit, and the first letters are older."""
        client = facts.connect(self._settings, _CONNECT_S, self._world)
        days = facts.offsets_kept_minutes(client, self._settings.bootstrap_servers, self._world) / (24 * 60)
        before_ms = round((self._world.unix() - days * 86_400) * 1000)
        return sorted(tail.older(client, topic, low, before_ms)), days

    def confirm(self, topic: str) -> None:
        """Raises Fenced where somebody else has moved it since."""
        left = self._left[topic]
        found = dict.fromkeys(left, -1) | self.committed(topic, left)
        if moved := {partition for partition in left if found[partition] != left[partition]}:
            at = min(moved)
            raise Fenced(
                f"another replay has moved group {self._group} on {place_of(topic, at)} from {_told(left[at])} to "
                f"{_told(found[at])}: this one stops, what it has committed stands"
            )

    def committed(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Stable offsets of those partitions that have one."""
        places = [TopicPartition(topic, partition) for partition in partitions]
        deadline = self._world.now() + _COMMITTED_S
        while True:
            try:
                found = self._consumer.committed(places, timeout=_ASK_S)
                error = next((at.error for at in found if at.error is not None), None)
                if error is None:
                    return {at.partition: at.offset for at in found if at.offset >= 0}
            except KafkaException as raised:
                error = raised.args[0]
            action = classify("committed", error)
            if action is not Action.RETRY:
                raise stop_error(CallFailed("committed", action, error))
            if self._world.now() > deadline:
                raise Unavailable(f"the offsets of group {self._group} cannot be had: {describe_error(error)}")
            self._world.sleep(0.05)


def _told(offset: int) -> str:
    return "no offset" if offset < 0 else str(offset)


def letters(
    settings: Settings, topic: str, place: Place | None, on_forgotten: Callable[[str], None] = lambda sentence: None
) -> Iterator[Letter]:
    """The dead letters in this topic up to its end of now, from `place` on if there is one. `on_forgotten` is told
    where it may have been forgotten."""
    held = tail.spans(settings, topic, _CONNECT_S)
    at = {} if place is None else place.of(topic, held)
    starts = {partition: max(span.low, at.get(partition, 0)) for partition, span in held.items()}
    if place is not None:
        place.stands[topic] = starts
        without = {p: span.low for p, span in held.items() if p not in at and span.low < span.stable}
        forgotten, days = place.forgotten(topic, without) if without else ([], 0.0)
        if forgotten:
            where = ", ".join(f"[{partition}]" for partition in forgotten)
            on_forgotten(
                f"no replay's place is known of {topic} {where}, and letters there are older than the {days:g} days "
                "that the brokers keep one (offsets.retention.minutes): they may have been replayed before"
            )
    with tail.TopicReader(settings, topic, starts, uncommitted=False) as reader:
        for seen in tail.read_until(reader, tail.ends_of(held, uncommitted=False)):
            yield letter_of(seen.record)


# ---- replaying ------------------------------------------------------------------------------------------------


class Replay:
    """The replays of one App: `with Replay(app, settings) as replay: replay.topic("orders")`.

    `letters_of`: the letters of the App of this id, in place of its own, from where that one's replay stands. Those
    that do not say whose they are belong to every App.
    """

    def __init__(self, app: App, settings: Settings, letters_of: str | None = None, world: World = REAL) -> None:
        self._world = world
        self._whose = letters_of or app.id
        group = group_of(self._whose)
        self._settings = settings.with_values(**{"group.id": group, "transactional.id": group})
        self._app, self._hooks = app, Hooks(app)
        # The worker's own, but each letter is run once: what fails again waits for another replay.
        self._handler = Handler(app, passing=settings.passed_headers, policy=dlq, now=world.now)
        self._transactions = Transactions(self._settings, offsets=True, world=world)
        self._interval_s = self._settings["eos.transaction.interval.ms"] / 1000

    def __enter__(self) -> Replay:
        # First: what a predecessor left open is aborted, and one that runs is fenced before its place is read.
        self._transactions.__enter__()
        try:
            self._place = Place(self._settings, group_of(self._whose), self._world)
            self._hooks.start()
        except BaseException:
            self._transactions.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._handler.end()
            self._hooks.stop(failed=kind is not None)
        finally:
            self._place.close()
            self._transactions.__exit__()

    def topic(
        self, source: str, function: str | None = None, limit: int | None = None, from_earliest: bool = False
    ) -> Told:
        """Replays the dead letters of one source topic, `limit` of them at most.

        UsageError where letters may have been replayed before and the place is forgotten, unless `from_earliest`.
        """

        def refuse(sentence: str) -> None:
            if not from_earliest:
                raise UsageError(sentence, remedy="`--from earliest` replays all that is there, once you know")

        route, told, topic = route_of(self._app, source, function), Told(), dead_letter_topic(source)
        waiting = itertools.islice(letters(self._settings, topic, self._place, refuse), limit)
        handled = self._handle(route, waiting, told)
        while True:
            # Of no letter too, once: for each partition the brokers count the days from its last commit.
            self._commit(route, topic, handled, told)
            if not (handled := self._handle(route, waiting, told)):
                return told

    def _handle(self, route: Route, waiting: Iterator[Letter], told: Told) -> list[Handled]:
        """What the function makes of the next letters, for as long as a transaction's interval."""
        self._handler.ended((), {})  # nothing is kept of letters that are committed
        done: list[Handled] = []
        until = self._world.now() + self._interval_s
        for letter in itertools.islice(waiting, _MOST):
            if not letter.is_of(self._whose):
                told.strangers[letter.app] = told.strangers.get(letter.app, 0) + 1
                done.append(Handled(letter, []))
                continue
            done.append(self._run(route, letter))
            if self._world.now() >= until:
                break
        return done

    def _run(self, route: Route, letter: Letter) -> Handled:
        kept = Kept()
        halt = self._handler.handle_route(kept, route, [letter.record])
        if halt is not None and halt.error is not None:
            raise halt.error
        if not kept.dead_letters:
            return Handled(letter, kept.sends)
        failed = parts_of(kept.sends[0][-1] or [])[1]["exception"]
        return Handled(letter, [again(letter, kept.sends[0])], failed)

    def _commit(self, route: Route, topic: str, handled: list[Handled], told: Told) -> None:
        try:
            self._send(topic, handled)
        except PoisonRecord as refused:
            # Nothing of it was committed. Which one was it? It is a dead letter again then.
            if len(handled) > 1:
                for one in handled:
                    self._commit(route, topic, [one], told)
                return
            if handled[0].failed:
                raise  # its dead letter itself is refused
            self._handler.refused(handled[0].letter.record, refused)
            handled = [self._run(route, handled[0].letter)]
            self._send(topic, handled)
        for one in handled:
            if one.failed:
                told.failed[one.failed] = told.failed.get(one.failed, 0) + 1
            elif one.letter.is_of(self._whose):
                told.handled += 1
                told.outputs += len(one.sends)

    def _send(self, topic: str, handled: list[Handled]) -> None:
        """One transaction: outputs, letters that failed again, and how far the replay came."""
        after = self._place.stands[topic].copy()
        with self._transactions.begin() as txn:
            if txn.renewed:
                self._place.confirm(topic)
            for one in handled:
                for to, value, key, partition, timestamp_ms, headers in one.sends:
                    where = None if partition < 0 else partition
                    txn.send(to, value, key=key, partition=where, timestamp_ms=timestamp_ms, headers=headers or ())
                after[one.letter.partition] = one.letter.offset + 1
            offsets = [TopicPartition(topic, partition, offset) for partition, offset in after.items()]
            txn.send_offsets(offsets, self._place.metadata())
        self._place.moved(topic, after)
