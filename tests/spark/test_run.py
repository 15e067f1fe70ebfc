"""Run an App with `eos spark run` on real Spark and Kafka, and judge by the contents of Kafka."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from confluent_kafka import Message
from kafka import errors as kafka_errors

from tests.support.pipeline import REPOSITORY, WorkerProcess
from tests.support.reading import create_topic, transaction_of, wait_until
from tests.support.spark_standalone import python_without

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.spark import SparkRuns
pytest_plugins = ["tests.support.spark"]

pytestmark = [pytest.mark.takes(145), pytest.mark.timeout(560)]

SPARK_S = 240.0
USAGE, POISON, INPUT_GONE, UNAVAILABLE, TEMPORARY, CONFIGURATION, FENCED = 64, 65, 66, 69, 75, 78, 79

# Every way in which an App describes outputs; each output names its source offset in its value or a header.
EVERYTHING = """
    import msgspec
    from eos import App, Out, Record

    app = App($app)


    class Order(msgspec.Struct):
        number: int
        name: str = "nobody"


    @app.process($numbers, to=$to)
    def several(record: Record):
        place = f"{record.topic}/{record.partition}/{record.offset}"
        yield place
        if record.value is None:
            yield Out(None, topic=$to[1], headers={"place": place, "none": None})
        elif int(record.value) % 3 == 0:
            yield Out({"place": place, "headers": [name for name, _ in record.headers]}, topic=$to[1], partition=2)
        elif int(record.value) % 3 == 1:
            yield Out(record.value, key={"k": int(record.value)}, topic=$to[1], headers=[("place", place)],
                      timestamp=record.timestamp + 7)


    @app.process($orders, to=$to[0])
    def one(order: Order | None) -> Order | None:
        return None if order is None or order.number % 2 else Order(order.number, order.name.upper())


    @app.process_batch($batches, to=$to[2])
    def many(records: list[Record]):
        return [record.out(f"{record.topic}/{record.partition}/{record.offset}") for record in records]
"""

COPY = """
    import os, time
    from eos import App, Record

    app = App($app)


    @app.process($source, to=$to)
    def copy(record: Record) -> bytes:
        if record.value == b"bad" and not os.path.exists($mended):
            raise ValueError("this one is bad")
        return record.value
"""

HOLD = """
    import os, time
    from eos import App, Record

    app = App($app)


    @app.process($source, to=$to)
    def slow(record: Record) -> bytes:
        while record.value == b"3" and not os.path.exists($go_on):
            time.sleep(0.05)
        return record.value
"""


def load_everything(runs: SparkRuns, numbers: str, orders: str, batches: str, count: int) -> None:
    """Load committed and aborted transactions in turn, with and without keys, headers, timestamps and tombstones."""
    producer = runs.loader(**{"transactional.id": f"{runs.prefix}-load"})
    producer.init_transactions(30)
    # Recent timestamps, because retention would delete older records during the test.
    yesterday_ms = int(time.time() * 1000) - 86_400_000
    for turn in range(8):
        producer.begin_transaction()
        for number in range(count // 8):
            key = None if number % 11 == 0 else f"key {number % 37}".encode()
            value = None if number % 17 == 0 else str(number).encode()
            headers = [("h", b"\x00\xff"), ("n", None)] if number % 5 == 0 else []
            stamp = yesterday_ms + number
            producer.produce(numbers, value, key, headers=headers, timestamp=stamp)
            order = None if value is None else b'{"number": %d, "name": "\xc3\xa4 %d"}' % (number, number)
            producer.produce(orders, order, key, timestamp=stamp)
            producer.produce(batches, value, key, timestamp=stamp)
        producer.flush(30)
        if turn % 3 == 1:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)


def content(message: Message, number: int) -> tuple[Any, ...]:
    """Return all of a record but its offset, and its partition only where it follows from the record."""
    where = number if message.key() is not None else None
    _, stamp = message.timestamp()
    return where, message.key(), message.value(), tuple(message.headers() or ()), stamp


def sources(messages: list[Message]) -> dict[str, list[int]]:
    """Return the source offsets by source partition, in the order of the output partition."""
    found: dict[str, list[int]] = {}
    for message in messages:
        value = (message.value() or b"").decode(errors="replace")
        if value.count("/") == 2 and not value.startswith("{"):
            head, _, offset = value.rpartition("/")
            found.setdefault(head, []).append(int(offset))
    return found


def values_of(found: Mapping[int, list[Message]]) -> list[bytes | None]:
    return [message.value() for messages in found.values() for message in messages]


def copying(runs: SparkRuns, source: str, target: str) -> str:
    return runs.app(COPY, app=runs.prefix, source=source, to=target, mended=str(runs.directory / "mended"))


def holding(runs: SparkRuns, source: str, target: str) -> str:
    """Copy as `copying`, but keep the transaction of record 3's batch open until a file `go-on` exists."""
    go_on = str(runs.directory / "go-on")
    return runs.app(HOLD, app=runs.prefix, source=source, to=target, go_on=go_on)


def test_app_on_spark_gives_the_outputs_of_the_worker(spark_runs: SparkRuns) -> None:
    inputs = [spark_runs.topic(name) for name in ("numbers", "orders", "batches")]
    load_everything(spark_runs, *inputs, count=6_000)
    outputs: dict[str, list[str]] = {}
    for engine in ("worker", "spark"):
        to = outputs[engine] = [spark_runs.topic(f"{engine}-{name}") for name in ("a", "b", "c")]
        names = dict(zip(("numbers", "orders", "batches"), inputs, strict=True))
        target = spark_runs.app(EVERYTHING, f"on_{engine}.py", app=f"{spark_runs.prefix}-{engine}", to=to, **names)
        start = spark_runs.worker if engine == "worker" else spark_runs.spark
        # Make the micro-batches small, so that there are several.
        run = start(target, "--until-end", "-X", "eos.transaction.max.records=5000")
        assert run.wait() == 0, run.log[-3_000:]
    compared = 0
    for theirs, ours in zip(outputs["worker"], outputs["spark"], strict=True):
        expected, found = spark_runs.settled(theirs), spark_runs.settled(ours)
        count = Counter(content(m, p) for p, messages in expected.items() for m in messages)
        assert Counter(content(m, p) for p, messages in found.items() for m in messages) == count
        compared += count.total()
        for messages in found.values():
            for head, offsets in sources(messages).items():
                assert offsets == sorted(offsets), f"out of order: {head}"
    assert compared > 5 * 750 * 3
    assert spark_runs._processes[-1].log.count("batch committed") > 1


def test_run_exits_with_65_for_poison_record_and_66_for_deleted_input(
    spark_runs: SparkRuns,
) -> None:
    """Run four times on one checkpoint; each run continues where the previous one ended."""
    source, target = spark_runs.topic("in"), spark_runs.topic("out")
    values = [b"%d" % n for n in range(3_000)]
    values[700] = b"bad"
    spark_runs.load(source, values)
    app = copying(spark_runs, source, target)
    run = spark_runs.spark(app, "--until-end")
    run.assert_ended(POISON, f"copy failed on {source}[1]@233: ValueError: this one is bad")
    assert "app_of_test.py" in run.log, "the user's own frame is missing"
    assert "spark_connector" not in run.log.split("query starts", 1)[1]
    assert values_of(spark_runs.settled(target)) == [], "records of the failed batch are visible"

    (spark_runs.directory / "mended").touch()
    more = [
        b"%d" % n for n in range(3_000, 6_000)
    ]  # The failed batch stays as it was; these records arrive in several batches.
    spark_runs.load(source, more)
    busy = spark_runs.spark(app, "-X", "eos.transaction.max.records=500")
    busy.wait_log("batch committed", SPARK_S, count=2)
    busy.terminate()  # most likely during a batch
    assert busy.wait() == 0, busy.log[-3_000:]

    assert spark_runs.spark(app, "--until-end").wait() == 0
    assert sorted(values_of(spark_runs.settled(target))) == sorted(values + more)

    spark_runs.load(source, [b"%d" % n for n in range(600)])
    spark_runs.delete_before(source, 1, 2_150)
    after_deletion = spark_runs.spark(app, "--until-end")
    after_deletion.assert_ended(INPUT_GONE, "the input at the checkpoint's offset is gone", source)
    assert len(values_of(spark_runs.settled(target))) == 6_000


@pytest.mark.deep
def test_errors_are_reported_in_one_sentence_before_spark_starts(spark_runs: SparkRuns) -> None:
    source = spark_runs.topic("in")
    missing = f"{spark_runs.prefix}-missing"
    app = copying(spark_runs, source, missing)
    spark_runs.spark(app).assert_ended(UNAVAILABLE, f"topic {missing} does not exist")
    target = create_topic(spark_runs.servers, f"{spark_runs.prefix}-there")
    app = copying(spark_runs, source, target)
    spark_runs.spark(app, "-X", "isolation.level=read_uncommitted").assert_ended(CONFIGURATION, "isolation.level")
    spark_runs.spark(app, "-X", "eos.lineage=true").assert_ended(CONFIGURATION, "eos.lineage")
    spark_runs.spark(app, "--option", "failOnDataLoss=false").assert_ended(CONFIGURATION, "failOnDataLoss")
    spark_runs.spark(app, "-X", "ssl.ca.location=/nowhere.pem").assert_ended(CONFIGURATION, "/nowhere.pem")
    spark_runs.eos("spark", "run", app, "--master", "spark://127.0.0.1:1").assert_ended(USAGE, "--checkpoint")
    unreachable = ("--bootstrap-servers", "127.0.0.1:1", "-X", "eos.startup.timeout.ms=1000")
    spark_runs.spark(app, *unreachable).assert_ended(UNAVAILABLE, "127.0.0.1:1 cannot be reached")
    sinkless = spark_runs.app(
        """
        from eos import App, Record
        app = App("nothing")
        @app.process($source)
        def look(record: Record) -> None: ...
        """,
        "sinkless.py",
        source=source,
    )
    spark_runs.spark(sinkless).assert_ended(CONFIGURATION, "names a destination")


def test_executor_runs_an_app_without_the_drivers_kafka_client(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["confluent_kafka"] = sys.modules["lmdb"] = None
sys.path.insert(0, {str(REPOSITORY / "examples")!r})
import flights, pyarrow as pa
from pyspark import cloudpickle
from spark_connector.apply import Apply
from spark_connector.keyed import Keyed
cloudpickle.loads(cloudpickle.dumps(Keyed(flights.app, 5000)))
apply = cloudpickle.loads(cloudpickle.dumps(Apply(flights.app, 5000)))
value = b'{{"carrier": "UA", "dest": "IAH", "dep_delay": 16}}'
columns = dict(key=[b"k"], value=[value], topic=["flights"], partition=pa.array([0], pa.int32()), offset=[7],
               timestamp=pa.array([1_600_000_000_123_000], pa.timestamp("us", "UTC")),
               headers=pa.nulls(1, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))))
(out,) = apply(iter([pa.RecordBatch.from_pydict(columns)]))
rows = out.to_pylist()
assert [row["topic"] for row in rows] == ["flight-delays", "late-flights"], rows
assert rows[0]["timestamp_ms"] == 1_600_000_000_123 and rows[0]["key"] == b"k", rows
assert not set(["kafka", "spark_connector.run", "spark_connector.sink"]) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
def test_error_names_the_module_missing_on_the_executor(spark_runs: SparkRuns) -> None:
    source, target = spark_runs.topic("in"), spark_runs.topic("out")
    spark_runs.load(source, [b"x"])
    python = python_without(["pyarrow"], spark_runs.directory / "python")
    environment = {"PYSPARK_PYTHON": python, "PYTHONPATH": str(REPOSITORY)}
    run = spark_runs.spark(copying(spark_runs, source, target), "--until-end", environment=environment)
    run.assert_ended(
        CONFIGURATION,
        "the executors' Python lacks a package, or its version is not the driver's: No module named 'pyarrow': "
        "pip install",
    )


@pytest.mark.deep
def test_executors_get_the_app_and_the_package_from_the_driver(spark_runs: SparkRuns) -> None:
    source, target = spark_runs.topic("in"), spark_runs.topic("out")
    app = spark_runs.app(
        """
        import os
        import eos, spark_connector
        from eos import App, Record
        app = App($app)
        @app.process($source, to=$to)
        def where(record: Record) -> str:
            return " ".join([str(os.getpid()), __file__, eos.__file__, spark_connector.__file__])
        """,
        app=spark_runs.prefix,
        source=source,
        to=target,
    )
    spark_runs.load(source, [b"%d" % n for n in range(600)])
    # Run two executors in separate processes and folders.
    run = spark_runs.spark(app, "--until-end", "--master", "local-cluster[2,1,1024]", "--conf", "spark.cores.max=2")
    assert run.wait() == 0, run.log[-3_000:]
    values = [(value or b"").decode().split() for value in values_of(spark_runs.settled(target))]
    assert len(values) == 600
    for _, module, eos_file, connector_file in values:
        assert str(spark_runs.directory) not in module, "an executor uses the driver's file"
        assert "eos.zip" in eos_file
        assert "spark_connector.zip" in connector_file


@pytest.mark.deep
def test_killed_jvm_exits_with_75_and_a_restart_continues(spark_runs: SparkRuns) -> None:
    source, target = spark_runs.topic("in"), spark_runs.topic("out")
    app = copying(spark_runs, source, target)
    spark_runs.load(source, [b"%d" % n for n in range(3_000)])
    run = spark_runs.spark(app, "-X", "eos.transaction.max.records=500")
    run.wait_log("batch committed", SPARK_S)
    _jvm(run).kill()
    run.assert_ended(TEMPORARY, "JVM is gone")
    assert spark_runs.spark(app, "--until-end").wait() == 0
    assert sorted(values_of(spark_runs.settled(target))) == sorted(b"%d" % n for n in range(3_000))


@pytest.mark.deep_for("the older")
@pytest.mark.parametrize("newer_is_too_late", [True, False], ids=["the newer", "the older"])
def test_slower_of_two_drivers_on_one_checkpoint_ends_with_79(newer_is_too_late: bool, spark_runs: SparkRuns) -> None:
    """Start two drivers: Spark lets one of them record the next batch. A slower newer driver has fenced nobody yet."""
    source, target = spark_runs.topic("in"), spark_runs.topic("out")
    app = copying(spark_runs, source, target)
    batches = count()

    def batch_by(run: WorkerProcess) -> None:
        """Write one record, which is one batch, and wait until the checkpoint has it as finished."""
        number, before = next(batches), run.log.count("batch committed")
        spark_runs.load(source, [b"%d" % number])
        done = spark_runs.directory / "checkpoint" / "commits" / str(number)
        wait_until("the batch", lambda: done.exists() or not run.running, SPARK_S)
        assert run.log.count("batch committed") > before, run.log[-3_000:]

    older = spark_runs.spark(app)
    batch_by(older)
    newer = spark_runs.spark(app)
    wait_until("the driver knows its next batch", lambda: _reads(spark_runs, newer), SPARK_S)
    too_late, in_time = (newer, older) if newer_is_too_late else (older, newer)
    jvm = _jvm(too_late)
    jvm.suspend()
    batch_by(in_time)
    jvm.resume()
    too_late.assert_ended(FENCED, "another run of this query")
    batch_by(in_time)
    in_time.terminate()
    assert in_time.wait() == 0, in_time.log[-3_000:]
    assert sorted(values_of(spark_runs.settled(target))) == [b"%d" % n for n in range(next(batches))]


@pytest.mark.deep
def test_newer_of_two_drivers_in_one_batch_writes_the_batch(spark_runs: SparkRuns) -> None:
    source, target = spark_runs.topic("in"), spark_runs.topic("out")
    app = holding(spark_runs, source, target)
    spark_runs.load(source, [b"%d" % n for n in range(30)])
    transactional_id = f"{spark_runs.prefix}-spark"
    older = spark_runs.spark(app)
    wait_until("a transaction is open", lambda: _is_ongoing(spark_runs, transactional_id), SPARK_S)
    epoch = transaction_of(spark_runs.servers, transactional_id).producer_epoch
    newer = spark_runs.spark(app, "--until-end")
    wait_until(
        "the newer driver's transaction is open",
        lambda: (
            _is_ongoing(spark_runs, transactional_id)
            and transaction_of(spark_runs.servers, transactional_id).producer_epoch > epoch
        ),
        SPARK_S,
    )
    (spark_runs.directory / "go-on").touch()
    older.assert_ended(FENCED, "another query, or another run of this one, took over")
    assert newer.wait() == 0, newer.log[-3_000:]
    assert sorted(values_of(spark_runs.settled(target))) == sorted(b"%d" % n for n in range(30))


def _jvm(run: WorkerProcess) -> psutil.Process:
    (jvm,) = [child for child in psutil.Process(run.pid).children() if child.name() == "java"]
    return jvm


def _reads(runs: SparkRuns, run: WorkerProcess) -> bool:
    """Return whether Spark reads the end of the source after the checkpoint's end."""
    assert run.running, run.log[-3_000:]
    port = int(runs.servers.rpartition(":")[2])
    jvms = [child for child in psutil.Process(run.pid).children() if child.name() == "java"]
    return any(c.raddr and c.raddr.port == port for jvm in jvms for c in jvm.net_connections())


@pytest.mark.deep
def test_second_signal_stops_immediately_and_a_restart_continues(spark_runs: SparkRuns) -> None:
    source, target = spark_runs.topic("in"), spark_runs.topic("out")
    app = holding(spark_runs, source, target)
    spark_runs.load(source, [b"%d" % n for n in range(30)])
    run = spark_runs.spark(app, "--until-end")
    run.wait_log("query starts", SPARK_S)
    transactional_id = f"{spark_runs.prefix}-spark"
    wait_until("a transaction is open", lambda: _is_ongoing(spark_runs, transactional_id), SPARK_S)
    run.terminate()
    run.wait_log("stopping", SPARK_S)
    run.terminate()
    run.assert_ended(TEMPORARY, "requested a second time")
    wait_until("the transaction was aborted", lambda: not _is_ongoing(spark_runs, transactional_id))
    (spark_runs.directory / "go-on").touch()
    assert spark_runs.spark(app, "--until-end").wait() == 0
    assert sorted(values_of(spark_runs.settled(target))) == sorted(b"%d" % n for n in range(30))


def _is_ongoing(runs: SparkRuns, transactional_id: str) -> bool:
    try:
        return transaction_of(runs.servers, transactional_id).state == "Ongoing"
    except kafka_errors.TransactionalIdNotFoundError:
        return False
