"""Supports Spark: an exactly-once Kafka sink for Structured Streaming, and Apps that run on Spark.

    spark_session(...)        a session with Spark's Kafka connector on its class path
    read_committed(...)       Spark's Kafka source with the settings that keep the guarantee
    exactly_once_sink(...)    for foreachBatch: each micro-batch is one transaction
    exactly_once_write(...)   one batch DataFrame in one transaction

Names are imported when first used: executors import this package too, and need neither the driver's half nor a Kafka
client.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_connector.session import spark_session
    from spark_connector.sink import exactly_once_sink, exactly_once_write
    from spark_connector.source import read_committed

_HOMES = {
    "exactly_once_sink": "spark_connector.sink",
    "exactly_once_write": "spark_connector.sink",
    "read_committed": "spark_connector.source",
    "spark_session": "spark_connector.session",
}

__all__ = ["exactly_once_sink", "exactly_once_write", "read_committed", "spark_session"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spark_connector' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
