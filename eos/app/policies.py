"""Error policies: what becomes of a record that its function, its decoder or the broker refuses.

Owns the policies as data, the back-off between two tries, and the name of a dead letter's topic. It must never run a
function, send anything or look at an error: eos/worker/handling.py carries a policy out.

    stop                      the default: the worker commits what came before and ends with exit code 65
    skip                      nothing is sent for the record, its offset moves on: as if the function had returned None
    dlq                       the record goes to `<topic>.dlq` as it came, with headers that say why
    retry(n, then=policy)     the function runs up to n more times, with back-off, before `then` decides; with
                              on=(SomeError, ...) only after those
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from eos.errors import ConfigurationError

Verdict = Literal["stop", "skip", "dlq"]


@dataclass(frozen=True)
class Policy:
    """Immutable; made by `retry(...)`, or one of `stop`, `skip`, `dlq`.

    Between try k and the next, counted from 1, lie `min(backoff_max_ms, backoff_ms * 2**(k - 1))` milliseconds, in
    which no transaction is open; the records behind it wait.
    """

    verdict: Verdict
    retries: int = 0
    backoff_ms: int = 100
    backoff_max_ms: int = 10_000
    on: tuple[type[Exception], ...] = ()  # what is tried again; none: everything but what does not decode

    def wait_s(self, failures: int) -> float | None:
        """How long until the next try of a record that failed `failures` times; None: the verdict holds."""
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
    """Up to `n` more runs of the function, then `then` (stop, skip or dlq). Raises ConfigurationError.

    `on`: exceptions, as behind `except`; for all others `then` decides at once. Without it everything is tried again
    but what does not decode: that is only if `on` names it, or what a `decode=` of the user's raised.
    The n is of one process: a record that was given to another worker or that a restart reads again starts anew.
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
                f"retry: on={kind!r} is no exception class: name those that may pass the next time"
            )
    return replace(last, retries=n, backoff_ms=backoff_ms, backoff_max_ms=backoff_max_ms, on=kinds)


def policy_of(on_error: object) -> Policy:
    """A Policy, or the name of one that has no parameters. Raises ConfigurationError for anything else."""
    if isinstance(on_error, Policy):
        return on_error
    if isinstance(on_error, str) and on_error in _BY_NAME:
        return _BY_NAME[on_error]
    raise ConfigurationError(
        f"on_error={on_error!r} does not exist: it is stop, skip, dlq or retry(n, then=...) of eos"
    )
