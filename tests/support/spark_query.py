"""Run one streaming query through the exactly-once sink, in a test's Spark or in a driver program, and judge it.

Owns the loading of the source, the plan of the query and the call of the checker. It has none of the product's rules.
tests/support/spark_driver.py is the driver program.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

from eos.testing.checker import Report, check
from eos.testing.history import read_topic
from spark_connector import exactly_once_sink
from tests.support.reading import TooSlow, create_topics, settled_ends

SOURCE_PARTITIONS = 3
BY_TASKS = {"eos.spark.driver.bytes": "0"}  # settings under which every batch is too large for the driver to write
KEYS = 97


@dataclasses.dataclass
class Query:
    """Describe a query. `sink_servers`: the address of the sink's brokers, which may be a proxy.

    `plan`: stamped (each record once, with a stamp of its source) or counted (stateful: how often each key came so
    far).
    """

    servers: str
    source: str
    targets: list[str]
    transactional_id: str
    checkpoint: str
    sink_servers: str = ""
    per_batch: int = 1000
    plan: str = "stamped"
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    adopt_at: int | None = None
    shuffle_partitions: int = 2
    min_partitions: int = SOURCE_PARTITIONS

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Query:
        return cls(**json.loads(text))

    # Before

    def create(self, partitions: int = 4, replicas: int = 1, **config: str) -> Query:
        topics = [NewTopic(self.source, SOURCE_PARTITIONS, replicas)]
        topics += [NewTopic(target, partitions, replicas, config=config) for target in self.targets]
        create_topics(self.servers, topics)
        return self

    def load(self, records: int, first: int = 0) -> Query:
        """Load records with their number as value, and with few keys."""
        producer = Producer({"bootstrap.servers": self.servers, "acks": "all", "partitioner": "murmur2_random"})
        for number in range(first, first + records):
            producer.produce(self.source, b"%d" % number, b"key-%d" % (number % KEYS))
            producer.poll(0)
        assert producer.flush(60) == 0
        return self

    def restore(self, copy: Path) -> None:
        """Restore the checkpoint from `copy`."""
        shutil.rmtree(self.checkpoint)
        shutil.copytree(copy, self.checkpoint)

    # The query

    def start(self, spark: Any, on_step: Callable[[str], None] | None = None, **options: Any) -> Any:
        """Start a streaming query that ends when it has read the existing records. `options` replace the sink's."""
        spark.conf.set("spark.sql.shuffle.partitions", str(self.shuffle_partitions))
        source = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.servers)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", self.source)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self.per_batch)
            .option("minPartitions", self.min_partitions)
            .load()
        )
        arguments: dict[str, Any] = {
            "topic": self.targets[0] if len(self.targets) == 1 else self.targets,
            "transactional_id": self.transactional_id,
            "bootstrap_servers": self.sink_servers or self.servers,
            "settings": self.settings,
            "adopt_at": self.adopt_at,
            "on_step": on_step,
        }
        sink = exactly_once_sink(**(arguments | options))
        frame, mode = (_counted(source), "update") if self.plan == "counted" else (self._stamped(source), "append")
        writer = frame.writeStream.outputMode(mode).foreachBatch(sink)
        return writer.option("checkpointLocation", self.checkpoint).trigger(availableNow=True).start()

    def run(self, spark: Any, on_step: Callable[[str], None] | None = None, **options: Any) -> None:
        """Run the query until everything is read; raise the exception that ended it."""
        query = self.start(spark, on_step, **options)
        try:
            if not query.awaitTermination(240):
                raise TooSlow("the query did not end within 240 s")
        finally:
            query.stop()

    def _stamped(self, source: Any) -> Any:
        columns = ["key", "value", "partition", "offset"]
        schema = "key binary, value binary"
        if len(self.targets) > 1:
            schema += ", topic string"
        return source.select(*columns).mapInArrow(stamper(self.targets), schema)

    # After

    def verify(self, records: int) -> Report:
        """Check that read_committed readers find every record exactly once, in order."""
        settled_ends(self.servers, self.targets, 60)
        inputs = read_topic(self.servers, self.source, contents=False)
        outputs = read_topic(self.servers, self.targets)
        assert len(inputs) == records
        report = check(inputs.inputs(), outputs.outputs(), complete=True)
        report.raise_if_violated()
        assert len(outputs) == records
        return report

    def verify_counts(self, records: int) -> None:
        """Check a counted query: its counts only grow, and end at the right value."""
        settled_ends(self.servers, self.targets, 60)
        log = read_topic(self.servers, self.targets)
        latest: dict[bytes | None, bytes | None] = {}
        for key, value in zip(log.keys, log.values, strict=True):
            assert int(value or 0) > int(latest.get(key) or 0), f"{key!r} was {latest.get(key)!r}, then {value!r}"
            latest[key] = value
        assert latest == {b"key-%d" % i: b"%d" % len(range(i, records, KEYS)) for i in range(KEYS)}

    def written(self) -> int:
        """Return how many records are in the log, including those of open and aborted transactions."""
        return len(read_topic(self.servers, self.targets, "read_uncommitted", contents=False))


def stamper(targets: Sequence[str]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that puts a stamp of its source before each value and distributes rows to topics by offset."""

    def stamp(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Spark's Python workers cannot import `tests`, so this function is pickled by value.
        import struct

        import pyarrow

        for batch in batches:
            places = zip(batch["partition"].to_pylist(), batch["offset"].to_pylist(), strict=True)
            stamps = [struct.pack("<iiqi", 0, partition, offset, 0) for partition, offset in places]
            values = [mark + value for mark, value in zip(stamps, batch["value"].to_pylist(), strict=True)]
            columns = {"key": batch["key"], "value": pyarrow.array(values, pyarrow.binary())}
            if len(targets) > 1:
                names = [targets[offset % len(targets)] for offset in batch["offset"].to_pylist()]
                columns["topic"] = pyarrow.array(names, pyarrow.string())
            yield pyarrow.RecordBatch.from_pydict(columns)

    return stamp


def _counted(source: Any) -> Any:
    from pyspark.sql import functions as sf

    counts = source.groupBy(sf.col("key")).count()
    return counts.select("key", sf.col("count").cast("string").alias("value"))
