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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast, final

import msgspec

from eos.errors import ConfigurationError, IllegalState
from eos.serde import (
    Decode,
    annotation_name,
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


Headers = Sequence[tuple[str, bytes | str | None]] | Mapping[str, bytes | str | None]


@final
class Out(msgspec.Struct, frozen=True, gc=False):
    """One record to send.

    `value`: bytes as they are, str as UTF-8, None a tombstone, else JSON; `key` by the same rule, KEEP the
    input's key, None a null key. `topic` None: the first of `to`. `headers`: (name, bytes, str or None) pairs or
    a mapping; the input's are not copied. `partition` None: by the key. `timestamp`: milliseconds since the
    epoch, KEEP the input's, 0 the time of producing.
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
BatchFunction = TypeVar("BatchFunction", bound=Callable[[list[Record]], Iterable[Out | None] | None])


class Route:
    """One function with its topics, compiled: what an engine calls.

    `outputs(record)` gives what to send for one record. A route with `batch` set also has `outputs_batch(records)`
    for many; its `outputs` is a batch of one (for the record-by-record run that finds the culprit).
    Both raise whatever the function raises, DecodeError for a value that does not fit the annotation, TypeError or
    ValueError for a result that cannot be sent: these are about the record. A ConfigurationError (a destination
    that was not named) is about the App: no policy may skip or dead-letter a record because of it.
    """

    __slots__ = (
        "annotation", "batch", "destinations", "function", "name", "on_error", "outputs", "outputs_batch", "sources",
    )  # fmt: skip

    outputs: Callable[[Record], Sequence[Send]]
    outputs_batch: Callable[[list[Record]], list[Send]]

    def __init__(
        self,
        function: Callable[[Any], Any],
        annotation: object,
        sources: tuple[str, ...],
        destinations: tuple[str, ...],
        batch: bool,
        on_error: str,
    ) -> None:
        self.function, self.annotation, self.name = function, annotation, function_name(function)
        self.sources, self.destinations, self.batch, self.on_error = sources, destinations, batch, on_error
        if batch:
            _check_batch_annotation(annotation, self.name)
            self.outputs_batch = run = _compile_batch(function, self.name, destinations)
            self.outputs = lambda record: run([record])
        else:
            decode = _record_decoder(annotation, self.name)
            self.outputs = _compile_single(function, decode, self.name, destinations)
            # No loop in its place: an error out of it could not say which record it is about.
            self.outputs_batch = functools.partial(_not_a_batch_route, self.name)

    def __reduce__(self) -> tuple[object, ...]:
        # msgspec decoders and closures cannot be pickled; Spark ships routes to its executors: compile again there.
        arguments = (self.function, self.annotation, self.sources, self.destinations, self.batch, self.on_error)
        return Route, arguments

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
        self.routes: dict[str, Route] = {}  # by source topic

    @property
    def topics(self) -> list[str]:
        """All source topics, in the order of their definition."""
        return list(self.routes)

    @property
    def destinations(self) -> set[str]:
        """All topics that may be written to."""
        return {topic for route in self.routes.values() for topic in route.destinations}

    def process(
        self, topics: str | Iterable[str], *, to: str | Iterable[str] = (), on_error: str = "stop"
    ) -> Callable[[Function], Function]:
        """Decorate a function that gets one record of `topics` (what of it: by its annotation) and returns None, a
        value, an Out, or a list, tuple or generator of those. The first of `to` is where values go. The function
        stays as it is."""
        sources, destinations = _topic_lists(topics, to, on_error)

        def register(function: Function) -> Function:
            annotation = _annotation(function, Record, sys._getframe(1))
            self._add(Route(function, annotation, sources, destinations, False, on_error))
            return function

        return register

    def process_batch(
        self, topics: str | Iterable[str], *, to: str | Iterable[str] = (), on_error: str = "stop"
    ) -> Callable[[BatchFunction], BatchFunction]:
        """Decorate a function that gets a `list[Record]` and returns an iterable of Out, for speed: made by
        `record.out(value)`, or by `Out(value, key=...)`. The function stays as it is."""
        sources, destinations = _topic_lists(topics, to, on_error)

        def register(function: BatchFunction) -> BatchFunction:
            annotation = _annotation(function, list[Record], sys._getframe(1))
            self._add(Route(function, annotation, sources, destinations, True, on_error))
            return function

        return register

    def check(self) -> None:
        """Raises ConfigurationError for an App that has nothing to run."""
        if not self.routes:
            raise ConfigurationError(
                f'the App {self.id!r} has no function: decorate one with @app.process("topic", to="topic")'
            )

    def _add(self, route: Route) -> None:
        # All checks before the first change: a refused function leaves the App as it was.
        for topic in route.sources:
            if topic in self.routes:
                raise ConfigurationError(
                    f"the topic {topic!r} has two functions, {self.routes[topic].name} and {route.name}: "
                    "one function per topic, or two Apps"
                )
        loops = {*self.routes, *route.sources} & {*self.destinations, *route.destinations}
        if loops:
            raise ConfigurationError(
                f"the topic {min(loops)!r} is both a source and a destination of the App {self.id!r}: its records "
                "could come back for ever; chain steps as Apps of their own"
            )
        for topic in route.sources:
            self.routes[topic] = route

    def __repr__(self) -> str:
        return f"App({self.id!r}, {list({id(r): r for r in self.routes.values()}.values())})"


# ----------------------------------------------------------------------------------------- checks of a definition


def _check_name(name: object, what: str) -> None:
    # Kafka's rule for topics (org.apache.kafka.common.internals.Topic). Group ids may be anything, but an id that
    # keeps to it is legal in file names, metrics, ACL prefixes and in `<topic>.dlq` alike.
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name) or name in (".", ".."):
        raise ConfigurationError(
            f"{what} must be 1 to 249 letters, digits, '.', '_' or '-' (and not '.' or '..'), not {name!r}"
        )


def _topic_lists(
    topics: str | Iterable[str], to: str | Iterable[str], on_error: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if on_error != "stop":
        raise ConfigurationError(f"on_error={on_error!r} does not exist: the only policy in this version is 'stop'")
    if callable(topics):
        raise ConfigurationError('the decorator needs its topics: @app.process("topic", to="topic")')
    sources, destinations = _names(topics, "a source topic"), _names(to, "a destination topic")
    if not sources:
        raise ConfigurationError("a function needs at least one source topic")
    return sources, destinations


def _names(topics: object, what: str) -> tuple[str, ...]:
    names = [topics] if isinstance(topics, str) or not isinstance(topics, Iterable) else list(topics)
    for name in names:
        _check_name(name, what)
    return tuple(dict.fromkeys(cast("list[str]", names)))


def _annotation(function: Callable[..., object], default: object, frame: types.FrameType) -> object:
    if not callable(function):
        raise ConfigurationError(f"{function!r} is not a function")
    below = underlying(function)
    if inspect.iscoroutinefunction(below) or inspect.isasyncgenfunction(below):
        raise ConfigurationError(f"{function_name(function)} is a coroutine function: use def, not async def")
    return parameter_annotation(function, default, frame)


def _record_decoder(annotation: object, name: str) -> Decode | None:
    """The decoder for a function of one record; None: it gets the Record itself."""
    if without_none(annotation)[0] is Record:
        return None
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


class _HoldsSeveral(dict[type, bool]):
    """Whether a result of this type is several outputs, worked out once per type: `isinstance` of an ABC would cost
    more than all the rest. A NamedTuple is one value, as a Struct is."""

    def __missing__(self, kind: type) -> bool:
        if issubclass(kind, tuple):
            self[kind] = not hasattr(kind, "_fields")
        else:
            self[kind] = issubclass(kind, (list, collections.abc.Iterator))
        return self[kind]


_HOLDS_SEVERAL: Final = _HoldsSeveral()


def _compile_single(
    function: Callable[[Any], Any], decode: Decode | None, name: str, destinations: tuple[str, ...]
) -> Callable[[Record], Sequence[Send]]:
    """One of three closures of the same meaning. The two hot ones answer a bytes result, the common one for speed,
    with one type check and one tuple: no call but the user's (and the decoder's)."""
    normalise = _normaliser(name, destinations)

    if not destinations:

        def outputs_nowhere(record: Record) -> Sequence[Send]:
            return normalise(record, function(record if decode is None else decode(record.value)))

        return outputs_nowhere

    topic = destinations[0]

    if decode is None:

        def outputs_of_record(record: Record) -> Sequence[Send]:
            result = function(record)
            if type(result) is bytes:
                timestamp = record.timestamp
                return ((topic, result, record.key, -1, timestamp if timestamp > 0 else 0, None),)
            return normalise(record, result)

        return outputs_of_record

    decode_value = decode

    def outputs_of_value(record: Record) -> Sequence[Send]:
        result = function(decode_value(record.value))
        if type(result) is bytes:
            timestamp = record.timestamp
            return ((topic, result, record.key, -1, timestamp if timestamp > 0 else 0, None),)
        return normalise(record, result)

    return outputs_of_value


def _normaliser(name: str, destinations: tuple[str, ...]) -> Callable[[Record, object], Sequence[Send]]:
    """Whatever a function of one record returned -> Sends."""
    convert = _out_converter(name, destinations)
    topic = destinations[0] if destinations else None

    def one(record: Record, item: object) -> Send:
        if type(item) is Out:
            return convert(item, record)
        if topic is None:
            return convert(Out(item), record)  # raises: nowhere to send to
        value = item if type(item) is bytes else _value(item, name)
        timestamp = record.timestamp
        return topic, value, record.key, -1, timestamp if timestamp > 0 else 0, None

    def normalise(record: Record, result: object) -> Sequence[Send]:
        if result is None:
            return ()
        if _HOLDS_SEVERAL[type(result)]:
            # A list, not a generator: everything or nothing, also when the user's generator raises half way.
            items: Any = result
            return [one(record, item) for item in items if item is not None]
        return (one(record, result),)

    return normalise


def _compile_batch(
    function: Callable[[list[Record]], Any], name: str, destinations: tuple[str, ...]
) -> Callable[[list[Record]], list[Send]]:
    convert = _out_converter(name, destinations)
    default = destinations[0] if destinations else None

    def outputs_batch(records: list[Record]) -> list[Send]:
        result = function(records)
        if result is None:
            return []
        if isinstance(result, (Out, str, bytes, bytearray, Mapping)) or not isinstance(result, Iterable):
            raise TypeError(
                f"{name} returned a {type(result).__name__}: a batch function returns an iterable of Out, made by "
                "record.out(value) or Out(value, key=...)"
            )
        sends: list[Send] = []
        append = sends.append
        for out in result:
            # What record.out(bytes) makes, without a call; everything else by the rules in full.
            if (
                type(out) is Out
                and type(value := out.value) is bytes
                and type(timestamp := out.timestamp) is int
                and 0 <= timestamp < 2**63
                and ((key := out.key) is None or type(key) is bytes)
                and out.topic is None
                and out.partition is None
                and not out.headers
                and default is not None
            ):
                append((default, value, key, -1, timestamp, None))
            elif type(out) is Out:
                append(convert(out, None))
            elif out is not None:
                raise TypeError(
                    f"{name} gave a bare {type(out).__name__}: in a batch function no input says what its key is; "
                    "use record.out(value) or Out(value, key=...)"
                )
        return sends

    return outputs_batch


def _not_a_batch_route(name: str, records: list[Record]) -> list[Send]:
    raise IllegalState(f"{name} takes one record at a time: call outputs(record) for each of the {len(records)}")


def _out_converter(name: str, destinations: tuple[str, ...]) -> Callable[[Out, Record | None], Send]:
    """Out -> Send by the rules in full; the record is what KEEP refers to, None in a batch function."""
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
            if record is None:
                raise TypeError(
                    f"{name} gave an Out without a key: in a batch function no input says what to keep; use "
                    "record.out(value) or Out(value, key=...)"
                )
            key = record.key
        if timestamp is KEEP:
            timestamp_ms = 0 if record is None else max(record.timestamp, 0)
        else:
            timestamp_ms = _integer(timestamp, 2**63, "timestamp (milliseconds since the epoch)", name)
        return (
            topic,
            value if type(value) is bytes else _value(value, name),
            key if type(key) is bytes else encode_key(key),
            -1 if out.partition is None else _integer(out.partition, 2**31, "partition", name),
            timestamp_ms,
            _headers(out.headers, name) if out.headers else None,
        )

    return convert


def _value(value: object, name: str) -> bytes | None:
    kind = type(value)
    if kind is Record or kind is Out:  # both are Structs: JSON of them is never what was meant
        raise TypeError(
            f"{name} gave a {type(value).__name__} as a value: to pass a record on, use record.out(record.value)"
        )
    return encode(value)


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
