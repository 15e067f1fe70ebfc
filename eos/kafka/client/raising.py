"""What confluent-kafka's calls and callbacks raise comes out as an exception, and where it does no harm.

confluent-kafka 2.16 raises a fatal error that shows during poll() or flush() as a bare KafkaError (or, where Python
notices, a SystemError). KafkaError is no BaseException: no `except` clause with a type catches it, it passes through
every handler of a program and ends it. Every call that serves callbacks goes through `raising`. And a signal's
exception that comes while a client is taken down (its last lines go to a logger, in Python) can be left lying there:
whatever runs next ends with a SystemError in its place.

confluent-kafka lets an exception of a callback out of the call that served it: `consume` then destroys the messages
that it had already taken (the position is behind them: a silent loss), and `commit_transaction` raises before it
committed. So each callback that a user gives is `guarded`: what it raises is kept and raised later, where nothing is on
its way. An Interruption still passes at once; who polls must be ready for it.
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
_SERVED = ("stats_cb", "error_cb", "throttle_cb")


def raising(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The call's result; KafkaException instead of what is no exception, a signal's exception as what it is."""
    try:
        return call(*args, **kwargs)
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None
    except BaseException:
        raise
    except:  # noqa: E722 - see above
        bare = sys.exc_info()[1]
    # Behind the handler: Python could not keep it as a context.
    raise KafkaException(bare)


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
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames
            keep(_failure_of(error))

    return call


def _token_of(callback: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(callback)
    def call(text: str) -> Any:
        try:
            token = callback(text)
            if not (isinstance(token, tuple) and 2 <= len(token) <= 4 and isinstance(token[0], str)):
                raise TypeError("oauth_cb must return (token, seconds since the epoch at which it expires[, ...])")
            return (token[0], float(token[1]), *token[2:])
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames
            failure = _failure_of(error)
            log.warning("oauth_cb failed: no token, the client asks again", error=describe_error(failure))
            raise failure from error.__cause__

    return call


def _failure_of(error: BaseException) -> Exception:
    """Return what a callback raised, SystemExit and the like as a RuntimeError: they would end the program in silence.

    Raise an interruption."""
    raise_if_interrupted(error)
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a callback raised {describe_error(error)}")
    failure.__cause__ = error
    return failure
