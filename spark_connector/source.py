"""Configures Spark's Kafka source to read only committed records, and to lose none.

Owns those settings and their enforcement. It must never read anything itself.

Measured with Spark 4.2.0 on Kafka 4.3.1: with isolation.level=read_committed a batch ends at the last stable offset,
and the gaps that markers and aborted records leave between offsets do not count as lost data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eos import log
from eos.errors import ConfigurationError
from spark_connector.java_settings import java_consumer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORCED = {
    "kafka.isolation.level": ("read_committed", "a reader of uncommitted records would copy aborted ones"),
    "failOnDataLoss": ("true", "records that are gone before they were read would be skipped in silence"),
}
_NAMED = {
    "subscribe": "topics=",
    "kafka.bootstrap.servers": "bootstrap_servers=",
    "startingOffsets": "starting_offsets=",
    "maxOffsetsPerTrigger": "max_records=",
}


def read_committed(
    spark: SparkSession,
    topics: str | Sequence[str],
    *,
    bootstrap_servers: str,
    streaming: bool = True,
    starting_offsets: str = "earliest",
    max_records: int | None = None,
    settings: Mapping[str, Any] | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the committed records of `topics`: a streaming DataFrame, or with `streaming=False` a batch up to now.

    Columns: key, value (binary), topic, partition, offset, timestamp, timestampType, headers (array of key, value).
    `starting_offsets`: earliest, latest or Spark's JSON; it applies only to a query without a checkpoint, and new
    partitions start at their beginning. `max_records`: the maximum number of records of one micro-batch (offsets, so
    markers count). `settings`: as for the worker (`security.protocol`, `ssl.ca.location`, `sasl.username`, ...).
    `options`: further options for Spark's source (`minPartitions`, `kafka.NAME` for the Java client).

    Raises ConfigurationError for a setting that would break the guarantee, or cannot be translated for the Java client.
    """
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names:
        raise ConfigurationError("read_committed needs at least one topic")
    more = dict(options or {})
    _check(more)
    log.hide_debug_lines("py4j")  # py4j logs all that it passes to Java, including passwords in the options
    reader: Any = (spark.readStream if streaming else spark.read).format("kafka")
    java = java_consumer({**(settings or {}), "bootstrap.servers": bootstrap_servers})
    values = {f"kafka.{name}": value for name, value in java.items()} | {
        "subscribe": ",".join(names),
        "startingOffsets": starting_offsets,
        "includeHeaders": "true",
        **{name: value for name, (value, _) in _FORCED.items()},
    }
    if max_records is not None:
        if not streaming:
            raise ConfigurationError("max_records is for micro-batches: a batch read has only one")
        values["maxOffsetsPerTrigger"] = str(max_records)
    return reader.options(**(values | more)).load()  # type: ignore[no-any-return]


def _check(options: Mapping[str, str]) -> None:
    lower = {name.lower(): (name, str(value)) for name, value in options.items()}
    for name, (wanted, reason) in _FORCED.items():
        if name.lower() in lower and lower[name.lower()][1].lower() != wanted:
            raise ConfigurationError(
                f"{name}={lower[name.lower()][1]} would break exactly-once (allowed: {wanted}): {reason}"
            )
    for name, parameter in _NAMED.items():
        if name.lower() in lower:
            raise ConfigurationError(f"the option {name} is the argument {parameter} of read_committed")
