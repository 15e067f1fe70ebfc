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

Outcome = Any  # what a coroutine returned, or the Exception it raised


class _Here(threading.local):
    runner: asyncio.Runner | None = None
    fatal: BaseException | None = None


_here = _Here()


def run_all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Outcome]:
    """Runs all at once; what each returned or which Exception it raised, in their order.

    Raises what is no Exception (a signal's): the others are then left as they are, and `abandon()` must come next.
    """
    runner = _here.runner
    if runner is None:
        runner = _here.runner = asyncio.Runner()
        runner.get_loop().set_exception_handler(_on_exception)
    try:
        return runner.run(_gather(list(coroutines)))
    except RuntimeError:
        fatal, _here.fatal = _here.fatal, None
        if fatal is None:
            raise
        raise fatal from None


def run_one(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The coroutine's result or exception."""
    (outcome,) = run_all([coroutine])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def close() -> None:
    """Cancels what still runs on this thread's loop, and ends it."""
    runner, _here.runner = _here.runner, None
    if runner is not None:
        runner.close()


def abandon() -> None:
    """Forgets this thread's loop as it is: after a stop that took too long nothing of a user's code is waited for."""
    _here.runner = None


async def _gather(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Outcome]:
    return await asyncio.gather(*map(_outcome, coroutines))


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> Outcome:
    try:
        return await coroutine
    except Exception as error:  # noqa: BLE001 - it is the caller's to know
        return error
    except asyncio.CancelledError:
        return RuntimeError("the coroutine was cancelled from within")  # a CancelledError is no Exception
    except BaseException as error:  # noqa: BLE001 - raised by run_all
        _end_with(error)  # at once: the others may go on for as long as they like


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
