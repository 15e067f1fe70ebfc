"""What a user writes: an App made of functions from records to outputs.

Owns the meaning of a function's annotation and result: which topics, which key, which timestamp, which bytes. It
must never do I/O, import a Kafka client, or decide what becomes of a record that its function refuses: the worker
and Spark run the same Route and must get the same outputs from it.

Outputs of a record exist only once its function has returned (a generator: is used up). A function that fails
half way has sent nothing.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, cast, final

import msgspec

from eos import concurrent, hotloop
from eos.errors import CallFailed, ConfigurationError, IllegalState
from eos.hints import Hints
from eos.hotloop.python import END_OF_TIME, HOLDS_SEVERAL, Target, looks_like_a_pair
from eos.policies import DEAD_LETTER_SUFFIX, Policy, dead_letter_topic, policy_of, stop
from eos.serde import (
    IS_JSON,
    JSON,
    Decode,
    Encode,
    annotation_name,
    checked_decoder,
    checked_encoder,
    decoder,
    encode,
    encode_key,
    function_name,
    parameter_annotation,
    underlying,
    without_none,
)

Header = tuple[str, bytes | None]

# What an engine hands to its producer: (topic, value, key, partition, timestamp_ms, headers).
# partition -1: the partitioner decides. timestamp_ms 0: the time of producing.
Send = tuple[str, bytes | None, bytes | None, int, int, list[Header] | None]


class Sink(Protocol):
    """Where a feed puts its outputs: a producer, or what stands in its place."""

    @property
    def produce(self) -> Callable[..., object]:
        """confluent-kafka's produce() by position, so that nothing lies between: (topic, value, key[, partition, two
        callbacks that are None, timestamp_ms[, headers]])."""

    def refused(self, error: Exception, send: Send) -> object:
        """`produce` raised: sends the output after all, or raises CallFailed."""


class Fed(NamedTuple):
    """What became of the records of a feed: `sent` outputs of the first `handled` records went out. `error`: what the
    next record's function raised (nothing of that record went out), or the CallFailed of `refused`; None: all went.
    `culprit`: the record that the error is about, where that is known."""

    sent: int
    handled: int
    error: Exception | None
    culprit: Record | None = None

    @property
    def failure(self) -> CallFailed | None:
        """The `error` where it is the client's, and no function's."""
        if not isinstance(self.error, CallFailed):
            return None
        # A delivery that failed is reported during the send of some other record.
        return self.error.about(self.culprit) if self.error.call == "produce" else self.error


class Keep(enum.Enum):
    """The type of KEEP: an enum, so that it stays one object through copies and pickles, and narrows in mypy."""

    KEEP = "KEEP"

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = Keep.KEEP


# One Record per message at millions per second: positional, and invisible to the cyclic collector (gc=False).
# Frozen: nothing that a function does to a record may change what its outputs keep of it.
@final
class Record(msgspec.Struct, frozen=True, gc=False):
    """A record as it was read. `timestamp`: milliseconds since the epoch, -1 when unknown. `value` None: a
    tombstone. `headers`: (name, bytes or None) pairs, an empty sequence when there are none."""

    topic: str
    partition: int
    offset: int
    timestamp: int = -1
    key: bytes | None = None
    value: bytes | None = None
    headers: Sequence[Header] = ()

    def __init_subclass__(cls) -> None:
        # `type(x) is Out` is six times faster than `isinstance` of a Struct: both types are closed.
        raise TypeError("Record cannot be subclassed")

    def out(
        self,
        value: object,
        *,
        key: object = KEEP,
        topic: str | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Out:
        """An Out with this record's timestamp and, unless `key` says otherwise, its key."""
        timestamp = self.timestamp
        return Out(
            value,
            self.key if key is KEEP else key,
            topic,
            headers,
            partition,
            timestamp if timestamp > 0 else 0,  # unknown: the time of producing
        )


# See Route.feed.
Feed = Callable[[list[Record], Sink], Fed]
# Whatever a function of one record returned as what to send.
Normalise = Callable[["Record", object], Sequence[Send]]
# See Route.each.
Each = Callable[[list[Record]], Iterator[Sequence[Send]]]

Headers = Sequence[tuple[str, bytes | str | None]] | Mapping[str, bytes | str | None]


@final
class Out(msgspec.Struct, frozen=True, gc=False):
    """One record to send.

    `value`: bytes as they are, str as UTF-8, None a tombstone, else JSON; `key` by the same rule, KEEP the
    input's key, None a null key. `topic` None: the first of `to`. `headers`: (name, bytes, str or None) pairs or
    a mapping; of the input's those that `eos.headers.pass` names come before them. `partition` None: by the key.
    `timestamp`: milliseconds since the epoch, KEEP the input's, 0 the time of producing.

    In a batch function an Out has no single input, so nothing can be kept: it says its key and its timestamp.
    `record.out(value)` says the record's.
    """

    value: object
    key: object = KEEP
    topic: str | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int | Keep = KEEP

    def __init_subclass__(cls) -> None:
        raise TypeError("Out cannot be subclassed")


Function = TypeVar("Function", bound=Callable[[Any], object])
BatchFunction = TypeVar("BatchFunction", bound=Callable[[list[Record]], object])
Hook = TypeVar("Hook", bound=Callable[[], object])


class Route:
    """One function with its topics, compiled: what an engine calls.

    `outputs(record)` gives what to send for one record. A route with `batch` set also has `outputs_batch(records)`
    for many; its `outputs` is a batch of one (for the record-by-record run that finds the culprit).
    `feed(records, sink)` does the same for many records and puts each output at once where it belongs: the hot path,
    with nothing between the function and the client. `each(records)` gives the outputs record by record,
    as `outputs` does. With `concurrent` (an `async def`) both run the function on all records at once, and keep their
    order; what it returned for records behind one that failed is kept for the next call with them.
    All but `feed` raise whatever the function raises, DecodeError for a value that does not fit the annotation,
    TypeError or ValueError for a result that cannot be sent: these are about the record. A ConfigurationError (a
    destination that was not named) is about the App: no policy may skip or dead-letter a record because of it.
    """

    __slots__ = (
        "annotation", "batch", "concurrent", "decode", "destinations", "each", "encode", "feed", "function", "name",
        "on_error", "outputs", "outputs_batch", "passing", "sources",
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
    ) -> None:
        self.passing = passing
        self.function, self.annotation, self.name = function, annotation, function_name(function)
        self.sources, self.destinations, self.batch, self.on_error = sources, destinations, batch, on_error
        self.decode, self.encode, self.concurrent = decode, encode, is_async(function)
        # An encoder of the user's own is a part of the function: the way of all others stays as short as it is.
        finish = None if encode is None else functools.partial(_encoded, encode)
        if batch:
            _check_batch_annotation(annotation, self.name)
            run = _blocking(function) if self.concurrent else function
            self.outputs_batch, self.feed = _compile_batch(run, finish, self.name, destinations, Hints(function))
            outputs_batch = self.outputs_batch
            self.outputs = lambda record: outputs_batch([record])
            self.each = _one_by_one(self.outputs)
            return
        decoded = _record_decoder(annotation, self.name, decode)
        normalise = _normaliser(self.name, destinations, Hints(function), passing)
        if self.concurrent:
            self.outputs, self.each = _compile_concurrent(function, decoded, finish, normalise)
            self.feed = feed_each(self.each)
        else:
            run = function if finish is None else lambda given: finish(function(given))
            self.outputs, self.feed = _compile_single(run, self.name, decoded, normalise, destinations, passing)
            self.each = _one_by_one(self.outputs)
        # No loop in its place: an error out of it could not say which record it is about.
        self.outputs_batch = functools.partial(_not_a_batch_route, self.name)

    def __reduce__(self) -> tuple[object, ...]:
        # msgspec decoders and closures cannot be pickled; Spark ships routes to its executors: compile again there.
        parts = (
            "function",
            "annotation",
            "sources",
            "destinations",
            "batch",
            "on_error",
            "decode",
            "encode",
            "passing",
        )
        return Route, tuple(getattr(self, part) for part in parts)

    def with_passing(self, names: Iterable[str]) -> Route:
        """The same, and outputs get the input's headers of these names, unless an Out has its own of that name. Not in
        a batch function, whose outputs have no single input."""
        coders = self.decode, self.encode
        topics = self.sources, self.destinations
        return Route(self.function, self.annotation, *topics, self.batch, self.on_error, *coders, frozenset(names))

    def __repr__(self) -> str:
        return f"<Route {self.name}: {', '.join(self.sources)} -> {', '.join(self.destinations) or 'nothing'}>"


class App:
    """Functions from source topics to destination topics under one id: the consumer group and the prefix of every
    transactional.id. Nothing in it does I/O; `eos run` and Spark run it.

    Raises ConfigurationError for everything that is wrong before the first record, at the line that is wrong.
    """

    def __init__(self, id: str) -> None:
        _check_name(id, "the id of an App")
        self.id = id
        self.routes: dict[str, Route] = {}  # by source topic, those that patterns matched too
        self.patterns: dict[re.Pattern[str], Route] = {}
        self.start_hooks: list[Callable[[], object]] = []
        self.stop_hooks: list[Callable[[], object]] = []

    @property
    def topics(self) -> list[str]:
        """All source topics, in the order of their definition; those that were taken in come last."""
        return list(self.routes)

    @property
    def destinations(self) -> set[str]:
        """All topics that may be written to, those of dead letters too."""
        return _written(self.routes, self.functions)

    @property
    def functions(self) -> list[Route]:
        """Every function once; those that get records by a pattern alone come last."""
        return list(dict.fromkeys([*self.routes.values(), *self.patterns.values()]))

    def matched(self, there: Iterable[str]) -> dict[str, Route]:
        """The topics among `there` that `take_in` would add, sorted, with their functions."""
        found: dict[str, Route] = {}
        # A destination of the App is never among them: a pattern that matches one is refused at its definition.
        for topic in sorted(set(there) - self.routes.keys()):
            routes = list(dict.fromkeys(r for p, r in self.patterns.items() if _takes(p, topic)))
            if len(routes) > 1:
                raise ConfigurationError(
                    f"the topic {topic!r} matches the patterns of two functions, {routes[0].name} and "
                    f"{routes[1].name}: one function per topic; name it, or make one of the patterns narrower"
                )
            if routes and routes[0].on_error.verdict == "dlq" and dead_letter_topic(topic) in self.routes:
                raise ConfigurationError(
                    f"the topic {dead_letter_topic(topic)!r} is a source of the App {self.id!r}, and would get the "
                    f"dead letters of {topic!r}, which a pattern matches: make the pattern narrower, or use two Apps"
                )
            if routes:
                found[topic] = routes[0]
        return found

    def take_in(self, there: Iterable[str]) -> list[str]:
        """Gives the topics among `there` that a pattern matches to its function; returns those that are new.

        A topic that a function names stays that one's. Never taken: names that begin with `__`, and dead letters.
        Raises ConfigurationError, and takes nothing, when the patterns of two functions match one topic.
        """
        new = self.matched(there)
        self.routes |= new
        return list(new)

    def __copy__(self) -> App:
        """What a copy takes in, the original does not."""
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
    ) -> Callable[[Function], Function]:
        """Decorate a function that gets one record of `topics` (what of it: by its annotation) and returns None, a
        value, an Out, or a list, tuple or generator of those. The first of `to` is where values go. The function
        stays as it is.

        None is no output, so `return record.value` drops tombstones; `return record.out(record.value)` or `Out(value)`
        passes them on. Each item of a tuple is a record of its own: one with a key is `Out(value, key=key)`.

        A topic that begins with `^` is a pattern: a regular expression of Python's `re` that must match the whole name.
        Topics that match are read, those too that come while a worker runs.

        An `async def` runs on many records at once (`eos.async.max.records`); outputs keep the input's order.
        `on_error`: eos.stop, eos.skip, eos.dlq or eos.retry(n, then=...), see eos.policies. `decode(value)` makes what
        the function gets of a record's bytes, in place of the annotation; `encode(value)` makes the bytes of every
        value that is not None. What they raise is treated as if the function had raised it.
        """
        sources, destinations, policy = _definition(topics, to, on_error)

        def register(function: Function) -> Function:
            annotation = _annotation(function, Record if decode is None else object, sys._getframe(1))
            _check_destination(function, destinations)
            coders = (checked_decoder(decode, annotation), checked_encoder(encode))
            self._add(Route(function, annotation, sources, destinations, False, policy, *coders))
            return function

        return register

    def process_batch(
        self,
        topics: str | Iterable[str],
        *,
        to: str | Iterable[str] = (),
        on_error: Policy | str = stop,
        encode: Callable[[Any], bytes] | None = None,
    ) -> Callable[[BatchFunction], BatchFunction]:
        """Decorate a function that gets a `list[Record]` and returns an iterable of Out, for speed: made by
        `record.out(value)`, which keeps that record's key and timestamp, or by `Out(value, key=...)`, which has the
        time of producing unless it says another. The function stays as it is.

        `topics`, `on_error`, `encode`: as for `process`. A batch function that raises is run again record by record,
        unless the policy is stop, which names the range.
        """
        sources, destinations, policy = _definition(topics, to, on_error)

        def register(function: BatchFunction) -> BatchFunction:
            annotation = _annotation(function, list[Record], sys._getframe(1))
            _check_destination(function, destinations)
            self._add(Route(function, annotation, sources, destinations, True, policy, None, checked_encoder(encode)))
            return function

        return register

    def on_start(self, function: Hook) -> Hook:
        """Decorate a function without arguments, `def` or `async def`, that runs before the first record: for
        connections and models. Several run in the order of their definition. The function stays as it is."""
        return self._add_hook(self.start_hooks, function)

    def on_stop(self, function: Hook) -> Hook:
        """As `on_start`, after the last commit, in the opposite order; however the run ended, but not after a stop that
        took too long, and not if `on_start` failed."""
        return self._add_hook(self.stop_hooks, function)

    def _add_hook(self, hooks: list[Callable[[], object]], function: Hook) -> Hook:
        try:
            inspect.signature(function).bind()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{function!r} must be callable without arguments: {error}") from error
        hooks.append(function)
        return function

    def check(self) -> None:
        """Raises ConfigurationError for an App that has nothing to run."""
        if not self.functions:
            raise ConfigurationError(
                f'the App {self.id!r} has no function: decorate one with @app.process("topic", to="topic")'
            )

    def _add(self, route: Route) -> None:
        # All checks before the first change: a refused function leaves the App as it was.
        names = dict.fromkeys((source for source in route.sources if not is_pattern(source)), route)
        patterns = dict.fromkeys((re.compile(source) for source in route.sources if is_pattern(source)), route)
        for topic in names:
            if topic in self.routes:
                raise ConfigurationError(
                    f"the topic {topic!r} has two functions, {self.routes[topic].name} and {route.name}: "
                    "one function per topic, or two Apps"
                )
        for pattern in patterns:
            if pattern in self.patterns:
                raise ConfigurationError(
                    f"the pattern {pattern.pattern!r} has two functions, {self.patterns[pattern].name} and "
                    f"{route.name}: one function per topic, or two Apps"
                )
        routes, patterns = self.routes | names, self.patterns | patterns
        written = _written(routes, [*self.functions, route])
        if loops := routes.keys() & written:
            raise ConfigurationError(
                f"the topic {min(loops)!r} is both a source and a destination of the App {self.id!r}: its records "
                "could come back for ever; chain steps as Apps of their own"
            )
        for pattern in patterns:
            if caught := [topic for topic in sorted(written) if _takes(pattern, topic)]:
                raise ConfigurationError(
                    f"the pattern {pattern.pattern!r} matches {caught[0]!r}, a destination of the App {self.id!r}: its "
                    "records could come back for ever; make it narrower, or chain steps as Apps of their own"
                )
        self.routes, self.patterns = routes, patterns

    def __repr__(self) -> str:
        return f"App({self.id!r}, {self.functions})"


def is_pattern(source: str) -> bool:
    """Whether a source is a pattern and no name, as librdkafka's and Java's subscribe tell them apart."""
    return source.startswith("^")


def _takes(pattern: re.Pattern[str], topic: str) -> bool:
    """Kafka's own topics are nobody's input, and dead letters come back only on purpose."""
    never = topic.startswith("__") or topic.endswith(DEAD_LETTER_SUFFIX)
    return not never and pattern.fullmatch(topic) is not None


def _written(routes: Mapping[str, Route], functions: Iterable[Route]) -> set[str]:
    dead = {dead_letter_topic(topic) for topic, route in routes.items() if route.on_error.verdict == "dlq"}
    return dead.union(*(route.destinations for route in functions))


# ----------------------------------------------------------------------------------------- checks of a definition


def is_topic_name(name: object) -> bool:
    """Kafka's rule for topics (org.apache.kafka.common.internals.Topic)."""
    return isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name)) and name not in (".", "..")


def _check_name(name: object, what: str) -> None:
    # Group ids may be anything, but an id that keeps to the rule for topics is legal in file names, metrics, ACL
    # prefixes and in `<topic>.dlq` alike.
    if not is_topic_name(name):
        raise ConfigurationError(
            f"{what} must be 1 to 249 letters, digits, '.', '_' or '-' (and not '.' or '..'), not {name!r}"
        )


def _definition(
    topics: str | Iterable[str], to: str | Iterable[str], on_error: object
) -> tuple[tuple[str, ...], tuple[str, ...], Policy]:
    policy = policy_of(on_error)
    if callable(topics):
        raise ConfigurationError('the decorator needs its topics: @app.process("topic", to="topic")')
    sources, destinations = _listed(topics), _listed(to)
    for source in sources:
        if isinstance(source, str) and is_pattern(source):
            _check_pattern(source)
            continue
        _check_name(source, "a source topic")
        if policy.verdict == "dlq":
            _check_name(dead_letter_topic(source), "the topic of dead letters")
    for destination in destinations:
        _check_name(destination, "a destination topic")
    if not sources:
        raise ConfigurationError("a function needs at least one source topic")
    return tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(destinations)), policy


def _listed(topics: object) -> list[str]:
    names = [topics] if isinstance(topics, str) or not isinstance(topics, Iterable) else list(topics)
    return cast("list[str]", names)  # checked by whoever asked


def _check_pattern(source: str) -> None:
    try:
        re.compile(source)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"the pattern {source!r} is not a regular expression: {error}") from error


def _annotation(function: Callable[..., object], default: object, frame: types.FrameType) -> object:
    if not callable(function):
        raise ConfigurationError(f"{function!r} is not a function")
    return parameter_annotation(function, default, frame)


# Return annotations of a function that need not send anything, evaluated or as text.
_MAY_SEND_NOTHING: Final = (inspect.Signature.empty, None, types.NoneType, Any, object, typing.NoReturn, typing.Never)
_MAY_SEND_NOTHING_NAMES: Final = frozenset({"", "None", "Any", "object", "NoReturn", "Never"})


def _check_destination(function: Callable[..., object], destinations: Sequence[str]) -> None:
    """Refuses a function whose annotation says that it has something to send and that may send nowhere; without an
    annotation only its first output tells."""
    returned = inspect.signature(function).return_annotation
    if destinations or _may_send_nothing(returned):
        return
    told = returned.strip("'\"") if isinstance(returned, str) else annotation_name(returned)
    raise ConfigurationError(
        f"{function_name(function)} returns {told} by its annotation, but has no destination: name one with "
        'to="topic", or annotate -> None if it sends nothing'
    )


def _may_send_nothing(annotation: object) -> bool:
    """Text is looked at as it is: what it names may be imported for type checkers only."""
    if isinstance(annotation, str):
        text = annotation.strip("'\" ")
        if generic := re.fullmatch(r"[\w.]+\[(.*)\]", text):  # Iterator[None]
            return _may_send_nothing(generic[1].partition(",")[0])
        return text.rpartition(".")[2] in _MAY_SEND_NOTHING_NAMES
    origin = typing.get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Iterable | collections.abc.AsyncIterable):
        return bool(args := typing.get_args(annotation)) and _may_send_nothing(args[0])
    return isinstance(annotation, TypeVar) or any(annotation is one for one in _MAY_SEND_NOTHING)


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling it gives a coroutine or an async generator."""
    below = underlying(function)
    return inspect.iscoroutinefunction(below) or inspect.isasyncgenfunction(below)


def _record_decoder(annotation: object, name: str, decode: Decode | None) -> Decode | None:
    """The decoder for a function of one record; None: it gets the Record itself."""
    if without_none(annotation)[0] is Record:
        if decode is not None:
            raise ConfigurationError(
                f"{name} gets the Record as it is, so decode= has nothing to do: annotate its result"
            )
        return None
    if decode is not None:
        return decode
    if Record in _mentioned(annotation):
        raise ConfigurationError(
            f"{name} is annotated {annotation_name(annotation)}, but gets one record at a time: annotate Record, or "
            "decorate with process_batch"
        )
    return decoder(annotation)


def _mentioned(annotation: object) -> set[object]:
    inner = typing.get_args(annotation)
    return {a for a in inner if isinstance(a, type)}.union(*map(_mentioned, inner))


def _check_batch_annotation(annotation: object, name: str) -> None:
    kind = typing.get_origin(annotation) or annotation
    if kind not in (list, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable) or (
        typing.get_args(annotation) not in ((), (Record,))
    ):
        raise ConfigurationError(
            f"{name} is annotated {annotation_name(annotation)}, but a batch function gets a list[Record]"
        )


# --------------------------------------------------------------------------------------------- compiled functions


def _compile_single(
    function: Callable[[Any], Any],
    name: str,
    decode: Decode | None,
    normalise: Normalise,
    destinations: tuple[str, ...],
    passing: frozenset[str],
) -> tuple[Callable[[Record], Sequence[Send]], Feed]:
    """`outputs` and `feed` of a function of one record."""
    target = _target(name, destinations, passing)

    def outputs(record: Record) -> Sequence[Send]:
        return normalise(record, function(record if decode is None else decode(record.value)))

    def feed(records: list[Record], sink: Sink) -> Fed:
        partly = 0  # outputs that went out of a record that failed behind them
        produce, refused = sink.produce, sink.refused

        def other(record: Record, result: object) -> int:
            nonlocal partly
            sends = normalise(record, result)
            for send in sends:
                put(send, sink)
                partly += 1
            partly = 0
            return len(sends)

        sent, handled, error = hotloop.feed_values(records, function, decode, target, produce, refused, other)
        return Fed(sent + partly, handled, error, None if error is None else records[handled])

    return outputs, feed


def _target(name: str, destinations: tuple[str, ...], passing: frozenset[str] = frozenset()) -> Target | None:
    """Where the hot loop sends what is usual; without a destination nothing is."""
    if not destinations:
        return None
    json = JSON.encode

    def value_of(value: object) -> bytes | None:
        kind = type(value)
        try:
            # As `_value` does, in one call of Python's instead of three.
            return json(value) if IS_JSON[kind] and kind not in _NEVER_SENT else _value(value, name)
        except TypeError:
            return _value(value, name)  # which says what is wrong

    def key_of(key: object) -> bytes | None:
        return _key(key, name)

    return destinations[0], frozenset(destinations), passing or None, Out, KEEP, value_of, key_of


def put(send: Send, sink: Sink) -> None:
    topic, value, key, partition, timestamp_ms, headers = send
    try:
        sink.produce(topic, value, key, partition, None, None, timestamp_ms, headers)
    except Exception as error:  # noqa: BLE001 - the sink decides
        sink.refused(error, send)


def _one_by_one(outputs: Callable[[Record], Sequence[Send]]) -> Each:
    def each(records: list[Record]) -> Iterator[Sequence[Send]]:
        # A generator and no map(): a StopIteration out of a user's function would end a loop over that one silently.
        for record in records:
            yield outputs(record)

    return each


def feed_each(each: Each) -> Feed:
    """The feed of what gives the outputs record by record: not for speed."""

    def feed(records: list[Record], sink: Sink) -> Fed:
        sent = 0
        coming = iter(records)
        try:
            for _, sends in zip(coming, each(records), strict=False):
                for send in sends:
                    put(send, sink)
                    sent += 1
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            handled = len(records) - operator.length_hint(coming) - 1
            return Fed(sent, handled, error, records[handled])
        return Fed(sent, len(records), None)

    return feed


def _compile_concurrent(
    function: Callable[[Any], Any],
    decode: Decode | None,
    finish: Callable[[Any], Any] | None,
    normalise: Normalise,
) -> tuple[Callable[[Record], Sequence[Send]], Each]:
    """`outputs` and `each` of an `async def` of one record."""
    several = inspect.isasyncgenfunction(underlying(function))
    # What was made of records behind one that failed, with those records: they come again when it is dealt with, and
    # a function's effects elsewhere should not happen twice for that. Held, so that no id is used anew meanwhile.
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
            if isinstance(outcome, Exception):
                if behind := [(later, known[id(later)]) for later in records[number + 1 :]]:
                    ahead[:] = behind  # in place of older ones: those may never come again
                raise outcome
            yield outcome

    def outputs(record: Record) -> Sequence[Send]:
        return cast("Sequence[Send]", concurrent.run_one(run(record)))

    return outputs, each


def _blocking(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An `async def` of a batch as a function that returns when it is done."""
    several = inspect.isasyncgenfunction(underlying(function))

    async def run(records: list[Record]) -> Any:
        return [item async for item in function(records)] if several else await function(records)

    return lambda records: concurrent.run_one(run(records))


def _encoded(encode: Encode, result: Any) -> Any:
    """A function's result with all values in it encoded by the user's own encoder."""

    def one(item: Any) -> Any:
        if item is None:
            return None
        value = item.value if type(item) is Out else item
        if type(value) is Record or type(value) is Out:
            return item  # refused by the rule of all results
        return msgspec.structs.replace(item, value=encode(value)) if type(item) is Out else encode(value)

    return [one(item) for item in result] if HOLDS_SEVERAL[type(result)] else one(result)


def _normaliser(name: str, destinations: tuple[str, ...], hints: Hints, passing: frozenset[str]) -> Normalise:
    """Whatever a function of one record returned -> Sends."""
    convert = _out_converter(name, destinations)
    topic = destinations[0] if destinations else None

    def one(record: Record, item: object) -> Send:
        if type(item) is Out:
            send = convert(item, record)
        elif topic is None:
            send = convert(Out(item), record)  # raises: nowhere to send to
        else:
            value = item if type(item) is bytes else _value(item, name)
            timestamp = record.timestamp
            send = topic, value, record.key, -1, timestamp if timestamp > 0 else 0, None
        return _with_passed(send, record.headers, passing) if record.headers and passing else send

    def normalise(record: Record, result: object) -> Sequence[Send]:
        if result is None:
            if record.value is None and destinations:
                hints.tombstone(record)
            return ()
        if not HOLDS_SEVERAL[type(result)]:
            return (one(record, result),)
        # A list, not a generator: everything or nothing, also when the user's generator raises half way.
        items: list[Any] = result if type(result) is list else list(cast("Iterable[Any]", result))
        if type(result) is tuple and looks_like_a_pair(items, Out):
            hints.pair(record)
        sends = [one(record, item) for item in items if item is not None]
        if record.value is None and len(sends) < len(items):
            hints.tombstone(record)
        return sends

    return normalise


def _with_passed(send: Send, headers: Sequence[Header], passing: frozenset[str]) -> Send:
    """The output with the input's headers that are passed on, before its own."""
    own = send[5] or []
    given = {name for name, _ in own}
    passed = [(name, value) for name, value in headers if name in passing and name not in given]
    return (*send[:5], passed + own) if passed else send


def _compile_batch(
    function: Callable[[list[Record]], Any],
    finish: Callable[[Any], Any] | None,
    name: str,
    destinations: tuple[str, ...],
    hints: Hints,
) -> tuple[Callable[[list[Record]], list[Send]], Feed]:
    """`outputs_batch` and `feed` of a function of many records."""
    convert = _out_converter(name, destinations)
    target = _target(name, destinations)

    def run(records: list[Record]) -> list[Any]:
        result = function(records.copy())  # the list is the function's to change
        if result is None:
            return []
        if isinstance(result, (Out, str, bytes, bytearray, Mapping)) or not isinstance(result, Iterable):
            raise TypeError(
                f"{name} returned a {type(result).__name__}: a batch function returns an iterable of Out, made by "
                "record.out(value) or Out(value, key=..., timestamp=...)"
            )
        outs = result if type(result) is list else list(result)
        return outs if finish is None else cast("list[Any]", finish(outs))

    def converted(outs: list[Any]) -> list[Send]:
        sends: list[Send] = []
        for out in outs:
            if type(out) is Out:
                sends.append(convert(out, None))
            elif out is not None:
                raise TypeError(
                    f"{name} gave a bare {type(out).__name__}: in a batch function no input says what its key is; "
                    "use record.out(value) or Out(value, key=..., timestamp=...)"
                )
        return sends

    def outputs_batch(records: list[Record]) -> list[Send]:
        return converted(run(records))

    def feed(records: list[Record], sink: Sink) -> Fed:
        sent, culprit = 0, records[0] if len(records) == 1 else None
        try:
            outs = run(records)
            # Looked through before the first is sent: all of the batch's outputs go out, or none.
            if target is not None and (fed := hotloop.feed_outs(outs, target, sink.produce, sink.refused)) is not None:
                sent, failed = fed
                return Fed(sent, len(records), None) if failed is None else Fed(sent, 0, failed, culprit)
            for send in converted(outs):
                put(send, sink)
                sent += 1
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            return Fed(sent, 0, error, culprit)
        return Fed(sent, len(records), None)

    return outputs_batch, feed


def _not_a_batch_route(name: str, records: list[Record]) -> list[Send]:
    raise IllegalState(f"{name} takes one record at a time: call outputs(record) for each of the {len(records)}")


def _out_converter(name: str, destinations: tuple[str, ...]) -> Callable[[Out, Record | None], Send]:
    """Out -> Send by the rules in full; the record is what KEEP refers to, None in a batch function.

    ConfigurationError for what is wrong with the function and not with the record: no policy skips that.
    """
    allowed = frozenset(destinations)
    default = destinations[0] if destinations else None

    def convert(out: Out, record: Record | None) -> Send:
        topic = default if out.topic is None else out.topic
        if topic is None:
            raise ConfigurationError(f"{name} gave something to send, but no destination: name it with to=")
        if topic not in allowed:
            named = ", ".join(map(repr, destinations)) or "nothing"
            raise ConfigurationError(
                f"{name} sent to the topic {topic!r}, which its to= does not name (it names {named})"
            )
        value, key, timestamp = out.value, out.key, out.timestamp
        if key is KEEP:
            key = (record or _nothing_to_keep(name, "key")).key
        if timestamp is KEEP:
            timestamp_ms = max((record or _nothing_to_keep(name, "timestamp")).timestamp, 0)
        else:
            timestamp_ms = _integer(timestamp, END_OF_TIME, "timestamp (milliseconds since the epoch)", name)
        return (
            topic,
            value if type(value) is bytes else _value(value, name),
            key if type(key) is bytes else _key(key, name),
            -1 if out.partition is None else _integer(out.partition, 2**31, "partition", name),
            timestamp_ms,
            _headers(out.headers, name) if out.headers else None,
        )

    return convert


def _nothing_to_keep(name: str, what: str) -> NoReturn:
    raise ConfigurationError(
        f"{name} gave an Out without a {what}: in a batch function no input says what to keep; use record.out(value), "
        "or Out(value, key=..., timestamp=...) with the timestamp 0 for the time of producing"
    )


def send_of(
    name: str, topic: str, value: object, key: object, partition: int | None, timestamp_ms: int, headers: Headers
) -> Send:
    """What a loop of one's own sends, by the rules of an Out; `name` is how messages call the caller."""
    return (
        topic,
        value if type(value) is bytes else _value(value, name),
        key if type(key) is bytes else _key(key, name),
        -1 if partition is None else _integer(partition, 2**31, "partition", name),
        _integer(timestamp_ms, END_OF_TIME, "timestamp (milliseconds since the epoch)", name) if timestamp_ms else 0,
        _headers(headers, name) if headers else None,
    )


# Structs and an enum: JSON of them is never what was meant.
_NEVER_SENT: Final = frozenset({Record, Out, Keep})


def _value(value: object, name: str) -> bytes | None:
    if type(value) in _NEVER_SENT:
        raise TypeError(
            f"{name} gave a {type(value).__name__} as a value: to pass a record on, use record.out(record.value)"
        )
    return encode(value)


def _key(key: object, name: str) -> bytes | None:
    if type(key) in _NEVER_SENT:
        raise TypeError(f"{name} gave a {type(key).__name__} as a key: use record.key for that of a record")
    return encode_key(key)


def _integer(number: object, end: int, what: str, name: str) -> int:
    # Here, where the record is known, and not in the producer, where the error would be about nobody.
    try:
        result = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} gave the {what} {number!r}, which is not an int") from None
    if not 0 <= result < end:
        raise ValueError(f"{name} gave the {what} {number!r}, which is not in [0, {end})")
    return result


def _headers(headers: Headers, name: str) -> list[Header]:
    result: list[Header] = []
    for pair in headers.items() if isinstance(headers, Mapping) else headers:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"{name} gave the header {pair!r}: a header is a (str, bytes | str | None) pair")
        header, value = pair
        if value is not None and not isinstance(value, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"{name} gave the header {header!r} a {type(value).__name__}, not bytes, str or None")
        header.encode()  # a name that UTF-8 cannot hold raises here
        result.append((header, encode(value)))
    return result
