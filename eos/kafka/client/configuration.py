"""Every setting with its value, where that comes from and what it means: `eos config`, and docs/reference/settings.md.

Owns the meaning of Kafka's settings that we set, force or refuse; ours have theirs in `OPTIONS` of settings.py. The
command and the page are both made of `rows`, so they cannot disagree. It never shows a secret and never talks to Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eos.kafka.client.settings import (
    COMMON_DEFAULTS,
    CONSUMER_DEFAULTS,
    NOT_FOR_USERS,
    OPTIONS,
    PRODUCER_DEFAULTS,
    REFUSALS,
    SECRETS,
    STATISTICS_INTERVAL_MS,
    Settings,
)

HIDDEN = "(hidden)"
DEFAULT, FORCED = "default", "fixed"

# What a setting of Kafka's means here, for those that have a value of ours.
MEANINGS: dict[str, str] = {
    "bootstrap.servers": "brokers to begin at; also KAFKA_BOOTSTRAP_SERVERS and --bootstrap-servers",
    "reconnect.backoff.max.ms": "longest pause between two attempts to connect; Kafka's 10 s looks like a hung call",
    "fetch.queue.backoff.ms": "how long a full prefetch queue stops fetching; Kafka's 1000 costs a backlog 3.7x",
    "transaction.timeout.ms": "after this long the broker aborts an open transaction; at most its "
    "transaction.max.timeout.ms",
    "retry.backoff.ms": "pause before a call is retried; for one that took longer the statistics are looked at",
    "topic.metadata.propagation.max.ms": "how long a topic that does not exist may be a new one",
    "linger.ms": "how long a record waits for others before it is sent; a transaction's end does not wait",
    "partitioner": "where a key goes: as Java's clients do it",
    "message.timeout.ms": "a record that was not acknowledged by then aborts the transaction",
    "partition.assignment.strategy": "how a classic group shares partitions; roundrobin where an App or a session "
    "reads several topics, or a pattern",
    "session.timeout.ms": "classic group: a silent member is out after this long",
    "group.instance.id": "classic group: static membership, a restart within the session gets its partitions back",
    "statistics.interval.ms": "how often the client says what it sent: whether a request twice; after a slow call "
    "the next ones are waited for",
    "isolation.level": REFUSALS["isolation.level"].reason,
    "enable.auto.commit": REFUSALS["enable.auto.commit"].reason,
    "enable.auto.offset.store": REFUSALS["enable.auto.offset.store"].reason,
    "enable.idempotence": REFUSALS["enable.idempotence"].reason,
    "acks": REFUSALS["acks"].reason,
    "auto.offset.reset": "where a partition without a committed offset begins: earliest or latest",
}
# Defaults that are another one's value.
_NO_NUMBER = {"eos.instance": "host name", "group.instance.id": "the `transactional.id`"}
_FIXED = {
    "isolation.level": "read_committed",
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.idempotence": "true",
    "acks": "all",
}


@dataclass(frozen=True)
class Row:
    """One line of `eos config`."""

    name: str
    value: str
    origin: str
    meaning: str


def rows(settings: Settings, given: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Row]:
    """All settings of ours, and those of Kafka's that have a value by us or by the user. `given` as of
    eos.kafka.client.settings.sources: (origin, values), the weakest first."""
    origins: dict[str, str] = {}
    for origin, values in given:
        origins |= dict.fromkeys(values, origin)
    found = [Row(n, _shown(n, settings[n]), origins.get(n, DEFAULT), o.meaning) for n, o in OPTIONS.items()]
    found = [replace(r, value=settings.instance) if r.name == "eos.instance" else r for r in found]
    ours = _defaults(settings) | _FIXED
    for name in sorted({*ours, *(n for n in settings.values if not n.startswith("eos."))}):
        value = settings.values.get(name, ours.get(name))
        fallback = FORCED if name in _FIXED else DEFAULT
        origin = origins.get(name, fallback)
        found.append(Row(name, _shown(name, value), origin, MEANINGS.get(name, "passed on to Kafka's client as it is")))
    return found


def _defaults(settings: Settings) -> dict[str, Any]:
    """Kafka's settings that have another default here than in Kafka's client."""
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


def _shown(name: str, value: Any) -> str:
    if name in SECRETS:
        return HIDDEN
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def markdown() -> str:
    """docs/reference/settings.md."""
    plain = Settings({"eos.instance": "HOST"})
    defaults = rows(plain, [])
    ours = [r for r in defaults if r.name in OPTIONS]
    kafkas = [r for r in defaults if r.name not in OPTIONS and r.name not in _FIXED]
    refused = [(name, " or ".join(sorted(r.allowed)), r.reason) for name, r in sorted(REFUSALS.items())]
    return "\n".join(
        [
            "# Settings",
            "",
            "Made by `eos config --markdown`; a test keeps it up to date. `eos config [MODULE:APP]` shows the values "
            "in force and where each comes from.",
            "",
            "`eos.toml` < environment (`KAFKA_BOOTSTRAP_SERVERS`, `EOS_TRANSACTION_INTERVAL_MS` for "
            "`eos.transaction.interval.ms`) < flags (`--bootstrap-servers`, `-X name=value`), or what code gives "
            "`TransactSession` and `eos.transaction` by name. Names of Kafka's clients pass verbatim to "
            "confluent-kafka; an unknown name is refused, with the nearest one.",
            "",
            "## Ours",
            "",
            *_table(("setting", "default", "meaning"), [(f"`{r.name}`", _default(r), r.meaning) for r in ours]),
            "",
            "## Kafka's, with a default of ours",
            "",
            *_table(("setting", "default", "meaning"), [(f"`{r.name}`", _default(r), r.meaning) for r in kafkas]),
            "",
            "## Kafka's, with only some values",
            "",
            "Any other value would break exactly-once, or what is tested here, and is refused (exit 78).",
            "",
            *_table(("setting", "allowed", "why"), [(f"`{n}`", a, why) for n, a, why in refused]),
            "",
            "## Kafka's, not to be set",
            "",
            *_table(("setting", "why"), [(f"`{name}`", why) for name, why in sorted(NOT_FOR_USERS.items())]),
            "",
            "## Secrets",
            "",
            "Never shown, in no log, error or `eos config`: " + ", ".join(f"`{n}`" for n in sorted(SECRETS)) + ".",
            "",
        ]
    )


def _default(row: Row) -> str:
    if row.name in _NO_NUMBER:
        return _NO_NUMBER[row.name]
    return row.value.replace("|", "\\|") or "-"


def _table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [head, tuple("---" for _ in head), *lines]]
