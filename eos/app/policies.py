"""Defines error policies: what happens to a record that its function, its decoder or the broker refuses.

Owns the policies as data, the backoff between two attempts, and the name of a dead-letter topic. It must never run a
function, send anything or inspect an error: eos/engine/handling.py applies a policy.

    stop                      the default: the worker commits the records before it and exits with code 65
    skip                      the record has no output and its offset is committed, as if the function returned None
    dlq                       the record goes unchanged to `<topic>.dlq`, with headers that describe the error
    retry(n, then=policy)     the function runs up to n more times, with backoff, before `then` applies; with
                              on=(SomeError, ...) only after these exceptions
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from eos.errors import ConfigurationError

Verdict = Literal["stop", "skip", "dlq"]


@dataclass(frozen=True)
class Policy:
    """Holds an immutable error policy: `stop`, `skip`, `dlq`, or one that `retry(...)` returns.

    The pause between attempt k, counted from 1, and the next is `min(backoff_max_ms, backoff_ms * 2**(k - 1))`
    milliseconds. No transaction is open in the pause, and the records after the failed one wait.
    """

    verdict: Verdict
    retries: int = 0
    backoff_ms: int = 100
    backoff_max_ms: int = 10_000
    on: tuple[type[Exception], ...] = ()  # exceptions to retry; empty: all except those of decoding

    def wait_s(self, failures: int) -> float | None:
        """Return the seconds until a record that failed `failures` times is retried; None: the verdict applies."""
        if failures > self.retries:
            return None
        doublings = min(failures - 1, 30)
        return float(min(self.backoff_max_ms, self.backoff_ms * 2**doublings)) / 1000

    def __repr__(self) -> str:
        if not self.retries:
            return self.verdict
        on = f", on=({', '.join(kind.__name__ for kind in self.on)})" if self.on else ""
        return f"retry({self.retries}, then={self.verdict}{on})"


stop: Final = Policy("stop")
skip: Final = Policy("skip")
dlq: Final = Policy("dlq")
_BY_NAME: Final = {"stop": stop, "skip": skip, "dlq": dlq}


def retry(
    n: int,
    then: Policy | str = stop,
    *,
    on: type[Exception] | Iterable[type[Exception]] = (),
    backoff_ms: int = 100,
    backoff_max_ms: int = 10_000,
) -> Policy:
    """Return a policy that runs the function up to `n` more times before `then` (stop, skip or dlq) applies.

    `on`: the exceptions to retry, as in an `except` clause; for all others `then` applies at once. Without it every
    exception is retried, except one of decoding. A decoding error is retried only if `on` names DecodeError or the
    exception that a user's `decode=` raised. The attempts count within one process: after a restart, or with another
    worker, they start from zero. Raises ConfigurationError.
    """
    last = policy_of(then)
    if last.retries:
        raise ConfigurationError(f"then={last} cannot follow a retry: it must be stop, skip or dlq")
    for name, number, least in (("n", n, 1), ("backoff_ms", backoff_ms, 0), ("backoff_max_ms", backoff_max_ms, 0)):
        if not isinstance(number, int) or number < least:
            raise ConfigurationError(f"retry: {name}={number!r} must be an int of at least {least}")
    kinds = tuple(on) if isinstance(on, Iterable) else (on,)
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise ConfigurationError(
                f"retry: on={kind!r} is no exception class: name the exceptions after which a retry may succeed"
            )
    return replace(last, retries=n, backoff_ms=backoff_ms, backoff_max_ms=backoff_max_ms, on=kinds)


def policy_of(on_error: object) -> Policy:
    """Return the policy, given as a Policy or by the name of one without parameters.

    Raises ConfigurationError for anything else.
    """
    if isinstance(on_error, Policy):
        return on_error
    if isinstance(on_error, str) and on_error in _BY_NAME:
        return _BY_NAME[on_error]
    raise ConfigurationError(
        f"on_error={on_error!r} is not a policy: use eos.stop, eos.skip, eos.dlq or eos.retry(n, then=...)"
    )
