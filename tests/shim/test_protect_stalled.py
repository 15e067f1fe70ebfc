"""Stall a client in the middle of a Produce, which the shim forwards as it arrives, on real Kafka.

The client is our own and sends byte by byte, because no library stops there. Meanwhile its transaction ends, or another
connection takes over; then the rest of the Produce arrives. The contents of Kafka decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest, ProduceRequest
from kafka.record.memory_records import MemoryRecordsBuilder

from eos.broker import LocalKafka
from eos.shim.wire import api
from eos.testing.shim import ShimThread
from tests.shim.protected_clients import texts
from tests.shim.shims import eventually
from tests.support.reading import create_topic
from tests.support.wire import Wire, answer

Names = Callable[[str], str]

INVALID_PRODUCER_EPOCH, NOT_ENOUGH_REPLICAS = 47, 19
LONG = "stalled " * 20_000
OPTIONS = pytest.mark.parametrize("option", ["--protect", "--no-protect"])


class Client:
    """Send requests on any connection, without a software name, so that the shim challenges the client."""

    def __init__(self, shim: ShimThread, topic: str, name: str) -> None:
        self._shim, self._topic, self._name = shim, topic, name
        self.producer_id = self.epoch = -1
        self._wires: list[Wire] = []
        self.coordinator = self.connection()

    def connection(self) -> Wire:
        self._wires.append(Wire(self._shim.bootstrap_servers))
        return self._wires[-1]

    def close(self) -> None:
        for wire in self._wires:
            wire.socket.close()

    def init(self) -> None:
        # The first query of this kind creates the coordinators' topic.
        where = FindCoordinatorRequest(version=1, key=self._name, key_type=1)
        eventually(lambda: self.coordinator.ask(where).error_code == 0)
        request = InitProducerIdRequest(version=1, transactional_id=self._name, transaction_timeout_ms=60_000)
        response = eventually(lambda: (made := self.coordinator.ask(request)).error_code == 0 and made)
        self.producer_id, self.epoch = response.producer_id, response.producer_epoch

    def begin(self) -> None:
        topics = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
        request = AddPartitionsToTxnRequest(
            version=0,
            v3_and_below_transactional_id=self._name,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[topics(version=0, name=self._topic, partitions=[0])],
        )

        def added() -> bool:
            (result,) = self.coordinator.ask(request).results_by_topic_v3_and_below
            (partition,) = result.results_by_partition
            assert partition.partition_error_code in (0, 51), partition.partition_error_code
            return bool(partition.partition_error_code == 0)

        eventually(added)

    def end(self, committed: bool) -> None:
        identity = {"producer_id": self.producer_id, "producer_epoch": self.epoch}
        request = EndTxnRequest(version=1, transactional_id=self._name, committed=committed, **identity)
        response = self.coordinator.ask(request)
        assert response.error_code == 0, response.error_code

    def produce(self, sequence: int, value: str) -> Any:
        builder = MemoryRecordsBuilder(2, 0, 1 << 20)
        builder.set_producer_state(self.producer_id, self.epoch, sequence, True)
        builder.append(timestamp=1, key=None, value=value.encode())
        builder.close()
        topic = ProduceRequest.TopicProduceData
        partition = topic.PartitionProduceData(version=9, index=0, records=bytes(builder.buffer()))
        data = [topic(version=9, name=self._topic, partition_data=[partition])]
        return ProduceRequest(version=9, transactional_id=self._name, acks=-1, timeout_ms=10_000, topic_data=data)

    def sends(self, wire: Wire, sequence: int, value: str) -> int:
        """Return the error code of the broker or of the shim."""
        return error_of(wire.ask(self.produce(sequence, value)))

    def stalls(self, wire: Wire, sequence: int) -> Callable[[], int]:
        """Send all but the end of a Produce; return a function that sends the rest and returns the error code."""
        before = self._forwarded()
        request = self.produce(sequence, LONG)
        sent = wire.frame(request)
        wire.socket.sendall(sent[: len(sent) // 2])
        eventually(lambda: self._forwarded() > before)

        def send_rest() -> int:
            wire.socket.sendall(sent[len(sent) // 2 :])
            return error_of(answer(request, wire.receive()))

        return send_rest

    def _forwarded(self) -> int:
        """Return how many Produce requests the shim has begun to forward."""
        assert self._shim._chain is not None
        return self._shim._chain.traffic.requests.get(api.PRODUCE, (0, 0))[0]


def error_of(response: Any) -> int:
    return int(response.responses[0].partition_responses[0].error_code)


@contextmanager
def client_of(kafka: LocalKafka, names: Names, option: str = "--protect") -> Iterator[tuple[Client, str]]:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    with ShimThread(kafka.bootstrap_servers, protect=option == "--protect") as shim:
        client = Client(shim, topic, names("id"))
        client.init()
        client.begin()
        try:
            yield client, topic
        finally:
            client.close()


@OPTIONS
def test_stalled_produce_does_not_enter_next_transaction(kafka: LocalKafka, names: Names, option: str) -> None:
    """Stall without protection: the Produce takes the place of the next record (H2b), and no client gets an error."""
    with client_of(kafka, names, option) as (client, topic):
        stalled = client.stalls(client.connection(), 0)
        client.end(False)
        client.begin()
        late = stalled()
        other = client.connection()
        errors = [client.sends(other, 0, "next")]
        if errors == [NOT_ENOUGH_REPLICAS]:
            errors.append(client.sends(other, 0, "next"))
        client.end(True)
    found = texts(kafka.bootstrap_servers, topic)
    if option == "--protect":
        assert (late, errors) == (INVALID_PRODUCER_EPOCH, [NOT_ENOUGH_REPLICAS, 0])
        assert found == ["next"]
    else:
        assert (late, errors) == (0, [0])
        assert found == [LONG]


@pytest.mark.parametrize("way", ["commit", "init"])
def test_stalled_produce_of_ended_transaction_is_refused(kafka: LocalKafka, names: Names, way: str) -> None:
    with client_of(kafka, names) as (client, topic):
        wire = client.connection()
        assert client.sends(wire, 0, "first") == 0
        stalled = client.stalls(wire, 1)
        if way == "commit":
            client.end(True)
        else:
            client.init()
        client.begin()
        assert stalled() == INVALID_PRODUCER_EPOCH
        # After a commit, the client's sequences continue, even after lost responses; a new client starts at 0.
        assert client.sends(wire, 2 if way == "commit" else 0, "next") == 0
        client.end(True)
    assert texts(kafka.bootstrap_servers, topic) == (["first", "next"] if way == "commit" else ["next"])


def test_interrupted_produce_is_appended_once_after_a_retry(kafka: LocalKafka, names: Names) -> None:
    with client_of(kafka, names) as (client, topic):
        breaking = client.connection()
        assert client.sends(breaking, 0, "first") == 0
        client.stalls(breaking, 1)
        breaking.socket.close()
        other = client.connection()
        assert client.sends(other, 1, LONG) == NOT_ENOUGH_REPLICAS, "the shim must challenge the request"
        assert client.sends(other, 1, LONG) == 0
        assert client.sends(other, 2, "second") == 0
        client.end(True)
        client.begin()
        assert client.sends(other, 3, "third") == 0
        client.end(True)
    assert texts(kafka.bootstrap_servers, topic) == ["first", LONG, "second", "third"]


def test_produce_overtaken_on_trusted_connection_is_appended_once(kafka: LocalKafka, names: Names) -> None:
    """Move the trust to another connection while the first copy is half sent; its rest is a duplicate to the broker."""
    with client_of(kafka, names) as (client, topic):
        trusted, other = client.connection(), client.connection()
        assert client.sends(trusted, 0, "first") == 0
        stalled = client.stalls(trusted, 1)
        assert client.sends(other, 1, LONG) == NOT_ENOUGH_REPLICAS, "the shim must challenge the request"
        assert client.sends(other, 1, LONG) == 0
        assert stalled() == 0
        assert client.sends(other, 2, "second") == 0
        client.end(True)
    assert texts(kafka.bootstrap_servers, topic) == ["first", LONG, "second"]


def test_produce_overtaken_before_acceptance_is_appended_once(kafka: LocalKafka, names: Names) -> None:
    """Overtake a Produce before any acceptance: the shim trusts no connection before, and then the last one
    answered."""
    with client_of(kafka, names) as (client, topic):
        stalled = client.stalls(client.connection(), 0)
        other = client.connection()
        assert client.sends(other, 0, LONG) == 0
        assert stalled() == 0
        assert client.sends(other, 1, "second") == NOT_ENOUGH_REPLICAS, "the shim must challenge the request"
        assert client.sends(other, 1, "second") == 0
        client.end(True)
    assert texts(kafka.bootstrap_servers, topic) == [LONG, "second"]
