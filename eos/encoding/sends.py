"""Converts outputs to Sends: checks and encodes value, key and headers, and checks timestamp and partition.

Decides which outputs cannot be sent, and owns the error messages for them. It must never know the meaning of a
function's result (eos/app/results.py).
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from eos.encoding.serde import encode, encode_key
from eos.errors import ConfigurationError
from eos.hotloop.python import END_OF_TIME
from eos.records import KEEP, Header, Headers, Keep, Out, Record, Send


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
            raise ConfigurationError(f"{name} returned an output, but has no destination: name one with to=")
        if topic not in allowed:
            named = ", ".join(map(repr, destinations)) or "empty"
            raise ConfigurationError(
                f"{name} sent to the topic {topic!r}, which is not in its to= ({named}): add it there"
            )
        value, key, timestamp = out.value, out.key, out.timestamp
        if key is KEEP:
            key = (record or _raise_no_key(name)).key
        timestamp_ms = check_timestamp(max(kept_ms, 0) if timestamp is KEEP else timestamp, name)
        return (
            topic,
            value if type(value) is bytes else value_bytes(value, name),
            key if type(key) is bytes else key_bytes(key, name),
            -1 if out.partition is None else _check_integer(out.partition, 2**31, "partition", name),
            timestamp_ms,
            _encode_headers(out.headers, name) if out.headers else None,
        )

    return convert


def _raise_no_key(name: str) -> NoReturn:
    raise ConfigurationError(
        f"{name} returned an Out without a key: in a batch function no single input has a key to keep",
        remedy="return record.out(value), or Out(value, key=...), with key=None for a record without a key",
    )


def make_send(
    name: str, topic: str, value: object, key: object, partition: int | None, timestamp_ms: int, headers: Headers
) -> Send:
    """Return the Send for a value that a user's loop sends, encoded like an Out.

    `name` is the caller's name in messages.
    """
    return (
        topic,
        value if type(value) is bytes else value_bytes(value, name),
        key if type(key) is bytes else key_bytes(key, name),
        -1 if partition is None else _check_integer(partition, 2**31, "partition", name),
        check_timestamp(timestamp_ms, name) if timestamp_ms else 0,
        _encode_headers(headers, name) if headers else None,
    )


# These types are no values, although JSON could encode them.
NEVER_SENT: Final = frozenset({Record, Out, Keep})


def value_bytes(value: object, name: str) -> bytes | None:
    if type(value) in NEVER_SENT:
        raise TypeError(
            f"{name}: a value of type {type(value).__name__} cannot be sent: to pass a record on, use "
            "record.out(record.value)"
        )
    return encode(value)


def key_bytes(key: object, name: str) -> bytes | None:
    if type(key) in NEVER_SENT:
        raise TypeError(f"{name}: a key of type {type(key).__name__} cannot be sent: use record.key for a record's key")
    return encode_key(key)


def _check_integer(number: object, end: int, what: str, name: str) -> int:
    # Check here, because the producer could not name the record in its error.
    try:
        result = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: the {what} {number!r} is not an int") from None
    if not 0 <= result < end:
        raise ValueError(f"{name}: the {what} {number!r} is not in [0, {end})")
    return result


def check_timestamp(timestamp: object, name: str) -> int:
    """Return the timestamp of an output. Raise ValueError for one that brokers always refuse.

    Brokers do not report which record of a batch is wrong, and finding it takes many transactions.
    """
    if type(timestamp) is int and timestamp >= END_OF_TIME:
        raise ValueError(
            f"{name}: the timestamp {timestamp} is after the year 9999 in milliseconds{_explain_unit(timestamp)}: "
            "use milliseconds since the epoch, or timestamp=0 for the time when it is sent"
        )
    return _check_integer(timestamp, END_OF_TIME, "timestamp (milliseconds since the epoch)", name)


def _explain_unit(timestamp: int) -> str:
    for unit, per_s in (("microseconds", 10**6), ("nanoseconds", 10**9)):
        if timestamp // per_s < END_OF_TIME // 1000:
            moment = datetime.datetime.fromtimestamp(timestamp // per_s, datetime.UTC)
            return f" (in {unit} it is {moment:%Y-%m-%d %H:%M:%S} UTC)"
    return ""


def _encode_headers(headers: Headers, name: str) -> list[Header]:
    result: list[Header] = []
    for pair in headers.items() if isinstance(headers, Mapping) else headers:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"{name}: {pair!r} is not a header: a header is a (str, bytes | str | None) pair")
        header, value = pair
        if value is not None and not isinstance(value, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"{name}: the header {header!r} is of type {type(value).__name__}, not bytes, str or None")
        if b"\0" in header.encode():  # a name that UTF-8 cannot encode raises here
            raise ValueError(
                f"{name}: the header name {header!r} contains NUL, where Kafka's client would cut it: remove it"
            )
        result.append((header, encode(value)))
    return result
