"""Lists every setting with its value, origin and meaning, for `eos config` and docs/reference/settings.md.

Owns the descriptions of the Kafka settings that we set, force or refuse; `OPTIONS` of settings.py describes our own.
The command and the page are both built from `list_settings`, so they cannot disagree. It never shows a secret and
never talks to Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eos.kafka.client.settings import (
    COMMON_DEFAULTS,
    CONSUMER_DEFAULTS,
    OPTIONS,
    PRODUCER_DEFAULTS,
    REFUSALS,
    RESERVED,
    SECRETS,
    STATISTICS_INTERVAL_MS,
    Settings,
)

HIDDEN = "(hidden)"
DEFAULT, FORCED = "default", "fixed"

# Descriptions of the Kafka settings for which eos has a value.
MEANINGS: dict[str, str] = {
    "bootstrap.servers": "brokers for the first connection; also KAFKA_BOOTSTRAP_SERVERS and --bootstrap-servers",
    "reconnect.backoff.max.ms": "longest pause between two attempts to connect; with Kafka's 10 s a lost connection "
    "looks like a hung call",
    "reconnect.backoff.ms": "first pause before a connection; with Kafka's 100 a start takes 0.2 s longer",
    "fetch.queue.backoff.ms": "how long a full prefetch queue stops fetching; Kafka's 1000 makes a backlog take 3.7 "
    "times as long",
    "transaction.timeout.ms": "after this long the broker aborts an open transaction; at most its "
    "transaction.max.timeout.ms",
    "retry.backoff.ms": "pause before a call is retried; after a call that took longer, the session checks the "
    "client's statistics for a retry",
    "topic.metadata.propagation.max.ms": "how long a missing topic may be one that was just created",
    "linger.ms": "how long a record waits for others before it is sent; the end of a transaction does not wait",
    "partitioner": "how a key selects its partition: as Java's clients do",
    "message.timeout.ms": "a record that is not acknowledged within this time aborts the transaction",
    "partition.assignment.strategy": "how a classic group assigns partitions; roundrobin if an App or a session "
    "reads several topics, or a pattern",
    "session.timeout.ms": "classic group: a member that sends no heartbeat for this long leaves the group",
    "group.instance.id": "classic group: static membership; a restart within the session timeout keeps the partitions",
    "statistics.interval.ms": "how often the client reports statistics, which show whether it sent a request twice; "
    "after a slow call the session waits for the next report",
    "isolation.level": REFUSALS["isolation.level"].reason,
    "enable.auto.commit": REFUSALS["enable.auto.commit"].reason,
    "enable.auto.offset.store": REFUSALS["enable.auto.offset.store"].reason,
    "enable.idempotence": REFUSALS["enable.idempotence"].reason,
    "acks": REFUSALS["acks"].reason,
    "auto.offset.reset": "where a partition without a committed offset begins: earliest or latest",
}
# Defaults that come from another value.
_DESCRIBED_DEFAULTS = {"eos.instance": "host name", "group.instance.id": "the `transactional.id`"}
_FORCED_VALUES = {
    "isolation.level": "read_committed",
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.idempotence": "true",
    "acks": "all",
}


@dataclass(frozen=True)
class Row:
    """Holds one line of `eos config`."""

    name: str
    value: str
    origin: str
    meaning: str


def list_settings(settings: Settings, given: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Row]:
    """Return all settings of eos, and those Kafka settings for which eos or the user has a value.

    `given`: (origin, values) with the weakest source first, as `read_sources` returns them."""
    origins: dict[str, str] = {}
    for origin, values in given:
        origins |= dict.fromkeys(values, origin)
    found = [Row(n, _format_value(n, settings[n]), origins.get(n, DEFAULT), o.meaning) for n, o in OPTIONS.items()]
    found = [replace(r, value=settings.instance) if r.name == "eos.instance" else r for r in found]
    ours = _own_defaults(settings) | _FORCED_VALUES
    for name in sorted({*ours, *(n for n in settings.values if not n.startswith("eos."))}):
        value = settings.values.get(name, ours.get(name))
        fallback = FORCED if name in _FORCED_VALUES else DEFAULT
        origin = origins.get(name, fallback)
        found.append(
            Row(name, _format_value(name, value), origin, MEANINGS.get(name, "passed to Kafka's client unchanged"))
        )
    return found


def _own_defaults(settings: Settings) -> dict[str, Any]:
    """Return the Kafka settings whose default here differs from that of Kafka's client."""
    consumer, name = settings.consumer(), "partition.assignment.strategy"
    classic = {n: consumer[n] for n in (name, "session.timeout.ms", "group.instance.id") if n in consumer}
    return {
        **COMMON_DEFAULTS,
        **CONSUMER_DEFAULTS,
        **PRODUCER_DEFAULTS,
        **classic,
        "auto.offset.reset": "earliest",
        "message.timeout.ms": settings.transaction_timeout_ms,
        "statistics.interval.ms": STATISTICS_INTERVAL_MS,
    }


def _format_value(name: str, value: Any) -> str:
    if name in SECRETS:
        return HIDDEN
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def render_markdown() -> str:
    """Return the text of docs/reference/settings.md."""
    plain = Settings({"eos.instance": "HOST"})
    defaults = list_settings(plain, [])
    ours = [r for r in defaults if r.name in OPTIONS]
    kafkas = [r for r in defaults if r.name not in OPTIONS and r.name not in _FORCED_VALUES]
    refused = [(name, " or ".join(sorted(r.allowed)), r.reason) for name, r in sorted(REFUSALS.items())]
    return "\n".join(
        [
            "# Settings",
            "",
            "Generated by `eos config --markdown`; a test keeps it up to date. `eos config [MODULE:APP]` shows the "
            "values in force and the origin of each.",
            "",
            "`eos.toml` < environment (`KAFKA_BOOTSTRAP_SERVERS`, `EOS_TRANSACTION_INTERVAL_MS` for "
            "`eos.transaction.interval.ms`) < flags (`--bootstrap-servers`, `-X name=value`), or values that code "
            "passes to `TransactSession` and `eos.transaction`. Names of Kafka's clients are passed verbatim to "
            "confluent-kafka. An unknown name is refused, and the error suggests the nearest known one.",
            "",
            "## Settings of eos",
            "",
            *_render_table(
                ("setting", "default", "meaning"), [(f"`{r.name}`", _format_default(r), r.meaning) for r in ours]
            ),
            "",
            "## Kafka settings with a different default",
            "",
            *_render_table(
                ("setting", "default", "meaning"), [(f"`{r.name}`", _format_default(r), r.meaning) for r in kafkas]
            ),
            "",
            "## Kafka settings with restricted values",
            "",
            "Any other value would break exactly-once or is untested, and is refused (exit 78).",
            "",
            *_render_table(("setting", "allowed", "why"), [(f"`{n}`", a, why) for n, a, why in refused]),
            "",
            "## Reserved Kafka settings",
            "",
            *_render_table(("setting", "why"), [(f"`{name}`", why) for name, why in sorted(RESERVED.items())]),
            "",
            "## Secrets",
            "",
            "Never shown in logs, errors or `eos config`: " + ", ".join(f"`{n}`" for n in sorted(SECRETS)) + ".",
            "",
        ]
    )


def _format_default(row: Row) -> str:
    if row.name in _DESCRIBED_DEFAULTS:
        return _DESCRIBED_DEFAULTS[row.name]
    return row.value.replace("|", "\\|") or "-"


def _render_table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [head, tuple("---" for _ in head), *lines]]
