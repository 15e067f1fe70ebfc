"""Finds the query that calls a foreachBatch function: its id, and the source offsets of the batch.

Owns the access to Spark's JVM for this. It must never change the query.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eos.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY_ID = "sql.streaming.queryId"  # the local property that Spark's StreamExecution sets on its thread
_STOPS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
_LINES_BEFORE_OFFSETS = 2  # the version of the log, and metadata with times that a re-run may change


@dataclass(frozen=True)
class Query:
    """Describes the query that calls a foreachBatch function.

    `id` is stored in the checkpoint, so it stays the same after a restart. `run` changes at each start. `offsets` is a
    digest of the batch's end offsets. `execution` is Spark's StreamExecution.
    """

    id: str
    run: str
    offsets: str
    execution: Any


def current(df: DataFrame, batch: int) -> Query:
    """Return the query on whose thread this is called. Raise ConfigurationError outside foreachBatch."""
    frame: Any = df
    if not hasattr(frame, "_jdf"):
        raise ConfigurationError("Spark Connect is not supported: the sink runs in the driver's own process")
    query_id = df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
    if not query_id:
        raise ConfigurationError("the sink is for writeStream.foreachBatch; a batch DataFrame takes exactly_once_write")
    jvm: Any = df.sparkSession.sparkContext._jvm
    session = frame._jdf.sparkSession()
    key = java_class(jvm, "java.util.UUID").fromString(query_id)
    execution = session.sharedState().activeStreamingQueries().get(key)
    path = java_class(jvm, "org.apache.hadoop.fs.Path")(execution.resolvedCheckpointRoot(), f"offsets/{batch}")
    stream = path.getFileSystem(session.sessionState().newHadoopConf()).open(path)
    try:
        text = str(java_class(jvm, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))
    finally:
        stream.close()
    offsets = "\n".join(text.splitlines()[_LINES_BEFORE_OFFSETS:])
    run = str(execution.runId().toString())
    return Query(query_id, run, hashlib.sha256(offsets.encode()).hexdigest()[:32], execution)


def is_stop(df: DataFrame, error: Exception) -> bool:
    """Return whether `error` says that the query was stopped during a batch; then also drop its Java stack trace.

    Spark distinguishes a stop from a failure by a regular expression over Python's traceback, whose matcher recurses
    for each character. With a job's stack traces in it the stream's thread would overflow its stack instead of ending
    normally.
    """
    java: Any = getattr(error, "java_exception", None)
    if java is None or java.getClass().getName() not in _STOPS:
        return False
    gateway: Any = df.sparkSession.sparkContext._gateway
    java.setStackTrace(gateway.new_array(gateway.jvm.java.lang.StackTraceElement, 0))
    return True


@functools.cache
def java_class(jvm: Any, name: str) -> Any:
    """Return `jvm.a.b.C`, looked up once, for calls of its static methods and constructors.

    `jvm` belongs to the SparkContext. py4j queries the JVM for each part of a dotted name at each use: half a dozen
    round trips, which are noticeable for a small batch.
    """
    return functools.reduce(getattr, name.split("."), jvm)
