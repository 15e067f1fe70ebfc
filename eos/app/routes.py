"""Compiles one function of an App with its topics into the form that a worker, Spark and tests call.

Owns how records pass through a function (one by one, in batches or concurrently), and which outputs are sent if it
fails. A record's outputs exist only once its function has returned (a generator: is exhausted). A function that fails
in the middle has sent nothing.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import itertools
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from eos import hotloop
from eos.app import concurrent
from eos.app.expiry import ttls_of
from eos.app.layers import Layer
from eos.app.policies import Policy, stop
from eos.app.results import Hints, Normalise, encode_result, hot_loop_target, make_normaliser
from eos.app.state import Store
from eos.app.stores import CellsOf, Finish, Stores
from eos.encoding.sends import out_converter
from eos.encoding.serde import Decode, Encode, annotation_name, decoder, function_name, underlying, without_none
from eos.errors import ConfigurationError, IllegalState, raise_if_interrupted
from eos.hotloop.python import END_OF_TIME, Target
from eos.records import Each, Feed, FeedResult, Out, Record, Send, Sink

_timestamp = operator.attrgetter("timestamp")


class Route:
    """Holds one function with its topics, compiled into the form that an engine calls.

    `outputs(record)` returns what to send for one record. A route with `batch` also has `outputs_batch(records)` for
    many records; its `outputs` runs a batch of one, to find the record that fails. `feed(records, sink)` does the same
    for many records and sends each output directly: it is the hot path, with nothing between the function and the
    client. `each(records)` yields the outputs record by record, as `outputs` returns them. With `concurrent` (an `async
    def`), `feed` and `each` run the function on all records at once and keep their order. Results of records after a
    failed one are kept for the next call with these records.

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
        "each",
        "encode",
        "feed",
        "function",
        "name",
        "on_error",
        "outputs",
        "outputs_batch",
        "passing",
        "sources",
        "stores",
        "with_record",
    )  # fmt: skip

    feed: Feed
    outputs: Callable[[Record], Sequence[Send]]
    outputs_batch: Callable[[list[Record]], list[Send]]
    each: Each

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
        cells_of: CellsOf | None = None,
        name: str | None = None,
        with_record: bool = False,
    ) -> None:
        self.passing, self.stores, self.with_record = passing, stores, with_record
        self.function, self.annotation, self.name = function, annotation, name or function_name(function)
        self.sources, self.destinations, self.batch, self.on_error = sources, destinations, batch, on_error
        self.decode, self.encode, self.concurrent = decode, encode, is_async(function)
        # The user's own encoder becomes a part of the function, so the path of all other functions stays short.
        finish = None if encode is None else functools.partial(encode_result, encode)
        kept = Stores(self.name, stores, cells_of)
        hints = Hints(function)
        if batch:
            _check_batch_annotation(annotation, self.name)
            run = _blocking(function) if self.concurrent else function
            compiled = _compile_batch(run, finish, self.name, destinations, hints, kept if stores else None)
            self.outputs_batch, self.feed = compiled
            outputs_batch = self.outputs_batch
            self.outputs = lambda record: outputs_batch([record])
            self.each = _one_by_one(self.outputs)
            return
        decoded, typed = _record_decoder(annotation, self.name, decode, _first_parameter(function))
        if typed or with_record:
            function, decoded = _taking_record(function, decoded, typed, with_record), None
        normalise = make_normaliser(self.name, destinations, hints, passing)
        if self.concurrent:
            compile_ = functools.partial(_compile_keyed, kept) if stores else _compile_concurrent
            self.outputs, self.each = compile_(function, decoded, finish, normalise)
            self.feed = feed_from(self.each)
        elif stores:
            target = hot_loop_target(self.name, destinations, hints, passing)
            self.outputs, self.feed = _compile_stateful(kept.single(function), decoded, finish, normalise, target)
            self.each = _one_by_one(self.outputs)
        else:
            run = function if finish is None else lambda given: finish(function(given))
            target = hot_loop_target(self.name, destinations, hints, passing)
            self.outputs, self.feed = _compile_single(run, decoded, normalise, target)
            self.each = _one_by_one(self.outputs)
        # Not a loop over `outputs`: its errors could not name the record.
        self.outputs_batch = functools.partial(_not_a_batch_route, self.name)

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
        "name",
        "with_record",
    )

    def __reduce__(self) -> tuple[object, ...]:
        # msgspec decoders and closures cannot be pickled. Spark sends routes to its executors, which compile them
        # again.
        return functools.partial(Route, **{part: getattr(self, part) for part in self._PARTS}), ()

    def bind(self, passing: Iterable[str] = (), cells_of: CellsOf | None = None) -> Route:
        """Return the same route for one engine.

        Outputs get the input's headers with the `passing` names, unless an Out has its own header of that name. A batch
        function's outputs have no single input and get none. `cells_of`: returns where its state is kept.
        """
        parts = {part: getattr(self, part) for part in self._PARTS}
        return Route(**(parts | {"passing": frozenset(passing), "cells_of": cells_of}))

    @property
    def ttls(self) -> dict[bytes, int]:
        """Return the time-to-live of its stores that have one, in milliseconds by name."""
        return ttls_of(self.stores)

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
    """Return a function of the Record for one that gets its decoded value: alone, with the record, or in the record."""

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


def _compile_single(
    function: Callable[[Any], Any], decode: Decode | None, normalise: Normalise, target: Target | None
) -> tuple[Callable[[Record], Sequence[Send]], Feed]:
    """Return `outputs` and `feed` of a function of one record."""

    def outputs(record: Record) -> Sequence[Send]:
        return normalise(record, function(record if decode is None else decode(record.value)))

    return outputs, make_feed(function, decode, target, normalise)


def make_feed(
    function: Callable[[Any], Any], decode: Decode | None, target: Target | None, normalise: Normalise
) -> Feed:
    """Return the feed that uses the hot loop; the loop calls `normalise` for unusual results."""

    def feed(records: list[Record], sink: Sink) -> FeedResult:
        partly = 0  # outputs sent for a record that failed afterwards
        produce, refused = sink.produce, sink.on_produce_error

        def other(record: Record, result: object) -> int:
            nonlocal partly
            sends = normalise(record, result)
            for send in sends:
                send_to(send, sink)
                partly += 1
            partly = 0
            return len(sends)

        sent, handled, error = hotloop.feed_values(records, function, decode, target, produce, refused, other)
        if error is not None:
            raise_if_interrupted(error)
        return FeedResult(sent + partly, handled, error, None if error is None else records[handled])

    return feed


class _UnusualOutputs(list[Send]):
    """Outputs of a record that the hot loop cannot send itself."""


def _compile_stateful(
    run: Callable[[Record, Any, Finish], Any],
    decode: Decode | None,
    finish: Callable[[Any], Any] | None,
    normalise: Normalise,
    target: Target | None,
) -> tuple[Callable[[Record], Sequence[Send]], Feed]:
    """Return `outputs` and `feed` of a function with state; state changes count once the outputs are made."""

    def made(record: Record, result: Any) -> Sequence[Send]:
        return normalise(record, result if finish is None else finish(result))

    def outputs(record: Record) -> Sequence[Send]:
        return cast("Sequence[Send]", run(record, record if decode is None else decode(record.value), made))

    def usual(record: Record, result: Any) -> bytes | _UnusualOutputs | None:
        if finish is None and target is not None and record.timestamp < END_OF_TIME:
            if type(result) is bytes or (result is None and record.value is not None and target[-1]):
                return result
            if type(result) is str:
                return result.encode()
        return _UnusualOutputs(made(record, result))

    def one(record: Record) -> bytes | _UnusualOutputs | None:
        # no cast(): it would be a call for each record
        found: bytes | _UnusualOutputs | None = run(record, record if decode is None else decode(record.value), usual)
        return found

    return outputs, make_feed(one, None, target, _as_sends)


def _as_sends(record: Record, made: Any) -> Sequence[Send]:
    return cast("_UnusualOutputs", made)


def send_to(send: Send, sink: Sink) -> None:
    topic, value, key, partition, timestamp_ms, headers = send
    try:
        sink.produce(topic, value, key, partition, None, None, timestamp_ms, headers)
    except Exception as error:  # noqa: BLE001 - the sink decides
        sink.on_produce_error(error, send)


def _one_by_one(outputs: Callable[[Record], Sequence[Send]]) -> Each:
    def each(records: list[Record]) -> Iterator[Sequence[Send]]:
        # A generator and not map(): a StopIteration from a user's function would silently end a loop over map().
        for record in records:
            yield outputs(record)

    return each


def feed_from(each: Each) -> Feed:
    """Return a feed for outputs that come record by record; it is not the fast path."""

    def feed(records: list[Record], sink: Sink) -> FeedResult:
        sent = 0
        coming = iter(records)
        try:
            for _, sends in zip(coming, each(records), strict=False):
                for send in sends:
                    send_to(send, sink)
                    sent += 1
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            raise_if_interrupted(error)
            handled = len(records) - operator.length_hint(coming) - 1
            return FeedResult(sent, handled, error, records[handled])
        return FeedResult(sent, len(records), None)

    return feed


def _compile_concurrent(
    function: Callable[[Any], Any],
    decode: Decode | None,
    finish: Callable[[Any], Any] | None,
    normalise: Normalise,
) -> tuple[Callable[[Record], Sequence[Send]], Each]:
    """Return `outputs` and `each` of an `async def` of one record."""
    several = inspect.isasyncgenfunction(underlying(function))
    # Results of records after a failed one, with those records. The records come again, and the function's external
    # effects should not happen twice for that. Holding the records prevents reuse of their ids.
    ahead: list[tuple[Record, concurrent.Outcome]] = []

    async def run(record: Record) -> Sequence[Send]:
        given = record if decode is None else decode(record.value)
        result = [item async for item in function(given)] if several else await function(given)
        return normalise(record, result if finish is None else finish(result))

    def each(records: list[Record]) -> Iterator[Sequence[Send]]:
        wanted = set(map(id, records))
        known = {id(record): outcome for record, outcome in ahead if id(record) in wanted}
        ahead[:] = [kept for kept in ahead if id(kept[0]) not in wanted]
        unknown = [record for record in records if id(record) not in known]
        known |= zip(map(id, unknown), concurrent.run_all(map(run, unknown)) if unknown else (), strict=True)
        for number, record in enumerate(records):
            outcome = known[id(record)]
            if isinstance(outcome, BaseException):
                if behind := [(later, known[id(later)]) for later in records[number + 1 :]]:
                    ahead[:] = behind  # replaces older results, whose records may never come again
                raise outcome
            yield outcome

    def outputs(record: Record) -> Sequence[Send]:
        return cast("Sequence[Send]", concurrent.run_one(run(record)))

    return outputs, each


def _compile_keyed(
    stores: Stores,
    function: Callable[[Any], Any],
    decode: Decode | None,
    finish: Callable[[Any], Any] | None,
    normalise: Normalise,
) -> tuple[Callable[[Record], Sequence[Send]], Each]:
    """Return `outputs` and `each` of an `async def` with state.

    Records of one key run one after the other, and their changes are written when their outputs are yielded. After a
    failed record the later records of its key wait.
    """
    several = inspect.isasyncgenfunction(underlying(function))

    async def result_of(given: Any, *held: Any) -> Any:
        return [item async for item in function(given, *held)] if several else await function(given, *held)

    run = stores.concurrent(result_of)
    # Outcomes of records after a failed one, each with its record and its task's time. The records come again.
    ahead: list[tuple[Record, concurrent.Outcome, int]] = []

    def made(record: Record, result: Any) -> Sequence[Send]:
        return normalise(record, result if finish is None else finish(result))

    async def one(record: Record, seen: Layer, now: int) -> tuple[Any, list[Any]]:
        return await run(record, record if decode is None else decode(record.value), made, seen, now)

    async def chain(records: list[Record], known: dict[int, concurrent.Outcome], times: Mapping[int, int]) -> None:
        seen = Layer(stores.task_of(records[0]))
        for record in records:
            now = times.get(id(record), 0)
            if id(record) not in known:
                known[id(record)] = await concurrent.outcome_of(one(record, seen, now))
            if isinstance(outcome := known[id(record)], BaseException):
                return
            if record is not records[-1]:
                stores.write(outcome[1], seen, now)

    def each(records: list[Record]) -> Iterator[Sequence[Send]]:
        wanted = set(map(id, records))
        times = stores.times_of(records)
        chains: dict[tuple[int, bytes | None], list[Record]] = {}
        for record in records:
            chains.setdefault((record.partition, record.key), []).append(record)
        # A failed record does not advance the time. A record that ran at another time runs again, and so do the later
        # records of its key.
        current = {id(record): outcome for record, outcome, now in ahead if times.get(id(record), 0) == now}
        known = {
            id(record): current[id(record)]
            for few in chains.values()
            for record in itertools.takewhile(lambda record: id(record) in current, few)
        }
        ahead[:] = [kept for kept in ahead if id(kept[0]) not in wanted]
        waiting = [
            chain(few, known, times) for few in chains.values() if any(id(record) not in known for record in few)
        ]
        for outcome in concurrent.run_all(waiting) if waiting else ():
            if isinstance(outcome, BaseException):
                raise outcome  # not an exception of the function: the chain keeps those
        for number, record in enumerate(records):
            outcome = known[id(record)]
            if isinstance(outcome, BaseException):
                later = [other for other in records[number + 1 :] if id(other) in known]
                if later:
                    ahead[:] = [(other, known[id(other)], times.get(id(other), 0)) for other in later]
                raise outcome
            sends, held = outcome
            task = stores.task_of(record)
            stores.write(held, task, times.get(id(record), 0))
            if times:
                task.time_ms = times[id(record)]
            yield sends

    def outputs(record: Record) -> Sequence[Send]:
        (sends,) = each([record])
        return sends

    return outputs, each


def _blocking(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a blocking function for an `async def` of a batch."""
    several = inspect.isasyncgenfunction(underlying(function))

    async def run(*given: Any) -> Any:
        return [item async for item in function(*given)] if several else await function(*given)

    return lambda *given: concurrent.run_one(run(*given))


def _compile_batch(
    function: Callable[[list[Record]], Any],
    finish: Callable[[Any], Any] | None,
    name: str,
    destinations: tuple[str, ...],
    hints: Hints,
    stores: Stores | None,
) -> tuple[Callable[[list[Record]], list[Send]], Feed]:
    """Return `outputs_batch` and `feed` of a function of many records."""
    convert = out_converter(name, destinations)
    target = hot_loop_target(name, destinations, hints)

    def run(records: list[Record]) -> list[Any]:
        return checked(function(records.copy()), records)  # a copy, because the function may change the list

    def checked(result: Any, records: list[Record]) -> list[Any]:
        if result is None:
            if not hints.allows_none:
                hints.warn_none(records[0])
            return []
        if isinstance(result, (Out, str, bytes, bytearray, Mapping)) or not isinstance(result, Iterable):
            raise TypeError(
                f"{name} returned a {type(result).__name__}: a batch function returns an iterable of Out, made by "
                "record.out(value) or Out(value, key=...)"
            )
        outs = result if type(result) is list else list(result)
        return outs if finish is None else cast("list[Any]", finish(outs))

    def converted(outs: list[Any], latest_ms: int) -> list[Send]:
        sends: list[Send] = []
        for out in outs:
            if type(out) is Out:
                sends.append(convert(out, None, latest_ms))
            elif out is not None:
                raise TypeError(
                    f"{name} gave a bare {type(out).__name__}: in a batch function no input says what its key is; "
                    "use record.out(value) or Out(value, key=...)"
                )
        return sends

    def outputs_batch(records: list[Record]) -> list[Send]:
        return converted(run(records), _latest_ms(records))

    def feed(records: list[Record], sink: Sink) -> FeedResult:
        sent, culprit = 0, records[0] if len(records) == 1 else None
        try:
            outs = run(records)
            # Checked before the first send, so that all or none of the batch's outputs are sent.
            latest_ms = _latest_ms(records)
            fed = None
            if target is not None:
                fed = hotloop.feed_outs(outs, target, latest_ms, sink.produce, sink.on_produce_error)
            if fed is not None:
                sent, failed = fed
                return FeedResult(sent, len(records), None) if failed is None else FeedResult(sent, 0, failed, culprit)
            for send in converted(outs, latest_ms):
                send_to(send, sink)
                sent += 1
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            raise_if_interrupted(error)
            return FeedResult(sent, 0, error, culprit)
        return FeedResult(sent, len(records), None)

    if stores is None:
        return outputs_batch, feed
    keyed = stores.batch(function)

    def outputs_keyed(records: list[Record]) -> list[Send]:
        return keyed(records, lambda result: converted(checked(result, records), _latest_ms(records)))

    def feed_keyed(records: list[Record], sink: Sink) -> FeedResult:
        try:
            sends = outputs_keyed(records)
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            raise_if_interrupted(error)
            return FeedResult(0, 0, error, records[0] if len(records) == 1 else None)
        for send in sends:
            send_to(send, sink)
        return FeedResult(len(sends), len(records), None)

    return outputs_keyed, feed_keyed


def _latest_ms(records: list[Record]) -> int:
    """Return the default timestamp in ms of a batch function's outputs; 0: the time of producing."""
    return max(0, max(map(_timestamp, records), default=0))


def _not_a_batch_route(name: str, records: list[Record]) -> list[Send]:
    raise IllegalState(f"{name} takes one record at a time: call outputs(record) for each of the {len(records)}")
