"""The end of a query: errors of Spark's source translated to ours. The texts are those of Spark 4.2.0."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import StreamingQueryException

from eos.app.definition import App
from eos.app.state import State
from eos.errors import (
    ConfigurationError,
    EosError,
    Fenced,
    InputGone,
    NotAuthorised,
    PoisonRecord,
    Temporary,
    Unavailable,
)
from eos.kafka.client.settings import Settings
from eos.sql import Postgres
from spark_connector.failures import to_line
from spark_connector.run import Run, _Batches, _follow, check, error_of
from spark_connector.shipping import find_missing_package


def test_unsupported_app_is_refused_before_spark_starts() -> None:
    def count(value: str, seen: State[int]) -> str: ...  # type: ignore[empty-body]

    silent, stopping, chain, reading = App("app"), App("app"), App("app"), App("app")
    reading.source(Postgres("host=db"), table="outbox", to="out")
    silent.process("in", to="out", idle=timedelta(minutes=1))(count)
    stopping.process("in", to="out")(count)
    stopping.on_stop(lambda: None)
    for source, to in (("in", "between"), ("between", "out")):
        chain.process(source, to=to)(lambda value: value)
    for app, said in (
        (silent, "count has idle=, but on Spark nothing runs for a partition without new records"),
        (stopping, "count has state, and the App on_stop"),
        (chain, "between is written by one function of app and read"),
        (reading, "reads rows of table outbox, which a Spark query does not do"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            check(Run(app, Settings({"bootstrap.servers": "127.0.0.1:9"})))


def test_error_names_an_unpicklable_function_before_spark_starts() -> None:
    lock, app = threading.Lock(), App("app")

    @app.process("in", to="out")
    def guarded(value: str) -> str:
        with lock:
            return value

    with pytest.raises(ConfigurationError, match="guarded cannot be sent to Spark's executors: cannot pickle"):
        check(Run(app, Settings({"bootstrap.servers": "127.0.0.1:9"})))


DATA_LOSS = """Job aborted due to stage failure: Task 1 in stage 4.0 failed 1 times, most recent failure: Lost task 1.0
org.apache.spark.SparkException: [KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] Some data may have been lost because they
are not available in Kafka any more; either the data was aged out by Kafka or the topic may have been deleted before all
the data in the topic was processed.
If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.
Reason:
Could not read records in offset [100, 300) for topic partition in-1
with consumer group g. SQLSTATE: 22000
\tat org.apache.spark.sql.kafka010.KafkaExceptions$.couldNotReadOffsetRange(KafkaExceptions.scala:168)
Caused by: org.apache.kafka.clients.consumer.OffsetOutOfRangeException: Fetch position 100 is out of range for in-1
"""
OUT_OF_RANGE = (
    "org.apache.kafka.clients.consumer.OffsetOutOfRangeException: Fetch position 0 is out of range for in-1\n at x"
)
DENIED = "org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized to access topics: [in]\n at x"
OF_A_TASK = """Job aborted due to stage failure: Task 0 in stage 2.0 failed 4 times
org.apache.spark.api.python.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "worker.py", line 3602, in main
    read()
{0}
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:665)
"""
CONCURRENT = """[STREAM_FAILED] Query [id = 8c9bd319] terminated with exception: [CONCURRENT_STREAM_LOG_UPDATE] \
Concurrent update to the log. Multiple streaming jobs detected for 1.
Please make sure only one streaming job runs on a specific checkpoint location at a time. SQLSTATE: 40000"""
TLS = "org.apache.kafka.common.errors.SslAuthenticationException: SSL handshake failed"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            DATA_LOSS,
            InputGone,
            "the input at the checkpoint's offset is gone: Could not read records in offset [100, 300) for",
        ),
        (OUT_OF_RANGE, InputGone, "OffsetOutOfRangeException: Fetch position 0 is out of range for in-1"),
        (DENIED, NotAuthorised, "TopicAuthorizationException: Not authorized to access topics: [in]"),
        (TLS, ConfigurationError, "SSL handshake failed"),
        (
            CONCURRENT,
            Fenced,
            "another run of this query writes to its checkpoint: Concurrent update to the log. Multiple",
        ),
        (
            "[STREAM_FAILED] Query [id = 15c4] terminated with exception: "
            "[STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY] Cannot restart streaming query with stateful "
            "operators because the state directory is empty or missing.\nThis might have happened ...",
            ConfigurationError,
            "the checkpoint is of a run without state: begin with another --instance and --checkpoint: Cannot restart",
        ),
        ("x.UnknownTopicOrPartitionException: This server does not host this topic", Unavailable, "does not host"),
        (OF_A_TASK.format("OSError: no room"), Temporary, "the query failed: OSError: no room"),
        (OF_A_TASK.format("KeyboardInterrupt"), Temporary, "the query failed: KeyboardInterrupt"),
        ("ExecutorLostFailure (executor 1 exited)\nmore", Temporary, "the query failed: ExecutorLostFailure"),
    ],
)
def test_spark_source_error_is_one_sentence_with_an_exit_code(text: str, kind: type[EosError], said: str) -> None:
    for error, failure in ((Exception(text), None), (Exception("[STREAM_FAILED] ..."), Exception(text))):
        ended, trace = error_of(error, failure)
        assert type(ended) is kind
        assert said in str(ended)
        assert "\n" not in str(ended)
        assert "failOnDataLoss" not in str(ended)
        assert trace == ""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("ModuleNotFoundError: No module named 'spark_connector'", "No module named 'spark_connector': pip install"),
        (
            "pyspark.errors.exceptions.base.PySparkImportError: [PACKAGE_NOT_INSTALLED] PyArrow >= 18.0.0 must be "
            "installed; however, it was not found.",
            "PyArrow >= 18.0.0 must be installed; however, it was not found: pip install",
        ),
        (
            "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has "
            "different version: 3.10 than that in driver: 3.11, PySpark cannot run with different minor versions.",
            "Python in worker has different version: 3.10 than that in driver: 3.11: pip install",
        ),
    ],
)
def test_missing_package_of_an_executor_is_a_permanent_error(raised: str, said: str) -> None:
    found = find_missing_package(OF_A_TASK.format(raised))
    assert isinstance(found, ConfigurationError)
    assert said in str(found)
    assert find_missing_package(OF_A_TASK.format("ValueError: no")) is None


def test_sink_error_is_kept_but_an_executor_failure_wins() -> None:
    fenced = Fenced("another query took over")
    assert error_of(Exception("[STREAM_FAILED] BatchFailed: Fenced"), fenced)[0] is fenced
    poison = PoisonRecord("f failed on in[0]@3", "in", 0, 3)
    poison.__cause__ = ValueError("no")
    executor_error = Exception(f"org.apache.spark.SparkException: OffsetOutOfRangeException ... {to_line(poison)}")
    ended, _ = error_of(Exception("[STREAM_FAILED]"), executor_error)
    assert isinstance(ended, PoisonRecord)
    assert (ended.topic, ended.partition, ended.offset) == ("in", 0, 3)


@pytest.mark.parametrize(
    ("replaced", "kind"), [(True, Fenced), (False, Temporary), (Unavailable("the cluster is unavailable"), Temporary)]
)
def test_replaced_run_ends_only_if_the_other_run_continues(replaced: bool | Unavailable, kind: type[EosError]) -> None:
    def is_replaced() -> bool:
        if isinstance(replaced, Unavailable):
            raise replaced
        return replaced

    def await_termination(_: float) -> bool:
        raise StreamingQueryException(CONCURRENT)

    batches = _Batches(cast("Any", SimpleNamespace(is_replaced=is_replaced)))
    query = cast("Any", SimpleNamespace(awaitTermination=await_termination))
    with pytest.raises(kind, match="another run of this query writes to its checkpoint") as ended:
        _follow(query, batches)
    assert type(ended.value) is kind
