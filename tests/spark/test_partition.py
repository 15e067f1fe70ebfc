"""Write one partition without Spark: real brokers, a proxy that loses responses, and librdkafka as the reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from eos.broker import LocalKafka
from eos.testing.history import read_topic
from spark_connector import marker, task
from spark_connector.answers import Answer, Stopped
from spark_connector.claims import ClaimServer
from spark_connector.packing import pack_rows
from spark_connector.partition import PartitionWriter
from spark_connector.placing import TARGET
from spark_connector.recordbatch import COMPRESSIONS
from spark_connector.targets import ensure_marker_topic, longest_transaction_ms
from spark_connector.transaction import Transaction
from spark_connector.wire import Unreachable, Wire
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.reading import create_topic

Names = Callable[[str], str]


def connect(servers: str, timeout_ms: int = 15_000) -> Wire:
    return Wire({"bootstrap.servers": servers}, request_timeout_ms=timeout_ms)


@pytest.fixture
def wire(kafka: LocalKafka) -> Iterator[Wire]:
    wire = connect(kafka.bootstrap_servers)
    yield wire
    wire.close()


def rows(count: int, first: int = 0, size: int = 100) -> pa.RecordBatch:
    numbers = range(first, first + count)
    values = [b"%0*d" % (size, number) for number in numbers]
    return pa.record_batch({"key": pa.array([None] * count, pa.binary()), "value": pa.array(values, pa.binary())})


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_librdkafka_reads_the_written_records(compression: str, kafka: LocalKafka, names: Names, wire: Wire) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    transaction = Transaction(wire, names("id"), 60_000, 30)
    transaction.init()
    transaction.add([(topic, 0)])
    writer = PartitionWriter(wire, names("id"), transaction.identity, topic, 0, compression=compression)
    headed = {"key": pa.array([b"k", None], pa.binary()), "value": pa.array([None, b""], pa.binary())}
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    writer.write(pa.record_batch(headed | {"headers": pa.array([[("ü", b"1"), ("n", None)], None], kind)}))
    for first in range(0, 30_000, 10_000):
        writer.write(rows(10_000, first))
    writer.finish()
    assert len(read_topic(kafka.bootstrap_servers, topic)) == 0
    transaction.end(commit=True)
    Transaction(wire, names("id"), 60_000, 30).init()  # returns after the transaction has ended
    log = read_topic(kafka.bootstrap_servers, topic, header="ü")
    assert log.keys[:2] == [b"k", None]
    assert log.values[:2] == [None, b""]
    assert log.headers is not None
    assert log.headers[:2] == [b"1", None]
    assert log.values[2:] == [b"%0100d" % number for number in range(30_000)]


@pytest.mark.parametrize(("bound", "requests"), [(1, 80), (100_000, 80), (32_000_000, 80), (1, 7)])
def test_requests_to_many_partitions_stay_within_their_bounds(
    bound: int, requests: int, kafka: LocalKafka, names: Names, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write share 1 of two, the odd partitions: their rows are mixed, in three values of each of four batches."""
    monkeypatch.setattr(task, "_WAITING_BYTES", bound)
    monkeypatch.setattr(task, "_IN_FLIGHT_BYTES", bound if requests > 7 else 32_000_000)
    monkeypatch.setattr(task, "_IN_FLIGHT_REQUESTS", requests)
    in_flight, start = [0], Wire.start

    def counted(self: Wire, request: Any, node: int) -> Any:
        future = start(self, request, node)
        in_flight.append(len(self._manager._conns[node].in_flight_requests))
        return future

    monkeypatch.setattr(Wire, "start", counted)
    topic, name = create_topic(kafka.bootstrap_servers, names("out"), 8), names("id")
    transaction = Transaction(wire, name, 60_000, 30)
    transaction.init()
    transaction.add([(topic, partition) for partition in range(8)])
    server = ClaimServer("127.0.0.1", "127.0.0.1")
    server.claims.begin(transaction.identity)
    targets = tuple((topic, partition, 1_000_000) for partition in range(8))
    connection = {"bootstrap.servers": kafka.bootstrap_servers}
    job = task.Job(name, transaction.identity, targets, 2, connection, server.claims_client, "none", 30.0)
    packed = []
    for first in range(0, 12_000, 3_000):
        values = rows(3_000, first)
        places = pa.array([2 * (number % 4) + 1 for number in range(first, first + 3_000)], pa.int32())
        packed.append(pack_rows(values.append_column(TARGET, places), 2, first))
    (batch,) = task.writer(job)(iter(packed))
    result = task.Result.decode(batch.to_pylist()[0]["result"])
    assert result.sentence is None
    assert len(in_flight) > 4
    assert max(in_flight) <= requests
    assert (result.share, result.partitions, result.rows, result.sequences) == (1, 4, 12_000, 12_000)
    assert server.claims.end() == (frozenset({1}), None)
    transaction.end(commit=True)
    Transaction(wire, name, 60_000, 30).init()  # returns after the transaction has ended
    log = read_topic(kafka.bootstrap_servers, topic)
    found: dict[int, list[int]] = {}
    for partition, value in zip(log.partition.tolist(), log.values, strict=True):
        found.setdefault(partition, []).append(int(value or 0))
    assert found == {2 * residue + 1: list(range(residue, 12_000, 4)) for residue in range(4)}
    server.close()


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
@pytest.mark.parametrize("nth", [1, 3])
def test_lost_request_or_response_keeps_each_record_once(
    nth: int, fault: Fault, kafka: LocalKafka, names: Names
) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    with HoldingProxy.before(kafka) as proxy:
        wire = connect(kafka.proxied_servers)
        transaction = Transaction(wire, name, 60_000, 30)
        transaction.init()
        transaction.add([(topic, 0)])
        cut = proxy.on(ApiKey.Produce, fault, nth=nth, transactional_id=name)
        writer = PartitionWriter(wire, name, transaction.identity, topic, 0)
        for first in range(0, 40_000, 5_000):
            writer.write(rows(5_000, first))
        writer.finish()
        transaction.end(commit=True)
        Transaction(wire, name, 60_000, 30).init()
        assert writer.retries > 0
        assert cut.hit
        # A retry repeats the same bytes.
        sent: dict[bytes, set[bytes]] = {}
        for request in proxy.seen(ApiKey.Produce, name):
            batch = request.frame[request.frame.index(b"\x00\x00\x00\x00\x00\x00\x00\x00", 40) :]
            sent.setdefault(batch[53:57], set()).add(batch)
        wire.close()
    assert all(len(copies) == 1 for copies in sent.values())
    assert read_topic(kafka.bootstrap_servers, topic).values == [b"%0100d" % number for number in range(40_000)]


@pytest.mark.parametrize(
    ("api", "fault"),
    [
        (ApiKey.InitProducerId, Fault.CUT_AFTER),
        (ApiKey.AddPartitionsToTxn, Fault.CUT_BEFORE),
        (ApiKey.AddPartitionsToTxn, Fault.CUT_AFTER),
        (ApiKey.EndTxn, Fault.CUT_BEFORE),
        (ApiKey.EndTxn, Fault.CUT_AFTER),
    ],
)
def test_requests_with_lost_coordinator_responses_are_retried(
    api: ApiKey, fault: Fault, kafka: LocalKafka, names: Names
) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    with HoldingProxy.before(kafka) as proxy:
        wire = connect(kafka.proxied_servers)
        proxy.on(api, fault)
        transaction = Transaction(wire, name, 60_000, 30)
        for turn in range(2):
            transaction.init()
            transaction.add([(topic, 0)])
            writer = PartitionWriter(wire, name, transaction.identity, topic, 0)
            writer.write(rows(100, 100 * turn))
            writer.finish()
            transaction.end(commit=True)
        transaction.init()
        versions = {api.name: max(r.api_version for r in proxy.seen(api)) for api in (ApiKey.Produce, ApiKey.EndTxn)}
        wire.close()
    # Only requests of the protocol before KIP-890 part 2 were sent.
    assert versions == {"Produce": 11, "EndTxn": 4}
    assert read_topic(kafka.bootstrap_servers, topic).values == [b"%0100d" % number for number in range(200)]


def test_newer_identity_fences_the_older_identity(kafka: LocalKafka, names: Names, wire: Wire) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    old, new = (Transaction(wire, name, 60_000, 30) for _ in range(2))
    old.init()
    old.add([(topic, 0)])
    writer = PartitionWriter(wire, name, old.identity, topic, 0)
    writer.write(rows(10))
    writer.finish()
    new.init()
    for late in (lambda: (writer.write(rows(10)), writer.finish()), lambda: old.end(commit=True)):
        with pytest.raises(Stopped) as stopped:
            late()
        assert stopped.value.answer is Answer.FENCED
    assert len(read_topic(kafka.bootstrap_servers, topic)) == 0


def test_error_names_the_record_above_the_topics_limit(kafka: LocalKafka, names: Names, wire: Wire) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    transaction = Transaction(wire, name, 60_000, 30)
    transaction.init()
    transaction.add([(topic, 0)])
    with pytest.raises(Stopped, match=r"a record of 200\d\d\d bytes does not fit into max\.message\.bytes=100000"):
        PartitionWriter(wire, name, transaction.identity, topic, 0, max_bytes=100_000).write(rows(1, size=200_000))
    # If the topic's limit has become lower since it was read, the broker reports it.
    writer = PartitionWriter(wire, name, transaction.identity, topic, 0, max_bytes=4_000_000)
    writer.write(rows(1, size=3_000_000))
    with pytest.raises(Stopped, match="MESSAGE_TOO_LARGE"):
        writer.finish()


def test_partition_without_leader_fails_after_the_timeout(names: Names, wire: Wire) -> None:
    transaction = Transaction(wire, names("id"), 60_000, 30)
    transaction.init()
    nowhere = PartitionWriter(wire, names("id"), transaction.identity, names("no-topic"), 0, delivery_timeout_s=2)
    with pytest.raises(Unreachable, match=r"took no record within 2 s .*no leader"):
        nowhere.write(rows(1))
        nowhere.finish()


def test_broker_before_kip_890_is_supported(kafka392: LocalKafka, names: Names) -> None:
    topic, name = create_topic(kafka392.bootstrap_servers, names("out")), names("id")
    wire = connect(kafka392.bootstrap_servers)
    assert ensure_marker_topic(wire, [topic], 30) == marker.PARTITIONS
    reader = marker.MarkerReader(wire, 0, 30, name)
    key = marker.sink_key(name)
    transaction = Transaction(wire, name, longest_transaction_ms(wire, 30), 30)
    for batch, commit in enumerate([True, False, True]):
        transaction.init()
        transaction.add([(topic, 0), (marker.TOPIC, 0)])
        for where, partition, records in [
            (topic, 0, rows(100, 100 * batch)),
            (marker.TOPIC, 0, one_record(key, marker.Marker("q", batch, 100, "").encode())),
        ]:
            writer = PartitionWriter(wire, name, transaction.identity, where, partition)
            writer.write(records)
            writer.finish()
        transaction.end(commit)
        transaction.init()
        found = reader.read(key)
        assert found is not None
        assert found.batch == (batch if commit else batch - 1)
    wire.close()
    expected = [b"%0100d" % number for number in [*range(100), *range(200, 300)]]
    assert read_topic(kafka392.bootstrap_servers, topic).values == expected


def one_record(key: bytes, value: bytes) -> pa.RecordBatch:
    return pa.record_batch({"key": pa.array([key], pa.binary()), "value": pa.array([value], pa.binary())})
