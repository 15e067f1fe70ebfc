"""Reports the figures of one delivered batch: rows, bytes, and the seconds of each step.

Owns the names of these figures in the log, in Spark's metrics and for callers. It must never decide anything, and a
metrics system that refuses them must not fail a committed batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eos import log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ENABLED = "spark.sql.streaming.metricsEnabled"


@dataclass(frozen=True)
class Progress:
    """Holds the figures of a batch that this call committed. `batch`: "batch 7", or "write DAY"."""

    transactional_id: str
    batch: str
    rows: int
    bytes: int
    """Bytes of record batches, compressed."""
    partitions: int
    """The number of partitions that got rows."""
    tasks: int
    """The number of tasks that wrote; 0: the driver wrote."""
    resent: int
    """The number of record batches that were sent again because their acknowledgement was missing."""
    seconds: Mapping[str, float]
    """The seconds of each step of the driver, in order: init, decide, targets, add, produce, mark, commit. `produce`
    includes the fetch of a small batch's rows, which runs at the same time as the first three."""
    tasks_s: float
    """The sum of the tasks' seconds since their first row."""
    waited_s: float
    """The part of `tasks_s` spent waiting for the brokers."""

    def figures(self) -> dict[str, int]:
        """Return all figures by name; times are in milliseconds."""
        counts = ("rows", "bytes", "partitions", "tasks", "resent")
        times = {"tasks": self.tasks_s, "tasks_waited": self.waited_s, **self.seconds}
        return {name: getattr(self, name) for name in counts} | {
            f"{step}_ms": round(seconds * 1000) for step, seconds in times.items()
        }


def to_spark_metrics(df: DataFrame, execution: Any, progress: Progress) -> None:
    """Set gauges `eos.NAME` next to Spark's own of this query, if `spark.sql.streaming.metricsEnabled` is true.

    `execution`: Spark's StreamExecution.
    """
    from py4j.protocol import Py4JError

    try:
        if str(df.sparkSession.conf.get(_ENABLED, "false")).lower() != "true":
            return
        # Spark's metrics system picks up additions to a registry that it already has.
        registry = execution.streamMetrics().metricRegistry()
        for name, figure in progress.figures().items():
            registry.gauge(f"eos.{name}").setValue(figure)
    except Py4JError as error:
        log.warning("the batch is committed, and its metrics could not be set", error=str(error).splitlines()[0])
