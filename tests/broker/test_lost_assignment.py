"""Read a partition that the group assigned in a heartbeat response after the client's timeout (KIP-848)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, ResourceType

from eos import TransactSession
from eos.broker import LocalKafka
from eos.session.consumer import lost_assignment as unheard
from eos.shim.faults import Phase, Plan, Rule
from eos.testing.shim import ShimThread
from tests.support.reading import configure, create_topic, settled_values, wait_until

PARTITIONS = 4
LATE_S = 1.5  # longer than the heartbeat interval


def test_partitions_of_a_late_heartbeat_answer_are_read(
    kafka: LocalKafka, names: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unheard, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(unheard, "_PAUSE_S", 0.5)
    servers, group = kafka.bootstrap_servers, names("group")
    source, target = create_topic(servers, names("in"), PARTITIONS), create_topic(servers, names("out"))
    elsewhere = create_topic(servers, names("elsewhere"))
    configure(
        servers, group, "consumer.heartbeat.interval.ms", "500", ResourceType.GROUP
    )  # a short interval, so that a late response is noticed sooner
    other = Consumer({"bootstrap.servers": servers, "group.id": group, "group.protocol": "consumer", "log_level": 0})
    other.subscribe(
        [source], on_revoke=lambda *_: None
    )  # with a callback, the client keeps its partitions until it polls
    late = Plan([Rule("ConsumerGroupHeartbeat", "delay", Phase.AFTER_APPLY, nth=1_000_000, times=3, seconds=LATE_S)])
    with ShimThread(servers, late) as shim:
        settings = {
            "bootstrap.servers": shim.bootstrap_servers,
            "group.id": group,
            "group.protocol": "consumer",
            "transactional.id": names("tx"),
        }
        session = TransactSession(settings, [source])

        def copy() -> None:
            with session:
                for txn in session:
                    for record in txn.records:
                        txn.send(target, record.value)

        copying = threading.Thread(target=copy)
        copying.start()
        try:

            def shared() -> bool:
                other.poll(0.1)
                return len(other.assignment()) == len(session.group_consumer.assignment.reading) == PARTITIONS // 2

            wait_until("each member has half of the partitions", shared, 30)
            other.subscribe([elsewhere], on_revoke=lambda *_: None)
            wait_until(
                "the group assigns all partitions to the session", lambda: PARTITIONS in wanted(servers, group), 30
            )
            heartbeats = late.progress[0]
            seen = heartbeats.matched
            wait_until(
                "the session's client knows of the change in the group", lambda: heartbeats.matched > seen + 1, 30
            )
            heartbeats.matched = heartbeats.rule.nth - 1  # from the next response on
            wait_until("late heartbeat responses", lambda: late.fired, 30)

            def moved() -> bool:
                other.poll(0.1)  # gives the session its half of the partitions
                return {p.topic for p in other.assignment()} == {elsewhere}

            wait_until("the partitions of the other member are free", moved, 30)
            producer = Producer({"bootstrap.servers": servers})
            for partition in range(PARTITIONS):
                producer.produce(source, str(partition), partition=partition)
            assert producer.flush(30) == 0
            wait_until("all records are copied", lambda: session.counters.records_in == PARTITIONS, 60)
        finally:
            session.stop()
            copying.join(30)
            other.close()
    assert sorted(settled_values(servers, target)[0]) == [b"%d" % p for p in range(PARTITIONS)]
    assert "in a response that came too late for the client" in caplog.text


def wanted(servers: str, group: str) -> list[int]:
    """Return how many partitions the group wants each member to have."""
    admin = AdminClient({"bootstrap.servers": servers})
    members = admin.describe_consumer_groups([group])[group].result(10).members
    return [len(member.target_assignment.topic_partitions) for member in members if member.target_assignment]
