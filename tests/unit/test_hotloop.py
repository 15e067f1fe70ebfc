"""The compiled hot loop against the Python one: the same results and calls in the same order, no reference lost."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from confluent_kafka import KafkaError, Message, Producer
from hypothesis import given, settings
from hypothesis import strategies as st

import eos
from eos import App, hotloop
from eos.encoding.serde import DecodeError
from eos.engine.handling import Collector
from eos.errors import ConfigurationError
from eos.hotloop import python
from eos.records import KEEP, Out, Record

try:
    from eos.hotloop import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

BOTH = [
    pytest.param(python, id="python"),
    pytest.param(native, id="compiled", marks=pytest.mark.skipif(native is None, reason="no compiler was here")),
]
both = pytest.mark.parametrize("loop", BOTH)
compiled = pytest.mark.skipif(native is None, reason="no compiler was here")
reads = pytest.mark.parametrize("read", ["records_of", "fetched_of"])
FIELDS = Record.__struct_fields__


def fields_of(records: list[Any]) -> list[tuple[object, ...]]:
    return [tuple(getattr(record, name) for name in FIELDS) for record in records]


class Interrupt(BaseException):
    """A BaseException that is no Exception, and passes through."""


def message(offset: int = 7, **fields: Any) -> Message:
    given = {"topic": "in", "partition": 3, "key": b"k", "value": b"v", "timestamp": (1, 1_700_000_000_000)}
    return Message(**(given | {"offset": offset, "headers": None, "error": None} | fields))


def no_headers(message: Any, error: Exception) -> Any:
    raise error


# ---- records_of, fetched_of ---------------------------------------------------------------------------------------


@both
@reads
def test_messages_that_are_errors_are_skipped_and_the_order_is_kept(loop: Any, read: str) -> None:
    error = message(1, error=KafkaError(KafkaError._PARTITION_EOF))
    headed = message(2, headers=[("h", b"x")], key=None, value=None, timestamp=(0, -1))
    records = getattr(loop, read)([message(0), error, headed], Record, no_headers)
    assert fields_of(records) == [
        ("in", 3, 0, 1_700_000_000_000, b"k", b"v", ()),
        ("in", 3, 2, -1, None, None, [("h", b"x")]),
    ]
    makes_records = (loop, read) != (native, "fetched_of")
    assert [type(record) is Record for record in records] == [makes_records, makes_records]
    assert getattr(loop, read)([], Record, no_headers) == []


class Other:
    """An object with the interface of a Message, but of another type."""

    def __init__(self, real: Message, fails: str = "") -> None:
        self.real, self.fails = real, fails

    def __getattr__(self, name: str) -> Callable[[], object]:
        if name == self.fails:
            raise ValueError(name)
        return getattr(self.real, name)  # type: ignore[no-any-return]


@both
@reads
def test_foreign_messages_are_read_by_method_name(loop: Any, read: str) -> None:
    mixed = [Other(message(0)), message(1), Other(message(2))]
    records = getattr(loop, read)(mixed, Record, no_headers)
    assert [record.offset for record in records] == [0, 1, 2]
    records = getattr(loop, read)(mixed[1:], Record, no_headers)
    assert fields_of(records) == fields_of(python.records_of(mixed[1:], Record, no_headers))


@both
def test_fetched_records_keep_their_fields_when_other_messages_are_read(loop: Any) -> None:
    fetched = loop.fetched_of([message(0, timestamp=(1, 5))], Record, no_headers)
    loop.fetched_of([Late(topic="in", partition=0, offset=1)], Record, no_headers)
    assert fields_of(fetched) == [("in", 3, 0, 5, b"k", b"v", ())]
    with pytest.raises(AttributeError):
        fetched[0].other  # noqa: B018


class Heir(Message):
    """A subclass of Message, which the compiled loop must not treat as a plain Message."""


class Late(Message):
    """A Message whose getters return other values than its constructor got."""

    def timestamp(self) -> tuple[int, int]:
        kind, number = super().timestamp()
        return kind, number + 1

    def offset(self) -> int:
        return int(super().offset() or 0) + 1

    def partition(self) -> int:
        return int(super().partition() or 0) + 1

    def topic(self) -> str:
        return f"late {super().topic()}"

    def key(self) -> bytes:
        return b"late key"

    def value(self) -> bytes:
        return b"late value"


class Odd(Message):
    """A Message with a getter that is another getter of the client."""

    timestamp = Message.topic  # type: ignore[assignment]


class Hidden(Message):
    """A Message that never tells of its error."""

    def error(self) -> None:
        return None


class Counted(Message):
    """Creating an instance has an effect, so none is created to find the places of the fields."""

    made = 0

    def __init__(self, **fields: Any) -> None:
        type(self).made += 1
        super().__init__(**fields)


INT64 = st.integers(-(2**63), 2**63 - 1)
fields_of_message = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["in", "other"]),
        "partition": st.integers(-(2**31), 2**31 - 1),
        "offset": INT64,
        "timestamp": st.tuples(st.sampled_from([0, 1, 2]), INT64 | st.sampled_from([-1, 0, 1, 1_700_000_000_000])),
        "key": st.none() | st.binary(max_size=3),
        "value": st.none() | st.binary(max_size=3),
        "error": st.none() | st.just(KafkaError(KafkaError._PARTITION_EOF)),
    }
)


@both
@reads
@given(st.lists(st.tuples(st.sampled_from([Message, Heir, Late, Odd, Hidden, Counted]), fields_of_message)))
def test_fields_come_from_the_getters(loop: Any, read: str, made: list[tuple[type[Message], dict[str, Any]]]) -> None:
    messages = [kind(**fields) for kind, fields in made]
    before = Counted.made
    records = getattr(loop, read)(messages, Record, no_headers)
    assert Counted.made == before
    assert fields_of(records) == [
        (m.topic(), m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), ())
        for m in messages
        if m.error() is None
    ]


class Fields(msgspec.Struct, gc=False):
    topic: Any
    partition: Any
    offset: Any
    timestamp: Any
    key: Any
    value: Any
    headers: Any


Collected = msgspec.defstruct("Collected", FIELDS, frozen=True)  # as Record, but seen by the garbage collector
# Positional values fill the first field first.
Shuffled = msgspec.defstruct("Shuffled", (*FIELDS[-2::-1], "headers"), gc=False)
Named = msgspec.defstruct("Named", [(name, Any, None) for name in FIELDS], gc=False, kw_only=True)


class Wider(Fields, gc=False):
    more: int = 5


class Checked(Fields, gc=False):
    def __post_init__(self) -> None:
        if self.offset:
            self.topic = "checked"


class Slots:
    """A class with the same fields that is no Struct."""

    __slots__ = ("headers", "key", "offset", "partition", "timestamp", "topic", "value")

    def __init__(self, *fields: object) -> None:
        self.topic, self.partition, self.offset, self.timestamp, self.key, self.value, self.headers = fields
        if self.offset:
            self.topic = "checked"

    def __eq__(self, other: object) -> bool:
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)


def list_of(*fields: object) -> list[object]:
    return list(fields)


@both
@pytest.mark.parametrize("kind", [Collected, Shuffled, Wider, Checked, Slots, list_of, lambda *f: Record(*f)])
def test_other_record_type_is_created_by_calling_the_type(loop: Any, kind: Any) -> None:
    given = [message(0), message(1, key=None, headers=[("h", b"x")])]
    fields = [
        ("in", 3, 0, 1_700_000_000_000, b"k", b"v", ()),
        ("in", 3, 1, 1_700_000_000_000, None, b"v", [("h", b"x")]),
    ]
    made = [kind(*each) for each in fields]
    assert loop.records_of(given, kind, no_headers) == made
    assert [*map(gc.is_tracked, loop.records_of(given, kind, no_headers))] == [*map(gc.is_tracked, made)]
    with pytest.raises(TypeError):
        loop.records_of(given, Named, no_headers)


@both
@reads
@pytest.mark.parametrize("fails", ["error", "topic", "timestamp", "value", "headers"])
def test_getter_error_is_raised(loop: Any, read: str, fails: str) -> None:
    with pytest.raises(ValueError, match=fails):
        getattr(loop, read)([message(0), Other(message(1), fails)], Record, no_headers)


@both
@reads
def test_record_with_unreadable_headers_gets_replacement_headers(loop: Any, read: str) -> None:
    asked: list[tuple[object, str]] = []

    def others(message: Any, error: Exception) -> list[tuple[str, bytes]]:
        asked.append((message, str(error)))
        return [("other", b"x")]

    broken = Other(message(1), "headers")
    records = getattr(loop, read)([message(0), broken, message(2, headers=[("h", b"x")])], Record, others)
    assert [record.headers for record in records] == [(), [("other", b"x")], [("h", b"x")]]
    assert asked == [(broken, "headers")]


@both
def test_error_of_the_record_constructor_is_raised(loop: Any) -> None:
    def never(*_: object) -> None:
        raise LookupError("no record")

    with pytest.raises(LookupError):
        loop.records_of([message()], never, no_headers)


@both
@reads
def test_records_keep_the_topics_of_their_messages(loop: Any, read: str) -> None:
    topics = ["in", "in", "other", "in", "", "inn", "other", "other"]
    messages = [message(topic="".join(list(topic))) for topic in topics]
    assert [record.topic for record in getattr(loop, read)(messages, Record, no_headers)] == topics


# ---- runs_of ------------------------------------------------------------------------------------------------------


def placed(kind: Callable[..., Any], topic: str, partition: int, offset: int) -> Any:
    # Use equal values that are not the same object: topics are new strings, and partitions above 256 new numbers.
    where = {"topic": "".join([topic, "-in"]), "partition": partition + 0, "offset": offset}
    return kind(timestamp=0, key=None, value=None, **where) if kind is Record else kind(**where)


@both
@given(
    st.lists(
        st.tuples(
            st.sampled_from([Record, types.SimpleNamespace]),
            st.sampled_from("ab"),
            st.sampled_from([0, 1, 300]),
            st.sampled_from([-1, 0, 1, 2**40]),
        )
    )
)
def test_runs_begin_at_partition_change_or_offset_drop(loop: Any, made: list[tuple[Any, str, int, int]]) -> None:
    expected = [
        at for at, each in enumerate(made) if at == 0 or each[1:3] != made[at - 1][1:3] or each[3] <= made[at - 1][3]
    ]
    assert loop.runs_of([placed(*each) for each in made]) == expected


@both
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 1, 300]), st.sampled_from([0, 1, 2, 2**40]))))
def test_runs_of_fetched_records_are_those_of_records(loop: Any, made: list[tuple[str, int, int]]) -> None:
    messages = [message(topic=topic, partition=partition, offset=offset) for topic, partition, offset in made]
    fetched, records = (read(messages, Record, no_headers) for read in (loop.fetched_of, loop.records_of))
    expected = python.runs_of(records)
    assert loop.runs_of(fetched) == expected
    mixed = [(fetched, records)[at % 3 == 0][at] for at in range(len(made))]
    assert loop.runs_of(mixed) == expected


@both
@pytest.mark.parametrize("lacks", ["topic", "partition", "offset"])
def test_record_without_position_raises(loop: Any, lacks: str) -> None:
    where = {"topic": "in", "partition": 1, "offset": 1}
    del where[lacks]
    with pytest.raises(AttributeError, match=lacks):
        loop.runs_of([types.SimpleNamespace(topic="in", partition=1, offset=0), types.SimpleNamespace(**where)])


@compiled
def test_records_freed_during_comparison_are_not_touched() -> None:
    class Emptying:
        def __eq__(self, other: object) -> bool:
            records.clear()
            return True

        __hash__ = None  # type: ignore[assignment]

    records = [types.SimpleNamespace(topic="in", partition=Emptying(), offset=at) for at in range(9)]
    assert native.runs_of(records) == [0]


# ---- feed_values, feed_outs ---------------------------------------------------------------------------------------

HEADERS: tuple[Any, ...] = ((), [("a", b"1")], [("pass", b"1"), ("a", None), ("pass", b"2")], (("too", None),), [])
PASSING = frozenset({"pass", "too"})
PARTS: dict[str, list[Any]] = {
    "value": [b"v", "text", None, 5, "\ud800", Record("in", 0, 0), b"refuse"],
    "key": [KEEP, b"k", None, "text", 5, "\ud800", KEEP],
    "topic": [None, "out", "more", "unnamed", 5],
    "headers": [
        *HEADERS,
        [("pass", "own"), ("b", None)],
        {"h": b"x", "pass": None, "t": "text"},
        {},
        [("\ud841", b"x")],
        [("a\0b", b"x")],
        [("h", 5)],
        [["h", b"x"]],
        [("h",)],
        [(5, b"x")],
        types.MappingProxyType({"h": b"x"}),
    ],
    "partition": [None, 0, 2**31 - 1, 2**31, -1, True, "1"],
    "timestamp": [KEEP, 0, python.END_OF_TIME - 1, python.END_OF_TIME, 2**63, -1, True, 1.5, 10**12],
}


class Pair(NamedTuple):
    one: object
    two: object


class Lists(list[object]):
    """A subclass of list."""


class Texts(str):
    """A subclass of str."""


def generated(items: list[object]) -> Iterator[object]:
    for item in items:
        if item == "raise":
            raise ValueError("generator")
        yield item


# These functions build a result from items, once in each run.
SHAPES: dict[str, Callable[[list[object]], object]] = {
    "one": lambda items: items[0] if items else None,
    "list": list,
    "tuple": tuple,
    "generator": generated,
    "iterator": iter,
    "map": lambda items: map(copy.copy, items),
    "heir": Lists,
    "named": lambda items: Pair(*items[:2]) if len(items) > 1 else None,
}
usual_outs = st.builds(Out, **{name: st.sampled_from(values[:3]) for name, values in PARTS.items()})
odd_outs = st.builds(Out, **{name: st.sampled_from(values) for name, values in PARTS.items()})
values = st.sampled_from([b"v", "text", None, b"refuse", b"for good", 5, {"json": 1}, "\ud800", Texts("heir"), KEEP])
items = values | usual_outs | odd_outs | st.just("raise")
results = st.tuples(st.sampled_from(list(SHAPES)), st.lists(items, max_size=4))
stamps = st.sampled_from([1_700_000_000_000, 0, -1, python.END_OF_TIME - 1, python.END_OF_TIME, 2**63 - 1])
inputs = st.builds(
    lambda timestamp, key, value, headers: Record("in", 0, 7, timestamp, key, value, headers),
    stamps,
    st.sampled_from([b"k", None]),
    st.sampled_from([b"value", None]),
    st.sampled_from(HEADERS),
)


def message_of(record: Record) -> Message:
    headers = list(record.headers) or None
    return message(record.offset, timestamp=(1, record.timestamp), key=record.key, value=record.value, headers=headers)


class Case:
    """Records with the result of the function for each, and a producer and sinks that record their calls."""

    def __init__(
        self,
        results: list[tuple[Record, tuple[str, list[Any]]]],
        *,
        target: bool = True,
        none: bool = True,
        decodes: bool = False,
        passing: frozenset[str] | None = None,
    ) -> None:
        self.calls: list[Any] = []
        self.records = [record for record, _ in results]
        self.target = (
            ("out", frozenset({"out", "more"}), passing, Out, KEEP, self.encode, self.encode, none) if target else None
        )
        self.decode = self._decode if decodes else None
        self._results = iter(results)

    def _decode(self, value: bytes | None) -> object:
        self.calls.append(("decode", value))
        return value

    def function(self, given: object) -> object:
        _, (shape, made_of) = next(self._results)
        if shape == "one" and made_of == ["raise"]:
            raise ValueError("function")
        return SHAPES[shape](made_of)

    def encode(self, value: object) -> bytes | None:
        self.calls.append(("encode", value))
        if type(value) in (Record, type(KEEP)):
            raise TypeError("never sent")
        return repr(value).encode()

    def produce(self, *output: object) -> None:
        self.calls.append(("produce", *output))
        if output[1] in (b"refuse", b"for good"):
            raise BufferError("full")

    def on_produce_error(self, error: Exception, send: tuple[object, ...]) -> None:
        self.calls.append(("refused", type(error), send))
        if send[1] == b"for good":
            raise RuntimeError("refused")

    def other(self, record: Record, result: Any) -> int:
        shown = list(result) if hasattr(type(result), "__next__") else result
        self.calls.append(("other", record.offset, type(result) if result is not shown else None, shown))
        return 0 if result is None else 2

    def run(self, loop: Any) -> tuple[object, ...]:
        sent, handled, error = loop.feed_values(
            self.records, self.function, self.decode, self.target, self.produce, self.on_produce_error, self.other
        )
        return sent, handled, type(error), str(error), self.calls

    def run_batch(self, loop: Any) -> tuple[object, ...] | None:
        outs = [item for _, made_of in self._results for item in made_of[1]]
        try:
            fed = loop.feed_outs(outs, self.target, lambda: 7, self.produce, self.on_produce_error)
        except (TypeError, ValueError) as error:
            return type(error), str(error), self.calls
        return fed and (fed[0], type(fed[1]), str(fed[1]), self.calls)


def usual(*made: object) -> list[tuple[Record, tuple[str, list[Any]]]]:
    """Return records whose results have one item each."""
    return [(Record("in", 0, at, 5, b"k", b"v"), ("one", [one])) for at, one in enumerate(made)]


passing_names = st.sampled_from([None, PASSING, frozenset({"a"})])


@compiled
@settings(max_examples=300)
@given(st.lists(st.tuples(inputs, results)), st.booleans(), st.booleans(), st.booleans(), passing_names)
def test_compiled_and_python_loops_feed_the_same_values(
    made: Any, target: bool, decodes: bool, none: bool, passing: Any
) -> None:
    given = {"target": target, "decodes": decodes, "none": none, "passing": passing}
    both = [Case(made, **given).run(loop) for loop in (native, python)]
    assert both[0] == both[1]


@compiled
@settings(max_examples=300)
@given(st.lists(st.tuples(inputs, results)), st.booleans(), st.booleans(), passing_names)
def test_fetched_records_are_fed_as_records(made: Any, target: bool, none: bool, passing: Any) -> None:
    given = {"target": target, "decodes": True, "none": none, "passing": passing}
    fetched, records = Case(made, **given), Case(made, **given)
    fetched.records = native.fetched_of([message_of(record) for record in records.records], Record, no_headers)
    assert fetched.run(native) == records.run(python)


@compiled
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_compiled_and_python_loops_handle_each_part_of_an_out_alike(name: str, part: Any) -> None:
    made = [(Record("in", 0, 7, 5, b"k", b"v"), ("one", [Out(**{"value": b"v", name: part})]))]
    assert Case(made).run(native) == Case(made).run(python)


@compiled
@settings(max_examples=300)
@given(st.lists(st.tuples(inputs, st.tuples(st.just("list"), st.lists(usual_outs | items, max_size=3))), max_size=3))
def test_compiled_and_python_loops_feed_the_same_outs(made: Any) -> None:
    assert Case(made).run_batch(native) == Case(made).run_batch(python)


@both
@settings(max_examples=300)
@given(inputs, results, passing_names)
def test_hot_loop_results_match_route_outputs(loop: Any, record: Record, made: Any, passing: Any) -> None:
    """Compare with the rules of Route.outputs, which Spark uses. Of two errors of one output either may be raised,
    but never a record's failure in place of the App's."""
    shape, made_of = made
    app = App("app")
    app.process("in", to=["out", "more"])(lambda _: SHAPES[shape](made_of))
    route = app.routes["in"].bind(passing or ())
    try:
        wanted: Any = list(route.outputs(record))
    except (ConfigurationError, TypeError, ValueError) as error:
        wanted = isinstance(error, ConfigurationError)
    kept = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hotloop, "feed_values", loop.feed_values)
        fed = kept.feed(route.feed, [record])
    assert wanted == (kept.sends if fed.error is None else isinstance(fed.error, ConfigurationError))
    assert fed.sent == len(kept.sends)


@both
def test_passed_headers_are_added_to_sent_and_refused_outputs(loop: Any) -> None:
    made = [(Record("in", 0, 0, 5, b"k", b"v", given), ("one", [b"v"])) for given in HEADERS]
    own = Out(b"refuse", headers=[("pass", "own"), ("b", None)])
    made.append((Record("in", 0, 0, 5, b"k", b"v", HEADERS[3]), ("list", [own])))
    case = Case(made, passing=PASSING)
    assert case.run(loop)[:2] == (6, 6)
    produced = [call[8:] for call in case.calls if call[0] == "produce"]
    passed = [("pass", b"1"), ("pass", b"2")]
    with_own = [("too", None), ("pass", b"own"), ("b", None)]
    assert produced == [(), (), (passed,), ([("too", None)],), (), (with_own,)]
    (refused,) = [call for call in case.calls if call[0] == "refused"]
    assert refused[2][5] == with_own


@both
@pytest.mark.parametrize("headers", [[()], [3], [([], b"1")], 5])
def test_malformed_headers_are_an_error_of_their_record(loop: Any, headers: Any) -> None:
    record = types.SimpleNamespace(key=b"k", value=b"v", timestamp=5, headers=headers)
    target = Case([], passing=PASSING).target
    result = loop.feed_values([record], lambda r: r.value, None, target, never, never, never)
    assert result[:2] == (0, 0)
    assert isinstance(result[2], (IndexError, TypeError))


@compiled
def test_client_gets_passed_headers_and_those_of_an_out() -> None:
    given: list[Any] = []
    producer = client(10, lambda _, message: given.append(message.value()))
    record = Record("in", 0, 0, 5, b"k", b"v", [("pass", b"1"), ("too", None), ("a", b"2")])
    target = Case([], passing=PASSING).target
    outputs = [b"v", Out("w", headers={"own": "x"})]
    assert native.feed_values([record], lambda _: outputs, None, target, producer.produce, never, never)[0] == 2
    producer.purge()
    producer.flush(5)
    assert sorted(given) == [b"v", b"w"]  # a delivery report has no headers; tests/broker/test_eos_run.py reads them


@both
def test_feed_reports_where_it_stopped_and_why(loop: Any) -> None:
    case = Case(usual(b"v", None, {"json": 1}, b"refuse", "raise", b"v"))
    sent, handled, error, sentence, _ = case.run(loop)
    assert (sent, handled, error, sentence) == (3, 4, ValueError, "function")
    assert Case([]).run(loop)[:3] == (0, 0, type(None))


@both
def test_several_outputs_are_sent_only_after_all_are_created(loop: Any) -> None:
    for shape in ("list", "generator", "tuple"):
        for broken in ([Out(b"v"), KEEP], [b"v", b"w", "\ud800"]):
            case = Case([(usual(b"")[0][0], (shape, broken))])
            assert case.run(loop)[:2] == (0, 0)
            assert "produce" not in {call[0] for call in case.calls}
    case = Case([(usual(b"")[0][0], ("generator", [b"v", b"for good", b"w"]))])
    assert case.run(loop)[:3] == (1, 0, RuntimeError)


@both
@pytest.mark.parametrize("key", ["k", b"k", Texts("k")])
def test_pair_result_takes_the_slow_path(loop: Any, key: object) -> None:
    case = Case([(usual(b"")[0][0], ("tuple", pair)) for pair in ([key, b"v"], [key, Out(b"v")])])
    case.run(loop)
    assert [call[3] for call in case.calls if call[0] == "other"] == [(key, b"v")]


@both
def test_none_result_of_tombstone_takes_the_slow_path(loop: Any) -> None:
    """The result may be a tombstone to be forwarded."""
    tombstone = Record("in", 0, 9)
    case = Case([*usual(None, b"v"), (tombstone, ("one", [None])), (tombstone, ("list", [b"v", None]))])
    assert case.run(loop)[:2] == (3, 4)
    assert [call for call in case.calls if call[0] == "other"] == [
        ("other", 9, None, None),
        ("other", 9, None, [b"v", None]),
    ]


@both
@pytest.mark.parametrize("where", ["function", "produce", "on_produce_error", "other", "decode", "encode"])
def test_feed_returns_base_exceptions(loop: Any, where: str) -> None:
    """A function's SystemExit is its record's failure, a signal's exception ends the run: the caller knows which."""
    made = usual({"other": Out(b"v", topic="unnamed"), "on_produce_error": b"refuse", "encode": 5}.get(where, b"v"))
    case = Case(made, decodes=True)

    def interrupt(*_: object) -> None:
        raise Interrupt

    setattr(case, where, interrupt)
    if where == "encode":
        case.target = (*case.target[:5], interrupt, interrupt, True)  # type: ignore[index, assignment]
    assert case.run(loop)[:3] == (0, 0, Interrupt)


@both
def test_error_keeps_its_traceback(loop: Any) -> None:
    case = Case(usual("raise"))
    error = loop.feed_values(
        case.records, case.function, None, case.target, case.produce, case.on_produce_error, case.other
    )[2]
    frames = []
    trace: types.TracebackType | None = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "function"


@both
def test_hot_loop_reads_attributes_of_plain_objects_by_name(loop: Any) -> None:
    put: list[object] = []
    record = types.SimpleNamespace(key=b"k", value=b"v", timestamp=5)
    known = Record("in", 0, 0, 6, b"l", b"w")
    target = Case([]).target
    for records in ([record, known], [known, record]):
        assert loop.feed_values(records, lambda r: r.value, None, target, lambda *s: put.append(s), None, None)[0] == 2
    one, two = ("out", b"v", b"k", -1, None, None, 5), ("out", b"w", b"l", -1, None, None, 6)
    assert put == [one, two, two, one]


@both
def test_unusual_batch_result_sends_nothing(loop: Any) -> None:
    fine = Out(b"v", b"k", timestamp=0)
    for odd in (Out(b"v"), Out(b"v", timestamp=0), Out(b"v", b"k", "unnamed", timestamp=0), b"v"):
        case = Case([(Record("in", 0, 0), ("list", [fine, odd]))])
        assert case.run_batch(loop) is None, odd
        assert case.calls == []


@both
def test_batch_output_without_a_timestamp_gets_that_of_the_batch(loop: Any) -> None:
    case = Case([(Record("in", 0, 0), ("list", [Out(b"a", b"k"), Out(b"b", b"k", timestamp=0)]))])
    assert case.run_batch(loop) == (2, type(None), "None", case.calls)
    assert case.calls == [("produce", "out", b"a", b"k", -1, None, None, 7), ("produce", "out", b"b", b"k")]


@both
def test_time_of_a_batch_is_found_once_if_an_output_keeps_it(loop: Any) -> None:
    asked: list[int] = []
    outs = [Out(b"a", b"k", timestamp=5), Out(b"b", b"k"), Out(b"c", b"k")]

    def find_latest() -> int:
        asked.append(1)
        return 7

    for some, times in ((outs[:1], 0), (outs, 1)):
        asked.clear()
        assert loop.feed_outs(some, TARGET, find_latest, lambda *_: None, never) == (len(some), None)
        assert len(asked) == times


@both
def test_batch_feed_reports_its_stop_position(loop: Any) -> None:
    outs = [
        Out(b"a", b"k", timestamp=0),
        None,
        Out(b"refuse", None, timestamp=5),
        Out(b"for good", timestamp=0, key=b""),
    ]
    case = Case([(Record("in", 0, 0), ("list", outs))])
    assert case.run_batch(loop) == (2, RuntimeError, "refused", case.calls)
    assert case.calls == [
        ("produce", "out", b"a", b"k"),
        ("produce", "out", b"refuse", None, -1, None, None, 5),
        ("refused", BufferError, ("out", b"refuse", None, -1, 5, None)),
        ("produce", "out", b"for good", b""),
        ("refused", BufferError, ("out", b"for good", b"", -1, 0, None)),
    ]


@both
@pytest.mark.parametrize("in_batch", [False, True])
def test_list_that_an_encoder_clears_is_sent_completely(loop: Any, in_batch: bool) -> None:
    outs = [Out(5, b"k", timestamp=0), Out(b"b", b"k", timestamp=0), Out(b"c", b"k", timestamp=0)]

    def encode(value: object) -> bytes:
        outs.clear()
        return b"5"

    target = ("out", frozenset({"out"}), None, Out, KEEP, encode, encode, True)
    put: list[object] = []

    def produce(*call: object) -> None:
        put.append(call)

    if in_batch:
        assert loop.feed_outs(outs, target, int, produce, never) == (3, None)
    else:
        records = [Record("in", 0, 0, value=b"v")]
        assert loop.feed_values(records, lambda _: outs, None, target, produce, never, never) == (3, 1, None)
    assert put == [("out", b"5", b"k"), ("out", b"b", b"k"), ("out", b"c", b"k")]


@compiled
@pytest.mark.parametrize("target", [(), ("out",) * 8, "out", ("out", 1, 2, Out, KEEP, print, print)])
def test_malformed_target_is_refused(target: Any) -> None:
    with pytest.raises(TypeError):
        native.feed_outs([], target, int, never, never)
    with pytest.raises(TypeError):
        native.feed_values([], never, None, target, never, never, never)


# ---- Record.out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timestamp", [-1, 0, 1, 7, 2**31, python.END_OF_TIME, python.END_OF_TIME + 1])
@pytest.mark.parametrize("key", [b"key", None])
@pytest.mark.parametrize("value", [b"value", None, {"a": 1}])
def test_out_has_the_timestamp_and_key_of_its_record(timestamp: int, key: bytes | None, value: Any) -> None:
    record = Record("in", 3, 9, timestamp, key, b"before", [("h", b"x")])
    at = max(timestamp, 0)
    assert record.out(value) == Out(value, key, timestamp=at)
    assert record.out(value=value) == Out(value, key, timestamp=at)
    assert record.out(value, b"other") == Out(value, b"other", timestamp=at)
    assert record.out(value, None, "there", [("a", b"b")], 2) == Out(value, None, "there", [("a", b"b")], 2, at)
    assert record.out(value, partition=1, topic="there") == Out(value, key, "there", partition=1, timestamp=at)


def test_out_refuses_what_the_method_refuses() -> None:
    record = Record("in", 3, 9)
    for args, named in [((), {}), ((1, 2, 3, 4, 5, 6), {}), ((1,), {"value": 2}), ((1,), {"timestamp": 2})]:
        with pytest.raises(TypeError):
            record.out(*args, **named)  # type: ignore[arg-type]
    with pytest.raises((TypeError, AttributeError)):
        Record.out(7, b"value")  # type: ignore[arg-type]


def test_out_is_not_tracked_and_keeps_no_reference() -> None:
    key, value, timestamp = b"k" * 99, b"v" * 99, 10**12
    before = [sys.getrefcount(one) for one in (key, value, timestamp)]
    outs = [Record("in", 0, 0, timestamp, key).out(value) for _ in range(100)]
    assert not any(map(gc.is_tracked, outs))
    del outs
    assert [sys.getrefcount(one) for one in (key, value, timestamp)] == before


def test_out_shows_its_documentation_and_parameters() -> None:
    assert (Record.out.__doc__ or "").startswith("Return an Out with this record's timestamp")
    assert [*inspect.signature(Record.out).parameters] == ["self", "value", "key", "topic", "headers", "partition"]


@pytest.mark.skipif(not hotloop.COMPILED, reason="the compiled loop is not in use")
def test_out_is_compiled() -> None:
    assert not isinstance(Record.out, types.FunctionType)


# ---- bare decoders and encoders -------------------------------------------------------------------------------------


class Row(msgspec.Struct):
    n: int


@both
@pytest.mark.parametrize("annotation", [bytes, str, Row, dict, bytes | None, str | None, Row | None])
@pytest.mark.parametrize("value", [b'{"n": 1}', b'{"n": "1"}', b"\xff", b"", None])
def test_hot_loop_decodes_like_the_route(loop: Any, annotation: Any, value: bytes | None) -> None:
    given: list[object] = []

    def function(value: Any) -> None:
        given.append(value)

    function.__annotations__["value"] = annotation
    app = App("app")
    app.process("in", to="out")(function)
    route, record = app.routes["in"], Record("in", 0, 0, 5, b"k", value)
    wanted: Any = None
    try:
        route.outputs(record)
    except DecodeError as error:
        wanted = str(error), type(error.__cause__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hotloop, "feed_values", loop.feed_values)
        fed = Collector().feed(route.feed, [record])
    assert wanted == (fed.error and (str(fed.error), type(fed.error.__cause__)))
    assert given[:1] == given[1:]
    assert (fed.handled, len(given)) == ((0, 0) if wanted else (1, 2))


def with_attributes(function: Callable[[Any], Any], **attributes: object) -> Callable[[Any], Any]:
    function.__dict__.update(attributes)
    return function


class Bytes(bytes):
    """A subclass of bytes."""


@compiled
def test_decoder_is_called_for_values_that_its_bare_form_refuses() -> None:
    calls: list[object] = []
    given: list[object] = []

    def bare(value: bytes) -> object:
        if value == b"interrupt":
            raise Interrupt
        return {b"good": "bare"}[value]

    def decode(value: object) -> object:
        calls.append(value)
        return "decoded"

    values = [b"good", b"bad", None, Bytes(b"good"), b"interrupt"]
    records = [Record("in", 0, at, 5, b"k", value) for at, value in enumerate(values)]
    decode = with_attributes(decode, bare=bare)
    sent, handled, error = native.feed_values(records, given.append, decode, None, never, never, lambda *_: 0)
    assert (sent, handled, type(error)) == (0, 4, Interrupt)
    assert given == ["bare", "decoded", "decoded", "decoded"]
    assert calls == [b"bad", None, b"good"]


class Unhashable(type):
    """The type of types that cannot be in a set."""

    __hash__ = None  # type: ignore[assignment]


class Mixed(metaclass=Unhashable):
    """A class that is no known type of a bare encoder."""


@compiled
def test_encoder_is_called_for_values_that_its_bare_form_refuses() -> None:
    calls: list[object] = []
    put: list[object] = []

    def bare(value: object) -> bytes:
        if value == 2:
            raise TypeError("bare")
        if value == 3:
            raise LookupError("bare")
        return b"bare"

    def encode(value: object) -> bytes:
        calls.append(value)
        return b"encoded"

    def run(*results: object, **attributes: object) -> tuple[int, type]:
        encoder = with_attributes(encode, **({"bare": bare, "types": {int}} | attributes))
        target = ("out", frozenset({"out"}), None, Out, KEEP, encoder, never, True)
        records, coming = [Record("in", 0, at) for at in range(len(results))], iter(results)
        fed = native.feed_values(
            records, lambda _: next(coming), None, target, lambda *c: put.append(c[1]), never, never
        )
        return fed[1], type(fed[2])

    assert run(1, 2, 1.0, True, Out(1), "text", b"bytes", Out(None)) == (8, type(None))
    assert put == [b"bare", b"encoded", b"encoded", b"encoded", b"bare", b"text", b"bytes", None]
    assert calls == [2, 1.0, True]
    assert run(1, 3) == (1, LookupError)
    assert run(Mixed()) == (0, TypeError)
    for types_ in ([int], None, frozenset({float})):
        assert run(5, types=types_) == (1, type(None))
        assert calls.pop() == 5


@both
def test_json_results_are_encoded_like_other_results(loop: Any) -> None:
    """The first value of a type is encoded in another way than later ones."""
    app = App("app")
    app.process("in", to="out")(lambda record: json.loads(record.value))
    route = app.routes["in"]
    texts = ['{"a": 1}', '{"b": [2]}', "5", "6", "true", '"text"', "1.5"]
    records = [Record("in", 0, at, 5, b"k", text.encode()) for at, text in enumerate(texts)]
    kept = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hotloop, "feed_values", loop.feed_values)
        assert kept.feed(route.feed, records).error is None
        assert [send[1] for send in kept.sends] == [b'{"a":1}', b'{"b":[2]}', b"5", b"6", b"true", b"text", b"1.5"]
        for function in (lambda _: {"a": object()}, lambda record: record):
            other = App("app")
            other.process("in", to="out")(function)
            route = other.routes["in"]
            for record in records[:2]:  # the error stays the same once the type is known
                with pytest.raises(TypeError) as wanted:
                    route.outputs(record)
                fed = Collector().feed(route.feed, [record])
                assert (type(fed.error), str(fed.error)) == (TypeError, str(wanted.value))


@both
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100])
def test_generator_yields_many_outputs(loop: Any, length: int) -> None:
    case = Case([(usual(b"")[0][0], (shape, [b"v"] * length)) for shape in ("generator", "list")])
    assert case.run(loop)[:3] == (2 * length, 2, type(None))


# ---- the client's own produce ---------------------------------------------------------------------------------------


def client(room: int, delivered: Callable[..., None] = lambda *_: None) -> Producer:
    """A producer that never reaches a broker: only the content of its queue matters."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "queue.buffering.max.messages": room, "logger": SILENT}
    return Producer(settings | {"on_delivery": delivered})


SILENT = logging.getLogger("tests.silent")
SILENT.disabled = True


def never(*_: object) -> Any:
    raise AssertionError("refused")


TARGET = ("out", frozenset({"out", "more"}), None, Out, KEEP, never, never, True)


@both
def test_full_client_queue_accepts_the_records_that_fit(loop: Any) -> None:
    producer, refused = client(3), []
    outs = [
        Out(b"a", b"k", timestamp=0),
        Out(b"b", None, timestamp=5),
        Out(b"c", b"k", timestamp=0),
        Out(b"d", b"l", timestamp=0),
        Out(b"e", b"l", timestamp=6),
    ]
    assert loop.feed_outs(outs, TARGET, int, producer.produce, lambda *call: refused.append(call)) == (5, None)
    assert [(type(error), send) for error, send in refused] == [
        (BufferError, ("out", b"d", b"l", -1, 0, None)),
        (BufferError, ("out", b"e", b"l", -1, 6, None)),
    ]


@both
def test_client_queue_contains_the_sent_records(loop: Any) -> None:
    given: list[object] = []
    producer = client(1_000, lambda _, message: given.append((message.topic(), message.key(), message.value())))
    outs = [Out(b"%d" % n, b"k%d" % n if n % 2 else None, timestamp=n if n % 3 else 0) for n in range(9)]
    for topic in ("out", "more"):
        assert loop.feed_outs(outs, (topic, *TARGET[1:]), int, producer.produce, never) == (9, None)
    producer.purge()
    producer.flush(5)
    wanted = [(topic, out.key, out.value) for topic in ("out", "more") for out in outs]
    assert sorted(given, key=repr) == sorted(wanted, key=repr)


@both
def test_builtin_functions_as_producers_get_all_arguments(loop: Any) -> None:
    """Builtin functions differ in how they accept arguments."""
    outs, refused = [Out(b"v", b"k", timestamp=0)], []
    assert loop.feed_outs(outs, TARGET, int, "{} {} {}".format, never) == (1, None)
    assert loop.feed_outs(outs, TARGET, int, max, lambda error, _: refused.append(error)) == (1, None)
    assert loop.feed_outs(outs, TARGET, int, [].append, lambda error, _: refused.append(error)) == (1, None)
    assert [type(error) for error in refused] == [TypeError, TypeError]


# ---- references ---------------------------------------------------------------------------------------------------


@compiled
def test_feed_leaks_no_reference() -> None:
    """Run every path of the compiled functions many times: their arguments keep their number of references."""
    outs_of_all_kinds = [Out(**{"value": b"v", name: one}) for name, ones in PARTS.items() for one in ones]
    made = [
        (Record("in", 0, 0, 5, b"key" * 9, b"value" * 9, HEADERS[number % len(HEADERS)]), (shape, [item, b"v"]))
        for number, item in enumerate([b"v", "text", None, 5, b"refuse", *outs_of_all_kinds])
        for shape in SHAPES
    ]
    breaking = [("one", [b"for good"]), ("one", ["raise"]), ("generator", [b"v", "raise"]), ("list", [b"v", "\ud800"])]
    cases = [made, *([(made[0][0], each)] for each in breaking)]
    value, key, topic, latest = b"value" * 9, b"key" * 9, "out-topic", 10**12 + 1
    outs = [Out(value, key, timestamp=0), Out(value, key, timestamp=10**12), Out(value, key)]
    plain = message(10**6, topic=topic, key=key, value=value, headers=[("h", value)])
    messages = [plain, message(1, error=ERROR), plain, plain]
    broken = [messages[0], Other(messages[0], "headers")]
    decode = {value: value, key: 5}.__getitem__
    bare = with_attributes(lambda v: value if v is None else [v], bare=decode)
    encoder = with_attributes(lambda v: value, bare=lambda v: [v][v - 5] and key, types={int, list})
    bare_target = (topic, frozenset({topic}), None, Out, KEEP, encoder, encoder, True)
    values_of_all_kinds = [Record(topic, 0, 0, 5, key, one) for one in (value, key, None, b"other" * 9)]
    runs = [Record(topic, at // 2, at, 0, key, value, ()) for at in range(600, 900)]

    def turn() -> None:
        for each in cases:
            for passing in (None, PASSING):
                rest = each
                while rest:  # a failing record ends its feed
                    case = Case(rest, passing=passing)
                    rest = rest[case.run(native)[1] + 1 :]  # type: ignore[operator]
        Case(made).run_batch(native)
        odd = types.SimpleNamespace(key=key, value=value, timestamp=5, headers=[("pass", value), ()])
        native.feed_values([odd], lambda r: r.value, None, Case([], passing=PASSING).target, never, never, never)
        for kind in (Record, Collected, Checked, Slots, list_of):
            native.records_of(messages, kind, no_headers)
        for read in (native.records_of, native.fetched_of):
            with pytest.raises(ValueError, match="headers"):
                read(broken, Record, no_headers)
        fetched = native.fetched_of(messages, Record, no_headers)
        fields_of(fetched)
        native.runs_of([*fetched, runs[0]])
        native.feed_values(fetched, lambda v: v, bare, bare_target, lambda *_: None, never, never)
        native.runs_of(runs)
        with pytest.raises(AttributeError):
            native.runs_of([*runs, made])
        native.feed_outs(outs, TARGET, lambda: latest, lambda *_: None, never)
        native.feed_values(values_of_all_kinds, lambda v: v, bare, bare_target, lambda *_: None, never, never)

    kinds = [Out, Record, Collected, Checked, decode, *encoder.__dict__.values()]
    given_records = [record for record, _ in made]
    leaves_all_as_it_was(
        turn,
        [
            value,
            key,
            topic,
            latest,
            *kinds,
            *outs,
            *messages,
            *runs,
            *given_records,
            *outs_of_all_kinds,
            plain.headers(),
        ],
    )


@compiled
def test_client_produce_leaks_no_reference() -> None:
    value, key, topic = b"value" * 9, b"key" * 9, "out-topic"
    outs = [Out(value, key, timestamp=0), Out(value, key, timestamp=10**12)]
    full, producer = client(1), client(1_000)
    full.produce("queue", b"is full")

    def turn() -> None:
        native.feed_outs(outs, (topic, *TARGET[1:]), int, full.produce, lambda *_: None)
        native.feed_outs(outs, (topic, *TARGET[1:]), int, producer.produce, never)
        producer.purge()
        producer.poll(0)

    leaves_all_as_it_was(turn, [value, key, topic, Out, *outs, full, producer])


def leaves_all_as_it_was(turn: Callable[[], None], watched: list[object]) -> None:
    for _ in range(100):
        turn()  # creates the objects that are created once
    gc.collect()
    before = [sys.getrefcount(each) for each in watched]
    grown = []
    for _ in range(3):
        blocks, nones = sys.getallocatedblocks(), sys.getrefcount(None)
        for _ in range(250):
            turn()
        gc.collect()
        grown.append((sys.getallocatedblocks() - blocks, abs(sys.getrefcount(None) - nones)))
    assert [sys.getrefcount(each) for each in watched] == before
    # The interpreter's free lists fill at some time; a reference lost in each turn gives 250 every time.
    assert min(blocks for blocks, _ in grown) < 100
    assert min(nones for _, nones in grown) < 100


ERROR = KafkaError(KafkaError._PARTITION_EOF)


# ---- the choice ---------------------------------------------------------------------------------------------------


def choice(**environment: str) -> str:
    code = "import sys, eos.hotloop as h; print(h.COMPILED, h.feed_values.__module__, 'confluent_kafka' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@compiled
def test_compiled_loop_is_used_without_importing_client() -> None:
    assert choice() == "True eos.hotloop._native False"


def test_python_loop_can_be_chosen() -> None:
    assert choice(EOS_PURE_PYTHON="1") == "False eos.hotloop.python False"


@compiled
@pytest.mark.parametrize(("change", "used"), [("", True), ("// another rule\n", False)])
def test_compiled_loop_of_other_source_is_reported_and_not_used(tmp_path: Path, change: str, used: bool) -> None:
    """A pull leaves an editable installation like this; it also works if tests turn warnings into errors."""
    package = Path(eos.__file__).parent
    shutil.copytree(package, tmp_path / "eos", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "eos" / "hotloop" / "_native.c").open("a") as source:
        source.write(change)
    code = "import eos.app, eos.hotloop as h; print(h.__file__, h.COMPILED, h.feed_values.__module__)"

    def imported() -> subprocess.CompletedProcess[str]:
        ran = [sys.executable, "-W", "error", "-c", code]
        return subprocess.run(ran, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)

    done = imported()
    form = "True eos.hotloop._native" if used else "False eos.hotloop.python"
    assert done.stdout == f"{tmp_path}/eos/hotloop/__init__.py {form}\n"
    warned = done.stderr.splitlines()
    assert len(warned) == (0 if used else 1)
    assert used or warned[0].endswith("is not used: rebuild it with `pip install -e .`")
    (tmp_path / "eos" / "hotloop" / "_native.c").unlink()  # as in a wheel without the compiled loop
    assert "True eos.hotloop._native" in imported().stdout
