"""Implements the hot loop in Python: the reference for the compiled one (_native.c), step by step.

Change rules in both places; tests/unit/test_hotloop.py runs both on the same cases.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any, NoReturn, TypeVar

_Type = TypeVar("_Type", bound=type[Any])
_Method = TypeVar("_Method", bound=Callable[..., Any])

END_OF_TIME = 253_402_300_800_000  # the year 10000 in milliseconds: a later timestamp has another unit
_END_OF_PARTITIONS = 2**31
_LENGTH = struct.Struct(">I")
_NO_HEADERS = ()  # CPython has one empty tuple; another empty sequence only takes the slow path

Header = tuple[str, bytes | None]
# A Target holds, in this order: the topic of results that name none, all topics that may be named, the names of headers
# to pass on (or None), the type Out, its marker for "the record's" (KEEP), the encoders of values and of keys that are
# not text, and whether the result None is expected.
Encode = Callable[[Any], bytes | None]
Target = tuple[str, frozenset[str], frozenset[str] | None, type[Any], object, Encode, Encode, bool]
# The arguments of `produce`: topic, value and key; if needed, partition, two callbacks that are None and the timestamp;
# and headers, if there are any.
Call = tuple[Any, ...]


class _Nothing:
    """Is a type without objects; it equals no partition."""


class _Unusual(Exception):
    """Reports a result that the caller must handle."""


# Call headers() through methodcaller. If a method written in C sets an exception but still returns a result, CPython
# notices the exception in this call, but not in `m.headers()`.
headers_of = operator.methodcaller("headers")


def records_of(
    messages: Iterable[Any], record_type: Callable[..., Any], unreadable: Callable[[Any, Exception], Any]
) -> list[Any]:
    """Return a record for each of the client's messages, in order, without those that are errors. If the headers of a
    message raise, `unreadable` gets the message and the exception, and returns the record's headers."""
    records = []
    for m in messages:
        if m.error() is None:
            try:
                headers = headers_of(m) or ()
            except Exception as error:  # noqa: BLE001 - `unreadable` handles the error or raises it again
                headers = unreadable(m, error)
            records.append(
                record_type(m.topic(), m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), headers)
            )
    return records


def fetched_of(
    messages: Iterable[Any], record_type: Callable[..., Any], unreadable: Callable[[Any, Exception], Any]
) -> list[Any]:
    """Return what `records_of` does, for code that only reads the attributes of a record. The compiled form returns
    objects that leave most attributes in the client's messages, because making a Record takes longer."""
    return records_of(messages, record_type, unreadable)


def encode_key(key: bytes) -> bytes:
    """Return the part of a row's name that follows the store's prefix (eos/app/cells.py)."""
    return _LENGTH.pack(len(key)) + key


def fast_out(method: _Method, record_type: type[Any], out_type: type[Any], keep: object) -> _Method:
    """Return the method `out` of a record type, which makes an Out; the compiled form returns a compiled one.

    `keep`: the default of the key and the timestamp of an Out."""
    return method


def fast_state(
    state_type: _Type, store_type: type[Any], unread: object, absent: object, immutable: frozenset[object]
) -> _Type:
    """Return the type of the objects that functions get as State; the compiled form returns a subclass.

    `store_type`: what these objects are made from. `unread`, `absent`: the markers in place of a value. `immutable`:
    the types of defaults that cannot be changed in place."""
    return state_type


def runs_of(records: Sequence[Any]) -> list[int]:
    """Return the index of the first record of each run. A run ends where another partition begins or the offset does
    not rise."""
    runs: list[int] = []
    topic, partition, offset = None, _Nothing, 0
    for at, record in enumerate(records):
        if record.topic != topic or record.partition != partition or record.offset <= offset:
            topic, partition = record.topic, record.partition
            runs.append(at)
        offset = record.offset
    return runs


def feed_values(
    records: Sequence[Any],
    function: Callable[[Any], Any],
    decode: Callable[[Any], Any] | None,
    target: Target | None,
    produce: Callable[..., object],
    refused: Callable[[Exception, Any], object],
    other: Callable[[Any, Any], int],
) -> tuple[int, int, BaseException | None]:
    """Call a function with each record. Return (outputs sent, records handled, exception of the next record).

    A result of an expected type is sent to `target`: a value, or an Out with fields of the expected types. A list, a
    tuple or a generator may hold several such results, which are sent once all of them exist. Changes of a list after
    its function has returned have no effect. The result None of a record with a value sends nothing, if None is
    expected. Everything else goes to `other`, which returns how many outputs it sent. If `target` is None, all results
    go to `other`. `refused` gets an output that `produce` refused, with the exception.

    Decoders and encoders may have the attribute `bare`, a faster function with the same results for exact bytes (a
    decoder's) or for values of the types in the attribute `types` (an encoder's). The compiled loop calls it first, and
    the decoder or encoder itself if it raises.
    """
    sent = 0
    coming = iter(records)
    try:
        for record in coming:
            result = function(record if decode is None else decode(record.value))
            if result is None and record.value is not None and (target is None or target[-1]):
                continue
            if target is None or result is None:
                sent += other(record, result)
            elif (
                type(result) is bytes
                and (target[2] is None or record.headers is _NO_HEADERS)
                and 0 < record.timestamp < END_OF_TIME
            ):
                # This repeats the branch below without its call, because most functions return bytes.
                _put((target[0], result, record.key, -1, None, None, record.timestamp), produce, refused)
                sent += 1
            else:
                items = list(result) if type(result) is GeneratorType else result
                calls = _usual(record, items, target)
                if calls is None:
                    sent += other(record, items)
                for call in calls or ():
                    _put(call, produce, refused)
                    sent += 1
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
        return sent, len(records) - operator.length_hint(coming) - 1, error
    return sent, len(records), None


def feed_outs(
    outs: list[Any],
    target: Target,
    find_latest: Callable[[], int],
    produce: Callable[..., object],
    refused: Callable[[Exception, Any], object],
) -> tuple[int, Exception | None] | None:
    """Send the outputs of a batch function. Return (outputs sent, exception of `refused`). Send nothing and return None
    if any output is not of an expected type. `find_latest` returns the latest timestamp of the batch in milliseconds,
    and is called once if an output keeps the record's timestamp."""
    sent, out_type, keep = 0, target[3], target[4]
    latest_ms = find_latest() if any(type(out) is out_type and out.timestamp is keep for out in outs) else 0
    try:
        calls = [_call_of(out, None, target, latest_ms) for out in outs.copy() if out is not None]
    except _Unusual:
        return None
    try:
        for call in calls:
            _put(call, produce, refused)
            sent += 1
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return sent, error
    return sent, None


def _usual(record: Any, result: Any, target: Target) -> list[Call] | None:
    """Return the calls of `produce` for a result; None if it is not of an expected type."""
    kind = type(result)
    try:
        if kind is not list and kind is not tuple:
            odd = HOLDS_SEVERAL[kind] or issubclass(kind, tuple)
            return None if odd else [_call_of(result, record, target)]
        if record.value is None or (kind is tuple and looks_like_a_pair(result, target[3])):
            return None
        return [_call_of(item, record, target) for item in [*result] if item is not None]
    except _Unusual:
        return None


class _HoldsSeveral(dict[type, bool]):
    """Tells whether a result of a type is several outputs. Computed once per type, because `isinstance` of an ABC would
    cost more than everything else. A NamedTuple is one value, like a Struct."""

    def __missing__(self, kind: type) -> bool:
        if issubclass(kind, tuple):
            self[kind] = not hasattr(kind, "_fields")
        else:
            self[kind] = issubclass(kind, (list, Iterator))
        return self[kind]


HOLDS_SEVERAL = _HoldsSeveral()


def looks_like_a_pair(items: Sequence[Any], out_type: type[Any]) -> bool:
    """Return whether a tuple is a key and a value, as other libraries return them; the caller then logs a hint."""
    return len(items) == 2 and isinstance(items[0], (str, bytes)) and type(items[1]) is not out_type


def _call_of(item: Any, record: Any, target: Target, latest_ms: int = 0) -> Call:
    """Return the arguments of `produce`. Raises _Unusual, also if the output should keep a field of its record and has
    no record."""
    topic, destinations, passing, out_type, keep, value_of, key_of, _ = target
    value, key, timestamp, partition, headers = item, keep, keep, -1, None
    if type(item) is out_type:
        value, key, timestamp = item.value, item.key, item.timestamp
    if record is None and key is keep:
        raise _Unusual
    if type(item) is out_type:
        if item.topic is not None:
            topic = item.topic
            if type(topic) is not str or topic not in destinations:
                raise _Unusual
        if item.partition is not None:
            partition = item.partition
            if type(partition) is not int or not 0 <= partition < _END_OF_PARTITIONS:
                raise _Unusual
        if item.headers is not _NO_HEADERS:
            headers = _headers(item.headers)
    if key is keep:
        key = record.key
    elif key is not None and type(key) is not bytes:
        key = _encode_text(key, key_of)
    if timestamp is keep:
        timestamp = latest_ms if record is None else max(record.timestamp, 0)
    if type(timestamp) is not int or not 0 <= timestamp < END_OF_TIME:
        raise _Unusual
    if passing is not None and record is not None and record.headers is not _NO_HEADERS:
        own = headers or []
        given = [name for name, _ in own]
        headers = [header for header in record.headers if header[0] in passing and header[0] not in given] + own
    if type(value) is not bytes and value is not None:
        value = _encode_text(value, value_of)
    if headers:
        return topic, value, key, partition, None, None, timestamp, headers
    # Leave out the other arguments if possible: seven take 60 ns more than three.
    if timestamp == 0 and partition == -1:
        return topic, value, key
    return topic, value, key, partition, None, None, timestamp


def _encode_text(value: Any, other: Encode) -> bytes | None:
    """Return text as UTF-8, everything else encoded by `other`."""
    return value.encode() if type(value) is str else other(value)


def _headers(headers: Any) -> list[Header]:
    """Return the headers of an exact list, tuple or dict with text names. Raises _Unusual."""
    if type(headers) not in (list, tuple, dict):
        raise _Unusual
    result: list[Header] = []
    for pair in headers.items() if type(headers) is dict else headers:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str:
            raise _Unusual
        name, value = pair
        if b"\0" in name.encode():  # raises for text that UTF-8 cannot encode
            raise _Unusual
        if value is not None and type(value) is not bytes:
            value = _encode_text(value, _no_text)
        result.append((name, value))
    return result


def _no_text(value: Any) -> NoReturn:
    raise _Unusual


def _put(call: Call, produce: Callable[..., object], refused: Callable[[Exception, Any], object]) -> None:
    try:
        produce(*call)
    except Exception as error:  # noqa: BLE001 - `refused` decides
        topic, value, key, partition, _, _, timestamp, headers = call + (-1, None, None, 0, None)[len(call) - 3 :]
        refused(error, (topic, value, key, partition, timestamp, headers))
