"""All counts of a shim as Prometheus metrics, read when they are scraped.

Owns names and labels. Needs prometheus-client (extra `metrics`), imported at the first scrape.
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
    """Where the counts are, each read anew for every answer. `traffic`: per direction API key -> (frames, bytes)."""

    connections: Callable[[], tuple[int, int]]  # open now, made so far
    traffic: Callable[[], Mapping[str, Mapping[int, tuple[int, int]]]]
    errors: Callable[[], Mapping[tuple[str, str], int]]
    ends: Callable[[], Mapping[str, int]]
    protecting: Callable[[], bool] = bool  # not, unless somebody says so
    challenges: Callable[[], Mapping[str, int]] = _nothing
    refusals: Callable[[], Mapping[str, int]] = _nothing
    faults: Callable[[], Mapping[str, int]] = _nothing


def families(sources: Sources) -> Iterator[Any]:
    """Return what a scrape shows. Raises ImportError without prometheus-client."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    is_open, made = sources.connections()
    yield GaugeMetricFamily("eos_shim_connections", "Client connections that are open.", value=is_open)
    yield CounterMetricFamily("eos_shim_connections_made", "Client connections so far.", value=made)
    for name, what, place in (("frames", "Requests and answers", 0), ("bytes", "Bytes of requests and answers", 1)):
        family = CounterMetricFamily(f"eos_shim_{name}", f"{what} by API.", labels=("direction", "api"))
        for direction, by_key in sources.traffic().items():
            for key, counts in by_key.items():
                family.add_metric((direction, api.api_name(key)), counts[place])
        yield family
    protecting = "Whether the transactions of clients that begin now are protected."
    yield GaugeMetricFamily("eos_shim_protecting", protecting, value=int(sources.protecting()))
    errors = CounterMetricFamily(
        "eos_shim_errors", "Answers with an error, as clients saw them.", labels=("api", "error")
    )
    for values, count in sources.errors().items():
        errors.add_metric(values, count)
    yield errors
    for name, what, label, read in (
        ("transactions", "Transactions the coordinator ended.", "end", sources.ends),
        ("challenges", "Requests that protection did not pass.", "kind", sources.challenges),
        ("refusals", "Requests that the policy refused.", "error", sources.refusals),
        ("faults", "Faults that fired.", "action", sources.faults),
    ):
        family = CounterMetricFamily(f"eos_shim_{name}", what, labels=(label,))
        for value, count in read().items():
            family.add_metric((value,), count)
        yield family
