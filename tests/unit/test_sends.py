"""One rule for all sends: an App's Out, a session's send, and a send of a transaction without input."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from eos import KEEP, App, Out, Record
from eos.engine.handling import Collector
from eos.errors import ConfigurationError
from eos.plain import PlainTransaction
from eos.session.producer.states import State
from eos.session.transaction import Transaction


class Point(msgspec.Struct):
    x: int


INPUT = Record("in", 0, 7, timestamp=1_000, key=b"input", value=b"v")
Arguments = dict[str, Any]


def by_app(value: object, arguments: Arguments) -> Any:
    app = App("app")
    named = {"timestamp": arguments.get("timestamp_ms", 0)} | {
        n: v for n, v in arguments.items() if n != "timestamp_ms"
    }
    app.process("in", to="out")(lambda record: Out(value, **{"key": None} | named))
    (send,) = app.routes["in"].outputs(INPUT)
    return send


def by_session(value: object, arguments: Arguments) -> Any:
    sends: list[Any] = []
    session = SimpleNamespace(is_open=lambda txn: True, send=lambda *send: sends.append(send))
    Transaction(cast("Any", session), 0.0, 0.0, -1).send("out", value, **arguments)
    return sends[0]


def by_plain(value: object, arguments: Arguments) -> Any:
    sends: list[Any] = []
    producer = SimpleNamespace(state=State.IN_TRANSACTION, send=lambda *send: sends.append(send))
    PlainTransaction(cast("Any", producer), cast("Any", None)).send("out", value, **arguments)
    return sends[0][:-1]


Way = Callable[[object, Arguments], Any]
every_way = pytest.mark.parametrize("way", [by_app, by_session, by_plain])


@every_way
@pytest.mark.parametrize(
    ("value", "arguments", "sent"),
    [
        (b"v", {}, (b"v", None, -1, 0, None)),
        (None, {"key": b"k"}, (None, b"k", -1, 0, None)),
        ("ü", {"key": "ü"}, ("ü".encode(), "ü".encode(), -1, 0, None)),
        (bytearray(b"v"), {"key": memoryview(b"k")}, (b"v", b"k", -1, 0, None)),
        ({"b": 1, "a": 2}, {"key": {"b": 1, "a": 2}}, (b'{"b":1,"a":2}', b'{"a":2,"b":1}', -1, 0, None)),
        (Point(3), {"key": 3}, (b'{"x":3}', b"3", -1, 0, None)),
        (b"v", {"partition": 2, "timestamp_ms": 5}, (b"v", None, 2, 5, None)),
        (b"v", {"headers": {"a": "ü", "b": None}}, (b"v", None, -1, 0, [("a", "ü".encode()), ("b", None)])),
        (b"v", {"headers": [("a", b"1"), ("a", "2")]}, (b"v", None, -1, 0, [("a", b"1"), ("a", b"2")])),
        (b"v", {"headers": {}}, (b"v", None, -1, 0, None)),
    ],
)
def test_every_sender_encodes_values_keys_and_headers_the_same(
    way: Way, value: object, arguments: Arguments, sent: Any
) -> None:
    assert way(value, arguments) == ("out", *sent)


@every_way
@pytest.mark.parametrize(
    ("value", "arguments", "error", "sentence"),
    [
        (object(), {}, TypeError, "object cannot be sent"),
        (INPUT, {}, TypeError, r"a value of type Record cannot be sent: .*record\.out"),
        (Out(b"v"), {}, TypeError, "a value of type Out cannot be sent"),
        (KEEP, {}, TypeError, "a value of type Keep cannot be sent"),
        (b"v", {"key": INPUT}, TypeError, r"a key of type Record cannot be sent: use record\.key"),
        ("\ud800", {}, UnicodeEncodeError, "surrogates"),
        (b"v", {"partition": -2}, ValueError, "the partition -2"),
        (b"v", {"partition": "1"}, TypeError, "the partition '1'"),
        (b"v", {"timestamp_ms": -1}, ValueError, "the timestamp"),
        (b"v", {"headers": [("a", 1)]}, TypeError, "the header 'a' is of type int"),
        (b"v", {"headers": ["a"]}, TypeError, r"a header is a \(str, bytes"),
    ],
)
def test_every_sender_refuses_unsendable_output_with_same_error(
    way: Way, value: object, arguments: Arguments, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        way(value, arguments)


@pytest.mark.parametrize("way", [by_session, by_plain])
def test_send_without_input_has_no_key_to_keep(way: Way) -> None:
    with pytest.raises(TypeError, match=r"a key of type Keep cannot be sent: use record\.key"):
        way(b"v", {"key": KEEP})


# ---- an Out of a batch function --------------------------------------------------------------------------------------


def batch_of(function: Callable[[list[Record]], Any]) -> Any:
    app = App("app")
    app.process_batch("in", to="out")(function)
    return app.routes["in"].outputs_batch


def test_record_out_sets_key_and_timestamp_in_batch_function() -> None:
    assert batch_of(lambda records: [records[0].out("v")])([INPUT]) == [("out", b"v", b"input", -1, 1_000, None)]


@pytest.mark.parametrize("out", [Out("v"), Out("v", timestamp=0)])
def test_batch_out_without_key_is_refused(out: Out) -> None:
    run = batch_of(lambda records: [records[0].out("v"), out])
    with pytest.raises(
        ConfigurationError, match=r"an Out without a key: .* return record\.out\(value\), or Out\(value, key"
    ):
        run([INPUT])


@pytest.mark.parametrize(("times", "latest"), [((1_000, 3_000, 2_000), 3_000), ((-1, 5), 5), ((-1, -1), 0)])
@pytest.mark.parametrize("usual", [True, False])
def test_batch_out_without_timestamp_gets_latest_of_batch(times: tuple[int, ...], latest: int, usual: bool) -> None:
    """`usual`: through the hot loop; else by the rules in full."""
    headers = () if usual else MappingProxyType({"h": b"x"})
    records = [Record("in", 0, at, ms, b"key", b"v") for at, ms in enumerate(times)]

    def f(given: list[Record]) -> list[Out]:
        given.pop()  # the list is the function's
        return [Out("v", key="k", headers=headers), given[0].out("w"), Out("x", key=None, timestamp=0)]

    app = App("app")
    app.process_batch("in", to="out")(f)
    kept = Collector()
    app.routes["in"].feed(records, kept)
    assert kept.sends == app.routes["in"].outputs_batch(records)
    assert [send[4] for send in kept.sends] == [latest, max(times[0], 0), 0]


def test_batch_out_may_set_key_and_timestamp() -> None:
    run = batch_of(lambda records: [Out("v", b"k", timestamp=0), Out("v", None, timestamp=7)])
    assert run([INPUT]) == [("out", b"v", b"k", -1, 0, None), ("out", b"v", None, -1, 7, None)]
