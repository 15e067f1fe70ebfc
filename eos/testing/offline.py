"""Runs an App's functions without a broker: decoding, policies and outputs as in a worker.

Owns the form of the results. It must never import a Kafka client. The worker's own modules (eos/app/routes/,
eos/engine/handling.py) decide the outputs of a record; this module never does. Effects of a cluster do not appear: no
record is refused, no transaction aborts.
"""

from __future__ import annotations

import copy
import functools
import random
import typing
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from eos.app.cells import parse_cell
from eos.app.definition import App
from eos.app.expiry import UnexpiredCells
from eos.app.routes import Route
from eos.app.routes.source import to_record
from eos.app.stores import to_plain
from eos.encoding.dead_letters import dead_letter_topic
from eos.encoding.serde import encode, encode_key
from eos.engine.handling import Collector, Halt, Handler
from eos.engine.hooks import Hooks
from eos.errors import ConfigurationError
from eos.kafka.client.settings import Settings
from eos.records import Header, Record, Send
from eos.sql.outbox import TableRow
from eos.state.tasks import Task
from eos.testing.simulated_time import Advance, Tasks


@dataclass(frozen=True)
class Sent:
    """Holds one output.

    `partition` None: the partitioner chooses. `timestamp`: ms since the epoch, 0: time of producing."""

    topic: str
    value: bytes | None
    key: bytes | None
    partition: int | None
    timestamp: int
    headers: list[Header]


@dataclass
class Ran:
    """Holds the results of a run: all outputs in order, dead letters included, and counts.

    `topics`: the topics to which outputs can go.
    """

    sent: list[Sent] = field(default_factory=list)
    skipped: int = 0
    dead_letters: int = 0
    retries: int = 0
    late: int = 0
    duplicates: int = 0
    topics: Collection[str] = ()
    states: dict[str, dict[str, dict[bytes, Any]]] = field(default_factory=dict)
    """The final state of each function: by the name of the function, the name of the state, and the key."""

    def to(self, topic: str) -> list[Sent]:
        """Return the outputs to one topic. Raise ConfigurationError for a topic to which no output can go."""
        if self.topics and topic not in self.topics:
            raise ConfigurationError(f"no output goes to {topic!r}: outputs go to {', '.join(sorted(self.topics))}")
        return [sent for sent in self.sent if sent.topic == topic]

    def values(self, topic: str) -> list[bytes | None]:
        """Return the values of the outputs to one topic."""
        return [sent.value for sent in self.to(topic)]


Order = Literal["given", "shuffled"]
Step = Record | Advance


def run(app: App, steps: Iterable[Record | tuple[Any, ...] | Advance], *, order: Order = "given", seed: int = 0) -> Ran:
    """Run the App's functions on records, with `on_start` and `on_stop`; retries do not wait.

    A record is a Record, or `(topic, value)` or `(topic, value, key)`, which becomes a record of partition 0 with the
    next offset of its topic. Value and key follow the rule of outputs (bytes, str as UTF-8, None, else JSON). Outputs
    to a topic that a function reads are handled after the records, or shuffled among them. A row of a source is
    `(table, {"column": value})`; its id is the next number unless it has one. `advance(to)` between the
    records moves the time: event time of all partitions, or the clock, which stands still otherwise.

    `order`: "given" keeps the records' order; "shuffled" keeps only the order within each partition of a topic, as
    Kafka does, and `seed` determines the result.

    Raises PoisonRecord if the policy is stop, ConfigurationError for a record of a topic without a function,
    HookFailed.
    """
    app.check()
    if order not in typing.get_args(Order):
        raise ConfigurationError(f'order must be "given" or "shuffled", not {order!r}')
    draw = random.Random(seed) if order == "shuffled" else None
    offsets: defaultdict[str, int] = defaultdict(int)
    given: list[Step] = []
    tables = {route.source.table: route for route in app.sources.values() if route.source is not None}
    for step in steps:
        if not isinstance(step, Advance | Record) and step and step[0] in tables:
            given.append(_row_record(tables[step[0]], step, offsets))
        else:
            given += [step] if isinstance(step, Advance) else make_records([step], offsets)
    if draw is not None and any(isinstance(step, Advance) for step in given):
        raise ConfigurationError(
            'advance() needs order="given": there is no point between shuffled records at which the time could move'
        )
    app = copy.copy(app)
    records = [step for step in given if isinstance(step, Record)]
    app.add_topics(record.topic for record in records)
    for record in records:
        if record.topic not in app.routes:
            raise ConfigurationError(f"no function of {app!r} gets records of the topic {record.topic!r}")
    kept, ran, hooks = Collector(), Ran(topics=output_topics(app)), Hooks(app)
    tasks = Tasks(app)
    handler = Handler(app, passing=Settings({}).passed_headers, cells_of=tasks.cells_of, tasks_of=tasks.tasks_of)
    finished, latest_ms = False, 0
    try:
        hooks.start()
        while given:
            before = len(kept.sends)
            if isinstance(first := given[0], Advance):
                tasks.advance(first)
                ran.retries += _settle(lambda: handler.advance(kept, tasks.event_ms))
                given = [*_internal_records(app, kept.sends[before:], offsets), *given[1:]]
                continue
            part, given = _next_part(given) if draw is None else _draw_part(cast("list[Record]", given), draw)
            at = 0
            while (halt := handler.handle(kept, part[at:])) is not None:
                if halt.error is not None:
                    raise halt.error
                at += halt.handled
                ran.retries += 1
            given += _internal_records(app, kept.sends[before:], offsets)
            latest_ms = max(latest_ms, *(record.timestamp for record in part))
            if not given:
                # All input is handled, so functions that read the outputs of other functions have reached the same
                # time.
                before = len(kept.sends)
                ran.retries += _settle(functools.partial(handler.advance, kept, latest_ms, only_downstream=True))
                given += _internal_records(app, kept.sends[before:], offsets)
        finished = True
    finally:
        handler.end()
        hooks.stop(failed=not finished)
    ran.skipped, ran.dead_letters = kept.skipped, kept.dead_letters
    ran.sent += map(to_sent, kept.sends)
    ran.late, ran.duplicates = kept.late, kept.duplicates
    ran.states = {route.name: _merge_states(route, tasks.tasks_of(route).values()) for route in app.stateful}
    return ran


def _row_record(route: Route, step: tuple[Any, ...], offsets: defaultdict[str, int]) -> Record[Any]:
    """Return the record with which the function of a source gets a row."""
    (topic,), (table, *values) = route.sources, step
    if len(values) != 1 or not isinstance(values[0], dict):
        raise ConfigurationError(f'{step!r} is not a row of table {table}: give ({table!r}, {{"column": value}})')
    offsets[topic] += 1
    return to_record(topic, TableRow({"id": offsets[topic], "xid": "1", **values[0]}, table))


def _settle(fire: Callable[[], Halt | None]) -> int:
    """Fire timers until all of them are done, and return the number of retries. Raise the error that ends the run, if
    any.
    """
    retries = 0
    while (halt := fire()) is not None:
        if halt.error is not None:
            raise halt.error
        retries += 1
    return retries


def _merge_states(route: Route, tasks: Iterable[Task]) -> dict[str, dict[bytes, Any]]:
    """Return the final states of all partitions of a function, as `final_states` does."""
    merged: dict[str, dict[bytes, Any]] = {store.name: {} for store in route.values}
    for task in tasks:
        for name, values in final_states(route, task).items():
            merged[name].update(values)
    return merged


def _next_part(waiting: list[Step]) -> tuple[list[Record], list[Step]]:
    """Split off the records before the next Advance."""
    count = next((at for at, step in enumerate(waiting) if isinstance(step, Advance)), len(waiting))
    return cast("list[Record]", waiting[:count]), waiting[count:]


def _draw_part(waiting: list[Record], draw: random.Random) -> tuple[list[Record], list[Step]]:
    """Split off the first records of a partition, any number of them from 1 to all; keep the others in their order."""
    place = draw.choice(sorted({(record.topic, record.partition) for record in waiting}))
    count = draw.randint(1, sum((record.topic, record.partition) == place for record in waiting))
    part: list[Record] = []
    rest: list[Step] = []
    for record in waiting:
        is_next = len(part) < count and (record.topic, record.partition) == place
        (part if is_next else rest).append(record)
    return part, rest


def _internal_records(app: App, sends: Iterable[Send], offsets: defaultdict[str, int]) -> list[Record]:
    """Return the outputs that a function of the App reads, as records."""
    found = []
    for topic, value, key, partition, timestamp_ms, headers in sends:
        if topic in app.routes:
            at = offsets[topic]
            found.append(Record(topic, max(partition, 0), at, timestamp_ms, key, value, tuple(headers or ())))
            offsets[topic] += 1
    return found


def final_states(route: Route, task: Task) -> dict[str, dict[bytes, Any]]:
    """Return the final state of a task: by the name of the state and by key."""
    left: dict[str, dict[bytes, list[tuple[bytes, bytes]]]] = {store.stored_name: {} for store in route.values}
    seen = UnexpiredCells(task, route.ttls, task.time_ms)
    for cell in sorted(task.changed):  # nothing is ever committed here
        store, key, field = parse_cell(cell)
        if store in left and (value := seen.get(cell)) is not None:
            left[store].setdefault(key, []).append((field, value))
    return {
        store.name: {key: to_plain(store, values) for key, values in left[store.stored_name].items()}
        for store in route.values
    }


def to_sent(send: Send) -> Sent:
    topic, value, key, partition, timestamp, headers = send
    return Sent(topic, value, key, None if partition < 0 else partition, timestamp, headers or [])


def output_topics(app: App) -> set[str]:
    """Return the topics to which outputs of the App's functions can go, dead-letter topics included."""
    return {*app.destinations, *map(dead_letter_topic, app.routes)}


def make_records(
    records: Iterable[Record | tuple[Any, ...]], offsets: defaultdict[str, int] | None = None
) -> list[Record]:
    """Return records, converted as `run` does. `offsets`: the next offset of each topic, which is updated."""
    offsets = defaultdict(int) if offsets is None else offsets
    made: list[Record] = []
    for given in records:
        if isinstance(given, Record):
            made.append(given)
            offsets[given.topic] = max(offsets[given.topic], given.offset + 1)
            continue
        if not 2 <= len(given) <= 3:
            raise ConfigurationError(f"{given!r} is not a Record, (topic, value) or (topic, value, key)")
        topic, value, key = (*given, None)[:3]
        made.append(Record(topic, 0, offsets[topic], key=encode_key(key), value=encode(value)))
        offsets[topic] += 1
    return made
