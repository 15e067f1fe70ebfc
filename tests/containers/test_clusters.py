"""Check from outside that every fault of a test cluster does what it says, on containers and on local JVMs."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaAdminClient

from eos.errors import IllegalState, Unavailable
from eos.testing.clusters import Cluster
from eos.testing.clusters.jvm import JvmCluster
from tests.support.reading import TooSlow, wait_until

pytestmark = [pytest.mark.takes(306), pytest.mark.deep_for("container-3.9.2")]

DEADLINE_S = 60.0


def on(*clusters: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cluster", clusters, indirect=True)


newest = on("container-4.4.0", "jvm-4.4.0")
everywhere = on("container-4.4.0", "jvm-4.4.0", "container-3.9.2")


def new_topic(cluster: Cluster, name: str) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic(name, 1, 3)])[name].result(DEADLINE_S)
    assert cluster.wait_in_sync(name) >= 1
    return name


def send(cluster: Cluster, topic: str, value: str) -> None:
    """Write a value until at least two nodes have it (acks=all, min.insync.replicas=2)."""
    errors: list[KafkaError | None] = []
    # The producer is not idempotent, because an idempotent one would wait for a silent node instead of trying the next
    # leader.
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "acks": "all",
            "request.timeout.ms": 2000,
            "message.timeout.ms": int(DEADLINE_S * 1000),
            "log_level": 0,
        }
    )
    producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    producer.flush(DEADLINE_S)
    assert errors == [None], f"{value!r} was not acknowledged: {errors}"


def distinct_values(cluster: Cluster, topic: str) -> list[str]:
    """Return the distinct values of the topic in order, because `send` may write a value twice."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "unused",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: dict[str, None] = {}
    deadline = time.monotonic() + DEADLINE_S
    try:
        while True:
            if time.monotonic() >= deadline:
                raise TooSlow(f"{topic} had no end within {DEADLINE_S} s")
            message = consumer.poll(0.5)
            if message is None:
                continue
            if message.error() is None:
                values[(message.value() or b"").decode()] = None
            elif message.error().code() == KafkaError._PARTITION_EOF:
                return list(values)
    finally:
        consumer.close()


class Conversation:
    """Send ApiVersions requests on one connection to one node, and wait for the responses."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 5)
        self._asked = 0

    def ask(self) -> None:
        self._asked += 1
        self._socket.sendall(struct.pack(">ihhih", 10, 18, 0, self._asked, -1))

    def is_answered(self, within_s: float) -> bool:
        """Return whether the last request is answered in time; raise ConnectionError if the connection was closed or
        reset."""
        self._socket.settimeout(within_s)
        try:
            length, correlation = struct.unpack(">ii", self._read(8))
        except TimeoutError:
            return False
        self._read(length - 4)
        assert correlation == self._asked
        return True

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise ConnectionError("the node closed the connection")
            data += part
        return data

    def close(self) -> None:
        self._socket.close()


@contextmanager
def ended_conversation(server: str) -> Iterator[None]:
    """Open a connection that gets a response before the block and is closed after it."""
    with closing(Conversation(server)) as talk:
        talk.ask()
        assert talk.is_answered(10)
        yield
        with pytest.raises(ConnectionError):
            talk.ask()
            talk.is_answered(10)


def a_new_connection_is_answered(server: str) -> bool:
    try:
        with closing(Conversation(server)) as talk:
            talk.ask()
            return talk.is_answered(2)
    except OSError:
        return False


@everywhere
def test_killed_leader_is_replaced_and_returns_with_all_records(whole: Cluster, names: Callable[[str], str]) -> None:
    topic, servers = new_topic(whole, names("t")), whole.bootstrap_servers
    send(whole, topic, "before")
    leader = whole.leader_of(topic)
    with ended_conversation(whole.server(leader)):
        whole.kill(leader)
    assert not whole.running(leader)
    assert not a_new_connection_is_answered(whole.server(leader))
    send(whole, topic, "without the leader")
    assert whole.leader_of(topic) not in (leader, -1)
    wait_until("the killed node leaves the ISR", lambda: leader not in whole.in_sync_of(topic), DEADLINE_S)
    for again in (whole.kill, whole.restart):
        with pytest.raises(IllegalState, match=f"node {leader} is down"):
            again(leader)
    with pytest.raises(IllegalState, match=rf"nodes \[{leader}\] cannot become in-sync"):
        whole.wait_in_sync()
    whole.start(leader)
    assert whole.wait_in_sync() >= 1
    assert whole.in_sync_of(topic) == {0, 1, 2}
    assert whole.bootstrap_servers == servers
    wait_until("the node answers again", lambda: a_new_connection_is_answered(whole.server(leader)), DEADLINE_S)
    assert distinct_values(whole, topic) == ["before", "without the leader"]


@pytest.mark.deep_for("jvm*")
@newest
def test_stopped_leader_hands_over_before_it_ends(whole: Cluster, names: Callable[[str], str]) -> None:
    topic = new_topic(whole, names("t"))
    send(whole, topic, "before")
    leader = whole.leader_of(topic)
    whole.stop(leader)
    # A killed leader stays the leader until its session expires; a stopped one has handed over before it ends.
    assert whole.leader_of(topic) not in (leader, -1)
    assert leader not in whole.in_sync_of(topic)
    assert "shut down completed" in whole.log(leader)
    send(whole, topic, "meanwhile")
    whole.start(leader)
    whole.wait_in_sync()
    assert distinct_values(whole, topic) == ["before", "meanwhile"]


@pytest.mark.deep_for("jvm*")
@newest
def test_restarted_node_keeps_its_address_and_records(whole: Cluster, names: Callable[[str], str]) -> None:
    topic, servers = new_topic(whole, names("t")), whole.bootstrap_servers
    send(whole, topic, "before")
    leader = whole.leader_of(topic)
    with ended_conversation(whole.server(leader)):
        whole.restart(leader)
    assert whole.running(leader)
    assert whole.bootstrap_servers == servers
    assert a_new_connection_is_answered(whole.server(leader))
    assert "shut down completed" in whole.log(leader), "the node must be stopped, not killed"
    whole.wait_in_sync(topic)
    assert whole.in_sync_of(topic) == {0, 1, 2}
    assert distinct_values(whole, topic) == ["before"]


@newest
def test_paused_leader_keeps_connections_without_answering(whole: Cluster, names: Callable[[str], str]) -> None:
    topic = new_topic(whole, names("t"))
    leader = whole.leader_of(topic)
    with closing(Conversation(whole.server(leader))) as talk:
        talk.ask()
        assert talk.is_answered(10)
        whole.pause(leader)
        talk.ask()
        assert not talk.is_answered(1)
        send(whole, topic, "meanwhile")
        assert whole.leader_of(topic) not in (leader, -1)
        wait_until("the paused node leaves the ISR", lambda: leader not in whole.in_sync_of(topic), DEADLINE_S)
        assert whole.running(leader)
        with pytest.raises(IllegalState, match="paused already"):
            whole.pause(leader)
        whole.resume(leader)
        assert talk.is_answered(30), "the request was lost, or another node answered"
    whole.wait_in_sync()
    assert distinct_values(whole, topic) == ["meanwhile"]


@everywhere
def test_disconnected_leader_is_replaced_and_keeps_connections(whole: Cluster, names: Callable[[str], str]) -> None:
    topic = new_topic(whole, names("t"))
    send(whole, topic, "before")
    leader = whole.leader_of(topic)
    with closing(Conversation(whole.server(leader))) as talk:
        talk.ask()
        assert talk.is_answered(10)
        whole.partition(leader)
        talk.ask()
        assert not talk.is_answered(1), "a client must not reach the node"
        assert not a_new_connection_is_answered(whole.server(leader))
        send(whole, topic, "meanwhile")
        assert whole.leader_of(topic) not in (leader, -1), "the other nodes must not reach the node"
        wait_until("the cut node leaves the ISR", lambda: leader not in whole.in_sync_of(topic), DEADLINE_S)
        assert whole.running(leader)
        with pytest.raises(IllegalState, match="cut off already"):
            whole.partition(leader)
        whole.heal(leader)
        # The packets are dropped and not refused, so TCP sends the request again later.
        assert talk.is_answered(DEADLINE_S)
    whole.wait_in_sync()
    assert whole.in_sync_of(topic) == {0, 1, 2}
    assert distinct_values(whole, topic) == ["before", "meanwhile"]


@pytest.mark.deep_for("jvm*")
@newest
def test_controller_and_coordinators_agree_with_kafka(whole: Cluster, names: Callable[[str], str]) -> None:
    group, transactional_id = names("g"), names("x")
    group_coordinator = whole.coordinator_of(group=group)
    assert whole.coordinator_of(transactional_id=transactional_id) in range(3)
    producer = Producer(
        {"bootstrap.servers": whole.bootstrap_servers, "transactional.id": transactional_id, "log_level": 0}
    )
    producer.init_transactions(DEADLINE_S)
    topic = new_topic(whole, names("t"))
    consumer = Consumer({"bootstrap.servers": whole.bootstrap_servers, "group.id": group, "log_level": 0})
    consumer.subscribe([topic])
    try:
        wait_until("the group has a member", lambda: consumer.poll(0.1) or consumer.assignment(), DEADLINE_S)
        admin = AdminClient({"bootstrap.servers": whole.bootstrap_servers, "log_level": 0})
        described = admin.describe_consumer_groups([group])[group].result(DEADLINE_S)
    finally:
        consumer.close()
    assert described.coordinator is not None
    assert described.coordinator.id == group_coordinator
    other = KafkaAdminClient(bootstrap_servers=whole.bootstrap_servers.split(","))
    try:
        transaction = other.describe_transactions([transactional_id])[transactional_id]
        (quorum,) = other.describe_metadata_quorum()["topics"]
    finally:
        other.close()
    assert transaction.coordinator_id == whole.coordinator_of(transactional_id=transactional_id)
    assert quorum["partitions"][0]["leader_id"] == whole.controller()


@pytest.mark.deep_for("jvm*")
@newest
def test_slow_node_start_is_reported_with_state_and_last_log_lines(
    whole: Cluster,
) -> None:
    controller = whole.controller()
    whole.kill(controller)
    wait_until("another controller", lambda: whole.controller() != controller, DEADLINE_S)
    with pytest.raises(Unavailable, match=r"it names no node; its (container|JVM) is running.*; its log ends with: ."):
        whole.start(controller, timeout_s=0)
    assert whole.running(controller)
    whole.wait_ready([controller])
    assert whole.wait_in_sync() > 0


@on("jvm-4.4.0")
def test_node_that_fails_to_start_is_reported_and_restartable(whole: Cluster) -> None:
    assert isinstance(whole, JvmCluster)
    properties = whole._kafka.log_path(0).with_name("server.properties")
    whole.kill(0)
    right = properties.read_text()
    properties.write_text(right + "\nnum.io.threads=none\n")
    with pytest.raises(Unavailable, match=r"node 0 ended while it started: .*num\.io\.threads"):
        whole.start(0)
    assert not whole.running(0)
    properties.write_text(right)
    whole.start(0)
    assert whole.wait_in_sync() > 0


@newest
def test_acknowledged_records_survive_a_kill_of_all_nodes(whole: Cluster, names: Callable[[str], str]) -> None:
    topic, servers = new_topic(whole, names("t")), whole.bootstrap_servers
    sent = [f"record {n}" for n in range(20)]
    for value in sent:
        send(whole, topic, value)
    for i in range(3):
        whole.kill(i)
    assert whole.reachable() == []
    whole.repair()
    assert whole.reachable() == [0, 1, 2]
    assert whole.bootstrap_servers == servers
    assert distinct_values(whole, topic) == sent
