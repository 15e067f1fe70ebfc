"""Makes feeds, which pass the outputs of a function to a sink."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eos import hotloop
from eos.app.results import Normalise
from eos.encoding.serde import Decode
from eos.errors import raise_if_interrupted
from eos.hotloop.python import Target
from eos.records import Each, Feed, FeedResult, Record, Send, Sink


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


def send_to(send: Send, sink: Sink) -> None:
    topic, value, key, partition, timestamp_ms, headers = send
    try:
        sink.produce(topic, value, key, partition, None, None, timestamp_ms, headers)
    except Exception as error:  # noqa: BLE001 - the sink decides
        sink.on_produce_error(error, send)


def one_by_one(outputs: Callable[[Record], Sequence[Send]]) -> Each:
    def each(records: list[Record]) -> Iterator[Sequence[Send]]:
        # This is a generator and not map(), because a StopIteration from a user's function would silently end a loop
        # over map().
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
