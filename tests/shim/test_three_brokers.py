"""Run one shim for three real brokers: a local port each, no broker address in responses, one broker killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka.protocol.admin import DescribeClusterRequest
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import ProduceRequest

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.shim.wire.cursor import string
from tests.shim.shims import RunningShim, eventually, read_group, running
from tests.shim.tcp_connections import only_through
from tests.support.reading import create_topic
from tests.support.wire import Wire, answer

pytestmark = pytest.mark.takes(183)

Names = Callable[[str], str]
NOT_LEADER_OR_FOLLOWER = 6


@pytest.fixture(scope="module")
def shim(cluster: LocalKafka) -> Iterator[RunningShim]:
    """Start a shim that knows one broker and must find the other two."""
    with running(cluster.bootstrap_servers.split(",")[0], brokers=3) as shim:
        yield shim


def make_topic(shim: RunningShim, name: str, partitions: int = 6, copies: int = 3) -> str:
    return create_topic(",".join(shim.addresses), name, partitions, copies)


def search_patterns(cluster: LocalKafka) -> list[bytes]:
    """Return the forms of the brokers' own addresses in a response."""
    found = []
    for server in cluster.bootstrap_servers.split(","):
        host, port = server.rsplit(":", 1)
        found += [string(host, flexible) + int(port).to_bytes(4, "big") for flexible in (True, False)]
    return found


def test_each_broker_has_a_port_that_clients_use(cluster: LocalKafka, shim: RunningShim, names: Names) -> None:
    assert len(set(shim.addresses)) == 3
    topic = make_topic(shim, names("t"))
    with only_through(shim, cluster) as watch:
        producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": names("id")})
        producer.init_transactions(30)
        for number in range(3):
            producer.begin_transaction()
            for i in range(60):
                producer.produce(topic, f"{number}-{i}".encode(), partition=i % 6)
            producer.commit_transaction(30)
        assert len(set(read_group(shim.bootstrap_servers, names("g"), topic, count=180))) == 180
        told = {f"{b.host}:{b.port}" for b in producer.list_topics(timeout=10).brokers.values()}
    assert told == set(shim.addresses)
    reached = {port for _, port in watch.by_shim}
    assert reached == {int(server.rsplit(":", 1)[1]) for server in cluster.bootstrap_servers.split(",")}
    producer.close()


METADATA = [MetadataRequest(version=v, topics=None if v else []) for v in range(14)]
COORDINATOR = [
    FindCoordinatorRequest(version=v, key="some-group", key_type=0, coordinator_keys=["a", "b", "c"]) for v in range(7)
]
CLUSTER = [
    DescribeClusterRequest(version=v, include_cluster_authorized_operations=False, endpoint_type=1) for v in range(3)
]


@pytest.mark.parametrize(
    "request_", [*METADATA, *COORDINATOR, *CLUSTER], ids=lambda r: f"{type(r).__name__}-v{r.API_VERSION}"
)
def test_responses_of_real_brokers_have_shim_addresses_only(
    cluster: LocalKafka, shim: RunningShim, request_: Any
) -> None:
    known = {(host, int(port)) for host, port in (address.rsplit(":", 1) for address in shim.addresses)}
    with Wire(shim.bootstrap_servers) as wire:

        def told() -> tuple[bytes, set[tuple[str, int]]]:
            wire.send(request_)
            frame = wire.receive()
            answered = answer(request_, frame)
            nodes = (
                [*(answered.brokers or [])]
                if hasattr(answered, "brokers")
                else [*(answered.coordinators or [answered])]
            )
            return frame, {(node.host, node.port) for node in nodes if node.port >= 0 and node.host}

        # The first query for a coordinator creates the offsets topic, so no address is found before.
        frame, addresses = eventually(lambda: found if (found := told())[1] else None)
    assert addresses <= known
    assert not [pattern for pattern in search_patterns(cluster) if pattern in frame]


def not_leading(cluster: LocalKafka, shim: RunningShim, topic: str) -> tuple[str, int]:
    """Return the shim's address of a broker that does not lead partition 0, and the leader's node id."""
    metadata = AdminClient({"bootstrap.servers": shim.bootstrap_servers}).list_topics(topic, timeout=10)
    leader = metadata.topics[topic].partitions[0].leader
    other = next(broker for broker in metadata.brokers.values() if broker.id != leader)
    return f"{other.host}:{other.port}", leader


def batch() -> bytes:
    from kafka.record import MemoryRecordsBuilder

    builder = MemoryRecordsBuilder(magic=2, compression_type=0, batch_size=10_000)
    builder.append(timestamp=1, key=None, value=b"x", headers=[])
    builder.close()
    return bytes(builder.buffer())


def address_of_new_leader(
    wire: Wire, request: Any, cluster: LocalKafka, shim: RunningShim, leader: int, partitions: str
) -> None:
    """Send requests until the broker knows that it does not lead, and return the leader's address in the response."""

    def refused() -> bytes | None:
        wire.send(request)
        got = wire.receive()
        error = getattr(answer(request, got).responses[0], partitions)[0].error_code
        return got if error == NOT_LEADER_OR_FOLLOWER else None

    frame = eventually(refused)
    (endpoint,) = answer(request, frame).node_endpoints
    assert endpoint.node_id == leader
    assert f"{endpoint.host}:{endpoint.port}" in shim.addresses
    assert not [pattern for pattern in search_patterns(cluster) if pattern in frame]


@pytest.mark.parametrize("version", [10, 11, 12])
def test_new_leader_in_produce_response_has_the_shims_address(
    cluster: LocalKafka, shim: RunningShim, names: Names, version: int
) -> None:
    topic = make_topic(shim, names("t"), 1)
    address, leader = not_leading(cluster, shim, topic)
    topic_data = ProduceRequest.TopicProduceData
    partition = topic_data.PartitionProduceData(version=version, index=0, records=batch())
    request = ProduceRequest(
        version=version,
        transactional_id=None,
        acks=-1,
        timeout_ms=5000,
        topic_data=[topic_data(version=version, name=topic, partition_data=[partition])],
    )
    with Wire(address) as wire:
        address_of_new_leader(wire, request, cluster, shim, leader, "partition_responses")


@pytest.mark.parametrize("version", [16, 17, 18])
def test_new_leader_in_fetch_response_has_the_shims_address(
    cluster: LocalKafka, shim: RunningShim, names: Names, version: int
) -> None:
    topic = make_topic(shim, names("t"), 1, copies=1)  # With more replicas a follower would answer the fetch.
    address, leader = not_leading(cluster, shim, topic)
    with Wire(address) as wire:
        metadata = wire.ask(MetadataRequest(version=12, topics=None))
        topic_id = next(each.topic_id for each in metadata.topics if each.name == topic)
        fetch_topic = FetchRequest.FetchTopic
        partition = fetch_topic.FetchPartition(
            version=version, partition=0, current_leader_epoch=-1, fetch_offset=0, partition_max_bytes=1000
        )
        request = FetchRequest(
            version=version,
            max_wait_ms=100,
            min_bytes=1,
            max_bytes=1000,
            session_id=0,
            session_epoch=-1,
            topics=[fetch_topic(version=version, topic_id=topic_id, partitions=[partition])],
        )
        address_of_new_leader(wire, request, cluster, shim, leader, "partitions")


def two_transactions(producer: Producer, topic: str, word: str) -> None:
    for number in range(2):
        producer.begin_transaction()
        for i in range(60):
            producer.produce(topic, f"{word} {number}-{i}".encode(), partition=i % 6)
        producer.commit_transaction(60)


def test_killed_broker_returns_at_the_same_port(cluster: LocalKafka, shim: RunningShim, names: Names) -> None:
    def all_three(client: AdminClient | Producer) -> dict[int, str]:
        """Return node id -> address, once the queried broker knows all nodes."""

        def told() -> dict[int, str]:
            brokers = client.list_topics(timeout=10).brokers
            return {broker.id: f"{broker.host}:{broker.port}" for broker in brokers.values()}

        found: dict[int, str] = eventually(lambda: each if len(each := told()) == 3 else None)
        return found

    def events_named(event: str) -> list[dict[str, Any]]:
        return [each for each in list(shim.events)[seen:] if each.get("event") == event]

    topic, seen = make_topic(shim, names("t")), 0
    before = all_three(AdminClient({"bootstrap.servers": shim.bootstrap_servers}))
    # Do not kill the bootstrap broker, because librdkafka discovers unknown node ids from there.
    victim = 1
    try:
        with only_through(shim, cluster):
            producer = Producer(
                {"bootstrap.servers": ",".join(shim.addresses), "transactional.id": names("id"), "log_level": 0}
            )
            producer.init_transactions(60)
            with Wire(before[victim]) as to_victim:
                assert to_victim.ask(MetadataRequest(version=4, topics=[])).brokers
                # An earlier try may have left such lines too.
                eventually(
                    lambda: len(events_named("broker reachable again")) == len(events_named("broker unreachable"))
                )
                seen = len(shim.events)
                cluster.kill(victim)
                assert to_victim.ended(), "the client's connection outlived its broker"
            with Wire(before[victim]) as to_victim:
                to_victim.socket.sendall(to_victim.frame(MetadataRequest(version=4, topics=[])))
                assert to_victim.ended(), "the port of a dead broker must close its connections"
            two_transactions(producer, topic, "without it")
    finally:
        if not cluster.running(victim):
            cluster.start(victim)  # The test checks its readiness directly, not through the shim.
    with only_through(shim, cluster):
        two_transactions(producer, topic, "with it")
        with Wire(before[victim]) as to_victim:
            assert to_victim.ask(MetadataRequest(version=4, topics=[])).brokers
        # Each event is logged once, however often clients retried.
        (up,) = eventually(lambda: events_named("broker reachable again"))
        (down,) = events_named("broker unreachable")
        assert down["broker"] == up["broker"]
        assert down["broker"].startswith(f"broker {victim} ")
    assert all_three(producer) == before
    assert len(set(read_group(shim.bootstrap_servers, names("g"), topic, count=240))) == 240
    producer.close()
    cluster.wait_in_sync()


def test_shim_needs_at_least_one_broker_at_start(cluster: LocalKafka) -> None:
    (unused,) = free_ports(1)
    third = cluster.bootstrap_servers.split(",")[2]
    with running(f"127.0.0.1:{unused},{third}", brokers=4) as shim:
        told = (
            AdminClient({"bootstrap.servers": ",".join(shim.addresses), "log_level": 0}).list_topics(timeout=20).brokers
        )
        assert len(told) == 3
