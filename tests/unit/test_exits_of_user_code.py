"""SystemExit and other unusual exceptions of user code: the policy handles them, and the process continues."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import eos.testing
from eos import App, Out, PoisonRecord, Record, State, dlq, retry, skip
from eos.cli import invoke
from eos.engine.hooks import HookFailed
from eos.errors import Interruption, Temporary, safe_str
from eos.kafka.client.client_calls import guard_callbacks
from eos.signals import ShutdownExpired

GOOD, BAD = ("in", "good", "key"), ("in", "bad", "key")


class Own(BaseException):
    pass


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


EXITS = [SystemExit(0), SystemExit("no such thing"), asyncio.CancelledError(), GeneratorExit(), Own("x"), WithoutText()]


def raising(error: BaseException, value: object) -> str:
    if value in ("bad", b"bad"):
        raise error
    return "done"


# Ways to call user code.


def plain(app: App, error: BaseException, **more: Any) -> None:
    @app.process("in", to="out", **more)
    def f(value: str) -> str:
        return raising(error, value)


def generator(app: App, error: BaseException, **more: Any) -> None:
    @app.process("in", to="out", **more)
    def f(value: str) -> Iterator[str]:
        yield raising(error, value)


def coroutine(app: App, error: BaseException, **more: Any) -> None:
    @app.process("in", to="out", **more)
    async def f(value: str) -> str:
        await asyncio.sleep(0)
        return raising(error, value)


def task_of_a_coroutine(app: App, error: BaseException, **more: Any) -> None:
    async def later(value: str) -> str:
        await asyncio.sleep(0)
        return raising(error, value)

    @app.process("in", to="out", **more)
    async def f(value: str) -> str:
        return await asyncio.create_task(later(value))


def with_state(app: App, error: BaseException, **more: Any) -> None:
    @app.process("in", to="out", **more)
    def f(value: str, seen: State[int]) -> str:
        seen.set(seen.get(0) + 1)
        return raising(error, value)


def coroutine_with_state(app: App, error: BaseException, **more: Any) -> None:
    @app.process("in", to="out", **more)
    async def f(value: str, seen: State[int]) -> str:
        return raising(error, value)


def batch(app: App, error: BaseException, **more: Any) -> None:
    @app.process_batch("in", to="out", **more)
    def f(records: list[Record]) -> list[Out]:
        return [record.out(raising(error, record.value)) for record in records]


def batch_with_state(app: App, error: BaseException, **more: Any) -> None:
    @app.process_batch("in", to="out", **more)
    def f(records: list[Record], seen: dict[bytes, State[int]]) -> list[Out]:
        return [record.out(raising(error, record.value)) for record in records]


def decoder(app: App, error: BaseException, **more: Any) -> None:
    @app.process("in", to="out", decode=lambda value: raising(error, value), **more)
    def f(value: str) -> str:
        return value


def encoder(app: App, error: BaseException, **more: Any) -> None:
    @app.process("in", to="out", encode=lambda value: raising(error, value).encode(), **more)
    def f(value: str) -> str:
        return value


WAYS = [
    plain,
    generator,
    coroutine,
    task_of_a_coroutine,
    with_state,
    coroutine_with_state,
    batch,
    batch_with_state,
    decoder,
    encoder,
]
Way = Callable[..., None]


def app_of(way: Way, error: BaseException, **more: Any) -> App:
    app = App("app")
    way(app, error, **more)
    return app


@pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_exit_in_user_code_fails_its_record_by_the_policy(way: Way, error: BaseException) -> None:
    ran = eos.testing.run(app_of(way, error, on_error=dlq), [GOOD, BAD, GOOD])
    assert ran.values("out") == [b"done", b"done"]
    (dead_letter,) = ran.to("in.dlq")
    assert dead_letter.value == b"bad"


@pytest.mark.parametrize("way", WAYS)
def test_exit_under_stop_names_the_record_and_the_exception(way: Way) -> None:
    with pytest.raises(PoisonRecord, match="SystemExit: 3") as raised:
        eos.testing.run(app_of(way, SystemExit(3)), [BAD])
    assert (raised.value.exit_code, raised.value.offset) == (65, 0)
    assert "in[0]@0" in str(raised.value)


@pytest.mark.parametrize("way", [plain, coroutine])
def test_dead_letter_of_a_system_exit_names_class_message_and_line(way: Way) -> None:
    (dead_letter,) = eos.testing.run(app_of(way, SystemExit("no such thing"), on_error=dlq), [BAD]).to("in.dlq")
    headers = dict(dead_letter.headers)
    assert (headers["eos-dlq-exception"], headers["eos-dlq-message"]) == (b"SystemExit", b"no such thing")
    assert b"raise error" in (headers["eos-dlq-trace"] or b"")


def test_failure_without_text_is_named_by_its_class() -> None:
    with pytest.raises(PoisonRecord, match=r"f failed on in\[0\]@0: CancelledError$"):
        eos.testing.run(app_of(coroutine, asyncio.CancelledError()), [BAD])


def test_exit_of_an_unawaited_task_fails_no_record() -> None:
    app = App("app")

    async def leaves() -> None:
        sys.exit(0)

    @app.process("in", to="out")
    async def f(value: str) -> str:
        tasks.append(asyncio.create_task(leaves()))
        await asyncio.sleep(0.01)
        return value

    tasks: list[asyncio.Task[None]] = []
    assert eos.testing.run(app, [GOOD, GOOD]).values("out") == [b"good", b"good"]
    assert [type(task.exception()) for task in tasks] == [SystemExit, SystemExit]


# ---- interruptions from outside --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_interruption_passes_every_policy(way: Way) -> None:
    with pytest.raises(ShutdownExpired):
        eos.testing.run(app_of(way, ShutdownExpired("now"), on_error=skip), [BAD])


@pytest.mark.parametrize("way", [plain, generator, with_state, batch, decoder])
def test_ctrl_c_passes_every_policy(way: Way) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            eos.testing.run(app_of(way, KeyboardInterrupt(), on_error=skip), [BAD])
    finally:
        signal.signal(signal.SIGINT, before)


def test_interruption_in_a_group_or_context_passes() -> None:
    for way in (plain, coroutine):
        with pytest.raises(ShutdownExpired):
            eos.testing.run(app_of(way, BaseExceptionGroup("tasks", [ShutdownExpired()]), on_error=skip), [BAD])
        hidden = ValueError()
        hidden.__context__ = ShutdownExpired()
        with pytest.raises(ShutdownExpired):
            eos.testing.run(app_of(way, hidden, on_error=skip), [BAD])


def test_keyboard_interrupt_with_custom_handler_is_a_record_failure() -> None:
    """A worker's own handler never raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        for way in (plain, coroutine, task_of_a_coroutine):
            assert eos.testing.run(app_of(way, KeyboardInterrupt(), on_error=skip), [BAD]).skipped == 1
    finally:
        signal.signal(signal.SIGINT, before)


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [plain, coroutine, batch])
def test_memory_error_in_an_exception_group_is_not_dead_lettered(way: Way) -> None:
    group = ExceptionGroup("tasks", [ValueError("a"), ExceptionGroup("inner", [MemoryError()])])
    with pytest.raises(Temporary, match="ran out of resources"):
        eos.testing.run(app_of(way, group, on_error=dlq), [BAD])


@pytest.mark.parametrize(("inside", "retries"), [(TimeoutError(), 2), (ValueError(), 0)])
def test_retry_on_matches_inside_exception_groups(inside: Exception, retries: int) -> None:
    group = ExceptionGroup("tasks", [KeyError("k"), ExceptionGroup("inner", [inside])])
    policy = retry(2, on=TimeoutError, then=skip, backoff_ms=0)
    for way in (plain, decoder):
        ran = eos.testing.run(app_of(way, group, on_error=policy), [BAD])
        assert (ran.retries, ran.skipped) == (retries, 1)


def test_dead_letter_of_exception_group_lists_its_exceptions() -> None:
    group = ExceptionGroup("tasks", [ValueError("a"), KeyError("k")])
    (dead_letter,) = eos.testing.run(app_of(plain, group, on_error=dlq), [BAD]).to("in.dlq")
    assert dict(dead_letter.headers)["eos-dlq-message"] == b"tasks (2 sub-exceptions): ValueError: a; KeyError: 'k'"


# ---- outside of a record ---------------------------------------------------------------------------------------------


def test_error_whose_str_raises_is_named_by_its_class() -> None:
    assert safe_str(WithoutText()) == "(its __str__ raised RuntimeError)"
    with pytest.raises(PoisonRecord, match=r"f failed on in\[0\]@0: WithoutText: \(its __str__ raised RuntimeError\)"):
        eos.testing.run(app_of(plain, WithoutText()), [BAD])


@pytest.mark.parametrize("error", [SystemExit(0), WithoutText()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("which", ["on_start", "on_stop"])
def test_exit_in_a_hook_is_a_failed_hook(which: str, error: BaseException) -> None:
    app = app_of(plain, error)

    def hook() -> None:
        raise error

    getattr(app, which)(hook)
    with pytest.raises(HookFailed, match=type(error).__name__):
        eos.testing.run(app, [GOOD])


def test_exit_during_an_import_is_a_failed_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    assert invoke(["topology", "leaves:app"]) == 64
    assert "leaves could not be imported: SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stats_cb", "oauth_cb"])
def test_exit_in_a_callback_of_the_client_is_an_error(name: str) -> None:
    kept: list[Exception] = []

    def leaves(_: str) -> None:
        sys.exit(0)

    callback = guard_callbacks({name: leaves}, kept.append)[name]
    try:
        callback("{}")
    except RuntimeError as error:
        kept.append(error)
    assert [str(error) for error in kept] == ["a callback raised SystemExit: 0"]


def test_interruption_is_not_an_exception_subclass() -> None:
    """An `except Exception` in user code does not swallow an interruption."""
    assert issubclass(ShutdownExpired, Interruption)
    assert not issubclass(Interruption, Exception)
