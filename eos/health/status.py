"""Defines the status of a worker at one moment, and the rule for live and ready: data and pure functions, no I/O.

A Status travels as JSON from a worker to its supervisor, and from either to the page; the metrics come from it too.
Times are seconds since the epoch, durations are seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from eos.kafka.client.settings import Settings

CALL_LIMIT_S = 3.0
"""A worker counts as waiting for the cluster when a call takes longer than this."""
REPORT_LIMIT_S = 5.0
"""A supervised worker is not ready when its last report is older than this."""
_CALL_MARGIN_S = 10.0  # a hung call is abandoned 5 s after its timeout (eos.session.producer.producer)


class Incident(msgspec.Struct, frozen=True):
    """Holds one log event as text. `at`: seconds since the epoch."""

    at: float
    level: str
    text: str


class Distribution(msgspec.Struct, frozen=True):
    """Holds a histogram: `counts[i]` observations are <= `bounds[i]` and above the previous bound.

    The last count has no upper bound."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


class PartitionLag(msgspec.Struct, frozen=True):
    """Holds the lag of one partition in records; None if it is unknown."""

    topic: str
    partition: int
    records: int | None


class FunctionState(msgspec.Struct, frozen=True):
    """Holds the size of one function's state: values, bytes on disk (0: in memory), and changes left to restore."""

    function: str
    values: int
    bytes: int
    to_restore: int


class FunctionTime(msgspec.Struct, frozen=True):
    """Holds the time of one function: the least event time of its partitions, and its timers.

    `time_ms`: milliseconds since the epoch, 0 before the first record."""

    function: str
    time_ms: int
    timers: int
    due: int


class Status(msgspec.Struct):
    """Holds the status of one worker; `reason` describes its activity, or why it is not live or not ready."""

    app: str
    instance: str
    pid: int
    started_at: float
    at: float
    live: bool = True
    ready: bool = False
    reason: str = "starting"
    stuck_after_s: float = 60.0
    records_in: int = 0
    records_out: int = 0
    transactions: int = 0
    retries: int = 0
    repeated: int = 0
    late: int = 0
    duplicates: int = 0
    aborts: dict[str, int] = {}
    rebuilds: dict[str, int] = {}
    replacements: dict[str, int] = {}
    rebalances: dict[str, int] = {}
    poison: dict[str, int] = {}
    restarts: int = 0
    commit_seconds: Distribution = Distribution()
    end_to_end_seconds: Distribution = Distribution()
    lags: list[PartitionLag] = []
    states: list[FunctionState] = []
    times: list[FunctionTime] = []
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    incidents: list[Incident] = []

    @property
    def lag(self) -> int | None:
        """Return the lag of all its partitions, or None while one is unknown."""
        known = [lag.records for lag in self.lags if lag.records is not None]
        return sum(known) if len(known) == len(self.lags) else None


def add_counts(before: Status, now: Status) -> Status:
    """Return `now` with the counts of the worker's earlier processes added, so that a worker's counts never decrease.

    Values of the process itself (memory, CPU, start time) stay those of `now`.
    """
    return msgspec.structs.replace(
        now,
        **{name: getattr(before, name) + getattr(now, name) for name in _COUNTS},
        **{name: _add_by_cause(getattr(before, name), getattr(now, name)) for name in _COUNTS_BY_CAUSE},
        **{name: _add_distributions(getattr(before, name), getattr(now, name)) for name in _DISTRIBUTIONS},
    )


_COUNTS = ("records_in", "records_out", "transactions", "retries", "repeated", "late", "duplicates")
_COUNTS_BY_CAUSE = ("aborts", "rebuilds", "replacements", "rebalances", "poison")
_DISTRIBUTIONS = ("commit_seconds", "end_to_end_seconds")


def _add_by_cause(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {cause: before.get(cause, 0) + now.get(cause, 0) for cause in before | now}


def _add_distributions(before: Distribution, now: Distribution) -> Distribution:
    if before.bounds != now.bounds:  # `before` or `now` is empty, because its process has never reported
        return now if now.bounds else before
    counts = tuple(a + b for a, b in zip(before.counts, now.counts, strict=True))
    return Distribution(now.bounds, counts, before.total + now.total)


class Sample(NamedTuple):
    """Holds the values that only the worker's own thread can read, which it does twice a second."""

    in_group: bool
    unresolved: int
    lags: list[PartitionLag]
    restoring: int = 0
    states: tuple[FunctionState, ...] = ()
    times: tuple[FunctionTime, ...] = ()


class Verdict(NamedTuple):
    """Holds whether a worker is live and ready, and why."""

    live: bool
    ready: bool
    reason: str


def stuck_after_s(settings: Settings) -> float:
    """Return for how many seconds a worker's thread may make no progress.

    It is eos.liveness.timeout.ms, but never less than the limits for a transaction and for a call.
    """
    least = (
        settings["eos.liveness.timeout.ms"] / 1000,
        settings.transaction_timeout_ms / 1000,
        settings["eos.call.timeout.ms"] / 1000 + _CALL_MARGIN_S,
    )
    return float(max(least))


def judge(
    pulse: tuple[str, str, float, float], now: float, limit_s: float, sample: Sample | None, stuck_at: str = ""
) -> Verdict:
    """Decide whether a worker is live and ready, with the reason.

    Live: the thread made progress within `limit_s` seconds. Ready: the worker is in its group, owns the partitions that
    the group assigned, and does not wait for the cluster. A worker that waits for the cluster is live, because each
    attempt counts as progress. `pulse` is Pulse.now, and `now` is of the same clock; `stuck_at` is the code that the
    thread is executing.
    """
    doing, what, since, moved = pulse
    still_s = now - moved
    if doing == "stopped":
        return Verdict(False, False, "stopped")
    # The App's own start (loading a model) may take any time; the session's start has its own limit.
    if doing != "starting" and still_s > limit_s:
        where = f" at {stuck_at}" if stuck_at else ""
        doing_what = "handling records" if doing == "handling" else f"{doing} {what}".strip()
        return Verdict(False, False, f"stuck for {still_s:.0f} s while {doing_what}{where}")
    if doing in ("starting", "stopping"):
        return Verdict(True, False, doing)
    if doing == "calling" and now - since > CALL_LIMIT_S:
        return Verdict(True, False, f"waiting for the cluster for {now - since:.0f} s ({what})")
    if sample is None or not sample.in_group:
        return Verdict(True, False, "not in its group yet, or the cluster does not answer")
    if sample.unresolved:
        return Verdict(True, False, f"waiting for the committed offsets of {sample.unresolved} partitions")
    if sample.restoring:
        return Verdict(True, False, f"restoring the state of {sample.restoring} partitions")
    return Verdict(True, True, "handling records" if doing == "handling" else "running")


def judge_report(status: Status, silent_s: float) -> Verdict:
    """Return whether a worker is live and ready, judged from its last report.

    A worker that stopped reporting is not ready, and after its limit it is not live either.
    """
    if silent_s > status.stuck_after_s:
        return Verdict(False, False, f"has not reported for {silent_s:.0f} s")
    if silent_s > REPORT_LIMIT_S:
        return Verdict(status.live, False, f"has not reported for {silent_s:.0f} s")
    return Verdict(status.live, status.ready, status.reason)
