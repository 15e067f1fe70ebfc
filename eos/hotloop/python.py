"""The hot loop in Python: what the compiled one (_native.c) must do too, step by step.

A rule that is changed here is changed there; tests/unit/test_hotloop.py runs both on the same cases.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any, NoReturn

END_OF_TIME = 253_402_300_800_000  # the year 10000 in milliseconds: what is later was meant in another unit
_END_OF_PARTITIONS = 2**31
_NO_HEADERS = ()  # CPython has one empty tuple; another empty sequence only takes the longer way

Header = tuple[str, bytes | None]
# Where usual results of a function go: the topic of those that name none, all topics that may be named, the names of
# headers that are passed on (None: none are), the type Out, what stands for "the record's" in it (KEEP), and what makes
# bytes, or None, of a value and of a key that is no text; whether the result None is usual.
Encode = Callable[[Any], bytes | None]
Target = tuple[str, frozenset[str], frozenset[str] | None, type[Any], object, Encode, Encode, bool]
# What `produce` is given: topic, value and key; where it takes more, partition, two callbacks that are None and the
# timestamp; where there are some, headers.
Call = tuple[Any, ...]


class _Nothing:
    """No object has this type, and no partition is it."""


class _Unusual(Exception):
    """What is left to the caller."""


# Not `m.headers()`: CPython calls that without a look whether the method left an exception behind beside its result.
headers_of = operator.methodcaller("headers")


def records_of(
    messages: Iterable[Any], record_type: Callable[..., Any], unreadable: Callable[[Any, Exception], Any]
) -> list[Any]:
    """A record of each of the client's messages, in order, without those that are errors. Where a message raises when
    it is asked for its headers, `unreadable` gets it with what it raised, and returns the record's."""
    records = []
    for m in messages:
        if m.error() is None:
            try:
                headers = headers_of(m) or ()
            except Exception as error:  # noqa: BLE001 - `unreadable` tells which it takes
                headers = unreadable(m, error)
            records.append(
                record_type(m.topic(), m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), headers)
            )
    return records


def runs_of(records: Sequence[Any]) -> list[int]:
    """Where in `records` another partition begins, or the offset does not rise; 0 is the first, if there are any."""
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
    """(outputs sent, records handled, what the next record failed of): a function of one record on many.

    A usual result is sent to `target`: a value, or an Out whose fields are of the usual types, or several of them in a
    list, a tuple or a generator, none before all of them are made. None of a record that has a value is no output,
    where it is usual. All else is for `other`, which returns how many outputs it sent; with `target` None whatever is
    to be sent. `refused` gets what `produce` raised, with the output.
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
                # As below, without a call: bytes are a function's usual result by far.
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
    latest_ms: int,
    produce: Callable[..., object],
    refused: Callable[[Exception, Any], object],
) -> tuple[int, Exception | None] | None:
    """(how many were sent, what `refused` raised): the outputs of a batch function, if all are usual; else None, and
    nothing was sent. `latest_ms`: the timestamp of those that keep theirs, the latest of the batch."""
    sent = 0
    try:
        calls = [_call_of(out, None, target, latest_ms) for out in outs if out is not None]
    except _Unusual:
        return None
    try:
        for call in calls:
            _put(call, produce, refused)
            sent += 1
    except Exception as error:  # noqa: BLE001 - the caller's to tell
        return sent, error
    return sent, None


def _usual(record: Any, result: Any, target: Target) -> list[Call] | None:
    """What a result leads to, if it is usual."""
    kind = type(result)
    try:
        if kind is not list and kind is not tuple:
            odd = HOLDS_SEVERAL[kind] or issubclass(kind, tuple)
            return None if odd else [_call_of(result, record, target)]
        if record.value is None or (kind is tuple and looks_like_a_pair(result, target[3])):
            return None
        return [_call_of(item, record, target) for item in result if item is not None]
    except _Unusual:
        return None


class _HoldsSeveral(dict[type, bool]):
    """Whether a result of this type is several outputs, worked out once per type: `isinstance` of an ABC would cost
    more than all the rest. A NamedTuple is one value, as a Struct is."""

    def __missing__(self, kind: type) -> bool:
        if issubclass(kind, tuple):
            self[kind] = not hasattr(kind, "_fields")
        else:
            self[kind] = issubclass(kind, (list, Iterator))
        return self[kind]


HOLDS_SEVERAL = _HoldsSeveral()


def looks_like_a_pair(items: Sequence[Any], out_type: type[Any]) -> bool:
    """Whether the items of a tuple are a key and a value, as other libraries return them: there is a hint for that."""
    return len(items) == 2 and isinstance(items[0], (str, bytes)) and type(items[1]) is not out_type


def _call_of(item: Any, record: Any, target: Target, latest_ms: int = 0) -> Call:
    """For `produce`; without a record nothing can be kept of it. Raises _Unusual."""
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
        key = _text(key, key_of)
    if timestamp is keep:
        timestamp = latest_ms if record is None else max(record.timestamp, 0)
    if type(timestamp) is not int or not 0 <= timestamp < END_OF_TIME:
        raise _Unusual
    if passing is not None and record is not None and record.headers is not _NO_HEADERS:
        own = headers or []
        given = [name for name, _ in own]
        headers = [header for header in record.headers if header[0] in passing and header[0] not in given] + own
    if type(value) is not bytes and value is not None:
        value = _text(value, value_of)
    if headers:
        return topic, value, key, partition, None, None, timestamp, headers
    # Seven arguments take 60 ns more than three.
    if timestamp == 0 and partition == -1:
        return topic, value, key
    return topic, value, key, partition, None, None, timestamp


def _text(value: Any, other: Encode) -> bytes | None:
    """As UTF-8, or what `other` makes of it."""
    return value.encode() if type(value) is str else other(value)


def _headers(headers: Any) -> list[Header]:
    """Of an exact list, tuple or dict of texts."""
    if type(headers) not in (list, tuple, dict):
        raise _Unusual
    result: list[Header] = []
    for pair in headers.items() if type(headers) is dict else headers:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str:
            raise _Unusual
        name, value = pair
        if b"\0" in name.encode():  # what UTF-8 cannot hold raises
            raise _Unusual
        if value is not None and type(value) is not bytes:
            value = _text(value, _no_text)
        result.append((name, value))
    return result


def _no_text(value: Any) -> NoReturn:
    raise _Unusual


def _put(call: Call, produce: Callable[..., object], refused: Callable[[Exception, Any], object]) -> None:
    try:
        produce(*call)
    except Exception as error:  # noqa: BLE001 - it decides
        topic, value, key, partition, _, _, timestamp, headers = call + (-1, None, None, 0, None)[len(call) - 3 :]
        refused(error, (topic, value, key, partition, timestamp, headers))
