"""Runs coroutine functions from a thread that has no event loop of its own running.

Owns one asyncio event loop per thread, made at the first need and kept until `close()`: connections that a function or
an `on_start` opened belong to that loop. It must never keep a coroutine running between two calls on purpose; tasks
that a user's function started go on when the next call runs the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, cast

from eos import log
from eos.errors import (
    ConfigurationError,
    EosError,
    IllegalState,
    Temporary,
    interruption_of,
    raise_if_interrupted,
    safe_str,
)

Outcome = Any  # what a coroutine returned, or the exception it raised


class _Here(threading.local):
    runner: asyncio.Runner | None = None
    fatal: BaseException | None = None


_here = _Here()


def run_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Outcome]:
    """Runs all at once; what each returned or which exception it raised, in their order.

    Raises an interruption (eos/errors.py): the others are then left as they are, and `abandon()` must come next.
    Raises an EosError where they could not be run: that is about this thread, never about what they were given.
    """
    given = list(coroutines)
    try:
        runner = _running()
    except EosError:
        for coroutine in given:
            coroutine.close()
        raise
    running: list[asyncio.Task[list[Outcome]]] = []
    coroutine = _gather(given, running)
    while True:
        try:
            return runner.run(coroutine)
        except RuntimeError as error:
            fatal, _here.fatal = _here.fatal, None
            if fatal is None:
                raise IllegalState(f"the event loop of async functions does not run any more: {error}") from error
            raise fatal from None
        except (SystemExit, KeyboardInterrupt) as error:
            raise_if_interrupted(error)
            # Of a task or a callback that a function started: asyncio stops its loop for these two, whoever awaits
            # the task gets them too.
            log.warning(
                "a task of an async function stopped the event loop", error=f"{type(error).__name__}: {safe_str(error)}"
            )
            coroutine = _rest_of(running[0])


def prepare() -> None:
    """Makes this thread's loop, where what a coroutine inherits of the caller's context is nobody's yet: neither a
    record's nor a transaction's. Raises ConfigurationError in a thread whose event loop runs: no second one can run in
    it. Temporary: none can be made."""
    _running()


def _running() -> asyncio.Runner:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise ConfigurationError(
            "async def functions cannot run here, because an event loop runs in this thread already (as in a notebook "
            "or an async test)",
            remedy="give the App a thread of its own: `await asyncio.to_thread(eos.testing.run, app, records)`",
        )
    if _here.runner is None:
        runner = asyncio.Runner()
        try:
            runner.get_loop().set_exception_handler(_on_exception)
        except OSError as error:  # no file is left for its selector
            raise Temporary(f"no event loop for async functions can be made: {error}") from error
        _here.runner = runner
    return _here.runner


def run_one(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The coroutine's result or exception."""
    (outcome,) = run_all([coroutine])
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def close() -> None:
    """Cancels what still runs on this thread's loop, and ends it."""
    runner, _here.runner = _here.runner, None
    if runner is not None and not runner.get_loop().is_closed():  # a function's own act
        runner.close()


def abandon() -> None:
    """Forgets this thread's loop as it is: after a stop that took too long nothing of a user's code is waited for."""
    _here.runner = None


async def _gather(
    coroutines: list[Coroutine[Any, Any, Any]], running: list[asyncio.Task[list[Outcome]]]
) -> list[Outcome]:
    """Run all; `running` gets the task that does."""
    running.append(cast("asyncio.Task[list[Outcome]]", asyncio.current_task()))
    return await asyncio.gather(*map(outcome_of, coroutines))


async def _rest_of(task: asyncio.Task[list[Outcome]]) -> list[Outcome]:
    return await task


async def outcome_of(coroutine: Coroutine[Any, Any, Any]) -> Outcome:
    """Of one that runs under `run_all`."""
    try:
        return await coroutine
    except asyncio.CancelledError:
        return RuntimeError("the coroutine was cancelled from within")
    except BaseException as error:  # noqa: BLE001 - it is the caller's to know
        if (interruption := interruption_of(error)) is not None:
            _end_with(interruption)  # at once: the others may go on for as long as they like
        return error


def _end_with(error: BaseException) -> None:
    _here.fatal = _here.fatal or error
    asyncio.get_running_loop().stop()


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A signal's exception that asyncio caught in a callback of its own must not be lost: the loop ends with it."""
    error = context.get("exception")
    interruption = interruption_of(error) if isinstance(error, BaseException) else None
    if interruption is not None:
        _end_with(interruption)
    else:
        loop.default_exception_handler(context)
