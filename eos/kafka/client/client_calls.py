"""Makes confluent-kafka's calls raise real exceptions, and keeps callbacks from raising inside those calls.

confluent-kafka 2.16 raises a fatal error that appears during poll() or flush() as a bare KafkaError (or, where Python
notices, a SystemError). KafkaError is not a BaseException: no `except` clause with a type catches it, so it passes
every handler and ends the program. Every call that serves callbacks goes through `call_client`. In the same way, an
exception raised by a signal handler while a client is closed (the client logs through Python then) can remain set, and
the next call ends with a SystemError in its place.

confluent-kafka lets a callback's exception escape from the call that served it: `consume` then destroys the messages
that it had already taken (the position is after them: a silent loss), and `commit_transaction` raises before it
commits. So `guard_callbacks` wraps each callback of a user: its exception is kept and raised later, while no call is in
progress. An Interruption still passes at once; code that polls must be ready for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from confluent_kafka import KafkaException

from eos import log
from eos.errors import describe_error, raise_if_interrupted

P = ParamSpec("P")
T = TypeVar("T")
_GUARDED = ("stats_cb", "error_cb", "throttle_cb")


def call_client(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the call's result. Raise KafkaException for a bare KafkaError. A signal handler's exception passes
    unchanged."""
    try:
        return call(*args, **kwargs)
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None
    except BaseException:
        raise
    except:  # noqa: E722 - a bare KafkaError matches no type
        bare = sys.exc_info()[1]
    # Raise outside the handler: Python cannot set a bare KafkaError as an exception's context.
    raise KafkaException(bare)


def guard_callbacks(configuration: dict[str, Any], keep: Callable[[Exception], None]) -> dict[str, Any]:
    """Return the configuration with callbacks that pass their exceptions to `keep` instead of raising them.

    `oauth_cb` is the exception: what it raises reaches the client, which then has no token and asks again in ten
    seconds. Its wrapper also raises for a malformed token, which would otherwise surface as an exception from the call
    that served it.
    """
    wrapped = {
        name: _guard_callback(configuration[name], keep) for name in _GUARDED if callable(configuration.get(name))
    }
    if callable(configuration.get("oauth_cb")):
        wrapped["oauth_cb"] = _guard_token_callback(configuration["oauth_cb"])
    return configuration | wrapped


def _guard_callback(callback: Callable[..., Any], keep: Callable[[Exception], None]) -> Callable[..., None]:
    @functools.wraps(callback)
    def call(*args: Any) -> None:
        try:
            callback(*args)
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames
            keep(_to_exception(error))

    return call


def _guard_token_callback(callback: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(callback)
    def call(text: str) -> Any:
        try:
            token = callback(text)
            if not (isinstance(token, tuple) and 2 <= len(token) <= 4 and isinstance(token[0], str)):
                raise TypeError("oauth_cb must return (token, seconds since the epoch at which it expires[, ...])")
            return (token[0], float(token[1]), *token[2:])
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames
            failure = _to_exception(error)
            log.warning("oauth_cb failed, the client will retry", error=describe_error(failure))
            raise failure from error.__cause__

    return call


def _to_exception(error: BaseException) -> Exception:
    """Return a callback's error as an Exception. SystemExit and the like become a RuntimeError, so that they do not end
    the program silently. Raise an interruption."""
    raise_if_interrupted(error)
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a callback raised {describe_error(error)}")
    failure.__cause__ = error
    return failure
