"""Error policies: how the worker's handler treats a failed record, without a broker."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import pickle
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eos
import eos.engine.handling
import eos.testing
from eos import App, Out, Record, dlq, retry, skip, stop
from eos.app.lineage import Ledger
from eos.app.policies import Policy, policy_of
from eos.encoding.dead_letters import MAX_MESSAGE_BYTES, make_dead_letter
from eos.encoding.lineage import HEADER, decode
from eos.encoding.serde import DecodeError
from eos.engine.handling import DeadLetterRefused, Halt, Handler, RecordRefused
from eos.errors import Action, CallFailed, ConfigurationError, PoisonRecord, Temporary
from eos.records import Feed, FeedResult, Send, UnreadableHeaders, readable_headers


class Order(msgspec.Struct):
    number: int


class Txn:
    """Accept every send except those with a value in `refuses`, which raise as in a client with a full queue."""

    def __init__(self, refuses: Iterable[bytes] = ()) -> None:
        self.sends: list[Send] = []
        self.skipped = self.dead_letters = 0
        self.waited_s = 0.0
        self.failure: CallFailed | None = None
        self._refuses = set(refuses)
        self.fed: list[int] = []

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        if self.failure is not None:
            return FeedResult(0, len(records), None)  # like a session: sends after a failure are ignored
        self.fed.append(len(records))
        fed = feed(records, self)
        self.failure = fed.failure
        return fed if self.failure is None else FeedResult(fed.sent, len(records), None)

    def count(self, *, skipped: int = 0, dead_letters: int = 0) -> None:
        self.skipped += skipped
        self.dead_letters += dead_letters

    def produce(self, *send: Any) -> None:
        topic, value, key = send[:3]
        if value in self._refuses:
            raise BufferError("refused by the client")
        self.sends.append((topic, value, key, -1, send[6] if len(send) > 6 else 0, send[7] if len(send) > 7 else None))

    def on_produce_error(self, error: Exception, send: Send) -> None:
        raise CallFailed("produce", Action.POISON, error)

    @property
    def values(self) -> list[bytes | None]:
        return [send[1] for send in self.sends]


def records(*values: bytes | None, topic: str = "in", partition: int = 0) -> list[Record]:
    return [Record(topic, partition, 10 + n, 1_000 + n, b"k", value, [("h", b"1")]) for n, value in enumerate(values)]


def upper(value: bytes) -> bytes:
    if value.startswith(b"bad"):
        raise ValueError(f"no {value.decode()}")
    return value.upper()


UPPER_RAISES = upper.__code__.co_firstlineno + 2


def app_of(function: Callable[[Any], Any] = upper, on_error: Policy | str = stop, **more: Any) -> App:
    app = App("app")
    app.process("in", to="out", on_error=on_error, **more)(function)
    return app


def handled(app: App, *values: bytes | None) -> Txn:
    """Return the transaction in which the App's handler handled records of all these values."""
    txn = Txn()
    assert Handler(app).handle(txn, records(*values)) is None
    return txn


VALUES = (b"a", b"bad 1", b"b", b"bad 2", b"c")


# ---- the policies themselves -----------------------------------------------------------------------------------------


def test_policies_are_exported_and_accepted_by_name() -> None:
    assert (eos.stop, eos.skip, eos.dlq, eos.retry) == (stop, skip, dlq, retry)
    assert [policy_of(name) for name in ("stop", "skip", "dlq")] == [stop, skip, dlq]
    assert app_of(on_error="dlq").routes["in"].on_error is dlq
    assert pickle.loads(pickle.dumps(retry(3, then=skip))) == retry(3, then=skip)
    assert [repr(policy) for policy in (stop, retry(2, then=dlq))] == ["stop", "retry(2, then=dlq)"]
    named = retry(2, then=dlq, on=[TimeoutError, KeyError])
    assert repr(named) == "retry(2, then=dlq, on=(TimeoutError, KeyError))"
    assert pickle.loads(pickle.dumps(named)) == named
    assert retry(2, on=OSError).on == (OSError,)


@pytest.mark.parametrize("wrong", ["retry", "", None, 5, "Skip", retry])
def test_unknown_policy_is_a_configuration_error(wrong: Any) -> None:
    app = App("app")
    for decorator in (app.process, app.process_batch):
        with pytest.raises(ConfigurationError, match=r"use eos\.stop, eos\.skip, eos\.dlq or eos\.retry"):
            decorator("in", to="out", on_error=wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 0},
        {"n": -1},
        {"n": "3"},
        {"n": 1, "then": retry(1)},
        {"n": 1, "then": "again"},
        {"n": 1, "backoff_ms": -1},
        {"n": 1, "on": ["TimeoutError"]},
        {"n": 1, "on": [ValueError("an instance")]},
        {"n": 1, "on": KeyboardInterrupt},
        {"n": 1, "on": 3},
    ],
)
def test_invalid_retry_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        retry(**arguments)


def test_backoff_doubles_to_its_maximum_and_ends_after_n_retries() -> None:
    policy = retry(5, backoff_ms=100, backoff_max_ms=500)
    assert [policy.wait_s(failures) for failures in range(1, 8)] == [0.1, 0.2, 0.4, 0.5, 0.5, None, None]
    assert skip.wait_s(1) is None
    assert retry(10**9, backoff_ms=1).wait_s(10**9) == 10.0


def test_dead_letter_topics_are_destinations_with_valid_names() -> None:
    app = App("app")
    app.process(["a", "b"], to="out", on_error=retry(1, then=dlq))(upper)
    app.process("c", to="out", on_error=skip)(upper)
    assert app.destinations == {"out", "a.dlq", "b.dlq"}
    with pytest.raises(ConfigurationError, match="the dead-letter topic"):
        app.process("x" * 246, to="out", on_error=dlq)(upper)
    with pytest.raises(ConfigurationError, match=r"a -> a\.dlq -> a: in this cycle"):
        app.process("a.dlq", to="a")(upper)


# ---- one record at a time --------------------------------------------------------------------------------------------


def test_stop_policy_halts_before_the_record_and_names_its_offset() -> None:
    txn = Txn()
    halt = Handler(app_of()).handle(txn, records(*VALUES))
    assert halt is not None
    assert (halt.handled, txn.values) == (1, [b"A"])
    assert isinstance(halt.error, PoisonRecord)
    assert str(halt.error) == "upper failed on in[0]@11: ValueError: no bad 1"
    assert (halt.error.topic, halt.error.partition, halt.error.offset) == ("in", 0, 11)
    assert isinstance(halt.error.__cause__, ValueError)


def test_logged_error_message_is_cut_as_in_a_dead_letter(caplog: pytest.LogCaptureFixture) -> None:
    def raise_with_value(value: bytes) -> None:
        raise ValueError(value.decode())

    huge = b"x" * 1_000_000
    cut = "x" * MAX_MESSAGE_BYTES + "..."
    for policy in (skip, dlq, retry(1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "eos"):
            Handler(app_of(raise_with_value, policy)).handle(Txn(), records(huge))
        (line,) = caplog.messages
        assert f"error=ValueError: {cut}" in line
        assert len(line) < 2 * MAX_MESSAGE_BYTES
    for app in (app_of(raise_with_value), batch_app(stop)):
        halt = Handler(app).handle(Txn(), records(b"bad" + huge, b"b"))
        assert halt is not None
        assert len(str(halt.error)) < 2 * MAX_MESSAGE_BYTES


def test_dlq_sends_the_unchanged_record_with_offset_and_error() -> None:
    txn = handled(app_of(on_error=dlq), *VALUES)
    assert txn.values == [b"A", b"bad 1", b"B", b"bad 2", b"C"]
    assert (txn.skipped, txn.dead_letters) == (0, 2)
    topic, value, key, partition, timestamp, headers = txn.sends[1]
    assert (topic, value, key, partition, timestamp) == ("in.dlq", b"bad 1", b"k", -1, 0)
    assert headers == [
        ("h", b"1"),
        ("eos-dlq-topic", b"in"),
        ("eos-dlq-partition", b"0"),
        ("eos-dlq-offset", b"11"),
        ("eos-dlq-timestamp", b"1001"),
        ("eos-dlq-app", b"app"),
        ("eos-dlq-function", b"upper"),
        ("eos-dlq-exception", b"ValueError"),
        ("eos-dlq-message", b"no bad 1"),
        ("eos-dlq-trace", f'{__file__}:{UPPER_RAISES} in upper: raise ValueError(f"no {{value.decode()}}")'.encode()),
    ]


def test_dead_letter_names_modules_and_cuts_long_messages() -> None:
    record = Record("in", 0, 1, value=None, headers=[(HEADER, b"of an earlier step"), ("h", None)])
    send = make_dead_letter(record, DecodeError("ü" * MAX_MESSAGE_BYTES))
    headers = dict(send[5] or [])
    assert send[1] is None
    assert headers["eos-dlq-exception"] == b"eos.serde.DecodeError"
    assert headers["eos-dlq-message"] == ("ü" * (MAX_MESSAGE_BYTES // 2) + "...").encode()
    assert headers["eos-dlq-timestamp"] == b"-1"
    assert next(iter(headers)) == "h", "lineage of an earlier step is removed"
    assert make_dead_letter(record, ValueError("\ud800"))[5][-1] == ("eos-dlq-message", b"?")  # type: ignore[index]


def test_first_failure_at_each_line_is_logged_with_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def inner(value: bytes) -> bytes:
        raise KeyError(value) if value == b"rare" else ValueError(value)

    def outer(value: bytes) -> bytes:
        return inner(value)

    Handler(app_of(outer, skip)).handle(Txn(), records(*[b"often"] * 30, b"rare", b"rare"))
    lines = caplog.messages
    assert len(lines) == 11, "ten lines, and the first with the rare error"
    file, raised = __file__, inner.__code__.co_firstlineno + 1
    called = outer.__code__.co_firstlineno + 1
    code = 'raise KeyError(value) if value == b"rare" else ValueError(value)'
    trace = f"trace={file}:{called} in outer: return inner(value) > {file}:{raised} in inner: {code}"
    assert [line for line in lines if trace in line] == [lines[0], lines[10]]
    assert "error=KeyError: b'rare'" in lines[10]
    assert all(line.endswith(f" at={file}:{raised}") for line in lines[1:10])


def test_number_of_logged_error_types_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    def function(value: bytes) -> bytes:
        raise type("NewClass", (Exception,), {})

    Handler(app_of(function, skip)).handle(Txn(), records(*[b"a"] * 1_000))
    assert len(caplog.messages) == 100


def test_suppressed_log_lines_are_summarised_later(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimpleNamespace(now=100.0)
    app = app_of(on_error=skip)
    app.process("other", to="out", on_error=dlq)(upper)
    handler = Handler(app, now=lambda: clock.now)
    txn = Txn()
    handler.handle(txn, [*records(*[b"bad 1"] * 30), *records(b"bad 2", topic="other")])
    assert (txn.skipped, txn.dead_letters) == (30, 1)
    assert len(caplog.messages) == 10
    assert "record skipped topic=in partition=0 offset=10 error=ValueError: no bad 1" in caplog.messages[0]
    clock.now += 9.9
    handler.tick()
    assert len(caplog.messages) == 10
    clock.now += 0.2
    handler.tick()
    (line,) = caplog.messages[10:]
    assert line == (
        "more records failed unlogged=21 of=record skipped: 20, dead letter: 1 last=other[0]@10 "
        "error=ValueError: no bad 2"
    )
    clock.now += 60
    handler.tick()
    handler.end()
    assert len(caplog.messages) == 11, "no failure is logged twice"
    handler.handle(Txn(), records(*[b"bad"] * 12))
    handler.end()
    assert caplog.messages[-1].startswith("more records failed unlogged=2 of=record skipped: 2 last=in[0]@21 ")


@pytest.mark.parametrize("last_record_fails", [False, True])
def test_run_summarises_suppressed_log_lines_at_its_end(
    last_record_fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_of(on_error=skip)
    app.process("other", to="out")(upper)
    given: list[Any] = [("in", b"bad")] * 12 + [("other", b"bad" if last_record_fails else b"a")]
    with pytest.raises(PoisonRecord) if last_record_fails else contextlib.nullcontext():
        eos.testing.run(app, given)
    assert caplog.messages[-1].startswith("more records failed unlogged=2 ")


def test_decode_error_is_handled_by_the_policy() -> None:
    def double(order: Order) -> int:
        return order.number * 2

    txn = handled(app_of(double, dlq), b'{"number":2}', b"{", None, b'{"number":3}')
    assert txn.values == [b"4", b"{", None, b"6"]
    assert {dict(send[5] or []).get("eos-dlq-exception") for send in txn.sends} == {None, b"eos.serde.DecodeError"}


def test_record_that_fails_after_an_output_sends_none() -> None:
    def some(value: bytes) -> Any:
        yield value
        yield Out(value, partition=-5) if value == b"bad" else value

    assert handled(app_of(some, skip), b"a", b"bad", b"b").values == [b"a", b"a", b"b", b"b"]


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


@pytest.mark.parametrize("policy", [stop, skip, dlq, retry(3, then=skip)])
def test_configuration_error_stops_under_any_policy(policy: Policy) -> None:
    txn = Txn()
    halt = Handler(app_of(lambda record: Out(b"x", topic="unnamed"), policy)).handle(txn, records(b"a"))
    assert halt is not None
    assert isinstance(halt.error, ConfigurationError)
    assert (halt.handled, txn.sends, txn.skipped) == (0, [], 0)


@pytest.mark.parametrize("policy", [stop, skip, dlq, retry(3, on=(KeyError,), then=skip)])
@pytest.mark.parametrize(
    "full",
    [
        MemoryError(),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "no"),
        OSError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EROFS, "Read-only file system"),
        RuntimeError("can't start new thread"),
        caused(ConnectionError("the service cannot be reached"), by=OSError(errno.EMFILE, "Too many open files")),
    ],
    ids=lambda error: str(error)[:12] or "memory",
)
@pytest.mark.parametrize("batch", [False, True])
def test_resource_exhaustion_is_not_a_record_failure(policy: Policy, full: Exception, batch: bool) -> None:
    def filling(record: Record) -> Out:
        if record.value == b"b":
            raise full
        return record.out(b"x")

    app = App("app")
    if batch:
        app.process_batch("in", to="out", on_error=policy)(lambda given: [filling(record) for record in given])
    else:
        app.process("in", to="out", on_error=policy)(filling)
    txn = Txn()
    halt = Handler(app).handle(txn, records(b"a", b"b", b"c"))
    assert halt is not None
    assert isinstance(halt.error, Temporary)
    assert halt.error.__cause__ is full
    assert "ran out of resources on in[0]@1" in str(halt.error)
    assert (halt.handled, len(txn.sends), txn.skipped, txn.dead_letters) == ((0, 0, 0, 0) if batch else (1, 1, 0, 0))


def test_memory_error_in_a_decoder_is_not_a_record_failure() -> None:
    def decode(value: bytes) -> Any:
        raise MemoryError

    app = App("app")
    app.process("in", to="out", on_error=skip, decode=decode)(lambda record: record.value)
    halt = Handler(app).handle(Txn(), records(b"a"))
    assert halt is not None
    assert isinstance(halt.error, Temporary)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "no"),
        ConnectionRefusedError(),
        ConnectionRefusedError(errno.ECONNREFUSED, "no listener"),
        RuntimeError("no"),
    ],
    ids=repr,
)
def test_error_of_an_external_service_is_a_record_failure(error: Exception) -> None:
    def failing(value: bytes) -> bytes:
        raise error

    assert handled(app_of(failing, skip), b"a").skipped == 1


def test_retry_on_os_error_handles_a_full_disk() -> None:
    def waits(value: bytes) -> bytes:
        raise OSError(errno.ENOSPC, "no")

    halts = run_through(Handler(app_of(waits, retry(2, on=(OSError,), then=skip, backoff_ms=0))), records(b"a"), Txn())
    assert [halt.error for halt in halts] == [None, None]


# ---- retries ---------------------------------------------------------------------------------------------------------


def run_through(handler: Handler, given: list[Record], txn: Txn) -> list[Halt]:
    """Handle the records as the worker does, handing out unhandled records again."""
    halts = []
    while (halt := handler.handle(txn, given)) is not None:
        halts.append(halt)
        if halt.error is not None:
            break
        given = given[halt.handled :]
    return halts


def failing(times: int) -> Callable[[bytes], bytes]:
    """Return a function that fails this many times on each value that begins with "bad"."""
    counts: dict[bytes, int] = {}

    def function(value: bytes) -> bytes:
        counts[value] = counts.get(value, 0) + 1
        if value.startswith(b"bad") and counts[value] <= times:
            raise ValueError("not yet")
        return b"%s %d" % (value, counts[value])

    return function


def test_retry_repeats_a_record_after_its_backoff() -> None:
    txn = Txn()
    halts = run_through(Handler(app_of(failing(2), retry(2, backoff_ms=50))), records(*VALUES), txn)
    assert halts == [Halt(1, None, 0.05), Halt(0, None, 0.1), Halt(2, None, 0.05), Halt(0, None, 0.1)]
    assert txn.values == [b"a 1", b"bad 1 3", b"b 1", b"bad 2 3", b"c 1"]
    assert (txn.skipped, txn.dead_letters) == (0, 0)


@pytest.mark.parametrize(("raised", "tries"), [(TimeoutError, 2), (ConnectionError, 2), (ValueError, 0)])
def test_retry_of_named_errors_leaves_others_to_the_next_policy(raised: type[Exception], tries: int) -> None:
    def fails(value: bytes) -> bytes:
        raise raised("not now")

    txn = Txn()
    halts = run_through(Handler(app_of(fails, retry(2, then=skip, on=OSError))), records(b"a"), txn)
    assert (len(halts), txn.skipped) == (tries, 1)


def test_decode_error_is_retried_only_if_named() -> None:
    def function(order: Order) -> int:
        raise AssertionError("the function must not run")

    for on in ((), (ValueError, DecodeError)):
        txn = Txn()
        halts = run_through(Handler(app_of(function, retry(2, then=skip, on=on))), records(b"{"), txn)
        assert (len(halts), txn.skipped) == (2 if on else 0, 1)


def test_custom_decoder_error_is_retried_if_named() -> None:
    """The decoder may have queried a registry that is unavailable."""

    def asks(value: bytes) -> bytes:
        raise TimeoutError("the registry does not answer")

    for on, tries in (((), 0), ((TimeoutError,), 2), ((KeyError,), 0)):
        txn = Txn()
        policy = retry(2, then=skip, on=on)
        halts = run_through(Handler(app_of(lambda value: value, policy, decode=asks)), records(b"a"), txn)
        assert (len(halts), txn.skipped) == (tries, 1)


@pytest.mark.parametrize("then", [stop, skip, dlq])
def test_last_policy_decides_after_the_retries(then: Policy) -> None:
    txn = Txn()
    halts = run_through(Handler(app_of(failing(9), retry(2, then=then))), records(*VALUES), txn)
    waits = [halt.pause_s for halt in halts if halt.error is None]
    if then is stop:
        assert waits == [0.1, 0.2]
        assert isinstance(halts[-1].error, PoisonRecord)
        assert txn.values == [b"a 1"]
    else:
        assert waits == [0.1, 0.2] * 2
        dead = [b"bad 1", b"bad 2"] if then is dlq else []
        assert sorted(value for value in txn.values if value is not None) == sorted([b"a 1", b"b 1", b"c 1", *dead])
        assert (txn.skipped, txn.dead_letters) == ((2, 0) if then is skip else (0, 2))


def test_retries_are_counted_for_each_record() -> None:
    txn = Txn()
    given = records(*[b"bad %d" % n for n in range(5)])
    halts = run_through(Handler(app_of(failing(2), retry(2))), given, txn)
    assert len(halts) == 10
    assert len(txn.sends) == 5


# ---- batches ---------------------------------------------------------------------------------------------------------


def batch_app(policy: Policy, calls: list[int] | None = None) -> App:
    app = App("app")

    @app.process_batch("in", to="out", on_error=policy)
    def uppers(batch: list[Record]) -> list[Out]:
        if calls is not None:
            calls.append(len(batch))
        return [record.out(upper(record.value or b"")) for record in batch]

    return app


def test_failed_batch_under_stop_runs_once_and_names_its_range() -> None:
    calls: list[int] = []
    txn = Txn()
    halt = Handler(batch_app(stop, calls)).handle(txn, [*records(*VALUES), *records(b"a", partition=1)])
    assert halt is not None
    assert (halt.handled, txn.sends, calls) == (0, [], [6])
    assert "failed on one of 6 records (in[0]@10..14, in[1]@10..10)" in str(halt.error)


def test_batch_size_is_bounded_if_there_are_other_functions() -> None:
    calls: list[int] = []
    app = batch_app(stop, calls)
    app.process("other", to="out")(upper)
    txn = Txn()
    given = [*records(*[b"a"] * 7), *records(b"b", topic="other"), *records(*[b"c"] * 2)]
    assert Handler(app, batch_most=3).handle(txn, given) is None
    assert calls == [3, 3, 1, 2]
    assert txn.values == [b"A"] * 7 + [b"B"] + [b"C"] * 2


@pytest.mark.parametrize("policy", [skip, dlq])
def test_failed_batch_runs_again_record_by_record(policy: Policy) -> None:
    calls: list[int] = []
    txn = handled(batch_app(policy, calls), *VALUES)
    assert calls == [5, 1, 1, 1, 1, 1]
    assert [value for value in txn.values if not (value or b"").startswith(b"bad")] == [b"A", b"B", b"C"]
    assert (txn.skipped, txn.dead_letters) == ((2, 0) if policy is skip else (0, 2))


def test_retried_record_of_a_batch_runs_alone() -> None:
    calls: list[int] = []
    txn = Txn()
    handler = Handler(batch_app(retry(1, then=skip), calls))
    halts = run_through(handler, records(b"a", b"bad", *[b"c"] * 50), txn)
    assert [halt.handled for halt in halts] == [1]
    assert calls == [52, 1, 1, 1, 50]
    assert (len(txn.sends), txn.skipped) == (51, 1)


@pytest.mark.parametrize("policy", [stop, retry(1)], ids=repr)
def test_failed_batch_of_one_names_its_record(policy: Policy) -> None:
    halts = run_through(Handler(batch_app(policy)), records(b"bad"), Txn())
    assert str(halts[-1].error) == "uppers failed on in[0]@10: ValueError: no bad"


# ---- sends refused by the client or the broker -----------------------------------------------------------------------


def test_refused_send_names_its_record() -> None:
    txn = Txn(refuses=[b"B"])
    given = records(b"a", b"b", b"c")
    Handler(app_of()).handle(txn, given)
    assert txn.failure is not None
    assert txn.failure.record is given[1]


def test_waiting_for_queue_room_is_not_function_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    handler, txn = Handler(app_of(), now=lambda: clock.now), Txn(refuses=[b"B"])

    def waits(error: Exception, send: Send) -> None:
        clock.now += 5
        txn.waited_s += 5

    monkeypatch.setattr(txn, "on_produce_error", waits)
    assert handler.handle(txn, records(b"a")) is None
    clock.now += 1
    assert handler.handle(txn, records(b"b", b"b")) is None
    assert handler.open_time_s(txn, clock.now) == 1


def test_open_time_counts_from_a_failed_first_send() -> None:
    """If the transaction is lost, the error must name the slow function."""
    clock = SimpleNamespace(now=0.0)

    def slow(value: bytes) -> bytes:
        clock.now += 30
        return value.upper()

    handler, txn = Handler(app_of(slow), now=lambda: clock.now), Txn(refuses=[b"C"])
    handler.note_begin()
    handler.handle(txn, records(b"a", b"b", b"c"))
    assert txn.failure is not None
    assert handler.open_time_s(txn, clock.now) == 90


@pytest.mark.parametrize("several", [False, True], ids=["one record", "several"])
def test_transaction_is_open_from_its_first_output(several: bool) -> None:
    """The broker's timeout does not start at begin: it learns of the transaction with the first output."""
    clock = SimpleNamespace(now=0.0)

    def slow(value: bytes) -> bytes | None:
        clock.now += 10
        return None if value == b"drop" else value

    handler, txn = Handler(app_of(slow), now=lambda: clock.now), Txn()
    handler.note_begin()
    handler.handle(txn, records(b"drop", b"drop"))
    assert handler.open_time_s(txn, clock.now) == 0
    handler.handle(txn, records(*[b"a"] * (2 if several else 1)))
    # Within a slice the first output is not timed: the transaction counts as open since the start of the slice.
    assert handler.open_time_s(txn, clock.now) == (20 if several else 0)
    handler.handle(txn, records(b"drop"))
    assert handler.open_time_s(txn, clock.now) == (30 if several else 10)
    handler.note_begin()
    assert handler.open_time_s(txn, clock.now) == 0


def test_delivery_error_is_not_blamed_on_the_current_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_produce_error(error: Exception, send: Send) -> None:
        raise CallFailed("delivery", Action.POISON, error)

    txn = Txn(refuses=[b"B"])
    monkeypatch.setattr(txn, "on_produce_error", on_produce_error)
    Handler(app_of()).handle(txn, records(b"a", b"b"))
    assert txn.failure is not None
    assert txn.failure.record is None


def test_refused_send_of_a_batch_names_no_record() -> None:
    for values, known in (((b"a", b"b"), False), ((b"b",), True)):
        txn = Txn(refuses=[b"B"])
        Handler(batch_app(skip)).handle(txn, records(*values))
        assert txn.failure is not None
        assert (txn.failure.record is not None) is known


@pytest.mark.parametrize("policy", [skip, dlq])
def test_refused_record_fails_without_calling_its_function_again(policy: Policy) -> None:
    seen: list[bytes] = []

    def record_value(value: bytes) -> bytes:
        seen.append(value)
        return value

    handler = Handler(app_of(record_value, policy))
    given = records(b"a", b"b", b"c")
    handler.note_refused(given[1], CallFailed("delivery", Action.POISON, ValueError("too large")))
    txn = Txn()
    assert handler.handle(txn, given) is None
    assert seen == [b"a", b"c"]
    if policy is dlq:
        assert txn.values == [b"a", b"b", b"c"]
        headers = dict(txn.sends[1][5] or [])
        assert headers["eos-dlq-exception"] == b"eos.handling.RecordRefused"
        assert b"too large" in (headers["eos-dlq-message"] or b"")
    else:
        assert txn.values == [b"a", b"c"]
    handler.note_end({("in", 0)}, {("in", 0): 10})
    assert handler.handle(Txn(), given) is None
    assert seen == [b"a", b"c"] * 2, "not run after an abort for another reason either"
    handler.note_end({("in", 0)}, {("in", 0): 12})
    assert handler.handle(Txn(), given) is None
    assert seen[4:] == [b"a", b"b", b"c"], "a refusal is forgotten after the commit"


def test_refused_record_under_stop_halts_after_earlier_records() -> None:
    handler = Handler(app_of())
    given = records(b"a", b"b", b"c")
    handler.note_refused(given[1], CallFailed("produce", Action.POISON, ValueError("too large")))
    txn = Txn()
    halt = handler.handle(txn, given)
    assert halt is not None
    assert (halt.handled, txn.values) == (1, [b"A"])
    assert isinstance(halt.error, PoisonRecord)
    assert isinstance(halt.error.__cause__, RecordRefused)


def test_refused_record_runs_again_under_retry() -> None:
    handler = Handler(app_of(on_error=retry(1, then=skip)))
    given = records(b"a", b"b", b"c")
    refusal = CallFailed("produce", Action.POISON, ValueError("too large"))
    handler.note_refused(given[1], refusal)
    txn = Txn(refuses=[b"B"])
    assert handler.handle(txn, given) == Halt(1, None, 0.1)
    assert handler.handle(txn, given[1:]) is None
    assert txn.failure is not None, "the function ran again, and its output was refused again"
    handler.note_refused(txn.failure.record, txn.failure)
    again = Txn()
    assert handler.handle(again, given[1:]) is None
    assert (again.values, again.skipped) == ([b"C"], 1)


def test_refused_dead_letter_stops_the_run() -> None:
    handler = Handler(app_of(on_error=dlq))
    given = records(b"a", b"bad", b"c")
    txn = Txn(refuses=[b"bad"])
    assert handler.handle(txn, given) is None
    assert txn.failure is not None
    assert txn.failure.record is given[1]
    handler.note_refused(given[1], txn.failure)
    halt = handler.handle(Txn(), given)
    assert halt is not None
    assert halt.handled == 1
    assert isinstance(halt.error, PoisonRecord)
    assert isinstance(halt.error.__cause__, DeadLetterRefused)


def test_refused_output_is_not_mistaken_for_an_earlier_dead_letter() -> None:
    handler = Handler(app_of(failing(1), dlq))
    given = records(b"bad")
    assert handler.handle(Txn(), given) is None  # the dead letter was sent, but its transaction is aborted
    txn = Txn(refuses=[b"bad 2"])
    assert handler.handle(txn, given) is None  # the function succeeds now
    assert txn.failure is not None
    handler.note_refused(given[0], txn.failure)
    txn = Txn()
    assert handler.handle(txn, given) is None
    assert dict(txn.sends[0][5] or [])["eos-dlq-exception"] == b"eos.handling.RecordRefused"


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("policy", [skip, dlq, retry(1, then=dlq)], ids=repr)
def test_several_refused_records_are_found_one_by_one(policy: Policy, batch: bool) -> None:
    app = batch_app(policy) if batch else app_of(on_error=policy)
    given = records(b"a", b"r1", b"b", b"r2", b"bad", b"r3", b"c")
    handler, attempts = Handler(app), 0
    kept: list[bytes | None] = []
    while given:
        attempts += 1
        assert attempts < 60, "the same records are handed out forever"
        handler.note_end({("in", 0)}, {("in", 0): given[0].offset})
        txn = Txn(refuses=[b"R1", b"R2", b"R3"])
        # As in a session, a refused record of a batch is found by handing out one record at a time.
        part = given if not batch else given[:1]
        halt = handler.handle(txn, part)
        if txn.failure is not None:
            handler.note_refused(txn.failure.record, txn.failure)
            continue
        kept += txn.values
        given = given[len(part) if halt is None else halt.handled :]
    refused = [b"r1", b"r2", b"bad", b"r3"]
    dead = refused if policy.verdict == "dlq" else []
    assert [value for value in kept if value not in dead] == [b"A", b"B", b"C"]
    assert [value for value in kept if value in dead] == dead


def test_refusals_of_revoked_partitions_are_forgotten() -> None:
    handler = Handler(app_of(on_error=skip))
    given = records(b"a")
    handler.note_refused(given[0], CallFailed("delivery", Action.POISON, ValueError()))
    handler.note_end({("in", 1)}, {})
    txn = Txn()
    assert handler.handle(txn, given) is None
    assert txn.values == [b"A"]


# ---- lineage ---------------------------------------------------------------------------------------------------------


def test_lineage_counts_dead_letters_and_skipped_records() -> None:
    app = App("app")
    app.process("in", to="out", on_error=dlq)(upper)
    app.process("other", to="out", on_error=skip)(upper)
    ledger = Ledger()
    for topic in app.topics:
        ledger.begin((topic, 0), 10, None)
    txn = Txn()
    given = [*records(*VALUES), *records(*VALUES, topic="other")]
    assert Handler(app, ledger).handle(txn, given) is None
    assert dataclasses.astuple(ledger.tally(("in", 0))) == (10, 5, 5)
    assert dataclasses.astuple(ledger.tally(("other", 0))) == (10, 5, 3)
    sources = [decode(dict(send[5] or [])[HEADER] or b"") for send in txn.sends]
    assert [(s.offset, s.i, s.n, s.number) for s in sources if s.topic == "in"] == [(10 + n, 0, 1, n) for n in range(5)]
    assert [(s.offset, s.number) for s in sources if s.topic == "other"] == [(10, 0), (12, 1), (14, 2)]
    assert txn.sends[1][0] == "in.dlq"


def test_stop_iteration_with_lineage_does_not_end_the_records() -> None:
    def first(value: bytes) -> bytes:
        return next(iter([value] if value != b"empty" else []))

    app = app_of(first, skip)
    for ledger in (None, Ledger()):
        if ledger is not None:
            ledger.begin(("in", 0), 10, None)
        txn = Txn()
        assert Handler(app, ledger).handle(txn, records(b"a", b"empty", b"c")) is None
        assert (txn.values, txn.skipped) == ([b"a", b"c"], 1)


# ---- random failures ------------------------------------------------------------------------------------------------

PLANS = st.lists(st.integers(0, 4), max_size=30)  # how often each record fails; 4 and more: always


@given(PLANS, st.sampled_from([skip, dlq, retry(2, then=skip), retry(3, then=dlq)]), st.integers(1, 7), st.booleans())
def test_each_record_has_one_outcome_in_order(plan: list[int], policy: Policy, slice_size: int, batch: bool) -> None:
    failures = [0] * len(plan)

    def function(record: Record) -> Out:
        index = record.offset
        if failures[index] < plan[index] or plan[index] >= 4:
            failures[index] += not batch
            raise ValueError
        return record.out(b"ok %d" % index)

    app = App("app")
    if batch:
        app.process_batch("in", to="out", on_error=policy)(lambda rs: [function(r) for r in rs])
    else:
        app.process("in", to="out", on_error=policy)(function)
    given = [Record("in", 0, n, value=b"dead %d" % n) for n in range(len(plan))]
    handler, txn, at = Handler(app), Txn(), 0
    while at < len(given):
        part = given[at : at + slice_size]
        halt = handler.handle(txn, part)
        at += len(part) if halt is None else halt.handled
    passes = [n for n, times in enumerate(plan) if times == 0 or (not batch and times <= policy.retries and times < 4)]
    expected = [
        b"ok %d" % n if n in passes else b"dead %d" % n
        for n in range(len(plan))
        if n in passes or policy.verdict == "dlq"
    ]
    assert txn.values == expected
    lost = len(plan) - len(passes)
    assert (txn.skipped, txn.dead_letters) == ((0, lost) if policy.verdict == "dlq" else (lost, 0))


# ---- eos.testing.run -------------------------------------------------------------------------------------------------


def test_offline_run_applies_decoding_policies_and_outputs() -> None:
    app = App("app")

    @app.process("orders", to=["doubled", "copies"], on_error=retry(2, then=dlq))
    def double(order: dict[str, int]) -> Any:
        return [{"n": order["n"] * 2}, Out("copy", topic="copies", partition=3, headers={"h": "1"})]

    ran = eos.testing.run(
        app, [("orders", {"n": 1}, "key"), ("orders", "{"), Record("orders", 5, 70, value=b'{"n":4}')]
    )
    assert ran.values("doubled") == [b'{"n":2}', b'{"n":8}']
    assert ran.to("doubled")[0] == eos.testing.Sent("doubled", b'{"n":2}', b"key", None, 0, [])
    assert ran.to("copies")[1] == eos.testing.Sent("copies", b"copy", None, 3, 0, [("h", b"1")])
    assert (ran.values("orders.dlq"), ran.dead_letters, ran.skipped, ran.retries) == ([b"{"], 1, 0, 0)
    assert dict(ran.to("orders.dlq")[0].headers)["eos-dlq-offset"] == b"1"


def test_offline_run_raises_poison_record_for_a_failed_record() -> None:
    with pytest.raises(PoisonRecord, match=r"upper failed on in\[0\]@1: ValueError: no bad"):
        eos.testing.run(app_of(), [("in", "a"), ("in", "bad")])


def test_offline_run_names_wrong_input() -> None:
    with pytest.raises(ConfigurationError, match=r"no function of .* gets records of the topic 'other'"):
        eos.testing.run(app_of(), [("other", "a")])
    with pytest.raises(ConfigurationError, match="is not a Record"):
        eos.testing.run(app_of(), [("in",)])
    with pytest.raises(ConfigurationError, match="has no function"):
        eos.testing.run(App("app"), [])


# ---- own decoders and encoders ---------------------------------------------------------------------------------------


def reversed_bytes(value: bytes) -> str:
    return value[::-1].decode()


def starred(value: object) -> bytes:
    if value == "wrong":
        return "str"  # type: ignore[return-value]
    return f"*{value}*".encode()


def test_custom_decoder_and_encoder_are_used() -> None:
    app = app_of(lambda text: [text, Out(b"bytes too"), None, Out(None)], decode=reversed_bytes, encode=starred)
    assert handled(app, b"abc").values == [b"*cba*", b"*b'bytes too'*", None]
    batch = App("batch")
    batch.process_batch("in", to="out", encode=starred)(lambda rs: collections.deque(r.out(r.value) for r in rs))
    assert handled(batch, b"abc").values == [b"*b'abc'*"]


def test_custom_decoder_and_encoder_errors_are_record_failures() -> None:
    txn = handled(app_of(lambda text: text, dlq, decode=reversed_bytes), b"a", b"\xff", None)
    assert txn.values == [b"a", b"\xff", None]
    messages = [dict(send[5] or []).get("eos-dlq-message") or b"" for send in txn.sends]
    assert messages[1].startswith(b"reversed_bytes: UnicodeDecodeError")
    assert b"got a tombstone" in messages[2]
    txn = handled(app_of(lambda value: "wrong", dlq, encode=starred), b"a")
    assert b"starred returned a str, not bytes" in (dict(txn.sends[0][5] or [])["eos-dlq-message"] or b"")


def test_custom_decoder_passes_tombstones_to_functions_that_accept_them() -> None:
    def shown(text: str | None) -> str:
        return repr(text)

    assert handled(app_of(shown, decode=reversed_bytes), None, b"ab").values == [b"None", b"'ba'"]


def test_custom_decoders_survive_pickling_and_invalid_ones_are_refused() -> None:
    made = app_of(upper, decode=reversed_bytes, encode=starred).routes["in"]
    copied = pickle.loads(pickle.dumps((made.decode, made.encode)))
    assert copied[0](b"ab") == "ba"
    assert copied[1]("a") == b"*a*"
    with pytest.raises(ConfigurationError, match="decode="):
        app_of(decode="json")
    with pytest.raises(ConfigurationError, match="encode="):
        app_of(encode=5)
    with pytest.raises(ConfigurationError, match="gets the Record unchanged"):

        @App("app").process("in", decode=reversed_bytes)
        def whole(record: Record) -> None: ...


# ---- a record that cannot be read or sent --------------------------------------------------------------------------

WHY = "the name of header 1 of 2 is not UTF-8"


def unreadable(policy: Policy) -> tuple[Txn, Halt | None]:
    """Handle three records, the second with unreadable headers, and return the transaction and the halt."""
    handler, txn = Handler(app_of(on_error=policy)), Txn()
    given = records(b"a", b"b", b"c")
    given[1] = msgspec.structs.replace(given[1], headers=UnreadableHeaders([("b", b"2")], WHY))
    handler.note_unreadable(("in", 0, 11), WHY)
    return txn, handler.handle(txn, given)


@pytest.mark.parametrize("policy", [dlq, retry(3, then=dlq)])
def test_dead_letter_has_the_readable_headers_of_its_record(policy: Policy) -> None:
    txn, halt = unreadable(policy)
    assert halt is None
    assert txn.values == [b"A", b"b", b"C"]
    headers = txn.sends[1][5]
    assert headers is not None
    assert headers[0] == ("b", b"2")
    assert dict(headers)["eos-dlq-message"] == WHY.encode()


def test_stop_policy_halts_at_the_offset_of_unreadable_headers() -> None:
    txn, halt = unreadable(stop)
    assert halt is not None
    assert halt.handled == 1
    assert re.search(r"failed on in\[0\]@11: DecodeError: the name of header 1 of 2", str(halt.error))
    assert txn.values == [b"A"]


def test_unreadable_headers_raise_in_a_session_loop() -> None:
    headers = UnreadableHeaders([("b", b"2")], WHY)
    for read in (list, len, dict, lambda given: given[0], lambda given: ("b", b"2") in given):
        with pytest.raises(ValueError, match="header 1 of 2"):
            read(headers)
    assert (readable_headers(headers), readable_headers(())) == ([("b", b"2")], ())


MICROSECONDS = 1_700_000_000_000_000


def keep(value: str) -> str:
    return value


def keep_and_count(value: bytes, seen: eos.State[int]) -> bytes:
    seen.set(1)
    return value


async def keep_async(value: str) -> str:
    return value


def keep_many(given: list[Record]) -> list[Out]:
    return [record.out(record.value) for record in given]


@pytest.mark.parametrize("function", [keep, keep_and_count, keep_async, keep_many])
def test_timestamp_in_microseconds_is_handled_by_the_policy(function: Callable[..., Any]) -> None:
    app = App("app")
    (app.process_batch if function is keep_many else app.process)("in", to="out", on_error=dlq)(function)
    given = [Record("in", 0, 0, 1_000, b"k", b"a"), Record("in", 0, 1, MICROSECONDS, b"k", b"b")]
    ran = eos.testing.run(app, given)
    assert (ran.values("out"), ran.values("in.dlq")) == ([b"a"], [b"b"])
    assert b"in microseconds it is 2023-11-14 22:13:20 UTC" in dict(ran.to("in.dlq")[0].headers)["eos-dlq-message"]
