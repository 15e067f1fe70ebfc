"""Checks the arguments of a sink before anything is sent.

Owns the refusal of arguments and settings. It must never connect to Kafka or Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eos.errors import ConfigurationError
from eos.kafka.client.settings import Settings
from spark_connector import marker
from spark_connector.pem import contents
from spark_connector.recordbatch import COMPRESSIONS

_DELIVERY_TIMEOUT_MS = 120_000
_CHECKSUM = "spark.sql.shuffle.orderIndependentChecksum."
# Spark's setting, its forbidden value, and the reason. A setting that this version of Spark does not have is unset.
_UNSAFE = (
    ("spark.speculation", "true", "runs a task twice at once, and two tasks must not write one partition"),
    (
        "spark.shuffle.push.enabled",
        "true",
        "keeps Spark from noticing that a re-run task produced other rows, so a batch could mix both runs",
    ),
    (
        f"{_CHECKSUM}enabled",
        "false",
        "keeps Spark from noticing that a re-run task produced other rows, so a batch could mix both runs",
    ),
    (
        f"{_CHECKSUM}enableFullRetryOnMismatch",
        "false",
        "lets Spark continue when a re-run task produced other rows, so a batch could mix both runs",
    ),
)


def _nothing(_: str) -> None:
    pass


def refuse_unsafe(settings: Callable[[str], str | None]) -> None:
    """Raise ConfigurationError for Spark settings under which the guarantee cannot hold.

    `settings`: returns a Spark setting, None if it is not set.
    """
    for name, unsafe, why in _UNSAFE:
        if str(settings(name)).lower() == unsafe:
            safe = "false" if unsafe == "true" else "true"
            raise ConfigurationError(f"{name}={unsafe} {why}: set it to {safe} for this application")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Holds the checked arguments of a sink.

    `topic` is as the user gave it, `topics` a tuple. `connection`: Kafka's settings, with the contents of files in
    place of their paths, so that they hold on executors too.
    """

    topic: str | Sequence[str]
    topics: tuple[str, ...]
    transactional_id: str
    settings: Settings
    compression: str
    connection: Mapping[str, Any]
    on_step: Callable[[str], None]

    @classmethod
    def of(
        cls,
        topic: str | Sequence[str],
        transactional_id: str,
        bootstrap_servers: str,
        settings: Mapping[str, str] | None,
        compression: str,
        on_step: Callable[[str], None] | None = None,
    ) -> Options:
        """Check the arguments of a sink. Raise ConfigurationError if one is wrong or a TLS file cannot be read."""
        checked = Settings({**(settings or {}), "bootstrap.servers": bootstrap_servers})
        if compression == "none":
            compression = str(checked.values.get("compression.type", "none"))
        topics = (topic,) if isinstance(topic, str) else tuple(topic)
        _check(topics, transactional_id, compression, str(checked["partitioner"]))
        connection = contents(checked.connection()) | {"client.id": f"eos-spark-{transactional_id}"}
        return cls(
            topic=topic,
            topics=topics,
            transactional_id=transactional_id,
            settings=checked,
            compression=compression,
            connection=connection,
            on_step=on_step or _nothing,
        )

    @property
    def timeout_s(self) -> float:
        """Return for how many seconds a request of the driver is retried."""
        return float(self.settings["eos.startup.timeout.ms"]) / 1000

    @property
    def delivery_s(self) -> float:
        """Return for how many seconds one record batch may stay unacknowledged."""
        return int(self.settings.values.get("message.timeout.ms", _DELIVERY_TIMEOUT_MS)) / 1000

    @property
    def driver_bytes(self) -> int:
        """Return below how many bytes of a batch the driver writes the next one itself."""
        return int(self.settings["eos.spark.driver.bytes"])

    @property
    def claims_port(self) -> int:
        """Return the port on which the driver listens for executors' claims, or 0 for any port."""
        return int(self.settings["eos.spark.claims.port"])

    @property
    def transaction_ms(self) -> int | None:
        """Return the configured transaction.timeout.ms, or None for the broker's maximum."""
        asked = self.settings.values.get("transaction.timeout.ms")
        return None if asked is None else int(asked)


def _check(topics: tuple[str, ...], transactional_id: str, compression: str, partitioner: str) -> None:
    if not transactional_id:
        raise ConfigurationError("transactional_id must not be empty")
    if not topics or not all(topics) or len(set(topics)) != len(topics):
        raise ConfigurationError(f"topic must name at least one topic, each once: {list(topics)}")
    if marker.TOPIC in topics:
        raise ConfigurationError(f"{marker.TOPIC} holds the markers of all sinks and cannot be a target")
    if compression not in COMPRESSIONS:
        raise ConfigurationError(f"compression {compression} is none of {', '.join(COMPRESSIONS)}")
    if partitioner not in ("murmur2", "murmur2_random"):
        raise ConfigurationError(
            f"partitioner={partitioner} is not supported: the sink has only the Java client's partitioner, "
            "murmur2_random"
        )
