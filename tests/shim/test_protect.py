"""Protect clients on real Kafka from late requests on both sides of the shim; without protection they do damage.

A HoldingProxy is on one side of the shim. Its late copies are real requests of the client (or of the shim) that arrive
during the next transaction. The contents of Kafka decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kafka import TopicPartition as PythonPartition
from kafka.errors import KafkaError, OutOfOrderSequenceNumberError
from kafka.structs import OffsetAndMetadata

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from tests.shim.protected_clients import CLIENTS, Confluent, faulty, producer_of, python_producer, send, texts
from tests.shim.shims import eventually, running
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.raw import Background
from tests.support.reading import TooSlow, create_topic, settled_values, stable_offset, transaction_of

Names = Callable[[str], str]


@pytest.mark.deep_for("none", "gzip", "snappy", "lz4")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_each_transaction_has_its_own_epoch(kafka: LocalKafka, names: Names, codec: str) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out"), partitions=3), names("id")
    with running(kafka.bootstrap_servers) as shim:
        assert shim.named("protection started"), "protection must be on by default"
        producer = producer_of(shim.bootstrap_servers, name, **{"compression.type": codec})
        epochs, wanted = list[int](), list[str]()
        for number in range(12):
            producer.begin_transaction()
            values = [f"{number}-{i}" for i in range(6)]
            for i, value in enumerate(values):
                producer.produce(topic, value, partition=i % 3)
            assert producer.flush(30) == 0
            if number % 3 == 1:
                producer.abort_transaction(30)
            else:
                producer.commit_transaction(30)
                wanted += values
            epochs.append(transaction_of(kafka.bootstrap_servers, name).producer_epoch)
        assert epochs == list(range(epochs[0], epochs[0] + 12)), "the broker must see one epoch per transaction"
        producer.close()
    assert sorted(texts(kafka.bootstrap_servers, topic)) == sorted(wanted)


def test_consume_transform_produce_copies_every_record_once(kafka: LocalKafka, names: Names) -> None:
    servers = kafka.bootstrap_servers
    source, target, group, name = names("in"), names("out"), names("g"), names("id")
    create_topic(servers, source, 2)
    create_topic(servers, target, 2)
    loader = Producer({"bootstrap.servers": servers})
    for number in range(100):
        loader.produce(source, str(number), partition=number % 2)
    assert loader.flush(30) == 0
    with running(servers, "--protect") as shim:
        consumer = Consumer(
            {
                "bootstrap.servers": shim.bootstrap_servers,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([source])
        producer = producer_of(shim.bootstrap_servers, name)
        before = transaction_of(servers, name).producer_epoch
        done = transactions = 0
        while done < 100:
            batch = eventually(lambda: consumer.consume(10, 0.2))
            transactions += 1
            producer.begin_transaction()
            for message in batch:
                producer.produce(target, message.value(), partition=message.partition())
            positions = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)
            if transactions % 4 == 2:
                producer.abort_transaction(30)
                first = {message.partition(): message.offset() for message in reversed(batch)}
                for partition, offset in first.items():
                    consumer.seek(TopicPartition(source, partition, offset))
                continue
            producer.commit_transaction(30)
            done += len(batch)
        assert transaction_of(servers, name).producer_epoch == before + transactions
        consumer.close()
        producer.close()
    assert sorted(map(int, texts(servers, target))) == list(range(100))
    assert [stable_offset(servers, group, source, partition) for partition in (0, 1)] == [50, 50]


SIDES = pytest.mark.parametrize("side", ["client", "broker"])
OPTIONS = pytest.mark.parametrize("option", ["--protect", "--no-protect"])
FAILURES = (KafkaException, KafkaError, SystemError, AssertionError)
BOTH_CLIENTS = pytest.mark.parametrize("client_name", CLIENTS)


@pytest.mark.deep_for("abort-*", "*--no-protect-*-kafka-python")
@BOTH_CLIENTS
@SIDES
@OPTIONS
@pytest.mark.parametrize("late_outcome", ["commit", "abort"])
def test_late_end_does_not_end_the_next_transaction(
    kafka: LocalKafka, names: Names, client_name: str, side: str, option: str, late_outcome: str
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"), partitions=2)
    first_commits = late_outcome == "commit"
    with faulty(kafka, side, option, names("id")) as way:
        client = CLIENTS[client_name](way.servers, way.name)
        client.begin()
        client.send(topic, "first")
        late = way.proxy.on(ApiKey.EndTxn, Fault.LATE_COPY, transactional_id=way.name)
        client.end(first_commits)
        late.wait()
        client.begin()
        client.send(topic, "left")
        error = late.deliver_late().error
        client.send(topic, "right", partition=1)
        # The second transaction ends the other way.
        client.end(not first_commits)
        client.close()
    wanted = ["first"] if first_commits else ["left", "right"]
    found = texts(kafka.bootstrap_servers, topic)
    if option == "--protect":
        of_the_client = 51 if first_commits else client.late_after_abort["EndTxn"]
        assert error == (of_the_client if side == "client" else 90)
        assert found == wanted
    else:
        assert error == 0, "the late copy must end the next transaction"
        assert found != wanted, "all calls succeeded, but the result is wrong"


@pytest.mark.deep_for("* commit-*-broker-*", "* abort-*-client-*", "* crash-*-broker-*", "*--no-protect-*-kafka-python")
@BOTH_CLIENTS
@SIDES
@OPTIONS
@pytest.mark.parametrize(
    "rest", ["offsets and a commit", "the same partition and a commit", "the same partition and an abort", "a crash"]
)
def test_next_transaction_is_complete_after_a_late_end(
    kafka: LocalKafka, names: Names, client_name: str, side: str, option: str, rest: str
) -> None:
    servers, group = kafka.bootstrap_servers, names("g")
    topic, source = create_topic(servers, names("out")), create_topic(servers, names("in"))
    late_commits = rest != "offsets and a commit"
    protected = option == "--protect"
    with faulty(kafka, side, option, names("id")) as way:
        client = CLIENTS[client_name](way.servers, way.name)
        client.begin()
        client.send(topic, "first")
        late = way.proxy.on(ApiKey.EndTxn, Fault.LATE_COPY, transactional_id=way.name)
        client.end(late_commits)
        late.wait()
        client.begin()
        client.send(topic, "left")
        assert (late.deliver_late().error != 0) is protected
        if rest == "offsets and a commit":
            client.send_offset(group, source, 5)
            client.end(True)
        elif rest != "a crash":
            if not protected:
                settled_values(servers, topic)  # An EndTxn is answered before its marker is written.
            with contextlib.nullcontext() if protected else pytest.raises(FAILURES):
                client.send(topic, "right")
                client.end(rest.endswith("a commit"))
        # A successor takes over, and the transaction that the first client left open is aborted.
        producer_of(servers, way.name).close()
        with contextlib.suppress(*FAILURES):
            client.close(1)
    found = texts(servers, topic)
    if rest == "offsets and a commit":
        assert stable_offset(servers, group, source) == 5
        assert found == (["left"] if protected else []), "all calls succeeded, but the result is wrong"
    elif rest == "the same partition and a commit":
        assert found == (["first", "left", "right"] if protected else ["first", "left"]), (
            "half of the transaction is committed"
        )
    else:
        assert found == (["first"] if protected else ["first", "left"])


@pytest.mark.deep_for("commit-kafka-python", "abort-confluent-kafka")
@BOTH_CLIENTS
@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_end_txn_with_lost_responses_ends_its_transaction_once(
    kafka: LocalKafka, names: Names, client_name: str, outcome: str
) -> None:
    topic, commits = create_topic(kafka.bootstrap_servers, names("out")), outcome == "commit"
    with faulty(kafka, "broker", "--protect", names("id")) as way:
        client = CLIENTS[client_name](way.servers, way.name)
        before = transaction_of(kafka.bootstrap_servers, way.name).producer_epoch
        client.begin()
        client.send(topic, "first")
        lost = [
            way.proxy.on(ApiKey.EndTxn, Fault.CUT_AFTER, nth=number, transactional_id=way.name) for number in (1, 2, 3)
        ]
        client.end(commits)
        for each in lost:
            each.wait()
        sent = [request.fields for request in way.proxy.seen(ApiKey.EndTxn, way.name)]
        assert len(sent) >= 4
        assert [fields == sent[0] for fields in sent] == [True] * len(sent), (
            "each request must have the identity of its transaction"
        )
        assert transaction_of(kafka.bootstrap_servers, way.name).producer_epoch == before + 1
        client.begin()
        client.send(topic, "second")
        client.end(True)
        client.close()
    assert transaction_of(kafka.bootstrap_servers, way.name).producer_epoch == before + 2
    assert texts(kafka.bootstrap_servers, topic) == [*(["first"] if commits else []), "second"]


@pytest.mark.deep_for(
    "acknowledgement lost-*-broker-*",
    "record late-*-client-*",
    "acknowledgement lost-*-kafka-python",
    "record late---no-protect-*-kafka-python",
)
@BOTH_CLIENTS
@SIDES
@OPTIONS
@pytest.mark.parametrize("fault", [Fault.CUT_AFTER, Fault.LATE_COPY], ids=["acknowledgement lost", "record late"])
def test_abandoned_produce_does_not_harm_the_next_transaction(
    kafka: LocalKafka, names: Names, client_name: str, side: str, option: str, fault: Fault
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    with faulty(kafka, side, option, names("id")) as way:
        # The long backoff leaves time to abort before the Produce is sent again.
        client = CLIENTS[client_name](way.servers, way.name, backoff_ms=2_000)
        client.begin()
        client.send(topic, "first")
        client.end(True)
        client.begin()
        cut = way.proxy.on(ApiKey.Produce, fault, transactional_id=way.name)
        client.offer(topic, "aborted")
        cut.wait()
        client.notices_the_cut()
        client.end(False)
        sent = way.proxy.seen(ApiKey.Produce, way.name, cut.request.seen_at)
        # A client that continues with other sequences after an abort may send the record again.
        if option == "--no-protect" and client.reuses_sequences and len(sent) > 1:
            raise TooSlow("the record must not be sent again before the abort")
        client.begin()
        error = None
        if fault is Fault.LATE_COPY:
            # The broker must have added the partition to this transaction, but have no record of it.
            held = way.proxy.on(ApiKey.Produce, Fault.HOLD_REQUEST, transactional_id=way.name)
            client.offer(topic, "kept")
            held.wait()
            error = cut.deliver_late().error
            held.release()
            if option == "--no-protect" and not client.reuses_sequences:
                with pytest.raises(OutOfOrderSequenceNumberError):
                    client.flush()  # The client at least reports the loss, because its next sequence is another one.
                return
            client.flush()
        else:
            client.send(topic, "kept")
        client.end(True)
        client.close()
    found = texts(kafka.bootstrap_servers, topic)
    if option == "--protect":
        of_the_client = client.late_after_abort["Produce"]
        assert error == (None if fault is Fault.CUT_AFTER else of_the_client if side == "client" else 47)
    if option == "--protect" or not client.reuses_sequences:
        assert found == ["first", "kept"]
    else:
        assert not error
        assert found == (["first"] if fault is Fault.CUT_AFTER else ["first", "aborted"]), (
            "all calls succeeded, but the result is wrong"
        )


@pytest.mark.deep_for("--no-protect-*-kafka-python")
@BOTH_CLIENTS
@SIDES
@OPTIONS
def test_late_offsets_do_not_move_the_group(
    kafka: LocalKafka, names: Names, client_name: str, side: str, option: str
) -> None:
    servers, group = kafka.bootstrap_servers, names("g")
    source, topic = create_topic(servers, names("in")), create_topic(servers, names("out"))
    with faulty(kafka, side, option, names("id")) as way:
        client = CLIENTS[client_name](way.servers, way.name)
        client.begin()
        late = way.proxy.on(ApiKey.TxnOffsetCommit, Fault.LATE_COPY, transactional_id=way.name)
        client.send_offset(group, source, 1)
        late.wait()
        client.end(True)
        client.begin()
        client.send(topic, "x")
        client.send_offset(group, source, 2)
        error = late.deliver_late().error
        client.end(True)
        client.close()
    if option == "--protect":
        assert error == (14 if side == "client" else 47)
        assert stable_offset(servers, group, source) == 2
    else:
        assert error == 0, "the late copy must end the next transaction"
        assert stable_offset(servers, group, source) == 1, "all calls succeeded, but the result is wrong"


def abort_under_way(kafka: LocalKafka, names: Names, option: str, cut: bool) -> None:
    """Begin an abort while the response to a Produce of the transaction after an abort is on its way."""
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    with faulty(kafka, "client", option, names("id")) as way:
        client = Confluent(way.servers, way.name, debug="eos")
        client.begin()
        client.send(topic, "aborted")
        client.end(False)
        client.begin()
        held = way.proxy.on(ApiKey.Produce, Fault.HOLD_RESPONSE, transactional_id=way.name)
        client.offer(topic, "aborted too")
        held.wait()
        started = time.monotonic()
        before = len(client.lines)
        abort = Background(lambda: client.producer.abort_transaction(3 if cut else 30))
        # librdkafka purges queued records and waits for the others.
        client.wait_for_log("Purging and flushing", since=before)
        if cut:
            way.proxy.cut_all()
        held.release()
        if cut:
            with pytest.raises(KafkaException, match="Failed to flush") as caught:
                abort.result()
            assert caught.value.args[0].retriable()
            client.end(False)
        else:
            abort.result()
            assert time.monotonic() - started < 15
        client.begin()
        if not cut or option == "--protect":
            client.send(topic, "kept")
        client.end(True)
        client.close()
    assert texts(kafka.bootstrap_servers, topic) == (["kept"] if not cut or option == "--protect" else [])


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 25))])
def test_abort_does_not_wait_for_a_requeued_record(kafka: LocalKafka, names: Names, number: int) -> None:
    abort_under_way(kafka, names, "--protect", cut=False)


@pytest.mark.deep_for("--no-protect")
@OPTIONS
def test_librdkafka_abort_during_a_cut_succeeds_when_repeated(kafka: LocalKafka, names: Names, option: str) -> None:
    abort_under_way(kafka, names, option, cut=True)


# Other clients.


def test_kafka_python_has_an_epoch_per_transaction(kafka: LocalKafka, names: Names) -> None:
    servers, name, group = kafka.bootstrap_servers, names("id"), names("g")
    source = create_topic(servers, names("in"))
    topics = [create_topic(servers, names(f"out{i}"), 3) for i in range(2)]
    with (
        HoldingProxy.before(kafka) as proxy,
        running(kafka.proxied_servers, "--protect") as shim,
    ):
        producer = python_producer(shim.bootstrap_servers, name)
        epochs, wanted = list[int](), list[str]()
        for number in range(9):
            producer.begin_transaction()
            sent = [
                producer.send(topic, f"{number}-{topic}-{i}".encode(), partition=i % 3)
                for topic in topics
                for i in range(9)
            ]
            for future in sent:
                future.get(30)
            offsets = {PythonPartition(source, 0): OffsetAndMetadata(number, "", -1)}
            producer.send_offsets_to_transaction(offsets, group)
            if number % 3 == 1:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
                wanted += [f"{number}-{topic}-{i}" for topic in topics for i in range(9)]
            epochs.append(transaction_of(servers, name).producer_epoch)
        assert epochs == list(range(epochs[0], epochs[0] + 9)), "the broker must see one epoch per transaction"
        producer.close()
        several = [
            request
            for request in proxy.seen(ApiKey.Produce, name)
            if sum(len(topic["partition_data"]) for topic in request.fields["topic_data"]) > 1
        ]
        assert several, "a Produce must have more than one partition"
    assert sorted(value for topic in topics for value in texts(servers, topic)) == sorted(wanted)
    assert stable_offset(servers, group, source) == 8


def test_aiokafka_has_an_epoch_per_transaction(kafka: LocalKafka, names: Names) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    topic, name = create_topic(kafka.bootstrap_servers, names("out"), 2), names("id")

    async def work(servers: str) -> None:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=servers, transactional_id=name)
        await producer.start()
        for number in range(9):
            await producer.begin_transaction()
            for i in range(4):
                await producer.send_and_wait(topic, f"{number}-{i}".encode(), partition=i % 2)
            await (producer.abort_transaction() if number % 3 == 1 else producer.commit_transaction())
        await producer.stop()

    with running(kafka.bootstrap_servers, "--protect") as shim:
        asyncio.run(work(shim.bootstrap_servers))
    assert transaction_of(kafka.bootstrap_servers, name).producer_epoch == 9
    wanted = [f"{number}-{i}" for number in range(9) if number % 3 != 1 for i in range(4)]
    assert sorted(texts(kafka.bootstrap_servers, topic)) == sorted(wanted)


# Unprotected clients with their warnings, and clients that start and stop.


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_client_continues_after_the_last_epoch(kafka: LocalKafka, names: Names) -> None:
    """Exhaust the epochs: EndTxn then returns a new producer id, and the client keeps its own."""
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    with running(kafka.bootstrap_servers, "--protect") as shim:
        producer = producer_of(shim.bootstrap_servers, name)
        first = transaction_of(kafka.bootstrap_servers, name).producer_id
        count = (1 << 15) + 20
        for number in range(count):
            producer.begin_transaction()
            producer.produce(topic, str(number), partition=0)
            producer.commit_transaction(30)
        assert transaction_of(kafka.bootstrap_servers, name).producer_id != first
    assert texts(kafka.bootstrap_servers, topic) == [str(number) for number in range(count)]


def test_commit_after_transaction_timeout_is_answered_as_by_broker(kafka: LocalKafka, names: Names) -> None:
    """Let a transaction time out: brokers report it to KIP-890 part 2 with another error, INVALID_TXN_STATE.

    This error is fatal to older clients.
    """
    topic, told = create_topic(kafka.bootstrap_servers, names("out")), []
    with running(kafka.bootstrap_servers, "--protect") as shim:
        for which, servers in (("direct", kafka.bootstrap_servers), ("behind", shim.bootstrap_servers)):
            producer = producer_of(
                servers, names(which), **{"transaction.timeout.ms": 1_000, "message.timeout.ms": 1_000}
            )
            producer.begin_transaction()
            producer.produce(topic, "x", partition=0)
            assert producer.flush(30) == 0
            name = names(which)
            eventually(lambda name=name: transaction_of(kafka.bootstrap_servers, name).state == "CompleteAbort", 30)
            with pytest.raises(KafkaException) as raised:
                producer.commit_transaction(30)
            told.append(raised.value.args[0].name())
    assert told == ["_FENCED", "_FENCED"]


def test_requests_to_broker_without_support_pass_with_one_warning(kafka392: LocalKafka, names: Names) -> None:
    topic, name = create_topic(kafka392.bootstrap_servers, names("out")), names("id")
    with running(kafka392.bootstrap_servers, "--protect") as shim:
        (line,) = shim.named("protection unavailable")
        assert line["level"] == "warning"
        assert line["effect"] == "late requests can still change the next transaction"
        producer = producer_of(shim.bootstrap_servers, name)
        for number in range(3):
            producer.begin_transaction()
            assert not send(producer, topic, str(number))
            producer.commit_transaction(30)
        producer.close()
    assert transaction_of(kafka392.bootstrap_servers, name).producer_epoch == 0
    assert texts(kafka392.bootstrap_servers, topic) == ["0", "1", "2"]


def test_successor_and_restarted_shim_fence_clients(kafka: LocalKafka, names: Names) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    (port,) = free_ports(1)
    listen = ("--listen", f"127.0.0.1:{port}", "--protect")

    def transaction(producer: Producer, value: str) -> None:
        producer.begin_transaction()
        assert not send(producer, topic, value)
        producer.commit_transaction(30)

    with running(kafka.bootstrap_servers, *listen) as shim:
        zombie = producer_of(shim.bootstrap_servers, name)
        transaction(zombie, "1")
        successor = producer_of(shim.bootstrap_servers, name)
        transaction(successor, "2")
        with pytest.raises((KafkaException, SystemError, AssertionError)):
            transaction(zombie, "never")
        transaction(successor, "3")
    with running(kafka.bootstrap_servers, *listen) as shim:
        with pytest.raises((KafkaException, SystemError, AssertionError)):
            transaction(successor, "never")
        transaction(producer_of(shim.bootstrap_servers, name), "4")
    assert texts(kafka.bootstrap_servers, topic) == ["1", "2", "3", "4"]
