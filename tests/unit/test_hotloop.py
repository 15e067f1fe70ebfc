"""The compiled hot loop against the Python one: the same results and calls in the same order, no reference lost."""

from __future__ import annotations

import gc
import logging
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import KafkaError, Message, Producer
from hypothesis import given
from hypothesis import strategies as st

import eos
from eos.app import Out, Record
from eos.hotloop import python

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


class Interrupt(BaseException):
    """No Exception: it passes through."""


def message(offset: int = 7, **fields: Any) -> Message:
    given = {"topic": "in", "partition": 3, "key": b"k", "value": b"v", "timestamp": (1, 1_700_000_000_000)}
    return Message(**(given | {"offset": offset, "headers": None, "error": None} | fields))


# ---- records_of ---------------------------------------------------------------------------------------------------


@both
def test_messages_become_records_in_order_and_errors_none(loop: Any) -> None:
    error = message(1, error=KafkaError(KafkaError._PARTITION_EOF))
    headed = message(2, headers=[("h", b"x")], key=None, value=None, timestamp=(0, -1))
    assert loop.records_of([message(0), error, headed], Record) == [
        Record("in", 3, 0, 1_700_000_000_000, b"k", b"v", ()),
        Record("in", 3, 2, -1, None, None, [("h", b"x")]),
    ]
    assert loop.records_of([], Record) == []


class Other:
    """Something that can do what a Message can, but is none."""

    def __init__(self, real: Message, fails: str = "") -> None:
        self.real, self.fails = real, fails

    def __getattr__(self, name: str) -> Callable[[], object]:
        if name == self.fails:
            raise ValueError(name)
        return getattr(self.real, name)  # type: ignore[no-any-return]


@both
def test_what_is_no_message_of_the_client_is_asked_by_name(loop: Any) -> None:
    mixed = [Other(message(0)), message(1), Other(message(2))]
    assert [record.offset for record in loop.records_of(mixed, Record)] == [0, 1, 2]
    assert loop.records_of(mixed[1:], Record) == python.records_of(mixed[1:], Record)


class Heir(Message):
    """A Message by inheritance, which the compiled loop must not take for one in all."""


class Late(Message):
    """Its getter says something else than what it was made with."""

    def timestamp(self) -> tuple[int, int]:
        kind, number = super().timestamp()
        return kind, number + 1


class Odd(Message):
    """Its getter is the client's own, but another one."""

    timestamp = Message.topic  # type: ignore[assignment]


class Counted(Message):
    """Making one has an effect, so none is made to see where its timestamp lies."""

    made = 0

    def __init__(self, **fields: Any) -> None:
        type(self).made += 1
        super().__init__(**fields)


TIMES = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-1, 0, 1, 1_700_000_000_000])


@both
@given(st.lists(st.tuples(st.sampled_from([Message, Heir, Late, Odd, Counted]), st.sampled_from([0, 1, 2]), TIMES)))
def test_timestamps_are_what_the_getter_says(loop: Any, made: list[tuple[type[Message], int, int]]) -> None:
    messages = [kind(topic="in", timestamp=(how, when)) for kind, how, when in made]
    before = Counted.made
    records = loop.records_of(messages, Record)
    assert Counted.made == before
    assert [record.timestamp for record in records] == [m.timestamp()[1] for m in messages]


class Collected(msgspec.Struct, frozen=True):
    """As Record, but seen by the garbage collector."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Any


class Shuffled(msgspec.Struct, gc=False):
    """Record's fields in another order: what is called with the values fills the first field first."""

    value: Any
    key: Any
    timestamp: Any
    offset: Any
    partition: Any
    topic: Any
    headers: Any


class Fields(msgspec.Struct, gc=False):
    topic: Any
    partition: Any
    offset: Any
    timestamp: Any
    key: Any
    value: Any
    headers: Any


class Wider(Fields, gc=False):
    more: int = 5


class Checked(Fields, gc=False):
    def __post_init__(self) -> None:
        if self.offset:
            self.topic = "checked"


class Slots:
    """No Struct, but it has the same fields."""

    __slots__ = ("headers", "key", "offset", "partition", "timestamp", "topic", "value")

    def __init__(self, *fields: object) -> None:
        self.topic, self.partition, self.offset, self.timestamp, self.key, self.value, self.headers = fields
        if self.offset:
            self.topic = "checked"

    def __eq__(self, other: object) -> bool:
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)


class Named(msgspec.Struct, gc=False, kw_only=True):
    topic: Any = None
    partition: Any = None
    offset: Any = None
    timestamp: Any = None
    key: Any = None
    value: Any = None
    headers: Any = None


def list_of(*fields: object) -> list[object]:
    return list(fields)


@both
@pytest.mark.parametrize("kind", [Collected, Shuffled, Wider, Checked, Slots, list_of, lambda *f: Record(*f)])
def test_a_record_of_another_kind_is_made_by_calling_it(loop: Any, kind: Any) -> None:
    given = [message(0), message(1, key=None, headers=[("h", b"x")])]
    fields = [
        ("in", 3, 0, 1_700_000_000_000, b"k", b"v", ()),
        ("in", 3, 1, 1_700_000_000_000, None, b"v", [("h", b"x")]),
    ]
    made = [kind(*each) for each in fields]
    assert loop.records_of(given, kind) == made
    assert [*map(gc.is_tracked, loop.records_of(given, kind))] == [*map(gc.is_tracked, made)]
    with pytest.raises(TypeError):
        loop.records_of(given, Named)


@both
@pytest.mark.parametrize("fails", ["error", "topic", "timestamp", "value", "headers"])
def test_a_getter_that_raises_raises(loop: Any, fails: str) -> None:
    with pytest.raises(ValueError, match=fails):
        loop.records_of([message(0), Other(message(1), fails)], Record)


@both
def test_a_record_type_that_raises_raises(loop: Any) -> None:
    def never(*_: object) -> None:
        raise LookupError("no record")

    with pytest.raises(LookupError):
        loop.records_of([message()], never)


# ---- runs_of ------------------------------------------------------------------------------------------------------


def placed(kind: Callable[..., Any], topic: str, partition: int, offset: int) -> Any:
    # Equal ones that are not the same object: topics are new strings, and partitions above 256 new numbers.
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
def test_runs_begin_where_the_partition_changes_or_the_offset_does_not_rise(
    loop: Any, made: list[tuple[Any, str, int, int]]
) -> None:
    expected = [
        at for at, each in enumerate(made) if at == 0 or each[1:3] != made[at - 1][1:3] or each[3] <= made[at - 1][3]
    ]
    assert loop.runs_of([placed(*each) for each in made]) == expected


@both
@pytest.mark.parametrize("lacks", ["topic", "partition", "offset"])
def test_a_record_that_is_nowhere_raises(loop: Any, lacks: str) -> None:
    where = {"topic": "in", "partition": 1, "offset": 1}
    del where[lacks]
    with pytest.raises(AttributeError, match=lacks):
        loop.runs_of([types.SimpleNamespace(topic="in", partition=1, offset=0), types.SimpleNamespace(**where)])


@compiled
def test_records_that_go_while_they_are_compared_are_not_touched() -> None:
    class Emptying:
        def __eq__(self, other: object) -> bool:
            records.clear()
            return True

        __hash__ = None  # type: ignore[assignment]

    records = [types.SimpleNamespace(topic="in", partition=Emptying(), offset=at) for at in range(9)]
    assert native.runs_of(records) == [0]


# ---- feed_values --------------------------------------------------------------------------------------------------

ACTIONS = ("bytes", "none", "tombstone", "other", "raise", "refuse", "refuse for good", "other raises")


HEADERS: tuple[Any, ...] = ((), [("a", b"1")], [("pass", b"1"), ("a", None), ("pass", b"2")], (("too", None),), [])
PASSING = frozenset({"pass", "too"})


class Case:
    """A function, a producer and the rest, which write down what happens to them."""

    def __init__(
        self, actions: list[str], topic: str | None, decodes: bool, passing: frozenset[str] | None = None
    ) -> None:
        self.calls: list[object] = []
        self.passing = passing
        stamps = [1_700_000_000_000, 0, -1]
        self.records = [
            Record(
                "in",
                0,
                number,
                stamps[number % 3],
                b"k" if number % 2 else None,
                None if action == "tombstone" else action.encode(),
                HEADERS[number % len(HEADERS)],
            )
            for number, action in enumerate(actions)
        ]
        self.topic, self.decode = topic, self._decode if decodes else None

    def _decode(self, value: bytes | None) -> str:
        self.calls.append(("decode", value))
        return (value or b"none").decode()

    def function(self, given: Record | str) -> object:
        action = given if isinstance(given, str) else (given.value or b"none").decode()
        self.calls.append(("function", action))
        if action == "raise":
            raise ValueError("function")
        return {"none": None, "other": ["o"], "other raises": "x"}.get(action, action.encode())

    def produce(self, *output: object) -> None:
        self.calls.append(("produce", *output))
        if str(output[1]).startswith("b'refuse"):
            raise BufferError("full")

    def refused(self, error: Exception, send: tuple[object, ...]) -> None:
        self.calls.append(("refused", type(error), send))
        if send[1] == b"refuse for good":
            raise RuntimeError("refused")

    def other(self, record: Record, result: object) -> int:
        self.calls.append(("other", record.offset, result))
        if result == "x":
            raise TypeError("other")
        return 0 if result is None else 2

    def run(self, loop: Any) -> tuple[object, ...]:
        sent, handled, error = loop.feed_values(
            self.records, self.function, self.decode, self.topic, self.produce, self.refused, self.other, self.passing
        )
        return sent, handled, type(error), str(error), self.calls


@compiled
@given(
    st.lists(st.sampled_from(ACTIONS)),
    st.sampled_from(["out", None]),
    st.booleans(),
    st.sampled_from([None, PASSING, frozenset({"a"})]),
)
def test_both_feeds_do_the_same(
    actions: list[str], topic: str | None, decodes: bool, passing: frozenset[str] | None
) -> None:
    case = actions, topic, decodes, passing
    assert Case(*case).run(native) == Case(*case).run(python)


@both
def test_headers_that_are_passed_go_with_bytes_and_with_what_is_refused(loop: Any) -> None:
    case = Case(["bytes", "bytes", "refuse", "bytes", "bytes"], "out", decodes=False, passing=PASSING)
    assert case.run(loop)[:2] == (5, 5)
    produced = [call[8:] for call in case.calls if isinstance(call, tuple) and call[0] == "produce"]
    passed = [("pass", b"1"), ("pass", b"2")]
    assert produced == [(), (), (passed,), ([("too", None)],), ()]
    (refused,) = [call for call in case.calls if isinstance(call, tuple) and call[0] == "refused"]
    assert refused[2][5] == passed


@both
@pytest.mark.parametrize("headers", [[()], [3], [([], b"1")], 5])
def test_headers_of_another_shape_are_an_error_of_their_record(loop: Any, headers: Any) -> None:
    record = types.SimpleNamespace(key=b"k", value=b"v", timestamp=5, headers=headers)
    result = loop.feed_values([record], lambda r: r.value, None, "out", never, never, never, PASSING)
    assert result[:2] == (0, 0)
    assert isinstance(result[2], (IndexError, TypeError))


@compiled
def test_the_client_takes_the_headers_that_are_passed() -> None:
    given: list[Any] = []
    producer = client(10, lambda _, message: given.append(message.value()))
    record = Record("in", 0, 0, 5, b"k", b"v", [("pass", b"1"), ("too", None), ("a", b"2")])
    assert native.feed_values([record], lambda r: r.value, None, "out", producer.produce, never, never, PASSING)[0] == 1
    producer.purge()
    producer.flush(5)
    assert given == [b"v"]  # its headers a report does not tell; tests/broker/test_eos_run.py reads them


@both
def test_a_feed_says_where_it_stopped_and_why(loop: Any) -> None:
    case = Case(["bytes", "none", "other", "refuse", "raise", "bytes"], "out", decodes=False)
    sent, handled, error, sentence, _ = case.run(loop)
    assert (sent, handled, error, sentence) == (4, 4, ValueError, "function")
    assert Case([], "out", decodes=False).run(loop)[:3] == (0, 0, type(None))


@both
def test_none_of_a_record_without_a_value_is_for_other_to_judge(loop: Any) -> None:
    """It may be a tombstone that was to be passed on."""
    case = Case(["none", "tombstone", "bytes"], "out", decodes=False)
    assert case.run(loop)[:2] == (1, 3)
    assert ("other", 1, None) in case.calls
    assert ("other", 0, None) not in case.calls


@both
@pytest.mark.parametrize("where", ["function", "produce", "refused", "other", "decode"])
def test_an_interrupt_passes_through_a_feed(loop: Any, where: str) -> None:
    action = {"other": "other", "refused": "refuse"}.get(where, "bytes")
    case = Case([action], "out", decodes=True)

    def interrupt(*_: object) -> None:
        raise Interrupt

    setattr(case, where, interrupt)
    with pytest.raises(Interrupt):
        case.run(loop)


@both
def test_an_error_keeps_its_traceback(loop: Any) -> None:
    case = Case(["raise"], "out", decodes=False)
    error = loop.feed_values(case.records, case.function, None, "out", case.produce, case.refused, case.other)[2]
    frames = []
    trace: types.TracebackType | None = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "function"


@both
def test_records_that_are_plain_objects_are_read_by_name(loop: Any) -> None:
    put: list[object] = []
    record = types.SimpleNamespace(key=b"k", value=b"v", timestamp=5)
    known = Record("in", 0, 0, 6, b"l", b"w")
    for records in ([record, known], [known, record]):
        assert loop.feed_values(records, lambda r: r.value, None, "out", lambda *s: put.append(s), None, None)[0] == 2
    one, two = ("out", b"v", b"k", -1, None, None, 5), ("out", b"w", b"l", -1, None, None, 6)
    assert put == [one, two, two, one]


# ---- all_plain, put_plain -----------------------------------------------------------------------------------------

PLAIN = [
    Out(b"v", b"k", timestamp=0),
    Out(b"v", None, timestamp=0),
    Out(b"", b"", timestamp=2**63 - 1),
    Out(b"v", b"k", None, (), timestamp=0),
]
NOT_PLAIN = [
    Out("v", b"k", timestamp=0),
    Out(None, b"k", timestamp=0),
    Out(bytearray(b"v"), b"k", timestamp=0),
    Out(b"v", timestamp=0),
    Out(b"v", "k", timestamp=0),
    Out(b"v", b"k", "topic", timestamp=0),
    Out(b"v", b"k", None, [("h", b"x")], timestamp=0),
    Out(b"v", b"k", None, [], timestamp=0),
    Out(b"v", b"k", partition=0, timestamp=0),
    Out(b"v", b"k"),
    Out(b"v", b"k", timestamp=-1),
    Out(b"v", b"k", timestamp=2**63),
    Out(b"v", b"k", timestamp=2**200),
    Out(b"v", b"k", timestamp=True),
    Out(b"v", b"k", timestamp=1.5),  # type: ignore[arg-type]
    b"v",
    None,
    Record("in", 0, 0),
]


@both
def test_what_is_plain(loop: Any) -> None:
    assert loop.all_plain(PLAIN, Out) is True
    assert loop.all_plain([], Out) is True
    for odd in NOT_PLAIN:
        assert loop.all_plain([odd], Out) is False, odd
        assert loop.all_plain([*PLAIN, odd], Out) is False, odd


def put(loop: Any, outs: list[Out], fails: set[int], for_good: set[int]) -> tuple[object, ...]:
    calls: list[object] = []

    def produce(*output: object) -> None:
        calls.append(output)
        if len(calls) in fails:
            raise BufferError("full")

    def refused(error: Exception, send: object) -> None:
        calls.append((type(error), send))
        if len(calls) - 1 in for_good:
            raise RuntimeError("refused")

    sent, error = loop.put_plain(outs, "out", produce, refused)
    return sent, type(error), calls


@compiled
@given(
    st.lists(st.sampled_from(PLAIN)), st.sets(st.integers(1, 10), max_size=3), st.sets(st.integers(1, 10), max_size=2)
)
def test_both_put_the_same(outs: list[Out], fails: set[int], for_good: set[int]) -> None:
    assert put(native, outs, fails, for_good) == put(python, outs, fails, for_good)


@both
def test_where_putting_stops(loop: Any) -> None:
    outs = [Out(b"a", b"k", timestamp=0), Out(b"b", None, timestamp=5), Out(b"c", b"k", timestamp=0)]
    assert put(loop, outs, set(), set())[:2] == (3, type(None))
    sent, error, calls = put(loop, outs, {2}, {2})
    assert (sent, error) == (1, RuntimeError)
    assert calls == [
        ("out", b"a", b"k"),
        ("out", b"b", None, -1, None, None, 5),
        (BufferError, ("out", b"b", None, -1, 5, None)),
    ]


@both
def test_an_interrupt_passes_through_putting(loop: Any) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupt

    with pytest.raises(Interrupt):
        loop.put_plain([Out(b"a", b"k", timestamp=0)], "out", interrupt, print)


@compiled
def test_a_list_that_shrinks_while_it_is_put_ends_early() -> None:
    outs = [Out(b"a", b"k", timestamp=0), Out(b"b", b"k", timestamp=0), Out(b"c", b"k", timestamp=0)]
    sent, error = native.put_plain(outs, "out", lambda *_: outs.clear(), print)
    assert (sent, error) == (1, None)


# ---- the client's own produce ---------------------------------------------------------------------------------------


def client(room: int, delivered: Callable[..., None] = lambda *_: None) -> Producer:
    """It never reaches a broker: what matters is what is in its queue."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "queue.buffering.max.messages": room, "logger": SILENT}
    return Producer(settings | {"on_delivery": delivered})


SILENT = logging.getLogger("tests.silent")
SILENT.disabled = True


def never(*_: object) -> None:
    raise AssertionError("refused")


@both
def test_the_client_takes_what_it_has_room_for_and_the_rest_is_refused(loop: Any) -> None:
    producer, refused = client(3), []
    outs = [
        Out(b"a", b"k", timestamp=0),
        Out(b"b", None, timestamp=5),
        Out(b"c", b"k", timestamp=0),
        Out(b"d", b"l", timestamp=0),
        Out(b"e", b"l", timestamp=6),
    ]
    sent, error = loop.put_plain(outs, "out", producer.produce, lambda *call: refused.append(call))
    assert (sent, error) == (5, None)
    assert [(type(error), send) for error, send in refused] == [
        (BufferError, ("out", b"d", b"l", -1, 0, None)),
        (BufferError, ("out", b"e", b"l", -1, 6, None)),
    ]


@both
def test_the_client_has_in_its_queue_what_was_put(loop: Any) -> None:
    given: list[object] = []
    producer = client(1_000, lambda _, message: given.append((message.topic(), message.key(), message.value())))
    outs = [Out(b"%d" % n, b"k%d" % n if n % 2 else None, timestamp=n if n % 3 else 0) for n in range(9)]
    for topic in ("one", "two"):
        assert loop.put_plain(outs, topic, producer.produce, never) == (9, None)
    producer.purge()
    producer.flush(5)
    wanted = [(topic, out.key, out.value) for topic in ("one", "two") for out in outs]
    assert sorted(given, key=repr) == sorted(wanted, key=repr)


@both
def test_other_builtin_functions_get_their_arguments_too(loop: Any) -> None:
    """They are told apart by how they take them."""
    assert loop.put_plain([Out("upper", None, timestamp=0)], "text", getattr, never) == (1, None)
    refused: list[Exception] = []
    assert loop.put_plain([Out(b"v", b"k", timestamp=0)], "out", [].append, lambda error, _: refused.append(error)) == (
        1,
        None,
    )
    assert isinstance(refused[0], TypeError)


# ---- references ---------------------------------------------------------------------------------------------------


@compiled
def test_no_reference_is_lost_and_none_kept() -> None:
    """Every way through the compiled functions, many times: what they were given has as many references as before."""
    case = Case([*ACTIONS[:6], "bytes"], "out", decodes=True, passing=PASSING)
    for_good = Case(["bytes", "refuse for good"], "out", decodes=False)
    other_raises = Case(["other raises"], None, decodes=False)
    value, key, topic = b"value" * 9, b"key" * 9, "out-topic"
    outs = [Out(value, key, timestamp=0), Out(value, key, timestamp=10**12)]
    usual = message(10**6, topic=topic, key=key, value=value, headers=[("h", value)])
    messages = [usual, message(1, error=ERROR), usual, usual]
    broken = [messages[0], Other(messages[0], "headers")]
    runs = [Record(topic, at // 2, at, 0, key, value, ()) for at in range(600, 900)]

    def turn() -> None:
        for each in (case, for_good, other_raises):
            each.run(native)
            each.calls.clear()
        odd = types.SimpleNamespace(key=key, value=value, timestamp=5, headers=[("pass", value), ()])
        native.feed_values([odd], lambda r: r.value, None, topic, never, never, never, PASSING)
        for kind in (Record, Collected, Checked, Slots, list_of):
            native.records_of(messages, kind)
        with pytest.raises(ValueError, match="headers"):
            native.records_of(broken, Record)
        native.runs_of(runs)
        with pytest.raises(AttributeError):
            native.runs_of([*runs, case])
        native.all_plain([*outs, *NOT_PLAIN], Out)
        put(native, outs, {1}, set())
        put(native, outs, {1}, {1})

    kinds = [Out, Record, Collected, Checked]
    leaves_all_as_it_was(
        turn, [value, key, topic, *kinds, *outs, *messages, *runs, *case.records, *for_good.records, case.produce]
    )


@compiled
def test_the_client_s_produce_loses_no_reference_and_keeps_none() -> None:
    value, key, topic = b"value" * 9, b"key" * 9, "out-topic"
    outs = [Out(value, key, timestamp=0), Out(value, key, timestamp=10**12)]
    full, producer = client(1), client(1_000)
    full.produce("queue", b"is full")

    def turn() -> None:
        native.put_plain(outs, topic, full.produce, lambda *_: None)
        native.put_plain(outs, topic, producer.produce, never)
        producer.purge()
        producer.poll(0)

    leaves_all_as_it_was(turn, [value, key, topic, Out, *outs, full, producer])


def leaves_all_as_it_was(turn: Callable[[], None], watched: list[object]) -> None:
    for _ in range(200):
        turn()  # what is made once is made now
    gc.collect()
    before = [sys.getrefcount(each) for each in watched]
    grown = []
    for _ in range(3):
        blocks, nones = sys.getallocatedblocks(), sys.getrefcount(None)
        for _ in range(500):
            turn()
        gc.collect()
        grown.append((sys.getallocatedblocks() - blocks, abs(sys.getrefcount(None) - nones)))
    assert [sys.getrefcount(each) for each in watched] == before
    # The interpreter's free lists fill at some time; what is lost in each turn is 500 every time.
    assert min(blocks for blocks, _ in grown) < 200
    assert min(nones for _, nones in grown) < 200


ERROR = KafkaError(KafkaError._PARTITION_EOF)


# ---- the choice ---------------------------------------------------------------------------------------------------


def choice(**environment: str) -> str:
    code = "import sys, eos.hotloop as h; print(h.COMPILED, h.feed_values.__module__, 'confluent_kafka' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@compiled
def test_the_compiled_loop_is_used_where_it_is_and_no_client_is_imported_for_it() -> None:
    assert choice() == "True eos.hotloop._native False"


def test_python_can_be_chosen() -> None:
    assert choice(EOS_PURE_PYTHON="1") == "False eos.hotloop.python False"


@compiled
@pytest.mark.parametrize(("change", "used"), [("", True), ("// another rule\n", False)])
def test_a_compiled_loop_of_another_source_is_told_and_not_used(tmp_path: Path, change: str, used: bool) -> None:
    """As an editable installation is left behind by a pull; also where a user's tests turn warnings into errors."""
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
    told = done.stderr.splitlines()
    assert len(told) == (0 if used else 1)
    assert used or told[0].endswith("is not used: build it again with `pip install -e .`")
    (tmp_path / "eos" / "hotloop" / "_native.c").unlink()  # as in a wheel without it
    assert "True eos.hotloop._native" in imported().stdout
