"""Protect clients while coordinators and leaders die, and while clients request their next epoch (KIP-360)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kafka.protocol.producer import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

from eos.broker import LocalKafka
from tests.shim.chaos import Ledger
from tests.shim.protected_clients import CLIENTS, faulty, producer_of, send, texts
from tests.shim.shims import eventually, running
from tests.support.proxy import ApiKey, Fault
from tests.support.raw import Background
from tests.support.reading import coordinator_of, create_topic, leader_of, transaction_of
from tests.support.wire import Wire

pytestmark = pytest.mark.takes(271)

Names = Callable[[str], str]


@pytest.mark.deep_for("*-leader-*")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("deaths", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("role", ["coordinator", "leader"])
@pytest.mark.parametrize("client_name", ["confluent-kafka", pytest.param("kafka-python", marks=pytest.mark.long)])
def test_death_of_coordinator_or_leader_loses_no_record(
    cluster: LocalKafka, names: Names, client_name: str, role: str, deaths: int
) -> None:
    with running(cluster.bootstrap_servers, brokers=3) as shim:
        ledger = Ledger(cluster, CLIENTS[client_name], ",".join(shim.addresses), names("x"), seed=2, copies=3)
        over = False
        work = Background(lambda: ledger.run(lambda: over))
        try:
            for _ in range(deaths):
                eventually(lambda: ledger.committed)
                if role == "coordinator":
                    victim = coordinator_of(cluster.bootstrap_servers, ledger.name)
                else:
                    victim = leader_of(cluster.bootstrap_servers, ledger.topic)
                cluster.kill(victim)
                try:
                    before = ledger.committed
                    eventually(lambda since=before: ledger.committed >= since + 20, 180)
                finally:  # The next test on the cluster needs three nodes.
                    cluster.start(victim)
                    cluster.wait_in_sync()
        finally:
            over = True
            work.result(120)
    assert ledger.judge() == []
    assert ledger.aborted


def test_client_with_timed_out_record_gets_next_epoch(kafka: LocalKafka, names: Names) -> None:
    """Let a record time out: librdkafka aborts and requests another epoch (KIP-360), because its sequences have a
    gap."""
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    with faulty(kafka, "client", "--protect", names("id")) as way:
        # The proxy also holds the records that must arrive.
        producer = producer_of(way.servers, way.name, **{"message.timeout.ms": 6_000})
        for round_ in range(2):
            producer.begin_transaction()
            assert not send(producer, topic, f"first {round_}")
            producer.commit_transaction(30)
            producer.begin_transaction()
            lost = way.proxy.on(ApiKey.Produce, Fault.BLACKHOLE, transactional_id=way.name)
            errors = send(producer, topic, f"lost {round_}")
            lost.wait(0)
            assert [error.name() for error in errors] == ["_MSG_TIMED_OUT"]
            producer.abort_transaction(30)
            producer.begin_transaction()
            assert not send(producer, topic, f"second {round_}")
            producer.commit_transaction(30)
            assert lost.deliver_late().error == 47
        asked = [
            request for request in way.proxy.seen(ApiKey.InitProducerId, way.name) if request.fields["producer_id"] >= 0
        ]
        assert len(asked) >= 2, "the client did not request its next epoch"
        producer.close()
    assert texts(kafka.bootstrap_servers, topic) == [f"{word} {i}" for i in range(2) for word in ("first", "second")]


def test_epoch_bump_aborts_the_open_transaction(kafka: LocalKafka, names: Names) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")

    def init(wire: Wire, identity: tuple[int, int]) -> tuple[int, int]:
        asked = InitProducerIdRequest(
            version=4,
            transactional_id=name,
            transaction_timeout_ms=30_000,
            producer_id=identity[0],
            producer_epoch=identity[1],
        )
        given = eventually(lambda: (found := wire.ask(asked)).error_code == 0 and found)
        return given.producer_id, given.producer_epoch

    def add(wire: Wire, identity: tuple[int, int]) -> int:
        each = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(version=3, name=topic, partitions=[0])
        request = AddPartitionsToTxnRequest(
            version=3,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=identity[0],
            v3_and_below_producer_epoch=identity[1],
            v3_and_below_topics=[each],
        )
        answered = wire.ask(request).results_by_topic_v3_and_below[0].results_by_partition[0]
        return int(answered.partition_error_code)

    def end(wire: Wire, identity: tuple[int, int]) -> int:
        request = EndTxnRequest(
            version=3, transactional_id=name, producer_id=identity[0], producer_epoch=identity[1], committed=True
        )
        return int(wire.ask(request).error_code)

    with running(kafka.bootstrap_servers) as shim, Wire(shim.bootstrap_servers) as wire:
        first = init(wire, (-1, -1))
        assert add(wire, first) == 0
        second = init(wire, first)
        assert second[1] > first[1]
        assert add(wire, first) == 47, "the previous identity must be invalid"
        eventually(lambda: add(wire, second) == 0)
        assert end(wire, second) == 0
        third = init(wire, second)
        assert third == init(wire, second), "the same request must have the same response"
        eventually(lambda: add(wire, third) == 0)
        assert end(wire, third) == 0
    state = transaction_of(kafka.bootstrap_servers, name)
    assert (state.producer_id, state.producer_epoch) == (third[0], third[1] + 1)
