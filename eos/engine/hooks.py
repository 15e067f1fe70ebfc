"""Runs an App's hooks: its `on_start` functions before the first record, its `on_stop` functions at the end.

Owns their order and the consequences of a failing hook. It must never run while a transaction is open, and must not
wait for a user's code after a stop that took too long.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from eos import log
from eos.app import concurrent
from eos.app.definition import App
from eos.app.routes import is_async
from eos.encoding.serde import function_name
from eos.errors import Temporary, raise_if_interrupted, safe_str


class HookFailed(Temporary):
    """Reports that a function of `on_start` or `on_stop` raised the `__cause__`. No record is affected."""


class Hooks:
    """Runs the hooks of one run of an App."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._started = self._abandoned = False

    def start(self) -> None:
        """Run the start hooks in order.

        Raises HookFailed for the first hook that raises, and ConfigurationError before any hook if the App's coroutines
        cannot be run.
        """
        hooks = [*self._app.start_hooks, *self._app.stop_hooks]
        if any(route.concurrent for route in self._app.functions) or any(map(is_async, hooks)):
            concurrent.prepare()
        for hook in self._app.start_hooks:
            _run("on_start", hook)
        self._started = True

    def abandon(self) -> None:
        """Abandon the run; `stop` then runs no hooks."""
        self._abandoned = True

    def stop(self, failed: bool) -> None:
        """Run all stop hooks, the last one first, and close the event loop.

        Raises HookFailed if a hook raised; if the run `failed` anyway, the error is only logged.
        """
        if self._abandoned:
            concurrent.abandon()
            return
        errors: list[HookFailed] = []
        for hook in reversed(self._app.stop_hooks if self._started else []):
            try:
                _run("on_stop", hook)
            except HookFailed as error:
                log.event(logging.ERROR, "a hook failed", error=str(error))
                errors.append(error)
        concurrent.close()
        if errors and not failed:
            raise errors[0]


def _run(which: str, hook: Callable[[], Any]) -> None:
    try:
        result = hook()
        if inspect.iscoroutine(result):
            concurrent.run_one(result)
    except BaseException as error:
        raise_if_interrupted(error)
        sentence = f"{which}: {function_name(hook)} raised {type(error).__name__}: {safe_str(error)}"
        raise HookFailed(sentence) from error
