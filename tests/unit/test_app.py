"""The App, without Kafka: the outputs of a record, and refused definitions."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eos.testing
from eos.app.definition import App
from eos.app.policies import dlq, stop
from eos.app.routes import Route
from eos.app.state import State
from eos.encoding.serde import DecodeError
from eos.errors import ConfigurationError, IllegalState
from eos.hotloop.python import END_OF_TIME
from eos.records import KEEP, FeedResult, Out, Record, Send


class Flight(msgspec.Struct):
    carrier: str
    number: int
    dep_delay: float | None = None


class Late(msgspec.Struct):
    carrier: str
    minutes: float


@dataclasses.dataclass
class Plane:
    tail: str


class Point(NamedTuple):
    x: int
    y: int


RECORD = Record("in", 3, 42, 1700, b"key", b'{"carrier":"UA","number":7,"dep_delay":20.0}', [("h", b"1")])


def route(function: Callable[[Any], Any], to: str | Sequence[str] = "out") -> Route:
    app = App("app")
    app.process("in", to=to)(function)
    return app.routes["in"]


def batch_route(function: Callable[[list[Record]], Any], to: str | Sequence[str] = "out") -> Route:
    app = App("app")
    app.process_batch("in", to=to)(function)
    return app.routes["in"]


def outputs(result: object, record: Record = RECORD, to: str | Sequence[str] = "out") -> list[Send]:
    """Return the sends of a single-record function that returns `result`."""
    made = route(lambda _: result, to)
    return same_by_both_ways(lambda: list(made.outputs(record)), made, [record])


def outputs_batch(result: object, to: str | Sequence[str] = "out") -> list[Send]:
    made = batch_route(lambda _: result, to)
    return same_by_both_ways(lambda: made.outputs_batch([RECORD]), made, [RECORD])


def same_by_both_ways(outputs: Callable[[], list[Send]], made: Route, records: list[Record]) -> list[Send]:
    """Check that `outputs` returns (or raises) exactly what `feed` produces (or stops at)."""
    put, fed = feed(made, records)
    if fed.error is not None:
        assert (put, fed.sent, fed.handled) == ([], 0, 0)
        with pytest.raises(type(fed.error), match=re.escape(str(fed.error))):
            outputs()
        raise fed.error
    expected = outputs()
    assert (put, fed) == (expected, FeedResult(len(expected), len(records), None))
    return expected


def feed(made: Route, records: list[Record], full_at: Iterable[int] = ()) -> tuple[list[Send], FeedResult]:
    """Feed the records to a collecting produce(), which raises BufferError for the sends numbered in `full_at`."""
    put: list[Send] = []
    full = set(full_at)

    def produce(
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int = -1,
        _: None = None,
        __: None = None,
        time: int = 0,
        headers: Any = None,
    ) -> None:
        if len(put) in full:
            raise BufferError("full")
        put.append((topic, value, key, partition, time, headers))

    def on_produce_error(error: Exception, send: Send) -> None:
        assert isinstance(error, BufferError)
        put.append(send)

    return put, made.feed(records, SimpleNamespace(produce=produce, on_produce_error=on_produce_error))


def sent(value: bytes | None, **changes: object) -> Send:
    """Return the Send of a bare value returned for RECORD, with changes."""
    send = {"topic": "out", "value": value, "key": b"key", "partition": -1, "timestamp": 1700, "headers": None}
    return tuple({**send, **changes}.values())  # type: ignore[return-value]


header_lists = st.lists(
    st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.none() | st.binary()),
    min_size=1,
)


# --------------------------------------------------------------------------------------------- Record and Out


def test_record_without_headers_has_empty_sequence() -> None:
    assert list(Record("t", 0, 0, -1, None, None).headers) == []


def test_record_is_positional_and_immutable() -> None:
    assert (RECORD.topic, RECORD.partition, RECORD.offset, RECORD.timestamp) == ("in", 3, 42, 1700)
    assert (RECORD.key, RECORD.headers) == (b"key", [("h", b"1")])
    with pytest.raises(AttributeError):
        RECORD.value = b""  # type: ignore[misc]


def test_record_and_out_are_not_tracked_by_gc() -> None:
    assert Record.__struct_config__.gc is False
    assert Out.__struct_config__.gc is False


@pytest.mark.parametrize("closed", [Record, Out])
def test_record_and_out_cannot_be_subclassed(closed: type) -> None:
    with pytest.raises(TypeError, match="cannot be subclassed"):
        type(closed)("Sub", (closed,), {})


def test_record_out_copies_key_and_timestamp_but_not_headers() -> None:
    assert RECORD.out(b"v") == Out(b"v", key=b"key", timestamp=1700)
    assert RECORD.out(b"v", key=KEEP).key == b"key"


def test_record_out_uses_given_arguments() -> None:
    out = RECORD.out(b"v", key=None, topic="t", headers=[("a", None)], partition=2)
    assert out == Out(b"v", None, "t", [("a", None)], 2, 1700)


def test_record_out_with_unknown_timestamp_uses_the_time_of_sending() -> None:
    assert Record("t", 0, 0, -1, b"k", b"v").out(b"v").timestamp == 0


def test_keep_is_the_same_object_after_copying_and_pickling() -> None:
    assert copy.deepcopy(KEEP) is KEEP
    assert pickle.loads(pickle.dumps(KEEP)) is KEEP
    assert Out(b"").key is KEEP
    assert "KEEP" in repr(Out(b""))


# --------------------------------------------------------------------------------------- what a function gets


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, "é".encode(), "é"),
        (dict, b'{"a":1}', {"a": 1}),
        (Flight, b'{"carrier":"UA","number":1}', Flight("UA", 1)),
        (Plane, b'{"tail":"N1"}', Plane("N1")),
        (list[int], b"[1]", [1]),
        (Flight | None, None, None),
        (bytes | None, None, None),
        ("Flight", b'{"carrier":"UA","number":1}', Flight("UA", 1)),
    ],
)
def test_annotation_selects_decoder(annotation: object, value: bytes | None, expected: object) -> None:
    seen = []

    def f(argument): seen.append(argument)  # type: ignore[no-untyped-def]  # fmt: skip

    f.__annotations__["argument"] = annotation
    assert route(f).outputs(Record("in", 0, 0, 0, None, value)) == ()
    assert seen == [expected]


def test_record_annotation_passes_record_even_for_tombstone() -> None:
    def annotated(record: Record) -> None: seen.append(record)  # fmt: skip

    def optional(record: Record | None) -> None: seen.append(record)  # fmt: skip

    def bare(record): seen.append(record)  # type: ignore[no-untyped-def]  # fmt: skip

    for f in (annotated, optional, bare):
        seen: list[Record | None] = []
        for record in (RECORD, Record("in", 0, 0, 0, b"k", None)):
            route(f).outputs(record)
            assert seen.pop() is record


def test_decode_error_is_raised_before_function_call() -> None:
    def f(flight: Flight) -> None:
        raise AssertionError

    for value in (b"", b"{}", None):
        with pytest.raises(DecodeError):
            route(f).outputs(Record("in", 0, 0, 0, b"k", value))


def test_local_types_of_defining_function_resolve() -> None:
    class Local(msgspec.Struct):
        a: int

    app = App("app")

    @app.process("in", to="out")
    def f(value: Local) -> bytes:
        return str(value.a).encode()

    assert app.routes["in"].outputs(Record("in", 0, 0, 0, None, b'{"a":5}')) == (("out", b"5", None, -1, 0, None),)


def test_unresolvable_annotation_is_refused_at_decoration() -> None:
    def unresolved(value: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
    def undecodable(value: asyncio.Queue[int]) -> None: ...

    with pytest.raises(ConfigurationError, match="'Nowhere' of unresolved"):
        route(unresolved)
    with pytest.raises(ConfigurationError, match="no decoder"):
        route(undecodable)


def test_list_of_records_needs_process_batch() -> None:
    def f(records: list[Record]) -> None: ...

    with pytest.raises(ConfigurationError, match="decorate with process_batch"):
        route(f)


# ------------------------------------------------------------------------------------ what a function returns


def test_none_result_sends_nothing() -> None:
    assert outputs(None) == []


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (b"v", b"v"), (b"", b""), (bytearray(b"v"), b"v"), ("é", "é".encode()),
        (Late("UA", 1.5), b'{"carrier":"UA","minutes":1.5}'), ({"a": 1}, b'{"a":1}'), ({}, b"{}"),
        (Plane("N1"), b'{"tail":"N1"}'), (5, b"5"), (Point(1, 2), b"[1,2]"), (False, b"false"),
    ],
)  # fmt: skip
def test_bare_value_keeps_key_and_timestamp_but_not_headers(value: object, encoded: bytes) -> None:
    assert outputs(value) == [sent(encoded)]
    assert outputs(Out(value)) == [sent(encoded)]
    assert outputs([value]) == [sent(encoded)]


def test_contract_example_sends_only_late_flights() -> None:
    def late(flight: Flight) -> Late | None:
        if (flight.dep_delay or 0) > 15:
            return Late(flight.carrier, flight.dep_delay or 0)
        return None

    assert route(late).outputs(RECORD) == (sent(b'{"carrier":"UA","minutes":20.0}'),)
    assert route(late).outputs(Record("in", 0, 0, 0, None, b'{"carrier":"UA","number":1}')) == ()


def test_null_key_is_kept_and_unknown_timestamp_is_replaced() -> None:
    record = Record("in", 0, 0, -1, None, b"v")

    def typed(value: bytes) -> bytes:
        return value

    for result in (b"v", "v", Out(b"v"), [b"v"]):
        assert outputs(result, record) == [sent(b"v", key=None, timestamp=0)]
    assert list(route(typed).outputs(record)) == [sent(b"v", key=None, timestamp=0)]


def test_out_none_is_a_tombstone() -> None:
    assert outputs(Out(None)) == [sent(None)]
    assert outputs([Out(None), None]) == [sent(None)]
    assert outputs(Out(None, key=b"k")) == [sent(None, key=b"k")]


@pytest.mark.parametrize(
    ("key", "encoded"),
    [(KEEP, b"key"), (None, None), (b"k", b"k"), ("é", "é".encode()), (5, b"5"), ({"b": 1, "a": 2}, b'{"a":2,"b":1}')],
)
def test_out_key_is_kept_null_or_encoded(key: object, encoded: bytes | None) -> None:
    assert outputs(Out(b"v", key=key)) == [sent(b"v", key=encoded)]


@pytest.mark.parametrize(("timestamp", "expected"), [(KEEP, 1700), (0, 0), (5, 5), (END_OF_TIME - 1, END_OF_TIME - 1)])
def test_out_timestamp_is_kept_or_set(timestamp: Any, expected: int) -> None:
    assert outputs(Out(b"v", timestamp=timestamp)) == [sent(b"v", timestamp=expected)]


@pytest.mark.parametrize(("partition", "expected"), [(None, -1), (0, 0), (7, 7)])
def test_out_partition_is_set_or_left_to_partitioner(partition: int | None, expected: int) -> None:
    assert outputs(Out(b"v", partition=partition)) == [sent(b"v", partition=expected)]


@pytest.mark.parametrize(
    ("out", "error", "sentence"),
    [
        (Out(b"", timestamp=1.5), TypeError, "timestamp .* 1.5 is not an int"),  # type: ignore[arg-type]
        (Out(b"", timestamp=-1), ValueError, "timestamp .* -1 is not in"),
        (Out(b"", timestamp=2**70), ValueError, "is after the year 9999 in milliseconds: use"),
        (Out(b"", timestamp=1_700_000_000_000_000), ValueError, r"in microseconds it is 2023-11-14 22:13:20 UTC"),
        (Out(b"", timestamp=1_700_000_000 * 10**9), ValueError, r"in nanoseconds it is 2023-11-14 22:13:20 UTC"),
        (Out(b"", timestamp=None), TypeError, "timestamp"),  # type: ignore[arg-type]
        (Out(b"", partition="1"), TypeError, "partition '1' is not an int"),  # type: ignore[arg-type]
        (Out(b"", partition=-1), ValueError, "partition -1 is not in"),
        (Out(b"", partition=2**31), ValueError, "partition"),
        (Out(b"", headers=[("a",)]), TypeError, "header"),  # type: ignore[list-item]
        (Out(b"", headers=[(b"a", b"")]), TypeError, "header"),  # type: ignore[list-item]
        (Out(b"", headers={"a": 5}), TypeError, "header 'a' is of type int, not bytes, str or None"),  # type: ignore[dict-item]
        (Out(b"", headers=[("\ud800", b"")]), ValueError, "surrogates"),
        (Out(b"", headers=[("a\0b", b"")]), ValueError, "contains NUL"),
        (Out(b"", key="\ud800"), ValueError, "surrogates"),
        (Out(object()), TypeError, "a object cannot be sent"),
        (Out(b"", key=object()), TypeError, "a object cannot be sent"),
        (Out(Out(b"")), TypeError, "a value of type Out cannot be sent"),
    ],
)  # fmt: skip
def test_invalid_out_raises_with_its_record(out: Out, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        outputs(out)
    with pytest.raises(error, match=sentence):
        said = {name: 0 for name in ("key", "timestamp") if getattr(out, name) is KEEP}
        outputs_batch([msgspec.structs.replace(out, **said)])


def test_error_for_a_returned_record_suggests_record_out() -> None:
    for result in (RECORD, [RECORD], Out(RECORD)):
        with pytest.raises(TypeError, match=r"use record.out\(record.value\)"):
            outputs(result)


@given(header_lists)
def test_out_headers_are_sent_in_order_with_duplicates(headers: list[tuple[str, bytes | None]]) -> None:
    assert outputs(Out(b"v", headers=headers)) == [sent(b"v", headers=headers)]
    assert outputs(Out(b"v", headers=tuple(headers))) == [sent(b"v", headers=headers)]
    assert outputs(Out(b"v", headers=dict(headers))) == [sent(b"v", headers=list(dict(headers).items()))]
    assert outputs_batch([RECORD.out(b"v", headers=headers)]) == [sent(b"v", headers=headers)]


def test_out_header_values_may_be_str_and_empty_headers_are_none() -> None:
    assert outputs(Out(b"v", headers=[("a", "é")])) == [sent(b"v", headers=[("a", "é".encode())])]
    assert outputs(Out(b"v", headers=[])) == outputs(Out(b"v", headers={})) == [sent(b"v")]


def test_iterable_of_results_sends_several_outputs() -> None:
    items = [b"a", None, Out("b", key=None), {"c": 1}]
    expected = [sent(b"a"), sent(b"b", key=None), sent(b'{"c":1}')]
    assert len(expected) == 3
    makers: list[Callable[[], object]] = [
        lambda: items,
        lambda: tuple(items),
        lambda: (i for i in items),
        lambda: iter(items),
        lambda: itertools.chain(items),
    ]
    for make in makers:
        made = route(lambda _, make=make: make())
        assert same_by_both_ways(lambda made=made: list(made.outputs(RECORD)), made, [RECORD]) == expected


def test_only_the_outermost_list_is_split_into_outputs() -> None:
    assert outputs([[1, 2], (3,), Out([4])]) == [sent(b"[1,2]"), sent(b"[3]"), sent(b"[4]")]


def test_failing_generator_sends_nothing() -> None:
    def f(record: Record) -> Iterator[bytes]:
        yield b"a"
        raise LookupError("half way")

    with pytest.raises(LookupError, match="half way"):
        route(f).outputs(RECORD)


def test_function_error_is_raised_unchanged() -> None:
    def f(record: Record) -> bytes:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        route(f).outputs(RECORD)


@given(st.lists(st.none() | st.binary() | st.text()), st.none() | st.binary(), st.integers(-1, END_OF_TIME - 1))
def test_equal_results_of_different_types_send_equal_outputs(
    values: list[bytes | str | None], key: bytes | None, timestamp: int
) -> None:
    record = Record("in", 0, 0, timestamp, key, b"")
    expected = [send for value in values for send in outputs(value, record)]
    assert len(expected) == sum(value is not None for value in values)
    assert outputs(values, record) == expected
    assert outputs([None if v is None else Out(v) for v in values], record) == expected
    assert outputs([None if v is None else record.out(v) for v in values], record) == expected
    assert outputs_batch([None if v is None else record.out(v) for v in values]) == expected


# ----------------------------------------------------------------------------------------------- destinations


def test_first_destination_is_default_and_out_may_name_others() -> None:
    to = ["first", "second"]
    assert outputs(b"v", to=to) == [sent(b"v", topic="first")]
    assert outputs(Out(b"v", topic="second"), to=to) == [sent(b"v", topic="second")]
    assert outputs_batch([RECORD.out(b"v"), RECORD.out(b"v", topic="second")], to=to) == [
        sent(b"v", topic="first"),
        sent(b"v", topic="second"),
    ]


def test_undeclared_topic_is_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"'other', which is not in its to= \('out'\)"):
        outputs(Out(b"v", topic="other"))
    with pytest.raises(ConfigurationError, match="'other'"):
        outputs_batch([RECORD.out(b"v", topic="other")])
    with pytest.raises(ConfigurationError, match=r"\(empty\)"):
        outputs(Out(b"v", topic="other"), to=())


@pytest.mark.parametrize("result", [b"v", "v", Out(b"v"), Out(None), [b"v"], {"a": 1}])
def test_function_without_destination_may_return_only_none(result: object) -> None:
    with pytest.raises(ConfigurationError, match="no destination"):
        outputs(result, to=())


def test_batch_function_without_destination_may_return_only_none() -> None:
    with pytest.raises(ConfigurationError, match="no destination"):
        outputs_batch([RECORD.out(b"v")], to=())
    assert outputs_batch(None, to=()) == outputs_batch([], to=()) == []


OUT_AS_TEXT = "Iterator[Out | None]"


@pytest.mark.parametrize(
    "returned", [bytes, "bytes", bytes | None, "Total | None", Iterator[bytes], OUT_AS_TEXT, list[Out], "'Out'", bool]
)
@pytest.mark.parametrize("batch", [False, True])
def test_annotated_result_without_destination_is_refused(returned: object, batch: bool) -> None:
    app = App("app")
    define = app.process_batch if batch else app.process

    def totals(given): ...

    totals.__annotations__ = {"return": returned}
    sentence = r'^totals returns .+ by its annotation, but has no destination: name one with to="topic", or '
    with pytest.raises(ConfigurationError, match=sentence):
        define("in")(totals)
    assert app.routes == {}
    define("in", to="out")(totals)


@pytest.mark.parametrize(
    "returned",
    [None, "None", Any, "typing.Any", object, Iterator[None], "Iterator[None]", "Generator[None, int, str]", Ellipsis],
)
def test_function_annotated_to_return_none_needs_no_destination(returned: object) -> None:
    app = App("app")

    def watch(value): ...

    async def watch_slowly(value): ...

    for number, function in enumerate((watch, watch_slowly)):
        function.__annotations__ = {} if returned is Ellipsis else {"return": returned}
        app.process(f"in-{number}")(function)
    assert len(app.routes) == 2


def test_generator_without_destination_runs_to_its_end() -> None:
    seen = []

    def f(value: bytes) -> Iterator[None]:
        yield None
        seen.append(value)

    assert list(route(f, to=()).outputs(Record("in", 0, 0, 0, None, b"v"))) == []
    assert seen == [b"v"]


# ---------------------------------------------------------------------------------------------------- batches


def test_batch_function_gets_list_and_sends_yielded_outs() -> None:
    def f(records: list[Record]) -> Iterator[Out | None]:
        for record in records:
            yield None if record.offset == 1 else record.out(record.value)

    records = [Record("in", 0, offset, 10 + offset, b"%d" % offset, b"v") for offset in range(3)]
    assert batch_route(f).outputs_batch(records) == [
        ("out", b"v", b"0", -1, 10, None),
        ("out", b"v", b"2", -1, 12, None),
    ]


def test_batch_out_needs_a_key() -> None:
    assert outputs_batch([Out("v", key=None, timestamp=0)]) == [sent(b"v", key=None, timestamp=0)]
    assert outputs_batch([Out(b"v", key="k", timestamp=5, partition=1)]) == [
        sent(b"v", key=b"k", timestamp=5, partition=1)
    ]
    assert outputs_batch([Out(None, key=b"k", timestamp=0)]) == [sent(None, key=b"k", timestamp=0)]


@pytest.mark.parametrize("value", [b"v", "v", 5, {"a": 1}, [RECORD.out(b"v")], RECORD])
def test_error_for_a_bare_value_of_a_batch_suggests_record_out(value: object) -> None:
    with pytest.raises(TypeError, match=r"bare .*use record.out\(value\) or Out\(value, key="):
        outputs_batch([RECORD.out(b"v"), value])


@pytest.mark.parametrize("result", [b"", "", {}, Out(b"v", key=b"k"), 5, RECORD])
def test_batch_function_must_return_iterable_of_out(result: object) -> None:
    with pytest.raises(TypeError, match="a batch function returns an iterable of Out"):
        outputs_batch(result)


def test_failing_batch_sends_nothing() -> None:
    def f(records: list[Record]) -> Iterator[Out]:
        yield records[0].out(b"v")
        raise LookupError

    with pytest.raises(LookupError):
        batch_route(f).outputs_batch([RECORD])


def test_batch_route_can_run_record_by_record() -> None:
    def f(records: list[Record]) -> list[Out]:
        return [record.out(len(records)) for record in records]

    assert batch_route(f).batch is True
    assert list(batch_route(f).outputs(RECORD)) == [sent(b"1")]


def test_single_route_refuses_a_batch() -> None:
    single = route(lambda record: record.value)
    assert single.batch is False
    with pytest.raises(IllegalState, match="one record at a time"):
        single.outputs_batch([RECORD])


def test_feed_sends_all_outputs_in_order_with_full_queue() -> None:
    records = [Record("in", 0, i, i, b"k%d" % i, b"%d" % i) for i in range(6)]
    results: list[object] = [b"a", None, [b"b", "c"], Out(b"d", key=b"x"), {"e": 1}, b"f"]
    made = route(lambda record: results[record.offset])
    expected = [send for record in records for send in made.outputs(record)]
    for full_at in ([], [0], [1, 2, 3], range(9)):
        assert feed(made, records, full_at) == (expected, FeedResult(6, 6, None))


def test_batch_feed_sends_all_outputs_in_order_with_full_queue() -> None:
    records = [Record("in", 0, i, i, b"k%d" % i, b"%d" % i) for i in range(4)]
    plain = batch_route(lambda records: [record.out(b"v") for record in records])
    mixed = batch_route(lambda records: (record.out("v", headers={"h": "1"}) for record in records))
    for made in (plain, mixed):
        for full_at in ([], [0], [3], range(9)):
            assert feed(made, records, full_at) == (made.outputs_batch(records), FeedResult(4, 4, None))


def test_feed_stops_at_failed_record_without_its_outputs() -> None:
    def half(record: Record) -> Iterator[bytes]:
        yield b"first"
        if record.offset == 2:
            raise ValueError("no")
        yield b"second"

    put, fed = feed(route(half), [Record("in", 0, offset, value=b"") for offset in range(4)])
    assert (len(put), fed.sent, fed.handled, str(fed.error)) == (4, 4, 2, "no")


def test_batch_feed_with_a_wrong_output_sends_nothing() -> None:
    def last_is_wrong(records: list[Record]) -> Iterator[object]:
        yield from (record.out(b"v") for record in records)
        yield b"bare"

    put, fed = feed(batch_route(last_is_wrong), [RECORD, RECORD])
    assert (put, fed.sent, fed.handled, type(fed.error)) == ([], 0, 0, TypeError)


def fed_until_2(made: Route, records: list[Record]) -> FeedResult:
    """The client refuses the value 2 permanently."""

    def produce(topic: str, value: bytes | None, *rest: object) -> None:
        if value == b"2":
            raise RuntimeError("broken")

    def on_produce_error(error: Exception, send: Send) -> None:
        raise IllegalState("no more") from error

    return made.feed(records, SimpleNamespace(produce=produce, on_produce_error=on_produce_error))


def test_feed_stops_at_produce_error_and_counts_earlier_outputs() -> None:
    records = [Record("in", 0, i, 0, b"k", b"%d" % i) for i in range(5)]
    as_they_are = batch_route(lambda records: [record.out(record.value) for record in records])
    for made, handled in ((route(lambda record: record.value), 2), (as_they_are, 0)):
        fed = fed_until_2(made, records)
        assert (fed.sent, fed.handled, type(fed.error)) == (2, handled, IllegalState)


def test_feed_counts_outputs_sent_before_a_produce_error() -> None:
    """The client has these sends, so an abort must know of them."""
    made = route(lambda record: [b"1", b"2", b"3"] if record.offset else [b"0"])
    fed = fed_until_2(made, [Record("in", 0, i, 0, b"k", b"v") for i in range(2)])
    assert (fed.sent, fed.handled, type(fed.error)) == (2, 1, IllegalState)


def test_batch_function_may_change_its_list() -> None:
    def empties(records: list[Record]) -> list[Out]:
        return [records.pop().out(b"v") for _ in range(len(records))]

    records = [RECORD, RECORD]
    put, fed = feed(batch_route(empties), records)
    assert (len(put), fed, len(records)) == (2, FeedResult(2, 2, None), 2)


def test_batch_annotation_accepts_types_of_a_list_of_records() -> None:
    def a(records: list[Record]) -> None: ...
    def b(records: Sequence[Record]) -> None: ...
    def c(records: Iterable[Record]) -> None: ...
    def d(records): ...  # type: ignore[no-untyped-def]
    def e(records: list) -> None: ...  # type: ignore[type-arg]

    for f in (a, b, c, d, e):
        assert batch_route(f).outputs_batch([]) == []


def test_batch_annotation_of_other_type_is_refused() -> None:
    def a(records: Record) -> None: ...
    def b(records: list[Flight]) -> None: ...
    def c(records: dict[str, Record]) -> None: ...

    for f in (a, b, c):
        with pytest.raises(ConfigurationError, match=r"a batch function gets a list\[Record\]"):
            batch_route(f)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ definitions


def test_decorators_return_function_unchanged() -> None:
    app = App("app")

    def single(record: Record) -> bytes | None:
        return record.value

    def batch(records: list[Record]) -> list[Out]:
        return []

    assert app.process("a", to="out")(single) is single
    assert app.process_batch("b", to="out")(batch) is batch


def test_app_lists_routes_topics_and_destinations() -> None:
    app = App("late-flights_1.x")

    @app.process(["a", "b", "a"], to=["x", "y"])
    def single(record: Record) -> None: ...

    @app.process_batch("c", to="y")
    def batch(records: list[Record]) -> None: ...

    @app.process("d")
    def sink(record: Record) -> None: ...

    assert app.id == "late-flights_1.x"
    assert app.topics == list(app.routes) == ["a", "b", "c", "d"]
    assert app.destinations == {"x", "y"}
    assert app.routes["a"] is app.routes["b"]
    assert (app.routes["a"].sources, app.routes["a"].destinations) == (("a", "b"), ("x", "y"))
    assert [app.routes[t].batch for t in app.topics] == [False, False, True, False]
    assert (app.routes["a"].function, app.routes["a"].on_error) == (single, stop)
    assert (
        repr(app)
        == "App('late-flights_1.x', [<Route single: a, b -> x, y>, <Route batch: c -> y>, <Route sink: d -> nothing>])"
    )


@pytest.mark.parametrize("id", ["", " ", "a b", "a/b", "é", "a\n", ".", "..", "a" * 250, None, 5])
def test_illegal_app_id_is_refused(id: Any) -> None:
    with pytest.raises(ConfigurationError, match="the id of an App must be"):
        App(id)


@given(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}", fullmatch=True))
def test_legal_app_id_is_accepted(id: str) -> None:
    assert App(id).id == id


@pytest.mark.parametrize("topic", ["", "a b", "a,b", ".", "a" * 250, None, 5, b"a", ["a", ""], [None]])
def test_illegal_topic_is_refused(topic: Any) -> None:
    app = App("app")
    for decorator in (app.process, app.process_batch):
        with pytest.raises(ConfigurationError, match="a source topic must be"):
            decorator(topic, to="out")
        with pytest.raises(ConfigurationError, match="a destination topic must be"):
            decorator("in", to=topic)


def test_decorator_without_topics_or_brackets_is_refused() -> None:
    app = App("app")
    with pytest.raises(ConfigurationError, match="at least one source topic"):
        app.process([])
    with pytest.raises(ConfigurationError, match=r'@app.process\("topic"'):
        app.process(lambda record: None)  # type: ignore[arg-type]


def test_second_function_of_a_topic_is_refused_without_side_effect() -> None:
    app = App("app")

    @app.process("a", to="out")
    def first(record: Record) -> None: ...

    def second(record: Record) -> None: ...

    with pytest.raises(ConfigurationError, match="'a' has two functions, first and second"):
        app.process(["b", "a"], to="out")(second)
    assert app.topics == ["a"]
    assert app.routes["a"].function is first


Steps = list[tuple[str, str | list[str]]]


def chained(steps: Steps, **more: Any) -> App:
    def f(record: Record) -> None: ...

    app = App("app")
    for source, to in steps[:-1]:
        app.process(source, to=to)(f)
    before = dict(app.routes)
    try:
        app.process(steps[-1][0], to=steps[-1][1], **more)(f)
    except ConfigurationError:
        assert app.routes == before
        raise
    return app


@pytest.mark.parametrize(
    ("steps", "circle"),
    [
        ([("a", "a")], "a -> a"),
        ([("a", "b"), ("b", "a")], "a -> b -> a"),
        ([("x", "a"), ("a", "b"), ("b", ["y", "c"]), ("c", ["z", "a"])], "a -> b -> c -> a"),
        ([("a.dlq", "a"), ("a", "b")], "a.dlq -> a -> a.dlq"),
    ],
)
def test_cycle_of_topics_is_refused(steps: Steps, circle: str) -> None:
    with pytest.raises(ConfigurationError, match=f"reads and writes {circle}: in this cycle"):
        chained(steps, on_error=dlq)


@pytest.mark.parametrize(
    ("steps", "between"),
    [
        ([("a", "b"), ("b", "c")], {"b"}),
        ([("b", "c"), ("a", ["x", "b"])], {"b"}),
        ([("a", ["b", "c"]), ("b", "d"), ("c", "d"), ("d", "e")], {"b", "c", "d"}),
        ([("a", "b"), ("c", "d")], set()),
    ],
)
def test_chained_functions_are_allowed(steps: Steps, between: set[str]) -> None:
    assert chained(steps).chained == between


@pytest.mark.parametrize("function", [5, None, "f", lambda: None, lambda a, b: None])
def test_function_without_single_argument_is_refused(function: Any) -> None:
    with pytest.raises(ConfigurationError):
        route(function)


def test_check_refuses_only_an_app_without_functions() -> None:
    app = App("app")
    with pytest.raises(ConfigurationError, match="'app' has no function"):
        app.check()
    app.process("in")(lambda record: None)
    app.check()


# A module-level App, as users write it: pickle finds its function by name.
pickled = App("pickled")


@pickled.process(["a", "b"], to="out")
def of_flight(flight: Flight) -> str:
    return flight.carrier


@pickled.process_batch("c", to="out")
def of_batch(records: list[Record]) -> list[Out]:
    return [record.out(b"v") for record in records]


def test_app_survives_pickling() -> None:
    copied = copy.deepcopy(pickled)  # by __reduce__, like pickle, which cannot import this test module by name
    assert copied.topics == ["a", "b", "c"]
    assert copied.routes["a"] is copied.routes["b"]
    assert copied.routes["a"].outputs(RECORD) == (sent(b"UA"),)
    assert copied.routes["c"].outputs_batch([RECORD]) == [sent(b"v")]


def test_rerun_notebook_cell_replaces_function_and_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    main, app = types.ModuleType("__main__"), App("a")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__dict__["app"] = app

    def cell(topic: str, to: str, value: int) -> None:
        code = f"@app.process('{topic}', to='{to}')\ndef f(record): return b'{value}'\n"
        exec(f"{code}@app.on_start\ndef hello(): return {value}", main.__dict__)  # as a notebook does

    cell("in", "out", 1)
    cell("in", "out", 2)
    cell("^in-.*", "out", 3)
    cell("in", "out", 4)
    assert [(route.name, list(app.routes), app.patterns) for route in app.functions] == [("f", ["in"], {})]
    assert [hook() for hook in app.start_hooks] == [4]
    with pytest.raises(ConfigurationError, match="in -> in: in this cycle"):
        cell("in", "in", 5)
    assert list(app.routes) == ["in"], "a refused definition leaves the App unchanged"
    exec("class Call:\n    def __call__(self): ...\nfor _ in range(2): app.on_stop(Call())", main.__dict__)
    exec("for _ in range(2): app.on_stop(lambda: None)", main.__dict__)
    assert len(app.stop_hooks) == 4, "a hook without a name of its own replaces no other"
    main.__file__ = "script.py"
    with pytest.raises(ConfigurationError, match="'in' has two functions, f and f"):
        cell("in", "out", 6)


def beside_record(flight: Flight, record: Record) -> str:
    return f"{flight.number} {record.offset}"


def in_record(record: Record[Flight]) -> Out:
    return record.out(record.value.number, key=record.value.carrier)


def in_record_or_none(record: Record[Flight | None]) -> str:
    return "gone" if record.value is None else record.value.carrier


async def at_once(flight: Flight, record: Record) -> str:
    return f"{flight.number} {record.offset}"


def each(flight: Flight, record: Record) -> Iterator[str]:
    yield f"{flight.number} {record.offset}"


@pytest.mark.parametrize(
    ("function", "value", "key"),
    [
        (beside_record, b"7 42", b"key"),
        (at_once, b"7 42", b"key"),
        (each, b"7 42", b"key"),
        (in_record, b"7", b"UA"),
        (in_record_or_none, b"UA", b"key"),
    ],
)
def test_second_parameter_gets_record_with_decoded_value(
    function: Callable[..., Any], value: bytes, key: bytes
) -> None:
    made = pickle.loads(pickle.dumps(route(function)))
    assert [send[:3] for send in made.outputs(RECORD)] == [("out", value, key)]
    sent: list[Any] = []
    sink = SimpleNamespace(produce=lambda *send: sent.append(send[:3]), on_produce_error=None)
    assert made.feed([RECORD], sink).error is None
    assert sent == [("out", value, key)]
    wrong = msgspec.structs.replace(RECORD, value=b"{}")
    with pytest.raises(DecodeError):
        made.outputs(wrong)


def test_second_parameter_gets_record_with_value_and_state() -> None:
    app = App("app")

    @app.process("in", to="out")
    def count(value: str, record: Record, seen: State[int]) -> str:
        seen.set(seen.get(0) + 1)
        return f"{value} {record.offset} {seen.get()}"

    ran = eos.testing.run(app, [("in", "a", "k"), ("in", "b", "k")])
    assert ran.values("out") == [b"a 0 1", b"b 1 2"]


def test_second_parameter_gets_record_with_tombstone_or_custom_decoder() -> None:
    assert route(in_record_or_none).outputs(msgspec.structs.replace(RECORD, value=None))[0][1] == b"gone"
    app = App("app")

    @app.process("in", to="out", decode=lambda value: len(value))
    def length(given: int, record: Record) -> str:
        return f"{given} {record.offset}"

    assert app.routes["in"].outputs(RECORD)[0][1] == b"44 42"
