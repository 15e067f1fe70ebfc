"""Runs coroutine functions from a thread that has no event loop of its own running.

Owns one asyncio event loop per thread, made at the first need and kept until `close()`: connections that a function or
an `on_start` opened belong to that loop. It must never keep a coroutine running between two calls on purpose; tasks
that a user's function started go on when the next call runs the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any

from eos.errors import ConfigurationError, EosError, IllegalState, Temporary

Outcome = Any  # what a coroutine returned, or the Exception it raised


class _Here(threading.local):
    runner: asyncio.Runner | None = None
    fatal: BaseException | None = None


_here = _Here()


def run_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Outcome]:
    """Runs all at once; what each returned or which Exception it raised, in their order.

    Raises what is no Exception (a signal's): the others are then left as they are, and `abandon()` must come next.
    Raises an EosError where they could not be run: that is about this thread, never about what they were given.
    """
    given = list(coroutines)
    try:
        runner = _running()
    except EosError:
        for coroutine in given:
            coroutine.close()
        raise
    try:
        return runner.run(_gather(given))
    except RuntimeError as error:
        fatal, _here.fatal = _here.fatal, None
        if fatal is None:
            raise IllegalState(f"the event loop of async functions does not run any more: {error}") from error
        raise fatal from None


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
    if isinstance(outcome, Exception):
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


async def _gather(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Outcome]:
    return await asyncio.gather(*map(outcome_of, coroutines))


async def outcome_of(coroutine: Coroutine[Any, Any, Any]) -> Outcome:
    """Of one that runs under `run_all`."""
    try:
        return await coroutine
    except Exception as error:  # noqa: BLE001 - it is the caller's to know
        return error
    except asyncio.CancelledError:
        return RuntimeError("the coroutine was cancelled from within")  # a CancelledError is no Exception
    except BaseException as error:  # noqa: BLE001 - raised by run_all
        _end_with(error)  # at once: the others may go on for as long as they like
        return RuntimeError(f"ended by {error!r}")


def _end_with(error: BaseException) -> None:
    _here.fatal = _here.fatal or error
    asyncio.get_running_loop().stop()


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A signal's exception that asyncio caught in a callback of its own must not be lost: the loop ends with it."""
    error = context.get("exception")
    if isinstance(error, BaseException) and not isinstance(error, Exception):
        _end_with(error)
    else:
        loop.default_exception_handler(context)
