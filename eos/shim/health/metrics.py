"""Return all counts of a shim as Prometheus metrics at each scrape.

The module owns names and labels. It needs prometheus-client (extra `metrics`), which it imports at the first scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eos.shim.wire import api


def _nothing() -> Mapping[str, int]:
    return {}


@dataclass(frozen=True)
class Sources:
    """Hold the functions that read the counts. `traffic` returns per direction: API key -> (frames, bytes)."""

    connections: Callable[[], tuple[int, int]]  # open now, total
    traffic: Callable[[], Mapping[str, Mapping[int, tuple[int, int]]]]
    errors: Callable[[], Mapping[tuple[str, str], int]]
    ends: Callable[[], Mapping[str, int]]
    protecting: Callable[[], bool] = bool  # `bool()` is False
    challenges: Callable[[], Mapping[str, int]] = _nothing
    refusals: Callable[[], Mapping[str, int]] = _nothing
    faults: Callable[[], Mapping[str, int]] = _nothing


def families(sources: Sources) -> Iterator[Any]:
    """Yield the metrics of a scrape. Raises ImportError without prometheus-client."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    is_open, made = sources.connections()
    yield GaugeMetricFamily("eos_shim_connections", "Client connections that are open.", value=is_open)
    yield CounterMetricFamily("eos_shim_connections_made", "Client connections since the start.", value=made)
    for name, what, place in (("frames", "Requests and responses", 0), ("bytes", "Bytes of requests and responses", 1)):
        family = CounterMetricFamily(f"eos_shim_{name}", f"{what} by API.", labels=("direction", "api"))
        for direction, by_key in sources.traffic().items():
            for key, counts in by_key.items():
                family.add_metric((direction, api.api_name(key)), counts[place])
        yield family
    protecting = "Whether transactions that begin now are protected."
    yield GaugeMetricFamily("eos_shim_protecting", protecting, value=int(sources.protecting()))
    errors = CounterMetricFamily("eos_shim_errors", "Error responses sent to clients.", labels=("api", "error"))
    for values, count in sources.errors().items():
        errors.add_metric(values, count)
    yield errors
    for name, what, label, read in (
        ("transactions", "Transactions the coordinator ended.", "end", sources.ends),
        ("challenges", "Requests that protection rejected.", "kind", sources.challenges),
        ("refusals", "Requests that the policy refused.", "error", sources.refusals),
        ("faults", "Faults that fired.", "action", sources.faults),
    ):
        family = CounterMetricFamily(f"eos_shim_{name}", what, labels=(label,))
        for value, count in read().items():
            family.add_metric((value,), count)
        yield family
