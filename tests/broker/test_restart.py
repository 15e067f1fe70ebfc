"""Restart a killed worker on old and new brokers, and check the transactions that it left open."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eos.broker import LocalKafka
from eos.kafka.admin.fence import abort_open_transactions
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from tests.support.raw import RawProducer, raw_producer
from tests.support.reading import create_topic, settled_values, transaction_of, visible_values, wait_until

Names = Callable[[str], str]


@pytest.fixture(params=["kafka", "kafka392"])
def servers(request: pytest.FixtureRequest) -> str:
    kafka: LocalKafka = request.getfixturevalue(request.param)
    return kafka.bootstrap_servers


def test_start_aborts_transactions_of_both_ids_of_a_killed_worker(servers: str, names: Names) -> None:
    topic, ids = names("t"), [names("p"), names("p-alternate")]
    create_topic(servers, topic)
    killed = [RawProducer(servers, name) for name in ids]  # never closed, as after a SIGKILL
    for producer in killed:
        producer.begin()
        producer.send(topic, producer.transactional_id)
    before = {name: transaction_of(servers, name) for name in ids}
    assert [before[name].state for name in ids] == ["Ongoing", "Ongoing"]
    with ClusterAdmin(Settings({"bootstrap.servers": servers})) as admin:
        abort_open_transactions(admin, ids)
        after = {name: transaction_of(servers, name) for name in ids}
        assert [after[name].state for name in ids] == ["CompleteAbort", "CompleteAbort"]
        assert [after[name].producer_epoch - before[name].producer_epoch for name in ids] == [1, 1]
        abort_open_transactions(admin, ids)
    assert {name: transaction_of(servers, name) for name in ids} == after, (
        "an id without an open transaction must not change"
    )
    # A successor's init succeeds at its first try, without the client's fixed backoff of 500 ms. The count is 0 if
    # librdkafka has bootstrapped again, which restarts its counters (seen on 3.9.2).
    with raw_producer(servers, ids[0]) as successor:
        brokers = successor.settle(2)["brokers"].values()
        assert sum(broker["req"].get("InitProducerId", 0) for broker in brokers) <= 1
    assert visible_values(servers, topic) == {0: []}


def test_unused_and_committed_ids_stay_unchanged(servers: str, names: Names) -> None:
    topic, used, unused = names("t"), names("used"), names("unused")
    create_topic(servers, topic)
    with raw_producer(servers, used) as producer:
        producer.commit_one(topic, "a")
        wait_until("the markers", lambda: transaction_of(servers, used).state == "CompleteCommit")
        before = transaction_of(servers, used)
        with ClusterAdmin(Settings({"bootstrap.servers": servers})) as admin:
            abort_open_transactions(admin, [used, unused])
            assert admin.describe(unused) is None
        assert transaction_of(servers, used) == before
        producer.commit_one(topic, "b")
    assert [v for values in settled_values(servers, topic).values() for v in values] == [b"a", b"b"]
