"""A user's callbacks, so that what they raise does no harm inside the client.

confluent-kafka lets an exception of a callback out of the call that served it: `consume` then destroys the messages
that it had already taken (the position is behind them: a silent loss), and `commit_transaction` raises before it
committed. So each callback that a user gives is wrapped: what it raises is kept and raised later, where nothing is on
its way. A signal's exception (no `Exception`) still passes at once; who polls must be ready for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from eos import log

_SERVED = ("stats_cb", "error_cb", "throttle_cb")


def guarded(configuration: dict[str, Any], keep: Callable[[Exception], None]) -> dict[str, Any]:
    """The configuration with callbacks that hand what they raise to `keep`.

    `oauth_cb` is another matter: the client takes its failure for what it is, no token, and asks again in ten seconds.
    It is made to raise for a malformed token too, which would come out of the call otherwise.
    """
    wrapped = {name: _kept(configuration[name], keep) for name in _SERVED if callable(configuration.get(name))}
    if callable(configuration.get("oauth_cb")):
        wrapped["oauth_cb"] = _token_of(configuration["oauth_cb"])
    return configuration | wrapped


def _kept(callback: Callable[..., Any], keep: Callable[[Exception], None]) -> Callable[..., None]:
    @functools.wraps(callback)
    def call(*args: Any) -> None:
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001 - must not pass through C frames
            keep(error)

    return call


def _token_of(callback: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(callback)
    def call(text: str) -> Any:
        try:
            token = callback(text)
            if not (isinstance(token, tuple) and 2 <= len(token) <= 4 and isinstance(token[0], str)):
                raise TypeError("oauth_cb must return (token, seconds since the epoch at which it expires[, ...])")
            return (token[0], float(token[1]), *token[2:])
        except Exception as error:
            log.warning("oauth_cb failed: no token, the client asks again", error=f"{type(error).__name__}: {error}")
            raise

    return call
