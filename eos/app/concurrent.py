"""Runs coroutine functions from a thread that has no running event loop.

Owns one asyncio event loop per thread, created when first needed and kept until `close()`: connections that a function
or an `on_start` opened belong to that loop. It must never deliberately keep a coroutine running between two calls.
Tasks that a user's function started continue when the next call runs the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, cast

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

if TYPE_CHECKING:
    # Imported late at run time: most Apps have no coroutine functions, and would start 20 ms later.
    import asyncio

Outcome = Any  # a coroutine's result, or the exception that it raised


class _ThreadLoop(threading.local):
    runner: asyncio.Runner | None = None
    fatal: BaseException | None = None


_thread_loop = _ThreadLoop()


def run_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Outcome]:
    """Run all coroutines at once, and return the result or the exception of each in their order.

    Raises an interruption (eos/errors.py): the other coroutines then stay as they are, and `abandon()` must be called
    next. Raises an EosError if the coroutines could not be run. Such an error is about this thread, never about the
    coroutines.
    """
    given = list(coroutines)
    try:
        runner = _get_runner()
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
            fatal, _thread_loop.fatal = _thread_loop.fatal, None
            if fatal is None:
                raise IllegalState(f"the event loop of async functions has stopped: {error}") from error
            raise fatal from None
        except (SystemExit, KeyboardInterrupt) as error:
            raise_if_interrupted(error)
            # A task or callback that a function started raised SystemExit or KeyboardInterrupt, which stops asyncio's
            # event loop. Code that awaits the task gets the exception too.
            log.warning("async task stopped the event loop", error=f"{type(error).__name__}: {safe_str(error)}")
            coroutine = _wait_for(running[0])


def prepare() -> None:
    """Create this thread's event loop outside of any record or transaction, because coroutines inherit the context.

    Raises ConfigurationError in a thread with a running event loop, which allows no second one. Raises Temporary if the
    loop cannot be created.
    """
    _get_runner()


def _get_runner() -> asyncio.Runner:
    import asyncio

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
    if _thread_loop.runner is None:
        runner = asyncio.Runner()
        try:
            runner.get_loop().set_exception_handler(_on_exception)
        except OSError as error:  # no file descriptor is left for the event loop
            raise Temporary(f"no event loop for async functions could be created: {error}") from error
        _thread_loop.runner = runner
    return _thread_loop.runner


def run_one(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run the coroutine, and return its result or raise its exception."""
    (outcome,) = run_all([coroutine])
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def close() -> None:
    """Cancel the tasks that still run on this thread's loop, and close the loop."""
    runner, _thread_loop.runner = _thread_loop.runner, None
    if runner is not None and not runner.get_loop().is_closed():  # a function may have closed the loop
        runner.close()


def abandon() -> None:
    """Drop this thread's loop without closing it.

    After a stop that took too long, the worker must not wait for user code.
    """
    _thread_loop.runner = None


async def _gather(
    coroutines: list[Coroutine[Any, Any, Any]], running: list[asyncio.Task[list[Outcome]]]
) -> list[Outcome]:
    """Run all coroutines, and append the task that runs them to `running`."""
    import asyncio

    running.append(cast("asyncio.Task[list[Outcome]]", asyncio.current_task()))
    return await asyncio.gather(*map(outcome_of, coroutines))


async def _wait_for(task: asyncio.Task[list[Outcome]]) -> list[Outcome]:
    return await task


async def outcome_of(coroutine: Coroutine[Any, Any, Any]) -> Outcome:
    """Return the outcome of a coroutine that runs under `run_all`."""
    try:
        return await coroutine
    except BaseException as error:  # noqa: BLE001 - the caller decides
        if (interruption := interruption_of(error)) is not None:
            _stop_with(interruption)  # stop at once: other coroutines may run for a long time
        return error


def _stop_with(error: BaseException) -> None:
    import asyncio

    _thread_loop.fatal = _thread_loop.fatal or error
    asyncio.get_running_loop().stop()


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Stop the loop with a signal's exception that asyncio caught in a callback of its own, so that it is not lost."""
    error = context.get("exception")
    interruption = interruption_of(error) if isinstance(error, BaseException) else None
    if interruption is not None:
        _stop_with(interruption)
    else:
        loop.default_exception_handler(context)
