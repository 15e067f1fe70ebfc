"""`make bench-spark`: the exactly-once sink against Spark's own Kafka sink (at least once) on the same rows.

One query per load; in each of its micro-batches the same cached rows go through every sink, each time in another order,
so that all meet the same minutes of this machine. Spark's own sink runs with its defaults and once more with a producer
tuned for throughput. Prints rows/s, ratios, CPU seconds and the fixed cost of a small batch. Nothing here asserts.

CPU seconds are those of this process, Spark's JVM, its Python workers and the broker together, the collectors' and
compilers' too. They say more than rows/s where something else runs on the machine, but grow with it as well.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import pyspark
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import functions as sf
from rich.console import Console
from rich.table import Table

from benchmarks.clients import BROKER, describe_run
from eos.broker import LocalKafka
from spark_connector import exactly_once_sink, spark_session

PARTITIONS = 8
OURS, OWN, TUNED = "exactly once", "Spark's own", "Spark's own, tuned"
# The Java producer's batch.size of 16 KB is what most of its time at 100 B goes into.
TUNING = {"kafka.batch.size": "262144", "kafka.linger.ms": "20"}
# Micro-batches that are not counted: Spark and the broker are still being compiled, which takes a third of both cores.
WARMING = 5
Write = Callable[[Any, int], None]


class Taken(NamedTuple):
    """By one sink for one batch."""

    seconds: float
    cpu_s: float


def cpu_seconds() -> float:
    """Of this process and all below it since they began."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            times = process.cpu_times()
            total += times.user + times.system
    return total


def own_sink(bootstrap: str, topic: str, options: dict[str, str]) -> Write:
    """Spark's own Kafka sink on a micro-batch."""

    def write(df: Any, batch: int) -> None:
        writer = df.write.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("topic", topic)
        writer.options(**options).save()

    return write


def rows_of(spark: Any, per_batch: int, value_bytes: int, repeated: bool) -> Any:
    """A stream of `per_batch` rows a batch: 12-byte keys, values of this size: 64 hexadecimal digits, over and over if
    `repeated`, or digits that LZ4 cannot make shorter."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", per_batch).load()
    number = sf.col("value")
    salts = ["" if repeated else f"-{place}" for place in range(value_bytes // 64 + 1)]
    parts = [sf.sha2(sf.concat(number.cast("string"), sf.lit(salt)), 256) for salt in salts]
    key = sf.format_string("key-%08d", number % 10_000)
    value = sf.substring(sf.concat(*parts), 1, value_bytes)
    return source.select(key.cast("binary").alias("key"), value.cast("binary").alias("value"))


def measure(
    spark: Any, bootstrap: str, per_batch: int, value_bytes: int, rounds: int, repeated: bool
) -> dict[str, list[Taken]]:
    """What each sink took for each of `rounds` micro-batches, behind those that are not counted."""
    prefix = f"bench-{uuid.uuid4().hex[:8]}"
    topics = [f"{prefix}-{index}" for index in range(3)]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1) for topic in topics]).values():
        future.result(30)
    sinks: dict[str, Write] = {
        OURS: exactly_once_sink(topic=topics[0], transactional_id=prefix, bootstrap_servers=bootstrap),
        OWN: own_sink(bootstrap, topics[1], {}),
        TUNED: own_sink(bootstrap, topics[2], TUNING),
    }
    taken: dict[str, list[Taken]] = {name: [] for name in sinks}

    def batch(df: Any, number: int) -> None:
        if len(taken[OURS]) >= WARMING + rounds:
            return
        rows = df.persist()
        rows.count()
        order = list(sinks)
        for name in order[number % 3 :] + order[: number % 3]:
            began, cpu_began = time.monotonic(), cpu_seconds()
            sinks[name](rows, number)
            taken[name].append(Taken(time.monotonic() - began, cpu_seconds() - cpu_began))
        rows.unpersist(blocking=True)

    with tempfile.TemporaryDirectory() as checkpoint:
        stream = rows_of(spark, per_batch, value_bytes, repeated).writeStream.foreachBatch(batch)
        query = stream.option("checkpointLocation", checkpoint).start()
        while query.isActive and min(map(len, taken.values())) < WARMING + rounds:
            query.awaitTermination(0.2)
        if failed := query.exception():
            raise failed
        query.stop()
    admin.delete_topics(topics)
    return {name: all_taken[WARMING : WARMING + rounds] for name, all_taken in taken.items()}


def throughput(console: Console, name: str, per_batch: int, taken: dict[str, list[Taken]]) -> None:
    ratio = "median of the rounds' ratios, ours/it"
    table = Table("sink", "median rows/s", ratio, "CPU s per 1M rows", "all rounds", title=name)
    for sink, rounds in taken.items():
        rates = [per_batch / each.seconds for each in rounds]
        ratios = [its.seconds / mine.seconds for mine, its in zip(taken[OURS], rounds, strict=True)]
        shown = "" if sink == OURS else f"{statistics.median(ratios):.2f}"
        cpu = statistics.median(each.cpu_s for each in rounds) * 1_000_000 / per_batch
        every = " ".join(f"{rate / 1000:.0f}k" for rate in rates)
        table.add_row(sink, f"{statistics.median(rates):,.0f}", shown, f"{cpu:.2f}", every)
    console.print(table)


def fixed_cost(console: Console, per_batch: int, taken: dict[str, list[Taken]]) -> None:
    title = f"a batch of {per_batch} rows"
    table = Table("sink", "median ms", "ms above Spark's own", "CPU ms", "slowest", title=title)
    own = statistics.median(each.seconds for each in taken[OWN])
    for sink, rounds in taken.items():
        middle = statistics.median(each.seconds for each in rounds)
        cpu = statistics.median(each.cpu_s for each in rounds)
        slowest = max(each.seconds for each in rounds)
        milliseconds = (f"{middle * 1000:.0f}", f"{(middle - own) * 1000:+.0f}", f"{cpu * 1000:.0f}")
        table.add_row(sink, *milliseconds, f"{slowest * 1000:.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the rows, to try the script out")
    parser.add_argument("--noise", action="store_true", help="values that LZ4 cannot compress, the sink's worst case")
    options = parser.parse_args()
    console = Console(width=110)
    console.print(describe_run("spark_sink", f"PySpark {pyspark.__version__}"))
    config = {"spark.ui.enabled": "false", "spark.driver.memory": "3g", "spark.log.level": "ERROR"}
    with LocalKafka(nodes=1, config=BROKER) as kafka:
        spark = spark_session("bench", config=config)
        servers = kafka.bootstrap_servers
        for name, rows, size in (("1M x 100 B", 1_000_000, 88), ("300k x 1 KB", 300_000, 1_012)):
            count = int(rows * options.scale)
            throughput(console, name, count, measure(spark, servers, count, size, options.rounds, not options.noise))
        fixed_cost(console, 100, measure(spark, servers, 100, 88, options.rounds * 3, not options.noise))
        spark.stop()


if __name__ == "__main__":
    main()
