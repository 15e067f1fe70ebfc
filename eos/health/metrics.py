"""Converts statuses to Prometheus metrics when they are scraped; nothing here runs on a worker's hot path.

Owns the metrics' names, which docs/reference/metrics.md and docs/grafana-dashboard.json use. Values are in base units
(seconds, records, bytes). It needs prometheus-client (extra `metrics`), imported at the first scrape.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from eos.health.status import Distribution, FunctionState, FunctionTime, Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LABELS = ("app", "worker")  # not `instance`, which is Prometheus's own name for a scrape target
# name without _total, help, label of the causes, the causes that always appear, function that returns the counts
_BY_CAUSE: list[tuple[str, str, str, tuple[str, ...], Callable[[Status], dict[str, int]]]] = [
    (
        "eos_transactions_aborted",
        "Transactions that were aborted; their records were handled again.",
        "cause",
        ("application", "rebalance", "refused", "delivery"),
        lambda s: s.aborts,
    ),
    (
        "eos_rebuilds",
        "Recoveries from the committed offsets, because a transaction's outcome was unknown or its producer fenced.",
        "cause",
        ("timeout", "group", "commit", "send_offsets"),
        lambda s: s.rebuilds,
    ),
    (
        "eos_producers_replaced",
        "Producers replaced by a new epoch of the same transactional.id.",
        "cause",
        ("abort", "retry", "failure"),
        lambda s: s.replacements,
    ),
    (
        "eos_rebalances",
        "How often the group assigned or revoked partitions.",
        "kind",
        ("assigned", "revoked", "lost"),
        lambda s: s.rebalances,
    ),
    (
        "eos_poison_records",
        "Records that their function, their decoder or the broker refused, by the policy applied.",
        "policy",
        ("stop", "dlq", "skip"),
        lambda s: s.poison,
    ),
]
_COUNTERS: list[tuple[str, str, Callable[[Status], float]]] = [
    ("eos_records_in", "Input records of committed transactions.", lambda s: s.records_in),
    ("eos_records_out", "Output records of committed transactions.", lambda s: s.records_out),
    ("eos_transactions_committed", "Transactions that were committed.", lambda s: s.transactions),
    ("eos_retries", "Times that a failing record was tried again.", lambda s: s.retries),
    ("eos_records_repeated", "Input records that the client delivered twice and eos dropped.", lambda s: s.repeated),
    ("eos_records_late", "Records whose windows were closed, in committed transactions.", lambda s: s.late),
    ("eos_records_duplicate", "Records that once= dropped, in committed transactions.", lambda s: s.duplicates),
    ("eos_worker_restarts", "Times that the supervisor started this worker again.", lambda s: s.restarts),
    ("eos_cpu_seconds", "CPU time of the worker's process.", lambda s: s.cpu_seconds),
]
_GAUGES: list[tuple[str, str, Callable[[Status], float]]] = [
    ("eos_live", "1 if the worker makes progress, else 0 (/livez).", lambda s: s.live),
    ("eos_ready", "1 if the worker is in its group and its cluster answers, else 0 (/readyz).", lambda s: s.ready),
    ("eos_start_time_seconds", "When the worker's process started, since the epoch.", lambda s: s.started_at),
    ("eos_resident_memory_bytes", "Resident memory of the worker's process.", lambda s: s.memory_bytes),
]
_HISTOGRAMS: list[tuple[str, str, Callable[[Status], Distribution]]] = [
    (
        "eos_commit_seconds",
        "From sending a transaction's offsets until its commit was answered.",
        lambda s: s.commit_seconds,
    ),
    (
        "eos_end_to_end_seconds",
        "Age of a transaction's first input record, by its timestamp, when it was committed; once per transaction.",
        lambda s: s.end_to_end_seconds,
    ),
]
_LAG = (
    "eos_lag_records",
    "Offsets between the group's committed offset and the last stable offset of a partition of this worker.",
)
_STATES: list[tuple[str, str, Callable[[FunctionState], int]]] = [
    ("eos_state_values", "Values in a function's state, over the partitions of this worker.", lambda s: s.values),
    ("eos_state_bytes", "Size of the state on disk; 0 if it is in memory.", lambda s: s.bytes),
    ("eos_state_to_restore_records", "Records of the changelog that are still to be read.", lambda s: s.to_restore),
]
_TIMES: list[tuple[str, str, Callable[[Status, FunctionTime], float]]] = [
    (
        "eos_event_time_lag_seconds",
        "The clock's time minus the event time of a function, in its slowest partition on this worker.",
        lambda status, time: max(0.0, status.at - time.time_ms / 1000) if time.time_ms else 0.0,
    ),
    ("eos_timers", "Timers that are set; of a function with windows, its open windows.", lambda _, time: time.timers),
    (
        "eos_timers_due",
        "Timers that are due and have not fired, at most 1,000 per partition.",
        lambda _, time: time.due,
    ),
]


def collect_metrics(statuses: Iterable[Status]) -> Iterator[Metric]:
    """Return the metrics that a scrape of these workers contains."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    known = [status for status in statuses if status.app]  # a worker without `app` has not reported yet
    for name, meaning, value_of in _COUNTERS:
        counter = CounterMetricFamily(name, meaning, labels=LABELS)
        for status in known:
            counter.add_metric(_labels(status), value_of(status))
        yield counter
    for name, meaning, label, always, counts_of in _BY_CAUSE:
        counter = CounterMetricFamily(name, meaning, labels=(*LABELS, label))
        for status in known:
            for cause, count in {**dict.fromkeys(always, 0), **counts_of(status)}.items():
                counter.add_metric([*_labels(status), cause], count)
        yield counter
    for name, meaning, value_of in _GAUGES:
        gauge = GaugeMetricFamily(name, meaning, labels=LABELS)
        for status in known:
            gauge.add_metric(_labels(status), value_of(status))
        yield gauge
    for name, meaning, distribution_of in _HISTOGRAMS:
        histogram = HistogramMetricFamily(name, meaning, labels=LABELS)
        for status in known:
            distribution = distribution_of(status)
            histogram.add_metric(_labels(status), _buckets(distribution), distribution.total)
        yield histogram
    yield _lag(known, GaugeMetricFamily)
    for name, meaning, of_state in _STATES:
        gauge = GaugeMetricFamily(name, meaning, labels=(*LABELS, "function"))
        for status in known:
            for state in status.states:
                gauge.add_metric([*_labels(status), state.function], of_state(state))
        yield gauge
    for name, meaning, of_time in _TIMES:
        gauge = GaugeMetricFamily(name, meaning, labels=(*LABELS, "function"))
        for status in known:
            for time in status.times:
                gauge.add_metric([*_labels(status), time.function], of_time(status, time))
        yield gauge
    version = GaugeMetricFamily(
        "eos_info", "Always 1; the label `version` names the version of eos.", labels=(*LABELS, "version")
    )
    for status in known:
        version.add_metric([*_labels(status), importlib.metadata.version("eos-kafka")], 1)
    yield version


def _labels(status: Status) -> list[str]:
    return [status.app, status.instance]


def _lag(statuses: list[Status], family: Any) -> Metric:
    gauge: Metric = family(*_LAG, labels=(*LABELS, "topic", "partition"))
    for status in statuses:
        for lag in status.lags:
            if lag.records is not None:
                gauge.add_metric([*_labels(status), lag.topic, str(lag.partition)], lag.records)  # type: ignore[attr-defined]
    return gauge


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return the cumulative buckets that Prometheus expects."""
    bounds = [*map(str, distribution.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(distribution.counts), strict=True))


def metric_names() -> set[str]:
    """Return every name that a scrape can contain, with the suffixes of counters and histograms."""
    found = {f"{name}_total" for name, *_ in [*_COUNTERS, *_BY_CAUSE]}
    found |= {name for name, *_ in [*_GAUGES, *_STATES, *_TIMES]} | {_LAG[0], "eos_info"}
    return found | {f"{name}_{part}" for name, *_ in _HISTOGRAMS for part in ("bucket", "sum", "count")}
