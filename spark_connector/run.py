"""Runs an App as a Structured Streaming query: `eos spark run`, and `run_app` for a driver program of your own.

Owns the query around the sink: the source, the App's functions, the checkpoint location, signals, and the error that
ends the run. It must never decide whether to commit or abort (spark_connector/sink.py does), and never inspect a
record.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient
from pyspark import cloudpickle

from eos import log
from eos.app.definition import App
from eos.encoding.serde import function_name
from eos.errors import ConfigurationError, EosError, Fenced, InputGone, NotAuthorised, Temporary, Unavailable
from eos.kafka.admin.facts import check_topics
from eos.kafka.client.settings import Settings
from eos.signals import ShutdownExpired, StopSignals, stop_timeout_error
from spark_connector import checkpoint, failures, keyed
from spark_connector.apply import OUTPUTS, Apply
from spark_connector.java_settings import find_unused
from spark_connector.query import is_stop
from spark_connector.session import first_line, kill
from spark_connector.shipping import ship
from spark_connector.source import read_committed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from spark_connector.sink import Stream

DEFAULT_INSTANCE = "spark"
_OF_THE_SINK = ("eos.spark.driver.bytes", "eos.spark.claims.port")  # the settings of eos that apply to the sink
MAX_RECORDS = 1_000_000
"""The maximum number of input offsets of one micro-batch unless `eos.transaction.max.records` is set.

The whole computation of a batch must end within the transaction's timeout.
"""
_LOOK_S = 0.2
_ABORT_S = 10.0


@dataclass(frozen=True)
class Run:
    """Describes an App that runs as one query.

    `checkpoint`: the folder of the checkpoint, which a restart needs again. None means `checkpoints/TRANSACTIONAL_ID`
    in the working directory. `options`: options of Spark's Kafka source. `interval_ms`: milliseconds between the
    starts of two micro-batches; with 0 each batch starts as soon as the previous one has ended.
    """

    app: App
    settings: Settings
    checkpoint: str | None = None
    until_end: bool = False
    interval_ms: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def transactional_id(self) -> str:
        """Return an id without a host name, so that it stays the same wherever a driver is restarted."""
        return f"{self.app.id}-{self.settings['eos.instance'] or DEFAULT_INSTANCE}"

    @property
    def checkpoint_location(self) -> str:
        return self.checkpoint or f"checkpoints/{self.transactional_id}"

    @property
    def max_records(self) -> int:
        given = "eos.transaction.max.records" in self.settings.values
        return int(self.settings["eos.transaction.max.records"]) if given else MAX_RECORDS


def run_app(run: Run, spark: SparkSession) -> None:
    """Run the query until a signal stops it or, with `until_end`, until all records readable at the start are handled.

    Call `check` first. Call this in the main thread, because it handles SIGTERM and SIGINT. Raises subclasses of
    EosError, as a worker does.
    """
    from py4j.protocol import Py4JError

    batches = _Batches(sink(run))
    began = time.monotonic()
    log.info("query starts", transactional_id=run.transactional_id, checkpoint=run.checkpoint_location)
    try:
        checkpoint.require_same_state(spark, run.app, run.checkpoint_location)
        ship(spark, run.app)
        query = _start(run, spark, batches)
        with StopSignals(batches, run.settings["eos.shutdown.timeout.ms"] / 1000):
            _follow(query, batches)
    except (Py4JError, ConnectionError) as error:  # Py4J's attempt to reconnect raises ConnectionError
        raise Temporary(f"Spark's JVM is gone, or has stopped: {first_line(str(error))}") from error
    except ShutdownExpired as expired:
        # The signal may have interrupted a call to the JVM, so no further call is possible.
        kill(spark)
        _wait_for_abort(batches)
        raise stop_timeout_error(expired) from expired
    log.info("stopped", batches=batches.completed, seconds=round(time.monotonic() - began, 1))


def _wait_for_abort(batches: _Batches) -> None:
    """Wait until the sink has aborted its transaction, which it does when the JVM ends.

    Without the abort, readers would wait for the transaction's timeout."""
    deadline = time.monotonic() + _ABORT_S
    while batches.is_writing and time.monotonic() < deadline:
        time.sleep(0.05)


def check(run: Run) -> None:
    """Check the App, the settings, the cluster and the topics before Spark starts. Raises subclasses of EosError."""
    run.app.check()
    if run.app.patterns:
        raise ConfigurationError(
            f"the App {run.app.id!r} reads topics by the pattern {next(iter(run.app.patterns)).pattern!r}: on Spark a "
            "query reads topics by their names; name them, or use `eos run`"
        )
    for route in run.app.functions:
        if route.source is not None:
            raise ConfigurationError(
                f"the App {run.app.id!r} reads rows of table {route.source.table}, which a Spark query does not do: "
                "send them to a topic with an App for `eos run`, and read that topic on Spark"
            )
        if route.sink is not None:
            raise ConfigurationError(
                f"{route.name} writes rows into a database, which a Spark query does not do: send them to a topic as "
                "records, and write them into the database with an App for `eos run`"
            )
    if not run.app.destinations:
        raise ConfigurationError(
            f"no function of the App {run.app.id!r} names a destination with to=: there is nothing to send exactly once"
        )
    for route in run.app.functions:
        _check_sendable(route.name, route)
    for hook in (*run.app.start_hooks, *run.app.stop_hooks):
        _check_sendable(function_name(hook), hook)
    for route in run.app.stateful:
        if route.timing.idle_ms is not None:
            raise ConfigurationError(
                f"{route.name} has idle=, but on Spark nothing runs for a partition without new records: use "
                "`eos run`, or do without"
            )
        if run.app.stop_hooks:
            raise ConfigurationError(
                f"{route.name} has state, and the App on_stop: Spark does not say when a task with state ends; use "
                "`eos run`, or do without"
            )
    if run.app.chained:
        raise ConfigurationError(
            f"{min(run.app.chained)} is written by one function of {run.app.id} and read by another. A Spark query "
            "cannot chain functions: use `eos run`, or an App for each step"
        )
    if run.settings["eos.lineage"]:
        raise ConfigurationError("eos.lineage=true needs the group's offsets, which a Spark query does not commit")
    if left := find_unused(run.settings.values):
        log.info("not used by Spark's Kafka source", settings=",".join(left))
    deadline = time.monotonic() + run.settings["eos.startup.timeout.ms"] / 1000
    configuration: dict[str, Any] = {**run.settings.connection(), "logger": log.client_logger}
    client = AdminClient(configuration)
    topics = [*run.app.topics, *sorted(run.app.destinations)]
    check_topics(client, run.settings.bootstrap_servers, topics, deadline)


def _check_sendable(name: str, what: object) -> None:
    """Raise ConfigurationError for an object that cannot be pickled for the executors."""
    try:
        cloudpickle.dumps(what)  # type: ignore[no-untyped-call]
    except Exception as error:  # the user's objects may raise anything
        raise ConfigurationError(
            f"{name} cannot be sent to Spark's executors: {error}",
            remedy="what it uses must be pickled: open connections, files and locks in on_start, not at the import",
        ) from error


def outputs(run: Run, spark: SparkSession) -> DataFrame:
    """Return the App's outputs as rows for the sink."""
    remembering = [source for route in run.app.stateful for source in route.sources]
    without = [topic for topic in run.app.topics if topic not in remembering]
    how = run.settings["eos.batch.max.records"], run.settings["eos.async.max.records"], run.settings.passed_headers
    most = -(-run.max_records // (bool(remembering) + bool(without)))
    parts = []
    if without:
        parts.append(_source(run, spark, without, most).mapInArrow(Apply(run.app, *how), OUTPUTS))
    if remembering:
        parts.append(keyed.with_state(_source(run, spark, remembering, most), keyed.Keyed(run.app, *how)))
    rows = functools.reduce(lambda rows, more: rows.union(more), parts)
    return rows.selectExpr("*", "timestamp_millis(timestamp_ms) as timestamp").drop("timestamp_ms")


def _source(run: Run, spark: SparkSession, topics: list[str], most: int) -> DataFrame:
    options = dict(run.options)
    begin = options.pop("startingOffsets", str(run.settings.get("auto.offset.reset", "earliest")))
    return read_committed(
        spark,
        topics,
        bootstrap_servers=run.settings.bootstrap_servers,
        starting_offsets=begin,
        max_records=most,
        settings=_client_settings(run.settings),
        # The cluster's ACLs can allow the query's readers to use groups with this prefix.
        options={"groupIdPrefix": f"{run.app.id}-spark", **options},
    )


def sink(run: Run) -> Stream:
    from spark_connector.sink import exactly_once_sink

    return exactly_once_sink(
        topic=sorted(run.app.destinations),
        transactional_id=run.transactional_id,
        bootstrap_servers=run.settings.bootstrap_servers,
        settings=_client_settings(run.settings) | {name: str(run.settings[name]) for name in _OF_THE_SINK},
        compression=str(run.settings.get("compression.type", "none")),
    )


def _client_settings(settings: Settings) -> dict[str, str]:
    """Return the settings of the Kafka clients, without those of eos."""
    return {name: str(value) for name, value in settings.values.items() if not name.startswith("eos.")}


def _start(run: Run, spark: SparkSession, batches: _Batches) -> StreamingQuery:
    from pyspark.errors import PySparkException

    try:
        writer = outputs(run, spark).writeStream.queryName(run.transactional_id).foreachBatch(batches)
        writer = writer.option("checkpointLocation", run.checkpoint_location)
        if run.until_end:
            writer = writer.trigger(availableNow=True)
        elif run.interval_ms:
            writer = writer.trigger(processingTime=f"{run.interval_ms} milliseconds")
        return writer.start()
    except PySparkException as error:
        raise ConfigurationError(f"the query cannot be started: {first_line(str(error))}") from error


# ---------------------------------------------------------------------------------------------------- the query's life


class StopRequested(Exception):
    """Ends the query between two batches: foreachBatch raises it before the sink has begun the next one."""


class BatchFailed(Exception):
    """Stands for the sink's error in the exception that Spark gets. The error itself stays in this process."""


class _Batches:
    """Implements the foreachBatch function. It calls the sink until a stop is requested.

    It keeps the exception that the sink raised, because Spark passes on only the text of an exception.
    """

    def __init__(self, write: Stream) -> None:
        self.write = write
        self.stop_requested = False
        self.is_writing = False
        self.completed = 0
        self.failure: Exception | None = None

    def stop(self) -> None:
        """Stop before the next batch."""
        self.stop_requested = True

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        self.is_writing = True
        try:
            if self.stop_requested:
                raise StopRequested("a stop was asked for")
            self.write(rows, batch_id)
            self.completed += 1
        except Exception as error:
            self.failure = error
            if is_stop(rows, error):
                raise
            # Spark searches the whole traceback with a regular expression that recurses for each character
            # (query.is_stop). A long traceback would overflow its stack.
            raise BatchFailed(type(error).__name__) from None
        finally:
            self.is_writing = False


def _follow(query: StreamingQuery, batches: _Batches) -> None:
    """Wait until the query has ended, and raise the error that it ended with."""
    from pyspark.errors import PySparkException

    try:
        while not query.awaitTermination(_LOOK_S):  # type: ignore[arg-type]
            if batches.stop_requested and not batches.is_writing and _is_idle(query):
                query.stop()
    except PySparkException as error:
        if batches.stop_requested and isinstance(batches.failure, StopRequested):
            return
        log.debug("the query ended", error=str(error))
        ended, trace = error_of(error, batches.failure)
        print(trace, end="", file=sys.stderr)
        if isinstance(ended, Fenced) and batches.failure is None and not _is_replaced(batches.write):
            # This run has fenced the other one, which exits with 79. If this run exited with 79 too, neither would
            # continue.
            raise Temporary(f"{ended}; that one does not have the transactional.id") from None
        raise ended from None


def _is_replaced(write: Stream) -> bool:
    try:
        return write.is_replaced()
    except EosError as unanswered:
        log.warning("check for a newer run failed", error=str(unanswered))
        return False


def _is_idle(query: StreamingQuery) -> bool:
    """Return whether the query only waits for new data, so that it may be stopped.

    A batch may begin meanwhile. It ends with StopRequested, or the stop interrupts it before its commit. The next run
    reads the batch's rows again.
    """
    status = query.status
    return not (status["isTriggerActive"] and status["isDataAvailable"])


def error_of(error: Exception, failure: Exception | None) -> tuple[EosError, str]:
    """Return the error that ended the query, and the traceback of the user's own exception, or "".

    `error`: Spark's exception. `failure`: the exception that the sink raised, if any.
    """
    for text in (str(failure or ""), str(error)):
        if carried := failures.from_text(text):
            return carried
    return failure if isinstance(failure, EosError) else _spark_error(error, failure), ""


def _spark_error(error: Exception, failure: Exception | None) -> EosError:
    text = f"{failure or ''}\n{error}"
    for kind, what, pattern in _SPARK_ERRORS:
        if found := pattern.search(text):
            return kind(f"{what}: {first_line(found[found.lastindex or 0])}")
    return Temporary(f"the query failed: {_reason(str(failure or error))}")


def _reason(text: str) -> str:
    """Return the last line of the text if it is the traceback of a Python worker, otherwise its first line."""
    traceback = text.rpartition("Traceback (most recent call last):\n")[2]
    ends_with = [line for line in traceback.splitlines() if re.match(r"[\w.]+(: |$)", line)]
    return first_line(ends_with[0] if traceback != text and ends_with else text)


# The errors of Spark's source, known only by their text and error conditions (kafka-error-conditions.json).
_SPARK_ERRORS: tuple[tuple[type[EosError], str, re.Pattern[str]], ...] = (
    (NotAuthorised, "not authorised", re.compile(r"\w*(?:AuthorizationException|SaslAuthenticationException)\b.*")),
    (
        InputGone,
        "the input at the checkpoint's offset is gone",
        # The text before the reason is general, and advises to continue without the records.
        re.compile(r"\[KAFKA_DATA_LOSS[\s\S]*?Reason:\s*(.+)|(OffsetOutOfRangeException.*)"),
    ),
    (
        Fenced,
        "another run of this query writes to its checkpoint",
        re.compile(r"\[CONCURRENT_STREAM_LOG_UPDATE\] (.*)"),
    ),
    (
        ConfigurationError,
        "the checkpoint is of a run without state: begin with another --instance and --checkpoint",
        re.compile(r"\[STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY\] (.*)"),
    ),
    (Unavailable, "a topic of the source is gone", re.compile(r"UnknownTopicOrPartitionException.*")),
    (ConfigurationError, "TLS", re.compile(r"SslAuthenticationException.*")),
)
