"""Defines an App: functions from records to outputs, as a user writes them.

Owns the rules for definitions, and the assignment of topics to functions. It must never do I/O, import a Kafka
client, or decide about records that a function refuses. The worker and Spark run the same Route (eos/app/routes/),
and must get the same outputs from it.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Concatenate, Final, TypeVar, cast

from eos.app.annotations import parameter_annotation, takes_record
from eos.app.expiry import TimeToLive, with_ttl
from eos.app.policies import Policy, policy_of, stop
from eos.app.routes import Route, changelog_of, is_async
from eos.app.routes.handlers import check_merge, make_handler, make_window_cleaner
from eos.app.routes.sink import make_sink_target
from eos.app.routes.source import make_source_table, position_topic, publish, row_decoder
from eos.app.state import Store
from eos.app.stores import find_stores, with_old_names
from eos.app.timers import check_timer_name
from eos.app.timing import Timing, make_timing, uses_time
from eos.app.windows import SessionWindows, Windows
from eos.encoding.dead_letters import DEAD_LETTER_SUFFIX, dead_letter_topic
from eos.encoding.serde import annotation_name, function_name, wrap_decoder, wrap_encoder
from eos.errors import ConfigurationError
from eos.records import Record, is_pattern, is_topic_name
from eos.sql.database import Database
from eos.sql.outbox import Readable

# A function gets one record, or the part of it that its annotation names, and then its state.
Function = TypeVar("Function", bound=Callable[Concatenate[Any, ...], object])


BatchFunction = TypeVar("BatchFunction", bound=Callable[Concatenate[list[Record], ...], object])


Hook = TypeVar("Hook", bound=Callable[[], object])


class App:
    """Holds functions from source topics to destination topics under one id.

    The id is the consumer group, and the prefix of every transactional id. An App itself does no I/O; `eos run`,
    `eos.run` and Spark run it.

    A wrong definition raises ConfigurationError at its own line, before the first record.
    """

    def __init__(self, id: str) -> None:
        _check_name(id, "the id of an App")
        self.id = id
        self.routes: dict[str, Route] = {}  # the routes by source topic, including topics that patterns matched
        self.patterns: dict[re.Pattern[str], Route] = {}
        self.start_hooks: list[Callable[[], object]] = []
        self.stop_hooks: list[Callable[[], object]] = []

    @property
    def topics(self) -> list[str]:
        """Return all source topics in the order of their definition; topics that a pattern matched come last."""
        return list(self.routes)

    @property
    def reads_several_topics(self) -> bool:
        """Return whether the App reads several source topics, or may do so because it has a pattern."""
        return len(self.routes) > 1 or bool(self.patterns)

    @property
    def destinations(self) -> set[str]:
        """Return all topics that the App may write to, dead-letter topics included."""
        return _all_destinations(self.routes, self.functions)

    @property
    def chained(self) -> set[str]:
        """Return the topics that one function writes and another one reads."""
        return self.destinations & self.routes.keys()

    def follows(self, route: Route) -> bool:
        """Return whether a time-based function reads the output of another function of the App. Such a function does
        not take its time from its own records alone (eos/worker/watermarks.py).
        """
        return route.uses_time and not self.chained.isdisjoint(route.sources)

    @property
    def functions(self) -> list[Route]:
        """Return every function once; functions that read only by a pattern come last."""
        return list(dict.fromkeys([*self.routes.values(), *self.patterns.values()]))

    @property
    def sources(self) -> dict[str, Route]:
        """Return the functions that get the rows of tables, by the topic that holds the position in the table."""
        return {topic: route for topic, route in self.routes.items() if route.source is not None}

    @property
    def stateful(self) -> list[Route]:
        """Return the functions that have state."""
        return [route for route in self.functions if route.has_state]

    @property
    def changelogs(self) -> set[str]:
        """Return the changelog topics of its functions with state."""
        return {changelog_of(self.id, route) for route in self.stateful}

    def match_topics(self, there: Iterable[str]) -> dict[str, Route]:
        """Return the topics among `there` that `add_topics` would add, sorted, with their functions."""
        found: dict[str, Route] = {}
        # None of these topics is a destination of the App, because a pattern that matches a destination is refused when
        # it is defined.
        for topic in sorted(set(there) - self.routes.keys() - self.changelogs):
            routes = list(dict.fromkeys(r for p, r in self.patterns.items() if _matches(p, topic)))
            if len(routes) > 1:
                raise ConfigurationError(
                    f"the topic {topic!r} matches the patterns of two functions, {routes[0].name} and "
                    f"{routes[1].name}: a topic has one function; name the topic, or make one pattern narrower"
                )
            if routes and routes[0].on_error.verdict == "dlq" and dead_letter_topic(topic) in self.routes:
                raise ConfigurationError(
                    f"the topic {dead_letter_topic(topic)!r} is a source of the App {self.id!r}, and would get the "
                    f"dead letters of {topic!r}, which a pattern matches: make the pattern narrower, or use two Apps"
                )
            if routes:
                found[topic] = routes[0]
        return found

    def add_topics(self, there: Iterable[str]) -> list[str]:
        """Assign the topics among `there` that a pattern matches to the pattern's function, and return the new ones.

        A topic that a function names stays with that function. Topics whose name begins with `__`, dead-letter topics
        and the App's own changelogs are never added. Raises ConfigurationError, without adding any topic, if the
        patterns of two functions match the same topic.
        """
        new = self.match_topics(there)
        self.routes |= new
        return list(new)

    def __copy__(self) -> App:
        """Return a copy; topics added to the copy do not change the original."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), routes=dict(self.routes), patterns=dict(self.patterns))
        return copied

    def process(
        self,
        topics: str | Iterable[str],
        *,
        to: str | Iterable[str] = (),
        on_error: Policy | str = stop,
        decode: Callable[[bytes], Any] | None = None,
        encode: Callable[[Any], bytes] | None = None,
        ttl: TimeToLive | None = None,
        name: str | None = None,
        was: Mapping[str, str] = MappingProxyType({}),
        window: Windows | None = None,
        grace: timedelta | None = None,
        late: str | None = None,
        time: Callable[[Any], Any] | None = None,
        ahead: timedelta | None = None,
        idle: timedelta | None = None,
        once: Callable[[Any], Any] | None = None,
        within: timedelta | None = None,
        duplicates: str | None = None,
    ) -> Callable[[Function], Function]:
        """Decorate a function that gets one record of `topics` and returns its outputs.

        The function returns None, a value, an Out, or a list, tuple or generator of those. Values go to the first topic
        of `to`. The decorator returns the function unchanged.

        None means no output, so `return record.value` drops tombstones; `return record.out(record.value)` or
        `Out(value)` passes them on. Each item of a tuple is a record of its own: a record with a key is `Out(value,
        key=key)`.

        A function may read a topic that another function of the App writes, as long as there is no cycle. A topic that
        begins with `^` is a pattern: a regular expression of Python's `re` that must match the whole name. The function
        then reads all matching topics, including topics created while a worker runs.

        The annotation of the first parameter chooses what the function gets. A second parameter annotated `Record` gets
        the record: `def f(order: Order, record: Record)`. A single parameter `Record[Order]` gets the record with its
        value decoded. Further parameters annotated `State[T]`, `MapState[K, V]` or `ListState[T]` are state, stored by
        the record's key and committed with outputs and offsets (docs/howto/state.md).

        `on_error`: eos.stop, eos.skip, eos.dlq or eos.retry(n, then=...); see docs/howto/failures.md.

        `decode(value)` decodes a record's bytes in place of the annotation. `encode(value)` returns the bytes of every
        value that is not None. An exception from either counts as if the function had raised it.

        `ttl=timedelta(days=7)`, or `ttl={"seen": timedelta(days=7)}`: a value of the state expires this long after its
        last write, in the time of the records.

        `name`, `was`: state is stored under the names of the function and of its parameters. After a rename in the
        code, `name="count"` keeps the old name of the function, and `was={"total": "seen"}` says that the state `total`
        was named `seen`.

        A parameter annotated `Timers` sets and clears timers of the record's key (docs/howto/time.md).

        `window=eos.tumbling(hours=1)`: state is kept per key and window. The window closes, and `on_close` runs, once
        the time of the partition is `grace` after its end. A record that comes later is late: it is counted, and goes
        to the topic `late` if there is one.

        `time(value)` returns the time of a record, a datetime or milliseconds, in place of its timestamp. A record
        whose time is further `ahead` of the clock fails. Without records the time of a partition stands still. With
        `idle`, the time of a partition that was read to its end and has had no record for this long follows the clock,
        later by `idle`.

        `once(value)` returns the id of a record. The function gets only the first record of each id `within` a
        duration; the others are counted, and go to the topic `duplicates` if there is one. Ids are compared within a
        partition, so records of one id must have one key.

        An `async def` runs on many records at once (`eos.async.max.records`); outputs keep the order of the input.
        """
        sources, destinations, policy = _check_definition(topics, to, on_error)
        if name is not None:
            _check_name(name, "the name of a function")

        def register(function: Function) -> Function:
            frame = sys._getframe(1)
            stores = _find_stores(function, sources, frame, ttl, was)
            timing = make_timing(
                function_name(function),
                window=window,
                grace=grace,
                time=time,
                ahead=ahead,
                late=late,
                idle=idle,
                once=once,
                within=within,
                duplicates=duplicates,
            )
            _check_timing(function, sources, stores, timing)
            with_record = takes_record(function, frame)
            default = Record if decode is None and not with_record else object
            annotation = _resolve_first_annotation(function, default, frame, len(stores) + with_record)
            _check_destination(function, destinations)
            coders = (wrap_decoder(decode, annotation), wrap_encoder(encode))
            more: dict[str, Any] = {"stores": stores, "name": name, "with_record": with_record, "timing": timing}
            route = Route(function, annotation, sources, destinations, False, policy, *coders, **more)
            if timing.windows is not None:
                route.handlers[""] = make_window_cleaner(route)  # on_close may name another function later
            self._add(route)
            return function

        return register

    def process_batch(
        self,
        topics: str | Iterable[str],
        *,
        to: str | Iterable[str] = (),
        on_error: Policy | str = stop,
        encode: Callable[[Any], bytes] | None = None,
        ttl: TimeToLive | None = None,
        name: str | None = None,
        was: Mapping[str, str] = MappingProxyType({}),
    ) -> Callable[[BatchFunction], BatchFunction]:
        """Decorate a function that gets a `list[Record]` and returns an iterable of Out, for high throughput.

        `record.out(value)` keeps the key and timestamp of that record. `Out(value, key=...)` has the latest timestamp
        of the batch unless it sets its own. The decorator returns the function unchanged.

        `topics`, `to`, `on_error`, `encode`, `ttl`, `name`, `was`: as for `process`. If a batch function raises, it
        runs again record by record, except under the policy stop, whose error names the range of records. State is
        annotated `dict[bytes, State[T]]`: it maps each key of the batch to its state. Such a batch comes from one
        partition.
        """
        sources, destinations, policy = _check_definition(topics, to, on_error)
        if name is not None:
            _check_name(name, "the name of a function")

        def register(function: BatchFunction) -> BatchFunction:
            frame = sys._getframe(1)
            stores = _find_stores(function, sources, frame, ttl, was, batch=True)
            annotation = _resolve_first_annotation(function, list[Record], frame, len(stores))
            _check_destination(function, destinations)
            coders = (None, wrap_encoder(encode))
            more: dict[str, Any] = {"stores": stores, "name": name}
            self._add(Route(function, annotation, sources, destinations, True, policy, *coders, **more))
            return function

        return register

    def sink(
        self,
        topics: str | Iterable[str],
        database: Database,
        *,
        table: str | None = None,
        key: str | Iterable[str] = (),
        on_error: Policy | str = stop,
        decode: Callable[[bytes], Any] | None = None,
        name: str | None = None,
    ) -> Callable[[Function], Function]:
        """Decorate a function that writes the records of `topics` into a database, each exactly once.

        With `table`, the function returns a row: a dict, a msgspec Struct or a dataclass, whose names are the columns;
        or None for no row. `key` names the columns of the key. If the table has a row with the same key, the returned
        columns replace its values; otherwise, and without `key`, the row is inserted. Without `table`, the function
        gets a cursor as its second parameter (`def pay(payment: Payment, db: Cursor)`) and runs its own SQL, which
        commits together with the offsets.

        `database`: for example eos.sql.Postgres; it gets a table eos_offsets (docs/howto/databases.md). Such a
        function sends nothing to Kafka and has no state. `on_error`, `decode`, `name` and the first parameter: as for
        `process`. The decorator returns the function unchanged.
        """
        sources, _, policy = _check_definition(topics, (), on_error)
        if found := [source for source in sources if is_pattern(source)]:
            raise ConfigurationError(f"a function that writes rows must name its topics, but {found[0]!r} is a pattern")
        if name is not None:
            _check_name(name, "the name of a function")
        keys = tuple(_to_list(key))

        def register(function: Function) -> Function:
            frame = sys._getframe(1)
            if is_async(function):
                raise ConfigurationError(
                    f"{function_name(function)} is async: a function that writes rows must be an ordinary def"
                )
            target = make_sink_target(function, database, table, keys, frame)
            default = Record if decode is None else object
            annotation = _resolve_first_annotation(function, default, frame, target.table is None)
            coders = (wrap_decoder(decode, annotation), None)
            self._add(Route(function, annotation, sources, (), False, policy, *coders, name=name, sink=target))
            return function

        return register

    def source(
        self,
        database: Readable,
        *,
        table: str,
        to: str | Iterable[str],
        on_error: Policy | str = stop,
        delete: bool = False,
        encode: Callable[[Any], bytes] | None = None,
        name: str | None = None,
    ) -> Callable[[Function], Function]:
        """Send the rows of a table to Kafka, each exactly once and in the order of their transactions.

        Without a function, the columns value, key, topic and headers of a row make its record; only value is required.
        As a decorator, the function gets each row: a dict, or the msgspec Struct or dataclass of its annotation. It
        returns outputs as a function of `process` does. An output without a key gets the value of the column key as its
        key, if the row has that column.

        The table needs the columns `id` and `xid xid8 not null default pg_current_xact_id()` (docs/howto/outbox.md).
        `database`: eos.sql.Postgres. `delete`: delete rows once they are in Kafka. `on_error`: eos.stop, eos.skip or
        eos.retry(n). `encode`: as for `process`. `name`: the position in the table is kept under this name; by default
        under the table's.
        """
        destinations, policy = _check_destinations(to), policy_of(on_error)
        if not destinations:
            raise ConfigurationError(f'the rows of table {table!r} need a destination: name one with to="topic"')
        if policy.verdict == "dlq":
            raise ConfigurationError(
                f"on_error={policy} of table {table!r}: a row has no dead-letter topic, since it stays in its table; "
                "use eos.stop, eos.skip or eos.retry(n)"
            )
        named = table if name is None else name
        _check_name(named, "the name of a source")
        topic = position_topic(self.id, named)

        def define(function: Callable[[Any], object], frame: types.FrameType | None) -> Route:
            target = make_source_table(topic, database, table, delete, function)
            annotation = parameter_annotation(function, dict, frame)
            _check_destination(function, destinations)
            coders = (row_decoder(annotation), wrap_encoder(encode))
            more: dict[str, Any] = {"name": named, "source": target}
            return Route(function, annotation, (topic,), destinations, False, policy, *coders, **more)

        default = define(publish, None)
        self._add(default)

        def register(function: Function) -> Function:
            route = define(function, sys._getframe(1))
            self.routes = {source: old for source, old in self.routes.items() if old is not default}
            self._add(route)
            return function

        return register

    def on_timer(
        self, function: Callable[..., object], name: str, *, to: str | Iterable[str] | None = None
    ) -> Callable[[Function], Function]:
        """Decorate the function that runs when a timer of this name is due. `function` sets the timer by its parameter
        `Timers`.

        Its first parameter gets the key of the timer, as bytes or str, or a `Timer`. Further parameters are states of
        `function`, with the same names and annotations, and `Timers`. Results are as in `process`: an output has the
        timer's key and due time unless it sets its own. They go to the topics of `to`, by default to those of
        `function`. The error policy is that of `function`. The decorator returns the function unchanged.
        """
        timer, route = check_timer_name(name), self._route_of(function, "on_timer")
        if all(store.is_kept for store in route.stores):
            raise ConfigurationError(
                f"{route.name} sets no timers: give it a parameter that is annotated Timers",
                remedy=f"def {route.name}(..., due: Timers)",
            )
        return self._handler(route, timer, to)

    def on_close(
        self, function: Callable[..., object], *, to: str | Iterable[str] | None = None
    ) -> Callable[[Function], Function]:
        """Decorate the function that runs once for each window of `function`, when the window is final.

        Its first parameter gets the `Window`. Further parameters are states of `function`, with the same names and
        annotations. An output has the key of the window and a timestamp one millisecond before the window's end, unless
        it sets its own. The window's state is deleted afterwards. `to` and the error policy are as in `on_timer`. The
        decorator returns the function unchanged.
        """
        route = self._route_of(function, "on_close")
        if route.timing.windows is None:
            raise ConfigurationError(f"{route.name} has no windows to close: give it window=")
        return self._handler(route, "", to)

    def on_merge(self, function: Callable[..., object]) -> Callable[[Function], Function]:
        """Decorate the function that merges two session windows of `function` when a record between them joins them.

        It gets the states of the window that remains, in the order of `function`, and then those of the window that is
        merged into it and deleted afterwards: `def merge(total: State[int], other: State[int])`. Its result is ignored.
        The decorator returns the function unchanged.
        """
        route = self._route_of(function, "on_merge")
        if not isinstance(route.timing.windows, SessionWindows):
            raise ConfigurationError(f"{route.name} has no session windows to merge: give it window=eos.sessions(...)")

        def register(merge: Function) -> Function:
            check_merge(route, merge)
            route.merge = merge
            return merge

        return register

    def _route_of(self, function: Callable[..., object], decorator: str) -> Route:
        for route in self.functions:
            if route.function is function:
                return route
        raise ConfigurationError(
            f"{decorator}() needs a function of the App {self.id!r}, not {function!r}: decorate it with @app.process "
            "first"
        )

    def _handler(self, route: Route, timer: str, to: str | Iterable[str] | None) -> Callable[[Function], Function]:
        destinations = route.destinations if to is None else _check_destinations(to)

        def register(function: Function) -> Function:
            handler = make_handler(route, timer, function, destinations, sys._getframe(1))
            if timer in route.timer_names and not _replaces(function, route.handlers[timer].function):
                what = f"the timer {timer!r}" if timer else "the end of a window"
                raise ConfigurationError(f"{route.name} has two functions for {what}, {handler.name} is the second")
            _check_destination(function, destinations)
            replaced = route.handlers.get(timer)
            route.handlers[timer] = handler
            try:
                self._check_topics(self.routes, self.patterns)
            except ConfigurationError:
                # A refused function leaves the App as it was.
                route.handlers.pop(timer)
                route.handlers |= {} if replaced is None else {timer: replaced}
                raise
            route.timer_names.add(timer)
            return function

        return register

    def on_start(self, function: Hook) -> Hook:
        """Decorate a function without arguments, `def` or `async def`, to run before the first record.

        Use it to open connections and load models. Several such functions run in the order of their definition. The
        decorator returns the function unchanged.
        """
        return self._add_hook(self.start_hooks, function)

    def on_stop(self, function: Hook) -> Hook:
        """Decorate a function without arguments, `def` or `async def`, to run after the last commit.

        Several such functions run in the reverse order of their definition. They run however the run ended, except
        after a stop that took too long, or if an `on_start` function failed. The decorator returns the function
        unchanged.
        """
        return self._add_hook(self.stop_hooks, function)

    def _add_hook(self, hooks: list[Callable[[], object]], function: Hook) -> Hook:
        try:
            inspect.signature(function).bind()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{function!r} must be callable without arguments: {error}") from error
        hooks[:] = [*(old for old in hooks if not _replaces(function, old)), function]
        return function

    def check(self) -> None:
        """Raise ConfigurationError if the App has no function."""
        if not self.functions:
            raise ConfigurationError(
                f'the App {self.id!r} has no function: decorate one with @app.process("topic", to="topic")'
            )
        for route in self.functions:
            if isinstance(route.timing.windows, SessionWindows) and route.merge is None:
                raise ConfigurationError(
                    f"{route.name} has session windows, but no function that merges two of them",
                    remedy=f"decorate one with @app.on_merge({route.name})",
                )
            if not route.timer_names and any(not store.is_kept for store in route.stores):
                raise ConfigurationError(
                    f"{route.name} sets timers, but no function runs when they are due",
                    remedy=f'decorate one with @app.on_timer({route.name}, "name of the timer")',
                )

    def _add(self, route: Route) -> None:
        # All checks come before the first change, so a refused function leaves the App as it was.
        kept = {topic: old for topic, old in self.routes.items() if not _replaces(route.function, old.function)}
        others = {pattern: old for pattern, old in self.patterns.items() if not _replaces(route.function, old.function)}
        names = dict.fromkeys((source for source in route.sources if not is_pattern(source)), route)
        patterns = dict.fromkeys((re.compile(source) for source in route.sources if is_pattern(source)), route)
        for topic in names:
            if topic in kept:
                raise ConfigurationError(
                    f"the topic {topic!r} has two functions, {kept[topic].name} and {route.name}: "
                    "remove one of them, or use two Apps"
                )
        for pattern in patterns:
            if pattern in others:
                raise ConfigurationError(
                    f"the pattern {pattern.pattern!r} has two functions, {others[pattern].name} and "
                    f"{route.name}: remove one of them, or use two Apps"
                )
        routes, patterns = kept | names, others | patterns
        self._check_topics(routes, patterns)
        self.routes, self.patterns = routes, patterns

    def _check_topics(self, routes: Mapping[str, Route], patterns: Mapping[re.Pattern[str], Route]) -> None:
        """Raise ConfigurationError if an output of these functions could return to them, or reach a changelog."""
        functions = [*routes.values(), *patterns.values()]
        written = _all_destinations(routes, functions)
        for function in functions:
            if function.has_state and (changelog := changelog_of(self.id, function)) in written:
                raise ConfigurationError(
                    f"the App {self.id!r} writes to {changelog!r}, the changelog of {function.name}: a record that is "
                    "not state would stop every worker that restores it",
                    remedy="write to another topic, or give the function another name",
                )
        if cycle := _find_cycle(routes):
            raise ConfigurationError(
                f"the App {self.id!r} reads and writes {' -> '.join(cycle)}: in this cycle records could loop "
                "forever; use two Apps"
            )
        for pattern in patterns:
            if caught := [topic for topic in sorted(written) if _matches(pattern, topic)]:
                raise ConfigurationError(
                    f"the pattern {pattern.pattern!r} matches {caught[0]!r}, a destination of the App {self.id!r}: its "
                    "records could loop forever; make the pattern narrower, or name the topics"
                )

    def __repr__(self) -> str:
        return f"App({self.id!r}, {self.functions})"


def _replaces(new: Callable[..., object], old: Callable[..., object]) -> bool:
    """Return whether a function replaces an earlier one: in a notebook or at a prompt, running a cell again does so.

    In a file a second function of the same name is a mistake.
    """
    if hasattr(sys.modules.get("__main__"), "__file__"):
        return False
    made, before = ((getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (new, old))
    return made == before and made[0] == "__main__" and made[1] not in (None, "<lambda>")


def _matches(pattern: re.Pattern[str], topic: str) -> bool:
    """Return whether a pattern may match this topic: never Kafka's internal topics, nor dead-letter topics."""
    never = topic.startswith("__") or topic.endswith(DEAD_LETTER_SUFFIX)
    return not never and pattern.fullmatch(topic) is not None


def _all_destinations(routes: Mapping[str, Route], functions: Iterable[Route]) -> set[str]:
    dead = {dead_letter_topic(topic) for topic, route in routes.items() if route.on_error.verdict == "dlq"}
    return dead.union(*(route.all_destinations for route in functions))


def _find_cycle(routes: Mapping[str, Route]) -> tuple[str, ...]:
    """Return a cycle of topics, each written by the function that reads the one before; () if there is none.

    The first topic is repeated at the end.
    """
    harmless: set[str] = set()

    def walk(path: tuple[str, ...]) -> tuple[str, ...]:
        *before, topic = path
        if topic in before:
            return path[before.index(topic) :]
        if topic in routes and topic not in harmless:
            for written in sorted(_all_destinations({topic: routes[topic]}, [routes[topic]])):
                if found := walk((*path, written)):
                    return found
        harmless.add(topic)
        return ()

    return next(filter(None, (walk((topic,)) for topic in routes)), ())


# ---- checks of a definition ------------------------------------------------------------------------------------------


def _check_name(name: object, what: str) -> None:
    # Kafka allows any group id, but an id that follows the rule for topics is also valid in file names, metrics, ACL
    # prefixes and `<topic>.dlq`.
    if not is_topic_name(name):
        raise ConfigurationError(
            f"{what} must be 1 to 249 letters, digits, '.', '_' or '-' (and not '.' or '..'), not {name!r}"
        )


def _check_definition(
    topics: str | Iterable[str], to: str | Iterable[str], on_error: object
) -> tuple[tuple[str, ...], tuple[str, ...], Policy]:
    policy = policy_of(on_error)
    if callable(topics):
        raise ConfigurationError('the decorator needs its topics: @app.process("topic", to="topic")')
    sources = _to_list(topics)
    for source in sources:
        if isinstance(source, str) and is_pattern(source):
            _check_pattern(source)
            continue
        _check_name(source, "a source topic")
        if policy.verdict == "dlq":
            _check_name(dead_letter_topic(source), "the dead-letter topic")
    if not sources:
        raise ConfigurationError("a function needs at least one source topic")
    return tuple(dict.fromkeys(sources)), _check_destinations(to), policy


def _check_destinations(to: str | Iterable[str]) -> tuple[str, ...]:
    destinations = _to_list(to)
    for destination in destinations:
        _check_name(destination, "a destination topic")
    return tuple(dict.fromkeys(destinations))


def _check_timing(
    function: Callable[..., object], sources: Sequence[str], stores: Sequence[Store], timing: Timing
) -> None:
    """Raise ConfigurationError for a function that cannot use time as its decorator says."""
    name = function_name(function)
    if not uses_time(tuple(stores), timing):
        return
    kept = [store for store in stores if store.is_kept]
    if timing.windows is not None and not kept:
        raise ConfigurationError(
            f"{name} has window= but no state: annotate a parameter as state, for example total: State[int]"
        )
    if timing.windows is not None and len(kept) < len(stores):
        raise ConfigurationError(f"{name} has window= and Timers: use two functions, or on_close for the window's end")
    if timing.windows is not None and any(store.ttl_ms is not None for store in kept):
        raise ConfigurationError(f"{name} has window= and ttl=: the state of a window is deleted when it closes")
    if is_async(function):
        raise ConfigurationError(f"{name} is async, so it can have neither timers nor windows: make it an ordinary def")
    if len(sources) > 1 or is_pattern(sources[0]):
        raise ConfigurationError(
            f"{name} uses time, but reads {', '.join(sources)}: such a function must read one topic, given by its name"
        )


def _to_list(topics: object) -> list[str]:
    names = [topics] if isinstance(topics, str) or not isinstance(topics, Iterable) else list(topics)
    return cast("list[str]", names)  # the caller checks each name


def _check_pattern(source: str) -> None:
    try:
        re.compile(source)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"the pattern {source!r} is not a regular expression: {error}") from error


def _resolve_first_annotation(
    function: Callable[..., object], default: object, frame: types.FrameType, more: int = 0
) -> object:
    if not callable(function):
        raise ConfigurationError(f"{function!r} is not a function")
    return parameter_annotation(function, default, frame, more)


def _find_stores(
    function: Callable[..., object],
    sources: Sequence[str],
    frame: types.FrameType,
    ttl: TimeToLive | None,
    was: Mapping[str, str],
    batch: bool = False,
) -> tuple[Store, ...]:
    stores = with_ttl(function_name(function), find_stores(function, frame, batch), ttl)
    stores = with_old_names(function_name(function), stores, was)
    if stores and (len(sources) > 1 or is_pattern(sources[0])):
        raise ConfigurationError(
            f"{function_name(function)} has state, but reads {', '.join(sources)}: a function with state must read one "
            "topic, given by its name"
        )
    return stores


# The return annotations that do not show whether a function sends anything, as objects and as text.
_MAY_SEND_NOTHING: Final = (inspect.Signature.empty, None, types.NoneType, Any, object, typing.NoReturn, typing.Never)


_MAY_SEND_NOTHING_NAMES: Final = frozenset({"", "None", "Any", "object", "NoReturn", "Never"})


def _check_destination(function: Callable[..., object], destinations: Sequence[str]) -> None:
    """Raise ConfigurationError for a function without a destination whose annotation says that it returns outputs.

    Without an annotation only its first output shows this.
    """
    returned = inspect.signature(function).return_annotation
    if destinations or _may_send_nothing(returned):
        return
    shown = returned.strip("'\"") if isinstance(returned, str) else annotation_name(returned)
    raise ConfigurationError(
        f"{function_name(function)} returns {shown} by its annotation, but has no destination: name one with "
        'to="topic", or annotate -> None if it sends nothing'
    )


def _may_send_nothing(annotation: object) -> bool:
    """Return whether a function with this return annotation may be one that never sends an output.

    Text stays unevaluated, since its names may exist for type checkers only.
    """
    if isinstance(annotation, str):
        text = annotation.strip("'\" ")
        if generic := re.fullmatch(r"[\w.]+\[(.*)\]", text):  # Iterator[None]
            return _may_send_nothing(generic[1].partition(",")[0])
        return text.rpartition(".")[2] in _MAY_SEND_NOTHING_NAMES
    origin = typing.get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Iterable | collections.abc.AsyncIterable):
        return bool(args := typing.get_args(annotation)) and _may_send_nothing(args[0])
    return isinstance(annotation, TypeVar) or any(annotation is one for one in _MAY_SEND_NOTHING)
