"""What one delivered batch was: rows, bytes, and the seconds of each step.

Owns the numbers' names in the log, in Spark's metrics and for callers. It must never decide anything, and a metrics
system that refuses them must not fail a batch that is committed.
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
    """A batch that this call committed. `batch`: "batch 7", or "write DAY"."""

    transactional_id: str
    batch: str
    rows: int
    bytes: int
    """Of record batches, compressed."""
    partitions: int
    """That got rows."""
    tasks: int
    """That wrote them; 0: the driver did."""
    resent: int
    """Record batches that were in doubt and sent again."""
    seconds: Mapping[str, float]
    """Of each step of the driver, in order: init, decide, targets, add, produce, mark, commit."""
    tasks_s: float
    """The sum of what the tasks took from their first row on."""
    waited_s: float
    """Of these, for the brokers' answers."""

    def figures(self) -> dict[str, int]:
        """All numbers by name; times in milliseconds."""
        counts = ("rows", "bytes", "partitions", "tasks", "resent")
        times = {"tasks": self.tasks_s, "tasks_waited": self.waited_s, **self.seconds}
        return {name: getattr(self, name) for name in counts} | {
            f"{step}_ms": round(seconds * 1000) for step, seconds in times.items()
        }


def to_spark_metrics(df: DataFrame, execution: Any, progress: Progress) -> None:
    """Gauges `eos.NAME` beside Spark's own ones of this query, where `spark.sql.streaming.metricsEnabled` made those.
    `execution`: Spark's StreamExecution."""
    from py4j.protocol import Py4JError

    try:
        if str(df.sparkSession.conf.get(_ENABLED, "false")).lower() != "true":
            return
        # Spark's metrics system follows what is added to a registry that it has.
        registry = execution.streamMetrics().metricRegistry()
        for name, figure in progress.figures().items():
            registry.gauge(f"eos.{name}").setValue(figure)
    except Py4JError as error:
        log.warning("the batch is committed, and its metrics could not be set", error=str(error).splitlines()[0])
