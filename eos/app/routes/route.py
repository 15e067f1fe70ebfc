"""Compiles one function of an App with its topics into the form that a worker, Spark and tests call.

Owns the way in which records pass through a function (one by one, in batches or concurrently), and the choice of the
outputs that are sent if it fails. A record's outputs exist only once its function has returned (a generator: is
exhausted). A function that fails in the middle has sent nothing.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from eos.app.cells import CLOCK_TIMERS, EVENT_TIMERS
from eos.app.expiry import ttls_of
from eos.app.policies import Policy, stop
from eos.app.results import Hints, encode_result, hot_loop_target, make_normaliser
from eos.app.routes.async_ import Async
from eos.app.routes.batch import Batch, StatefulBatch, blocking
from eos.app.routes.keyed import Keyed
from eos.app.routes.single import Single, Stateful
from eos.app.routes.sink import RowSink, Writer
from eos.app.routes.timed import Caller, Tally, TimedFunction, TimerFunction
from eos.app.state import Store, TaskCells
from eos.app.stores import CellsOf, Stores
from eos.app.timers import DueTimer, Timer
from eos.app.timing import NO_TIMING, Timing, uses_time
from eos.encoding.serde import Decode, Encode, annotation_name, decoder, function_name, underlying, without_none
from eos.errors import ConfigurationError, IllegalState
from eos.records import Each, Feed, Record, Send
from eos.sql.database import SinkTarget
from eos.sql.outbox import SourceTable

Gives = Literal["timer", "window", "bytes", "str"]


def _timer(due: DueTimer, task: TaskCells) -> Timer:
    return Timer(due.key, due.name, due.due_ms, task.clock_ms() if due.clock else task.time_ms)


GIVERS: Final[Mapping[Gives, Callable[[DueTimer, TaskCells], Any]]] = {
    "timer": _timer,
    "window": lambda due, _: due.window,
    "bytes": lambda due, _: due.key,
    "str": lambda due, _: due.key.decode(),
}
TIMER_STORES: Final = (EVENT_TIMERS.encode(), CLOCK_TIMERS.encode())


class Route:
    """Holds one function with its topics, compiled into the form that an engine calls.

    `outputs(record)` returns what to send for one record. A route with `batch` also has `outputs_batch(records)` for
    many records; its `outputs` runs a batch of one, to find the record that fails. `feed(records, sink)` does the same
    for many records and sends each output directly: it is the hot path, with nothing between the function and the
    client. `each(records)` returns an iterator with one item per record: the sequence of Sends that `outputs` returns
    for it. With `concurrent` (an `async def`), `feed` and `each` run the function on all records at once and keep their
    order. Results of records after a failed one are kept for the next call with these records.

    All but `feed` raise the exceptions of the function, DecodeError for a value that does not fit the annotation, and
    TypeError or ValueError for a result that cannot be sent: these are about the record. A ConfigurationError (an
    undeclared destination) is about the App: no policy may skip or dead-letter a record because of it.
    """

    __slots__ = (
        "annotation",
        "batch",
        "concurrent",
        "decode",
        "destinations",
        "discard",
        "each",
        "encode",
        "feed",
        "function",
        "gives",
        "handlers",
        "merge",
        "name",
        "on_error",
        "outputs",
        "outputs_batch",
        "passing",
        "sink",
        "source",
        "sources",
        "stores",
        "takes_values",
        "tally",
        "timer_names",
        "timing",
        "window_stores",
        "with_record",
    )  # fmt: skip

    feed: Feed
    outputs: Callable[[Record], Sequence[Send]]
    outputs_batch: Callable[[list[Record]], list[Send]]
    each: Each
    handlers: dict[str, Route]
    """The timer functions by the name of the timer; the function of the name "" closes the windows."""
    tally: Tally | None
    """Counts the late records and duplicates of a route that uses time."""
    takes_values: bool
    """Whether the function gets values alone, so that no user code gets a Record."""
    discard: Callable[[Record], None] | None
    """Clears a timer whose function failed, if the route is a timer function."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        annotation: object,
        sources: tuple[str, ...],
        destinations: tuple[str, ...],
        batch: bool,
        on_error: Policy = stop,
        decode: Decode | None = None,
        encode: Encode | None = None,
        passing: frozenset[str] = frozenset(),
        stores: tuple[Store, ...] = (),
        window_stores: tuple[Store, ...] = (),
        cells_of: CellsOf | None = None,
        name: str | None = None,
        with_record: bool = False,
        timing: Timing = NO_TIMING,
        handlers: Mapping[str, Route] = MappingProxyType({}),
        gives: Gives | None = None,
        timer_names: set[str] | None = None,
        merge: Callable[..., object] | None = None,
        sink: SinkTarget | None = None,
        writer: Writer | None = None,
        source: SourceTable | None = None,
    ) -> None:
        """Compile the function. `passing`: the names of the headers that outputs copy from their input, see `bind`.
        `gives`: what the first parameter of a timer function gets; None for other functions. `timer_names`: the names
        of the timers that have a function; a function and its timer functions get the same names. `merge`: see
        App.on_merge. `source`: the table whose rows the function gets. `window_stores`: those that a function that
        closes windows deletes, which are all of the function with the windows.
        """
        self.window_stores = window_stores
        self.passing, self.stores, self.with_record = passing, stores, with_record
        self.function, self.annotation, self.name = function, annotation, name or function_name(function)
        self.sources, self.destinations, self.batch, self.on_error = sources, destinations, batch, on_error
        self.decode, self.encode, self.concurrent = decode, encode, is_async(function)
        self.merge = merge
        self.timing, self.gives, self.tally, self.discard = timing, gives, None, None
        self.timer_names = set[str]() if timer_names is None else timer_names
        self.handlers = {timer: handler.bind(cells_of=cells_of) for timer, handler in handlers.items()}
        # The user's own encoder becomes a part of the function, so that functions without one need no extra step.
        finish = None if encode is None else functools.partial(encode_result, encode)
        kept = Stores(self.name, stores, cells_of)
        hints = Hints(function)
        self.sink, self.source = sink, source
        shape: Single | Stateful | Async | Keyed | Batch | TimedFunction | TimerFunction | RowSink
        if batch:
            _check_batch_annotation(annotation, self.name)
            run = blocking(function) if self.concurrent else function
            if stores:
                shape = StatefulBatch(run, finish, self.name, destinations, hints, kept)
            else:
                shape = Batch(run, finish, self.name, destinations, hints)
            self.outputs_batch = shape.outputs_batch
        else:
            if gives is None:
                decoded, typed = _record_decoder(annotation, self.name, decode, _first_parameter(function))
            else:
                decoded, typed = None, False
            value_of = decoded
            if typed or with_record:
                function, decoded = _taking_record(function, decoded, typed, with_record), None
            normalise = make_normaliser(self.name, destinations, hints, passing)
            target = hot_loop_target(self.name, destinations, hints, passing)
            if gives is not None:
                deleted = Stores(self.name, window_stores, cells_of)
                caller = self._caller(function, kept)
                fired = TimerFunction(caller, kept, deleted, GIVERS[gives], finish, normalise, target)
                self.discard, shape = fired.discard, fired
            elif self.uses_time:
                caller = self._caller(function, kept)
                timed = TimedFunction(
                    self.name, caller, kept, timing, merge, decoded, value_of, finish, normalise, target
                )
                self.tally, shape = timed.tally, timed
            elif sink is not None:
                shape = RowSink(self.name, function, decoded, sink, writer)
            elif self.concurrent and stores:
                shape = Keyed(kept, function, decoded, finish, normalise)
            elif self.concurrent:
                shape = Async(function, decoded, finish, normalise)
            elif stores:
                shape = Stateful(kept.single(function, decoded), finish, normalise, target)
            else:
                run = function if finish is None else lambda given: finish(function(given))
                shape = Single(run, decoded, normalise, target)
            # This is not a loop over `outputs`, because an error of such a loop could not name its record.
            self.outputs_batch = functools.partial(_not_a_batch_route, self.name)
        self.outputs, self.each, self.feed = shape.outputs, shape.each, shape.feed
        self.takes_values = isinstance(shape, Single) and shape.takes_values

    def _caller(self, function: Callable[..., Any], stores: Stores) -> Caller:
        timers_at = next((at for at, store in enumerate(self.stores) if not store.is_kept), None)
        return Caller(function, stores, timers_at, self.timer_names, self.gives is not None)

    _PARTS = (
        "function",
        "annotation",
        "sources",
        "destinations",
        "batch",
        "on_error",
        "decode",
        "encode",
        "passing",
        "stores",
        "window_stores",
        "name",
        "with_record",
        "timing",
        "handlers",
        "gives",
        "timer_names",
        "merge",
        "sink",
        "source",
    )

    def __reduce__(self) -> tuple[object, ...]:
        # msgspec decoders and closures cannot be pickled. Spark sends routes to its executors, which compile them
        # again.
        return functools.partial(Route, **{part: getattr(self, part) for part in self._PARTS}), ()

    def bind(self, passing: Iterable[str] = (), cells_of: CellsOf | None = None, writer: Writer | None = None) -> Route:
        """Return the same route for one engine.

        Outputs get the input's headers with the `passing` names, unless an Out has its own header of that name. A batch
        function's outputs have no single input and get none. `cells_of`: returns the cells that hold its state.
        `writer`: takes its rows.
        """
        parts = {part: getattr(self, part) for part in self._PARTS}
        return Route(**(parts | {"passing": frozenset(passing), "cells_of": cells_of, "writer": writer}))

    @property
    def uses_time(self) -> bool:
        """Return whether the route needs the time of its task: it has timers, windows or deduplication."""
        return uses_time(self.stores, self.timing)

    @property
    def has_state(self) -> bool:
        """Return whether the route keeps state, so that it has a changelog. Timers are state too."""
        return bool(self.stores) or self.uses_time

    @property
    def all_destinations(self) -> list[str]:
        """Return all topics that the route writes to, those of its timer functions and of its late records included."""
        timed = itertools.chain.from_iterable(handler.destinations for handler in self.handlers.values())
        more = (topic for topic in (self.timing.late, self.timing.duplicates) if topic is not None)
        return list(dict.fromkeys([*self.destinations, *timed, *more]))

    @property
    def values(self) -> tuple[Store, ...]:
        """Return the route's stores without the parameter for timers."""
        return tuple(store for store in self.stores if store.is_kept)

    @property
    def timed_stores(self) -> frozenset[bytes]:
        """Return the names of the stores whose values start with a time (eos/state/values.py)."""
        return frozenset(self.ttls).union(TIMER_STORES if self.uses_time else ())

    @property
    def ttls(self) -> dict[bytes, int]:
        """Return the time-to-live in milliseconds of each store that has one, by name."""
        return ttls_of(self.stores) | self.timing.ttls

    def __repr__(self) -> str:
        return f"<Route {self.name}: {', '.join(self.sources)} -> {', '.join(self.destinations) or 'nothing'}>"


def changelog_of(app_id: str, route: Route) -> str:
    """Return the name of the changelog topic of an App's function."""
    return f"{app_id}-{route.name.replace('.', '-')}-changelog"


def is_async(function: Callable[..., object]) -> bool:
    """Return whether calling the function returns a coroutine or an async generator."""
    below = underlying(function)
    return inspect.iscoroutinefunction(below) or inspect.isasyncgenfunction(below)


def _first_parameter(function: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(function).parameters))


def _record_decoder(annotation: object, name: str, decode: Decode | None, parameter: str) -> tuple[Decode | None, bool]:
    """Return the decoder for a function of one record, and whether it gets a Record with the decoded value.

    The decoder is None if the function gets the Record as it is.
    """
    kind, _ = without_none(annotation)
    of = f"the parameter {parameter} of {name}: "
    if kind is Record:
        if decode is not None:
            raise ConfigurationError(
                f"{name} gets the Record unchanged, so decode= has no effect: annotate the type that decode= returns"
            )
        return None, False
    if typing.get_origin(kind) is Record:
        return decode or decoder(typing.get_args(kind)[0], of), True
    if decode is not None:
        return decode, False
    if Record in _mentioned_types(annotation):
        raise ConfigurationError(
            f"{name} is annotated {annotation_name(annotation)}, but gets one record at a time: annotate Record, or "
            "decorate with process_batch"
        )
    return decoder(annotation, of), False


def _taking_record(
    function: Callable[..., Any], decode: Decode | None, typed: bool, with_record: bool
) -> Callable[..., Any]:
    """Wrap `function` so that it can be called with a Record.

    It gets the decoded value, the value and the record, or the record holding the value.
    """

    def run(record: Record, *states: Any) -> Any:
        given = record if decode is None else decode(record.value)
        if typed:
            given = msgspec.structs.replace(record, value=given)
        return function(given, record, *states) if with_record else function(given, *states)

    return run


def _mentioned_types(annotation: object) -> set[object]:
    inner = typing.get_args(annotation)
    return {a for a in inner if isinstance(a, type)}.union(*map(_mentioned_types, inner))


def _check_batch_annotation(annotation: object, name: str) -> None:
    kind = typing.get_origin(annotation) or annotation
    if kind not in (list, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable) or (
        typing.get_args(annotation) not in ((), (Record,))
    ):
        raise ConfigurationError(
            f"{name} is annotated {annotation_name(annotation)}, but a batch function gets a list[Record]"
        )


def _not_a_batch_route(name: str, records: list[Record]) -> list[Send]:
    raise IllegalState(f"{name} takes one record at a time: call outputs(record) for each of the {len(records)}")
