"""Turns a function's result into the records to send, and warns about results that look like a mistake.

Owns the meaning of a result: its topic, key, timestamp and bytes, and which results cannot be sent. Each warning is
logged once per function and process. The hot loop (eos/hotloop) handles the usual results itself and calls this module
for the rest.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, cast

import msgspec

from eos import log
from eos.app.serde import (
    IS_JSON,
    JSON,
    Encode,
    encode,
    encode_key,
    function_name,
    may_return_none,
    underlying,
)
from eos.errors import ConfigurationError
from eos.hotloop.python import END_OF_TIME, HOLDS_SEVERAL, Target, looks_like_a_pair
from eos.records import KEEP, Header, Headers, Keep, Out, Record, Send

# Converts the result of a function of one record into the records to send.
Normalise = Callable[["Record", object], Sequence[Send]]


def target_of(
    name: str, destinations: tuple[str, ...], hints: Hints, passing: frozenset[str] = frozenset()
) -> Target | None:
    """Return what the hot loop needs to send usual results; None for a function without a destination."""
    if not destinations:
        return None
    json = JSON.encode

    def value_of(value: object) -> bytes | None:
        kind = type(value)
        try:
            # The same as `_value`, in one Python call instead of three.
            return json(value) if IS_JSON[kind] and kind not in _NEVER_SENT else _value(value, name)
        except TypeError:
            return _value(value, name)  # raises an error that explains the problem

    def key_of(key: object) -> bytes | None:
        return _key(key, name)

    return destinations[0], frozenset(destinations), passing or None, Out, KEEP, value_of, key_of, hints.none_is_usual


def encoded(encode: Encode, result: Any) -> Any:
    """Return a function's result with all its values encoded by the user's own encoder."""

    def one(item: Any) -> Any:
        if item is None:
            return None
        value = item.value if type(item) is Out else item
        if type(value) is Record or type(value) is Out:
            return item  # the common rules for results refuse it
        return msgspec.structs.replace(item, value=encode(value)) if type(item) is Out else encode(value)

    return [one(item) for item in result] if HOLDS_SEVERAL[type(result)] else one(result)


def normaliser(name: str, destinations: tuple[str, ...], hints: Hints, passing: frozenset[str]) -> Normalise:
    """Return a function that converts the result of a function of one record into Sends."""
    convert = out_converter(name, destinations)
    topic = destinations[0] if destinations else None

    def one(record: Record, item: object) -> Send:
        if type(item) is Out:
            send = convert(item, record, record.timestamp)
        elif topic is None:
            send = convert(Out(item), record, 0)  # raises: there is no destination
        else:
            value = item if type(item) is bytes else _value(item, name)
            send = topic, value, record.key, -1, _time(max(record.timestamp, 0), name), None
        return _with_passed(send, record.headers, passing) if record.headers and passing else send

    def normalise(record: Record, result: object) -> Sequence[Send]:
        if result is None:
            if destinations and record.value is None:
                hints.tombstone(record)
            elif not hints.none_is_usual:
                hints.nothing(record)
            return ()
        if not HOLDS_SEVERAL[type(result)]:
            return (one(record, result),)
        # A list, not a generator: all outputs or none, even if the user's generator raises half way.
        items: list[Any] = result if type(result) is list else list(cast("Iterable[Any]", result))
        if type(result) is tuple and looks_like_a_pair(items, Out):
            hints.pair(record)
        sends = [one(record, item) for item in items if item is not None]
        if record.value is None and len(sends) < len(items):
            hints.tombstone(record)
        return sends

    return normalise


def _with_passed(send: Send, headers: Sequence[Header], passing: frozenset[str]) -> Send:
    """Return the output with the input's headers that are passed on, placed before its own."""
    own = send[5] or []
    given = {name for name, _ in own}
    passed = [(name, value) for name, value in headers if name in passing and name not in given]
    return (*send[:5], passed + own) if passed else send


def out_converter(name: str, destinations: tuple[str, ...]) -> Callable[[Out, Record | None, int], Send]:
    """Return a function that converts an Out into a Send by the full rules.

    KEEP refers to the key of the record (in a batch function there is none), and to the given timestamp: the record's,
    or the latest of the batch. The function raises ConfigurationError if the error lies in the user's function and not
    in the record: no policy skips that.
    """
    allowed = frozenset(destinations)
    default = destinations[0] if destinations else None

    def convert(out: Out, record: Record | None, kept_ms: int) -> Send:
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
            key = (record or _no_key(name)).key
        timestamp_ms = _time(max(kept_ms, 0) if timestamp is KEEP else timestamp, name)
        return (
            topic,
            value if type(value) is bytes else _value(value, name),
            key if type(key) is bytes else _key(key, name),
            -1 if out.partition is None else _integer(out.partition, 2**31, "partition", name),
            timestamp_ms,
            _headers(out.headers, name) if out.headers else None,
        )

    return convert


def _no_key(name: str) -> NoReturn:
    raise ConfigurationError(
        f"{name} gave an Out without a key: in a batch function no input says which one to keep",
        remedy="return record.out(value), or Out(value, key=...) with the key None for a record without one",
    )


def send_of(
    name: str, topic: str, value: object, key: object, partition: int | None, timestamp_ms: int, headers: Headers
) -> Send:
    """Return the Send for a value that a user's own loop sends, by the rules of an Out.

    `name` is the caller's name in messages.
    """
    return (
        topic,
        value if type(value) is bytes else _value(value, name),
        key if type(key) is bytes else _key(key, name),
        -1 if partition is None else _integer(partition, 2**31, "partition", name),
        _time(timestamp_ms, name) if timestamp_ms else 0,
        _headers(headers, name) if headers else None,
    )


# Structs and an enum: JSON of them is never intended.
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
    # Checked here, where the record is known. In the producer the error could not name the record.
    try:
        result = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} gave the {what} {number!r}, which is not an int") from None
    if not 0 <= result < end:
        raise ValueError(f"{name} gave the {what} {number!r}, which is not in [0, {end})")
    return result


def _time(timestamp: object, name: str) -> int:
    """Return the timestamp of an output. Raise ValueError for one that brokers always refuse.

    Brokers do not report which record of a batch is wrong, and finding it takes many transactions.
    """
    if type(timestamp) is int and timestamp >= END_OF_TIME:
        raise ValueError(
            f"{name}: the timestamp {timestamp} lies after the year 9999 in milliseconds{_in_another_unit(timestamp)}: "
            "give milliseconds since the epoch, or timestamp=0 for the time of producing"
        )
    return _integer(timestamp, END_OF_TIME, "timestamp (milliseconds since the epoch)", name)


def _in_another_unit(timestamp: int) -> str:
    for unit, per_s in (("microseconds", 10**6), ("nanoseconds", 10**9)):
        if timestamp // per_s < END_OF_TIME // 1000:
            moment = datetime.datetime.fromtimestamp(timestamp // per_s, datetime.UTC)
            return f" (in {unit} it is {moment:%Y-%m-%d %H:%M:%S} UTC)"
    return ""


def _headers(headers: Headers, name: str) -> list[Header]:
    result: list[Header] = []
    for pair in headers.items() if isinstance(headers, Mapping) else headers:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"{name} gave the header {pair!r}: a header is a (str, bytes | str | None) pair")
        header, value = pair
        if value is not None and not isinstance(value, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"{name} gave the header {header!r} a {type(value).__name__}, not bytes, str or None")
        if b"\0" in header.encode():  # a name that UTF-8 cannot encode raises here
            raise ValueError(
                f"{name} gave the header {header!r}: a name ends at a NUL for Kafka's client, so none may be in it"
            )
        result.append((header, encode(value)))
    return result


# Keyed by where a function is defined, not by the function: a pickled copy is the same function.
_said: set[tuple[object, ...]] = set()

_TOMBSTONE = (
    "the function returned None for a record whose value is None, and None means no output: to pass tombstones on "
    "return Out(None), or record.out(record.value); to drop them without this line return ()"
)
_NOTHING = (
    "its return annotation has no None, so a `return` may be missing: records that it returns None for lead to no "
    "output; where that is meant annotate `| None`"
)
_PAIR = (
    "each item of a returned tuple is a record of its own: for one record with a key return Out(value, key=key); for "
    "several without this line return a list"
)


class Hints:
    """Warnings about the results of one function, each logged once per process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = getattr(underlying(function), "__code__", None)
        self._name = function_name(function)
        self.none_is_usual = may_return_none(function)
        self._done: set[str] = set()  # events that were logged or checked already
        self._defined = (self._name, getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", 0))

    def tombstone(self, record: Record) -> None:
        """Warn that the result None dropped a tombstone."""
        self._say("a tombstone led to no output", _TOMBSTONE, record)

    def nothing(self, record: Record) -> None:
        """Warn that a function returned None against its annotation."""
        self._say("a function returned None against its annotation", _NOTHING, record)

    def pair(self, record: Record) -> None:
        """Warn that a returned tuple looks like a key and a value."""
        self._say("a tuple is not a key and a value", _PAIR, record)

    def _say(self, event: str, why: str, record: Record) -> None:
        if event in self._done:
            return
        self._done.add(event)
        if (event, *self._defined) not in _said:
            _said.add((event, *self._defined))
            where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            log.warning(event, function=self._name, **where, why=why)
