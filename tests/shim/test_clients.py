"""Run foreign clients through a shim in front of three real brokers, on the oldest and the newest Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer

from eos.broker import LocalKafka
from tests.shim import java
from tests.shim.shims import RunningShim, eventually, launch, read, read_group, running
from tests.shim.tcp_connections import only_through
from tests.support.raw import Background
from tests.support.reading import create_topic, wait_known

pytestmark = [pytest.mark.takes(239), pytest.mark.deep_for("3.9.2*")]

Names = Callable[[str], str]


@pytest.fixture(scope="module", params=["4.4.0", "3.9.2"])
def broker(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    with LocalKafka(version=request.param, nodes=3) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def shim(broker: LocalKafka) -> Iterator[RunningShim]:
    with running(broker.bootstrap_servers.split(",")[0], brokers=3) as shim:
        yield shim
        assert not shim.closed_for_cause()


def make_topic(shim: RunningShim, name: str, partitions: int = 6) -> str:
    return create_topic(",".join(shim.addresses), name, partitions, 3)


def produce_transactions(shim: RunningShim, topic: str, transactional_id: str) -> list[str]:
    """Commit three and abort one of four transactions of 50 records, and return the readable values."""
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": transactional_id})
    producer.init_transactions(30)
    committed = []
    for number in range(4):
        producer.begin_transaction()
        values = [f"{number}-{i}" for i in range(50)]
        for value in values:
            producer.produce(topic, value.encode(), key=value.encode())
        producer.flush(30)
        if number == 1:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
            committed += values
    producer.close()
    return sorted(committed)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_confluent_kafka_commits_aborts_and_reads_in_a_group(
    broker: LocalKafka, shim: RunningShim, names: Names, protocol: str
) -> None:
    if protocol == "consumer" and broker.version.startswith("3"):
        pytest.skip("KIP-848 is not on by default before 4.0")
    topic = make_topic(shim, names("t"))
    with only_through(shim, broker):
        committed = produce_transactions(shim, topic, names("id"))
        consumer = Consumer(
            {
                "bootstrap.servers": shim.bootstrap_servers,
                "group.id": names("g"),
                "group.protocol": protocol,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([topic])
        assert sorted(read(consumer, len(committed))) == committed
        consumer.commit(asynchronous=False)
    consumer.close()


@pytest.mark.deep_for("*-gzip", "*-lz4")
@pytest.mark.parametrize("codec", ["none", "gzip", "lz4", "zstd"])
def test_records_of_every_codec_arrive_unchanged(shim: RunningShim, names: Names, codec: str) -> None:
    topic = make_topic(shim, names("t"), 1)
    producer = Producer(
        {"bootstrap.servers": shim.bootstrap_servers, "compression.codec": codec, "message.max.bytes": 1_000_000}
    )
    values = [f"{i}:" + chr(97 + i % 26) * (900_000 if i % 10 == 0 else 200) for i in range(40)]
    for value in values:
        producer.produce(topic, value.encode())
    assert producer.flush(60) == 0
    assert read_group(shim.bootstrap_servers, names("g"), topic, count=len(values)) == values


def test_acks_0_producer_keeps_its_connection_usable(shim: RunningShim, names: Names) -> None:
    topic = make_topic(shim, names("t"), 1)
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "acks": 0})
    for i in range(200):
        producer.produce(topic, f"{i}".encode())
        if i % 50 == 0:
            producer.flush(30)
            producer.list_topics(topic, timeout=30)
    assert producer.flush(30) == 0
    assert read_group(shim.bootstrap_servers, names("g"), topic, count=200) == [str(i) for i in range(200)]


def test_kafka_python_administers_produces_and_consumes(broker: LocalKafka, shim: RunningShim, names: Names) -> None:
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition

    topic, servers = names("t"), shim.bootstrap_servers
    with only_through(shim, broker):
        admin = KafkaAdminClient(bootstrap_servers=servers)
        admin.create_topics({topic: {"num_partitions": 1, "replication_factor": 3}})
        wait_known(",".join(shim.addresses), {topic: 1})
        cluster = admin.describe_cluster()
        assert {f"{node['host']}:{node['port']}" for node in cluster["brokers"]} == set(shim.addresses)
        producer = KafkaProducer(bootstrap_servers=servers, transactional_id=names("id"))
        producer.init_transactions()
        for number, ended in enumerate([producer.commit_transaction, producer.abort_transaction] * 2):
            producer.begin_transaction()
            for i in range(10):
                producer.send(topic, f"{number}-{i}".encode())
            ended()
        consumer = KafkaConsumer(
            topic,
            bootstrap_servers=servers,
            group_id=names("g"),
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            consumer_timeout_ms=60_000,
        )
        expected = [f"{number}-{i}" for number in (0, 2) for i in range(10)]
        values = [next(consumer).value.decode() for _ in expected]
        assert values == expected
        consumer.commit()
        assert consumer.committed(TopicPartition(topic, 0)) > len(expected)
    for client in (consumer, producer, admin):
        client.close()


def test_aiokafka_produces_transactions_and_consumes(broker: LocalKafka, shim: RunningShim, names: Names) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    topic = make_topic(shim, names("t"), 1)

    async def work() -> list[str]:
        servers = shim.bootstrap_servers
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=servers, transactional_id=names("id"))
        await producer.start()
        async with producer.transaction():
            for i in range(20):
                await producer.send_and_wait(topic, f"{i}".encode())
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"aborted")
        await producer.abort_transaction()
        consumer = aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=servers,
            group_id=names("g"),
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        )
        await consumer.start()
        async with asyncio.timeout(60):
            values = [(await consumer.getone()).value.decode() for _ in range(20)]
        with only_through(shim, broker):
            await consumer.commit()
        await consumer.stop()
        await producer.stop()
        return values

    assert asyncio.run(work()) == [str(i) for i in range(20)]


@pytest.mark.deep
def test_java_console_tools_produce_and_consume(broker: LocalKafka, shim: RunningShim, names: Names) -> None:
    topic, servers = make_topic(shim, names("t"), 1), shim.bootstrap_servers
    with only_through(shim, broker):
        lines = [f"line {i}" for i in range(30)]
        java.run(java.CONSOLE_PRODUCER, "--bootstrap-server", servers, "--topic", topic, input="\n".join([*lines, ""]))
        read = java.run(
            java.CONSOLE_CONSUMER,
            *("--bootstrap-server", servers, "--topic", topic, "--from-beginning"),
            *("--max-messages", "30", "--timeout-ms", "120000"),
        )
        assert read.splitlines() == lines


def test_java_transactional_client_copies_exactly_once(broker: LocalKafka, shim: RunningShim, names: Names) -> None:
    source, target = make_topic(shim, names("in"), 1), make_topic(shim, names("out"), 1)
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers})
    for i in range(200):
        producer.produce(source, f"{i}".encode())
    assert producer.flush(30) == 0
    with only_through(shim, broker):
        printed = java.run(
            java.TRANSACTIONAL_COPIER,
            *("--broker-list", shim.bootstrap_servers, "--input-topic", source, "--input-partition", "0"),
            *("--output-topic", target, "--max-messages", "200", "--transaction-size", "30"),
            *("--consumer-group", names("g"), "--transactional-id", names("id"), "--group-mode"),
        )
    assert '"totalProcessed":200' in printed.replace(" ", "")
    assert read_group(shim.bootstrap_servers, names("v"), target, count=200) == [str(i) for i in range(200)]


def test_java_share_group_consumes(broker: LocalKafka, shim: RunningShim, names: Names) -> None:
    if broker.version.startswith("3"):
        pytest.skip("share groups (KIP-932) came with 4.0")
    topic, servers = make_topic(shim, names("t"), 1), shim.bootstrap_servers
    group = names("share")
    consumer = java.start(
        java.SHARE_CONSUMER,
        *("--bootstrap-server", servers, "--topic", topic, "--group", group),
        *("--max-messages", "5", "--timeout-ms", "120000"),
    )
    try:
        producer = Producer({"bootstrap.servers": servers})

        def consumed() -> bool:
            # A share group starts at the end of the topic at an unknown time, so send new records until it has enough.
            producer.produce(topic, b"shared")
            producer.flush(10)
            return consumer.poll() is not None

        eventually(consumed, 60)
        assert consumer.stdout is not None
        assert consumer.stdout.read().splitlines().count("shared") == 5
    finally:
        consumer.kill()
        consumer.communicate()


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_lists_produces_and_consumes(broker: LocalKafka, shim: RunningShim, names: Names) -> None:
    topic, servers = make_topic(shim, names("t"), 1), shim.bootstrap_servers

    def kcat(*arguments: str, input: str = "") -> str:
        done = subprocess.run(
            [*command, *arguments], input=input, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    command = ["kcat", "-m", "60", "-b", servers]  # kcat itself waits 5 s for metadata.
    with contextlib.ExitStack() as afterwards, only_through(shim, broker):
        kcat("-P", "-t", topic, input="one\ntwo\n")
        assert kcat("-C", "-t", topic, "-e", "-q") == "one\ntwo\n"
        listed = json.loads(kcat("-L", "-J"))
        # The others are too short to be observed; this one stays connected until the end of the block.
        staying = subprocess.Popen([*command, "-C", "-t", topic, "-q", "-u"], stdout=subprocess.PIPE, text=True)
        afterwards.callback(staying.communicate)
        afterwards.callback(staying.kill)
        output = staying.stdout
        assert output is not None
        assert Background(lambda: [output.readline(), output.readline()]).result() == ["one\n", "two\n"]
    assert {each["name"] for each in listed["brokers"]} == set(shim.addresses)


@pytest.mark.deep
def test_eos_worker_runs_an_app(broker: LocalKafka, shim: RunningShim, names: Names, tmp_path: Path) -> None:
    # Names of this try, because a second try would find the topics, the group and the transactions of the first.
    app, code = tmp_path / "flights.py", Path("examples/flights.py").read_text()
    for name in ("flights", "flight-delays", "late-flights"):
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', f'"{names(name)}"')
    app.write_text(code)
    flights, delays, late = (make_topic(shim, names(name)) for name in ("flights", "flight-delays", "late-flights"))
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers})
    for i in range(300):
        flight = {"carrier": "UA", "dest": f"D{i}", "dep_delay": i % 40}
        producer.produce(flights, json.dumps(flight).encode())
    assert producer.flush(30) == 0
    with only_through(shim, broker):
        worker = launch("run", str(app), "--bootstrap-servers", shim.bootstrap_servers, "--until-end")
        try:
            _, errors = worker.communicate(timeout=90)
        finally:
            worker.kill()
            worker.wait()
        assert worker.returncode == 0, errors
    read_group(shim.bootstrap_servers, names("v"), delays, late, count=300 + sum(i % 40 > 15 for i in range(300)))
