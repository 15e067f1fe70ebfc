"""The hot loop in Python: what the compiled one (_native.c) must do too, step by step.

A rule that is changed here is changed there; tests/unit/test_hotloop.py runs both on the same cases.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

END_OF_TIME = 2**63  # milliseconds in Kafka's int64
_NO_HEADERS = ()  # CPython has one empty tuple; another empty sequence only takes the longer way


class _Nothing:
    """No object has this type, and no partition is it."""


def records_of(messages: Iterable[Any], record_type: Callable[..., Any]) -> list[Any]:
    """A record of each of the client's messages, in order, without those that are errors."""
    return [
        record_type(m.topic(), m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), m.headers() or ())
        for m in messages
        if m.error() is None
    ]


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
    topic: str | None,
    produce: Callable[..., object],
    refused: Callable[[Exception, Any], object],
    other: Callable[[Any, Any], int],
    passing: frozenset[str] | None = None,
) -> tuple[int, int, Exception | None]:
    """(outputs sent, records handled, what the next record failed of): a function of one record on many.

    A result that is bytes is produced to `topic` with the record's key and timestamp, and with those of its headers
    whose names are in `passing`; None of a record that has a value is no output, and all else is for `other`, which
    returns how many outputs it sent; with `topic` None so are bytes. `refused` gets what `produce` raised, with the
    output.
    """
    sent = 0
    usual = _Nothing if topic is None else bytes
    coming = iter(records)
    try:
        for record in coming:
            result = function(record if decode is None else decode(record.value))
            if type(result) is usual:
                timestamp = record.timestamp if record.timestamp > 0 else 0
                passed = None
                if passing is not None and record.headers is not _NO_HEADERS:
                    passed = [header for header in record.headers if header[0] in passing]
                try:
                    if passed:
                        produce(topic, result, record.key, -1, None, None, timestamp, passed)
                    else:
                        produce(topic, result, record.key, -1, None, None, timestamp)
                except Exception as error:  # noqa: BLE001 - it decides
                    refused(error, (topic, result, record.key, -1, timestamp, passed or None))
                sent += 1
            elif result is not None or record.value is None:
                sent += other(record, result)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return sent, len(records) - operator.length_hint(coming) - 1, error
    return sent, len(records), None


def all_plain(outs: list[Any], out_type: Any) -> bool:
    """Whether each is what record.out(bytes) or Out(bytes, key, timestamp=0) makes: all can be sent as it is."""
    for out in outs:
        if (
            type(out) is not out_type
            or type(out.value) is not bytes
            or (type(out.key) is not bytes and out.key is not None)
            or out.topic is not None
            or out.partition is not None
            or out.headers is not _NO_HEADERS
        ):
            return False
        timestamp = out.timestamp
        if not (type(timestamp) is int and 0 <= timestamp < END_OF_TIME):
            return False
    return True


def put_plain(
    outs: list[Any],
    topic: str,
    produce: Callable[..., object],
    refused: Callable[[Exception, Any], object],
) -> tuple[int, Exception | None]:
    """(how many were sent, what `refused` raised): outputs that are all plain, to one topic."""
    coming = iter(outs)
    while True:
        try:
            for out in coming:
                timestamp = out.timestamp
                if timestamp == 0:
                    produce(topic, out.value, out.key)  # eight arguments take 60 ns more than three
                else:
                    produce(topic, out.value, out.key, -1, None, None, timestamp)
            return len(outs), None
        except Exception as error:  # noqa: BLE001 - it decides
            sent = len(outs) - operator.length_hint(coming) - 1
            try:
                refused(error, (topic, out.value, out.key, -1, timestamp, None))
            except Exception as final:  # noqa: BLE001 - the caller's to tell
                return sent, final
