"""Run the sink in real queries on real Spark and Kafka: written records, refusals and restarts."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.partitioner.default import murmur2
from pyspark.errors import StreamingQueryException
from pyspark.sql.classic.dataframe import DataFrame

from eos.broker import LocalKafka
from eos.errors import ConfigurationError, Fenced, Unavailable
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.testing.history import read_topic
from spark_connector import exactly_once_sink, exactly_once_write
from spark_connector.packing import SLICE_BYTES
from spark_connector.progress import Progress
from spark_connector.routing import fetch, planned_for_the_sink
from spark_connector.transaction import Transaction
from tests.support.reading import create_topic, settled_ends, settled_records, transaction_of, wait_until
from tests.support.spark_query import Query

Names = Callable[[str], str]
Queries = Callable[..., Query]
KINDS = "key string, value string, partition int, timestamp timestamp, headers array<struct<key:string,value:binary>>"


def settled(servers: str, *topics: str) -> Any:
    """Return the committed records after the last transaction has ended."""
    settled_ends(servers, topics, 60)
    return read_topic(servers, topics)


# Written records


def test_columns_are_written_and_keys_partitioned_as_by_java(kafka: LocalKafka, names: Names, spark: Any) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"), 5)
    rows = [(f"key-{i}", f"value-{i}", None, None, None) for i in range(50)]
    rows += [
        ("key-x", None, 3, None, [("h", bytearray(b"1")), ("h", None)]),
        (None, "no key", None, None, []),
        (None, "at", 4, None, None),
    ]
    df = spark.createDataFrame(rows, KINDS).selectExpr("*", "timestamp_millis(1700000000123) as t", "'ignored' as note")
    df = df.withColumn("timestamp", df["t"])
    where: dict[str, str] = {"transactional_id": names("id"), "bootstrap_servers": kafka.bootstrap_servers}
    assert exactly_once_write(df, topic=topic, **where) == 53
    found = [message for each in settled_records(kafka.bootstrap_servers, topic).values() for message in each]
    assert len(found) == 53
    assert {message.timestamp()[1] for message in found} == {1700000000123}
    by_value = {message.value(): message for message in found}
    for i in range(50):
        key = b"key-%d" % i
        assert by_value[b"value-%d" % i].key() == key
        assert by_value[b"value-%d" % i].partition() == (murmur2(key) & 0x7FFFFFFF) % 5
    assert by_value[None].partition() == 3
    assert by_value[None].headers() == [("h", b"1"), ("h", None)]
    assert by_value[b"at"].partition() == 4
    assert by_value[b"no key"].headers() is None


def test_batch_id_is_written_once(kafka: LocalKafka, names: Names, spark: Any) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"), 3)
    df = spark.range(1000).selectExpr("cast(id as string) as value")
    where: dict[str, Any] = {
        "topic": topic,
        "transactional_id": names("id"),
        "bootstrap_servers": kafka.bootstrap_servers,
    }
    assert [exactly_once_write(df, batch_id=day, **where) for day in ("1", "2", "1", "2")] == [1000] * 4
    assert exactly_once_write(df.limit(0), batch_id="empty", **where) == 0
    assert exactly_once_write(df.limit(7), batch_id="3", remember_days=0, **where) == 7, (
        "the sink must forget earlier batches"
    )
    assert exactly_once_write(df.limit(7), batch_id="empty", **where) == 7
    assert exactly_once_write(df.limit(9), batch_id="3", **where) == 7
    where["topic"] = create_topic(kafka.bootstrap_servers, names("other"))
    with pytest.raises(ConfigurationError, match=f"batch_id 3 was written to {topic}, and not to {where['topic']}"):
        exactly_once_write(df, batch_id="3", **where)
    assert len(settled(kafka.bootstrap_servers, topic)) == 2014


@pytest.mark.deep_for("zstd")
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_many_or_large_rows_are_split_to_fit_the_topics_limit(
    compression: str, kafka: LocalKafka, queries: Queries, spark: Any
) -> None:
    # Several tasks read one source partition each, and the shuffle must keep their order.
    query = queries(kafka.bootstrap_servers, per_batch=20_000, min_partitions=11)
    query.create(2, **{"max.message.bytes": "20000"}).load(20_000)
    query.run(spark, compression=compression)
    query.verify(20_000)


def test_empty_batch_advances_the_marker(kafka: LocalKafka, names: Names, tmp_path: Path, spark: Any) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    source = tmp_path / "rows"
    source.mkdir()
    where = {"topic": topic, "transactional_id": names("id"), "bootstrap_servers": kafka.bootstrap_servers}
    for number, text in enumerate(["a\nb\n", "#\n", "#\n", "c\n"]):
        (source / f"{number}.txt").write_text(text)
        # Create a new sink each time, so that it knows only what is in Kafka.
        writer = spark.readStream.text(str(source)).where("value != '#'").writeStream
        query = (
            writer.foreachBatch(exactly_once_sink(**where))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        query.stop()
    assert sorted(str(value) for value in settled(kafka.bootstrap_servers, topic).values) == [
        "b'a'",
        "b'b'",
        "b'c'",
    ]


def test_planning_settings_of_the_sink_apply_only_to_its_own_batches(
    kafka: LocalKafka, names: Names, tmp_path: Path, spark: Any
) -> None:
    """Plan 200 rows of 100 KB, which are one Arrow batch under Spark's own settings.

    The user's function, before the sink, runs in the same job and gets batches of the sink's size.
    """
    adaptive, batch_bytes = "spark.sql.adaptive.enabled", "spark.sql.execution.arrow.maxBytesPerBatch"
    seen: list[list[tuple[str | None, str | None, int, int]]] = []

    def user(batches: Any) -> Any:
        for batch in batches:
            size = pa.array([batch.nbytes] * batch.num_rows, pa.int64())
            yield pa.RecordBatch.from_arrays([batch.column(0), size], names=["value", "bytes"])

    def largest(batches: Any) -> Any:
        for batch in batches:
            yield pa.record_batch({"bytes": [batch.nbytes], "users": [max(batch.column(1).to_pylist())]})

    def batch(df: Any, _: int) -> None:
        conf = df.sparkSession.conf

        def now(frame: Any) -> tuple[str | None, str | None, int, int]:
            rows = frame.mapInArrow(largest, "bytes long, users long").collect()
            return conf.get(adaptive), conf.get(batch_bytes, None), *map(max, zip(*rows, strict=True))

        told = [now(df)]
        with planned_for_the_sink(df):
            told.append(now(df))
            with planned_for_the_sink(df):  # another sink of the same batch, in another thread
                pass
            told.append(now(df))
        changed = df.where("length(value) > 0")
        with planned_for_the_sink(changed):
            told.append(now(changed))
        one, other = planned_for_the_sink(df), planned_for_the_sink(df)
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)  # The first to start is the first to end.
        other.__exit__(None, None, None)
        told.append(now(df))
        conf.set(batch_bytes, "1m")
        with planned_for_the_sink(df):
            told.append(now(df))
        seen.append([*told, (conf.get(adaptive), conf.get(batch_bytes), 0, 0)])

    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 200).option("numPartitions", 1).load()
    rows = stream.selectExpr("repeat('x', 100000) as value").mapInArrow(user, "value string, bytes long").writeStream
    query = rows.foreachBatch(batch).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    wait_until("a batch", lambda: seen or not query.isActive, 60)
    query.stop()
    assert query.exception() is None
    before, ours, still_ours, changed, overlapped, set_by_user, after = seen[0]
    assert before[:2] == changed[:2] == overlapped[:2] == ("true", None)
    assert min(*before[2:], *changed[2:]) > 20_000_000
    assert ours[:2] == still_ours[:2] == ("false", "3500000")
    for size in (*ours[2:], *still_ours[2:]):
        assert 3_000_000 < size < SLICE_BYTES
    assert set_by_user[:2] == ("false", "1m")
    assert max(set_by_user[2:]) < 1_300_000
    assert after[:2] == ("true", "1m")
    assert spark.conf.get(batch_bytes, None) is None, "the settings of the user's session must not change"


@pytest.mark.parametrize("many", [3, 30])
def test_rows_of_many_partitions_stay_in_order_in_few_tasks(
    many: int, kafka: LocalKafka, names: Names, tmp_path: Path, spark: Any
) -> None:
    """Write rows of many partitions as a stateful query has them: one key per partition keeps its rows together."""
    topic = create_topic(kafka.bootstrap_servers, names("out"), 3)
    sink = exactly_once_sink(topic=topic, transactional_id=names("id"), bootstrap_servers=kafka.bootstrap_servers)
    tracker = spark.sparkContext.statusTracker()
    tasks: list[int] = []

    def batch(df: Any, number: int) -> None:
        if tasks:
            return
        group = df.sparkSession.sparkContext.getLocalProperty("spark.jobGroup.id")
        before = set(tracker.getJobIdsForGroup(group))
        sink(df, number)
        (job,) = set(tracker.getJobIdsForGroup(group)) - before
        tasks.extend(sorted(tracker.getStageInfo(stage).numTasks for stage in tracker.getJobInfo(job).stageIds))

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3_000).option("numPartitions", many)
    # Row n is in partition n % many.
    rows = source.load().selectExpr(f"cast(value % {many} as string) as key", "cast(value as string) as value")
    query = rows.writeStream.foreachBatch(batch).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    wait_until("a batch", lambda: tasks or not query.isActive, 120)
    query.stop()
    assert query.exception() is None
    assert tasks == [2, min(many, 8)]
    log = settled(kafka.bootstrap_servers, topic)
    assert len(log) == 3_000
    by_key: dict[bytes | None, list[int]] = {}
    for key, value in zip(log.keys, log.values, strict=True):
        by_key.setdefault(key, []).append(int(value or 0))
    assert len(by_key) == many
    assert all(values == sorted(values) for values in by_key.values())


def test_small_batches_by_driver_and_large_ones_by_tasks_keep_the_order(
    kafka: LocalKafka, names: Names, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare batches of the driver and of tasks: same order, same partitions, nothing twice.

    The driver's transactions contain only the partitions that they write, because each gets a control record.
    """
    topic = create_topic(kafka.bootstrap_servers, names("out"), 12)
    added: list[int] = []
    add = Transaction.add

    def spy(transaction: Transaction, partitions: Any) -> None:
        added.append(len(partitions))
        add(transaction, partitions)

    monkeypatch.setattr(Transaction, "add", spy)
    source = tmp_path / "rows"
    source.mkdir()
    where = {"transactional_id": names("id"), "bootstrap_servers": kafka.bootstrap_servers}
    told: list[Progress] = []
    sink = exactly_once_sink(topic=topic, on_progress=told.append, **where)
    values = spark.readStream.text(str(source)).selectExpr("substring(value, 1, 1) as key", "value")
    query = values.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    noise = random.Random(1)
    sizes = [50, 50, 20_000, 50, 50, 0, 50]
    for number, rows in enumerate(sizes):
        lines = [f"{row % 7} {number} {row:05} {noise.randbytes(20).hex()}" for row in range(rows)]
        unseen = tmp_path / "unseen"
        unseen.write_text("\n".join(lines))
        unseen.rename(source / f"{number}.txt")  # Spark lists the file when it is complete.
        wait_until("the batch", lambda seen=number + 1: len(told) == seen or not query.isActive, 120)
    query.stop()
    assert query.exception() is None
    assert [progress.rows for progress in told] == sizes
    assert [progress.tasks > 0 for progress in told] == [True, False, True, True, False, False, False]
    used = [progress.partitions + 1 for progress in told]  # plus the marker's partition
    assert added == [used[number] if progress.tasks == 0 else 13 for number, progress in enumerate(told)]
    assert max(used) <= 8
    assert used[5] == 1
    log = settled(kafka.bootstrap_servers, topic)
    assert len(log) == sum(sizes)
    by_key: dict[bytes | None, list[bytes]] = {}
    for key, value in zip(log.keys, log.values, strict=True):
        by_key.setdefault(key, []).append((value or b"")[2:9])
    assert len(by_key) == 7
    assert all(values == sorted(set(values)) for values in by_key.values())


@pytest.mark.parametrize("changed", [False, True], ids=["as given", "changed"])
def test_driver_collects_no_more_rows_than_its_limit(
    changed: bool, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change the rows in the user's foreachBatch function; they have as many partitions as before."""
    fetched: list[list[pa.Table | None]] = []
    collected: list[pa.Table] = []
    size = 36 * 40
    to_arrow = DataFrame.toArrow

    def collect(frame: Any) -> pa.Table:
        collected.append(to_arrow(frame))
        return collected[-1]

    monkeypatch.setattr(DataFrame, "toArrow", collect)

    def batch(df: Any, _: int) -> None:
        rows = df.selectExpr("value") if changed else df
        few = rows.where("length(value) < 2") if changed else rows.limit(0)
        limits = [(few, 8, 20, 8 * 20), (rows, 8, 20, 8 * 20 * size), (rows, 8, 20, 8 * 20 * size - 1)]
        limits += [(rows, 8, 9, 10**9), (few, None, 20, 10**9)]
        fetched.append([fetch(frame, "t", *rest) for frame, *rest in limits])

    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 50).load()
    rows = stream.selectExpr("if(value < 10, 'x', array_join(transform(sequence(1, 40), x -> uuid()), '')) as value")
    query = rows.writeStream.foreachBatch(batch).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    wait_until("a batch", lambda: fetched or not query.isActive, 120)
    query.stop()
    assert query.exception() is None
    few, all_rows, too_large_a_row, too_many_of_a_task, of_unknown_tasks = fetched[0]
    assert few is not None
    assert few.num_rows == (10 if changed else 0)
    assert all_rows is not None
    assert sorted(map(len, all_rows.column("value").to_pylist())) == [1] * 10 + [size] * 90
    assert too_large_a_row is None
    assert collected[2].nbytes < 100 * size / 10, "a row that is too large must not reach the driver"
    assert too_many_of_a_task is None
    assert collected[3].num_rows == 8 * 10, "each task must send one row more than its limit"
    assert of_unknown_tasks is None


def test_tasks_write_small_batches_above_max_result_size(
    kafka: LocalKafka, names: Names, tmp_path: Path, spark: Any
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    told: list[Progress] = []
    where = {"transactional_id": names("id"), "bootstrap_servers": kafka.bootstrap_servers}
    sink = exactly_once_sink(topic=topic, on_progress=told.append, **where)
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3_000).load()
    rows = stream.selectExpr("md5(cast(value as string)) as value").writeStream.foreachBatch(sink)
    configuration = spark.sparkContext._jsc.sc().conf()
    configuration.set("spark.driver.maxResultSize", "64k")
    try:
        query = rows.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        wait_until("two batches", lambda: len(told) > 1 or not query.isActive, 120)
        query.stop()
    finally:
        configuration.remove("spark.driver.maxResultSize")
    assert query.exception() is None
    assert told[0].bytes < 256_000, "the batch must be small enough for the driver"
    assert told[1].tasks > 0


# Progress


def gauges(spark: Any, query: str) -> dict[str, Any]:
    """Return the sink's metrics of this query from the registry that all of Spark's metrics sinks report."""
    system = spark._jvm.org.apache.spark.SparkEnv.get().metricsSystem()
    field = system.getClass().getDeclaredField("registry")
    field.setAccessible(True)
    registered = field.get(system).getGauges()
    found = {}
    for name in registered.keySet().toArray():
        _, is_ours, figure = name.partition(f"spark.streaming.{query}.eos.")
        if is_ours:
            found[figure] = registered.get(name).getValue()
    return found


def test_batches_report_their_rows_and_step_times(
    kafka: LocalKafka, queries: Queries, spark: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("eos"), "propagate", True)
    caplog.set_level(logging.INFO, "eos")
    query = queries(kafka.bootstrap_servers, per_batch=700).create().load(2000)
    told: list[Progress] = []
    shown: list[dict[str, Any]] = []

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        shown.append(gauges(spark, spark.streams.active[0].id))

    running = query.start(spark, on_progress=on_progress)
    assert running.awaitTermination(240)
    query.verify(2000)
    rows = [progress.rows for progress in told]
    assert len(rows) >= 3
    assert sum(rows) == 2000
    for progress, gauge in zip(told, shown, strict=True):
        assert list(progress.seconds) == ["init", "decide", "targets", "add", "produce", "mark", "commit"]
        assert min(progress.seconds.values()) > 0
        assert gauge == progress.figures()
    lines = [record.getMessage() for record in caplog.records if "batch committed" in record.getMessage()]
    assert [f"rows={count} " in line for count, line in zip(rows, lines, strict=True)] == [True] * len(rows)


# Restarts


def test_batch_already_in_kafka_is_not_written_again_after_a_restart(
    kafka: LocalKafka, queries: Queries, spark: Any
) -> None:
    """Stop Spark between the sink's return and Spark's own commit: the last batch is run again, with state to write."""
    for plan in ("stamped", "counted"):
        query = queries(kafka.bootstrap_servers, plan=plan)
        query.source, query.checkpoint = f"{query.source}-{plan}", f"{query.checkpoint}-{plan}"
        query.targets, query.transactional_id = [f"{query.targets[0]}-{plan}"], f"{query.transactional_id}-{plan}"
        query.create().load(2000).run(spark)
        before = query.written()
        commits = Path(query.checkpoint, "commits")
        for file in (commits / "1", commits / ".1.crc"):
            file.unlink()
        query.load(1000, first=2000).run(spark)
        if plan == "stamped":
            query.verify(3000)
        else:
            assert query.written() > before
            query.verify_counts(3000)


def failure(query: Query, spark: Any, **options: Any) -> str:
    with pytest.raises(StreamingQueryException) as failed:
        query.run(spark, **options)
    return str(failed.value)


def test_older_or_deleted_checkpoint_is_refused(
    kafka: LocalKafka, queries: Queries, spark: Any, tmp_path: Path
) -> None:
    query = queries(kafka.bootstrap_servers).create().load(1000)
    query.run(spark)
    shutil.copytree(query.checkpoint, tmp_path / "older")
    query.load(1000, first=1000).run(spark)
    shutil.copytree(query.checkpoint, tmp_path / "one-behind")
    query.load(1000, first=2000).run(spark)
    query.restore(tmp_path / "older")
    query.per_batch = 700  # The repeated batch has another end.
    assert "batch 1, behind Kafka, whose last batch is 2" in failure(query, spark)
    query.restore(tmp_path / "one-behind")
    assert "batch 2 is in Kafka with other source offsets" in failure(query, spark)
    shutil.rmtree(query.checkpoint)
    query.per_batch = 1000
    assert "belongs to query" in failure(query, spark)
    query.verify(3000)


def test_query_without_its_marker_is_adopted_only_on_request(
    kafka: LocalKafka, queries: Queries, spark: Any, names: Names
) -> None:
    query = queries(kafka.bootstrap_servers).create().load(1000)
    query.run(spark)
    query.transactional_id = names("another-sink")
    query.load(1000, first=1000)
    assert "adopt_at=1" in failure(query, spark)
    assert "adopt_at=1" in failure(query, spark, adopt_at=2)
    query.run(spark, adopt_at=1)
    query.load(1000, first=2000).run(spark, adopt_at=1)  # The option may stay in the program.
    query.verify(3000)


# Refusals


def test_two_queries_with_the_same_transactional_id_are_distinguished(
    kafka: LocalKafka, queries: Queries, spark: Any, names: Names
) -> None:
    one = queries(kafka.bootstrap_servers).create().load(1000)
    one.run(spark)
    two = queries(kafka.bootstrap_servers)
    two.source, two.targets, two.checkpoint = names("in-2"), [names("out-2")], f"{one.checkpoint}-2"
    two.create().load(1000)
    with ClusterAdmin(Settings({"bootstrap.servers": kafka.bootstrap_servers})) as admin:
        before = admin.describe(one.transactional_id)
        assert "two queries have one transactional.id" in failure(two, spark)
        assert admin.describe(one.transactional_id) == before, "the running query was fenced"
    one.load(1000, first=1000).run(spark)
    one.verify(2000)
    assert two.written() == 0


@pytest.mark.parametrize("same_object", [True, False])
def test_second_write_in_one_micro_batch_is_refused(
    same_object: bool, kafka: LocalKafka, names: Names, spark: Any, tmp_path: Path
) -> None:
    topics = [create_topic(kafka.bootstrap_servers, names(name)) for name in ("a", "b")]
    name: dict[str, str] = {"transactional_id": names("id"), "bootstrap_servers": kafka.bootstrap_servers}
    sinks = [exactly_once_sink(topic=topics, **name)] * 2
    if not same_object:
        sinks = [exactly_once_sink(topic=topic, **name) for topic in topics]

    def both(df: Any, batch: int) -> None:
        for sink, topic in zip(sinks, topics, strict=True):
            sink(df.selectExpr("cast(value as string) as value", f"'{topic}' as topic"), batch)

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    writer = source.writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "checkpoint"))
    for _ in range(2):  # the second write is like one after a restart: Kafka has the rows of the first
        with pytest.raises(StreamingQueryException, match="would lose its rows"):
            writer.start().awaitTermination(60)
    assert len(settled(kafka.bootstrap_servers, *topics)) == 10


def test_driver_suspended_while_idle_does_not_fence_its_successor(
    kafka: LocalKafka, names: Names, spark: Any, tmp_path: Path
) -> None:
    """Run two drivers on one checkpoint: the older one ends with 79, and the newer one continues."""
    topic, checkpoint = create_topic(kafka.bootstrap_servers, names("out")), tmp_path / "checkpoint"
    name = {"topic": topic, "transactional_id": names("id"), "bootstrap_servers": kafka.bootstrap_servers}
    older, newer = exactly_once_sink(**name), exactly_once_sink(**name)
    turns = iter([older, older, newer, newer, older])
    failures: list[Exception] = []

    def write(df: Any, batch: int) -> None:
        try:
            next(turns)(df.selectExpr("cast(value as string) as value"), batch)
        except Exception as error:
            failures.append(error)
            raise

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    writer = source.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
    with pytest.raises(StreamingQueryException, match="another query, or another run of this one, took over"):
        writer.start().awaitTermination(120)
    assert [type(error) for error in failures] == [Fenced]
    turns = iter([newer])
    with pytest.raises(StreamingQueryException, match="StopIteration"):
        writer.start().awaitTermination(120)
    assert len(settled(kafka.bootstrap_servers, topic)) == 25


def test_error_for_a_batch_over_its_timeout_names_the_setting(kafka: LocalKafka, queries: Queries, spark: Any) -> None:
    query = queries(kafka.bootstrap_servers, settings={"transaction.timeout.ms": "1500"}).create().load(1000)

    def state() -> str:
        return transaction_of(query.servers, query.transactional_id).state

    def slow(step: str) -> None:
        if step == "add":
            wait_until("the broker ends the transaction", lambda: state() == "CompleteAbort")

    said = failure(query, spark, on_step=slow)
    assert "took longer than transaction.timeout.ms=1500" in said
    assert "transaction.max.timeout.ms allows 900000" in said
    assert len(settled(query.servers, *query.targets)) == 0
    query.settings = {}
    query.run(spark)
    query.verify(1000)


def test_transaction_timeout_defaults_to_the_brokers_maximum(kafka: LocalKafka, names: Names, spark: Any) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    df = spark.range(1).selectExpr("'v' as value")
    where: dict[str, Any] = {
        "topic": topic,
        "transactional_id": names("id"),
        "bootstrap_servers": kafka.bootstrap_servers,
    }
    assert exactly_once_write(df, **where) == 1
    admin = __import__("kafka").KafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    described = admin.describe_transactions([names("id")])[names("id")]
    admin.close()
    assert described.transaction_timeout_ms == 900_000
    with pytest.raises(ConfigurationError, match="INVALID_TRANSACTION_TIMEOUT"):
        exactly_once_write(df, settings={"transaction.timeout.ms": "3600000"}, **where)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("'a' as key", "needs a column value"),
        ("1 as value", "column value is int, it must be string or binary"),
        ("'v' as value; 'x' as headers", "column headers is string"),
        ("'v' as value; 9 as partition", "a row is for 9, which is not a partition of"),
        ("'v' as value; 'elsewhere' as topic", "a row is for elsewhere, which is not a partition of"),
        ("'v' as value; cast(null as string) as topic", "a row is for null, which is not a partition of"),
        ("repeat('v', 2000000) as value", "does not fit into max.message.bytes"),
        ("'v' as value; array(named_struct('key', cast(null as string), 'value', X'00')) as headers", "has no key"),
    ],
)
def test_invalid_rows_are_refused_with_one_sentence(
    columns: str, said: str, kafka: LocalKafka, names: Names, spark: Any
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"), 2)
    df = spark.range(100).selectExpr(*columns.split("; "))
    with pytest.raises(ConfigurationError) as refused:
        exactly_once_write(
            df, topic=[topic], transactional_id=names("id"), bootstrap_servers=kafka.bootstrap_servers, batch_id="b"
        )
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert len(settled(kafka.bootstrap_servers, topic)) == 0


def test_sink_refuses_wrong_arguments_before_it_sends() -> None:
    good: dict[str, Any] = {"topic": "t", "transactional_id": "i", "bootstrap_servers": "127.0.0.1:1"}
    for wrong, said in [
        ({"topic": []}, "at least one topic"),
        ({"topic": ["a", "a"]}, "each once"),
        ({"topic": "__eos_sinks"}, "markers of all sinks"),
        ({"transactional_id": ""}, "must not be empty"),
        ({"compression": "brotli"}, "none of none, gzip, snappy, lz4, zstd"),
        ({"settings": {"partitioner": "random"}}, "murmur2_random"),
        ({"settings": {"acks": "1"}}, "would break exactly-once"),
        ({"settings": {"tranaction.timeout.ms": "1"}}, "did you mean transaction.timeout.ms"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            exactly_once_sink(**(good | wrong))


def test_unsuitable_topics_are_refused(kafka: LocalKafka, names: Names, spark: Any) -> None:
    df = spark.range(1).selectExpr("'v' as value")
    where = {"transactional_id": names("id"), "bootstrap_servers": kafka.bootstrap_servers}
    with pytest.raises(Unavailable, match="does not exist"):
        exactly_once_write(df, topic=names("no"), **where)
    thin = names("thin")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(thin, 1, 1, config={"min.insync.replicas": "2"})])[thin].result(30)
    with pytest.raises(ConfigurationError, match=r"1 replicas and min\.insync\.replicas=2"):
        exactly_once_write(df, topic=thin, **where)
    with pytest.raises(Unavailable, match="cannot be reached"):
        exactly_once_write(
            df,
            topic="t",
            transactional_id="i",
            bootstrap_servers="127.0.0.1:1",
            settings={"eos.startup.timeout.ms": "1000"},
        )


def test_speculation_is_refused(kafka: LocalKafka, names: Names, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = spark.sparkContext.getConf().set("spark.speculation", "true")
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: configuration)
    with pytest.raises(ConfigurationError, match="two tasks must not write one partition"):
        exactly_once_write(
            spark.range(1).selectExpr("'v' as value"),
            topic="t",
            transactional_id=names("id"),
            bootstrap_servers=kafka.bootstrap_servers,
        )
