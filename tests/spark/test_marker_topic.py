"""Read the progress marker from the real topic, with aborted and open markers and those of other programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from eos.broker import LocalKafka
from spark_connector.marker import TOPIC, Marker, MarkerReader, sink_key
from spark_connector.partition import PartitionWriter
from spark_connector.targets import ensure_marker_topic
from spark_connector.transaction import Transaction
from spark_connector.wire import Wire
from tests.spark.test_partition import connect
from tests.support.reading import create_topic

Names = Callable[[str], str]
PARTITION = 3


@pytest.fixture
def wire(kafka: LocalKafka, names: Names) -> Iterator[Wire]:
    wire = connect(kafka.bootstrap_servers)
    ensure_marker_topic(wire, [create_topic(kafka.bootstrap_servers, names("target"))], 30)
    yield wire
    wire.close()


def mark(wire: Wire, name: str, batch: int, commit: bool | None = True) -> None:
    """Write a marker; with `commit` None, leave the transaction open."""
    transaction = Transaction(wire, name, 60_000, 30)
    transaction.init()
    transaction.add([(TOPIC, PARTITION)])
    writer = PartitionWriter(wire, name, transaction.identity, TOPIC, PARTITION)
    key, value = sink_key(name), Marker("q", batch, 0, "").encode()
    writer.write(pa.record_batch({"key": pa.array([key], pa.binary()), "value": pa.array([value], pa.binary())}))
    writer.finish()
    if commit is not None:
        transaction.end(commit)


def found(wire: Wire, reader: MarkerReader, name: str) -> int | str | None:
    """Return the batch of the marker as the sink reads it: after InitProducerId, which ends an open transaction.

    Brokers answer EndTxn before they write its control records; only InitProducerId waits for them.
    """
    Transaction(wire, name, 60_000, 30).init()
    marker = reader.read(sink_key(name))
    return None if marker is None else marker.batch


def test_only_committed_markers_count(wire: Wire, names: Names) -> None:
    ours = names("a")
    reader = MarkerReader(wire, PARTITION, 30, ours)
    assert found(wire, reader, ours) is None
    mark(wire, ours, 0)
    mark(wire, ours, 1, commit=False)
    for each in (reader, MarkerReader(wire, PARTITION, 30, ours)):
        assert found(wire, each, ours) == 0
    mark(wire, ours, 1)
    mark(wire, ours, 2, commit=None)
    for each in (reader, MarkerReader(wire, PARTITION, 30, ours)):
        assert found(wire, each, ours) == 1


def test_foreign_hanging_transaction_hides_no_marker(wire: Wire, names: Names) -> None:
    """Hold the last stable offset back; a reader that stopped there would write batch 1 twice."""
    ours, other = names("a"), names("b")
    reader = MarkerReader(wire, PARTITION, 30, ours)
    mark(wire, ours, 0)
    assert found(wire, reader, ours) == 0
    mark(wire, other, 7, commit=None)
    mark(wire, ours, 1)
    mark(wire, ours, 2, commit=False)
    for each in (reader, MarkerReader(wire, PARTITION, 30, ours)):
        assert found(wire, each, ours) == 1
    assert found(wire, MarkerReader(wire, PARTITION, 30, other), other) is None  # The open transaction is aborted now.
    for each in (reader, MarkerReader(wire, PARTITION, 30, ours)):
        assert found(wire, each, ours) == 1


def test_marker_reader_agrees_with_a_new_reader_after_every_step(kafka: LocalKafka, wire: Wire, names: Names) -> None:
    ours = names("a")
    old = MarkerReader(wire, PARTITION, 30, ours)
    plain = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for batch in range(12):
        mark(wire, ours, batch, commit=batch % 3 != 1)
        plain.produce(TOPIC, b"not ours", sink_key(names("c")), partition=PARTITION)
        assert plain.flush(30) == 0
        expected = batch if batch % 3 != 1 else batch - 1
        assert found(wire, old, ours) == found(wire, MarkerReader(wire, PARTITION, 30, ours), ours) == expected


def test_marker_reader_keeps_only_the_markers_of_its_sink(wire: Wire, names: Names) -> None:
    """Read a topic with the markers of several sinks and of writes with a batch_id."""
    ours, others = names("a"), [names(f"b{number}") for number in range(5)]
    for name in (ours, *others):
        mark(wire, name, 3)
    reader = MarkerReader(wire, PARTITION, 30, ours)
    assert found(wire, reader, ours) == 3
    assert set(reader.write_times) == {sink_key(ours)}
    assert abs(time.time() * 1000 - reader.write_times[sink_key(ours)]) < 300_000
