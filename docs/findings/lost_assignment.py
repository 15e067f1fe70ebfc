"""librdkafka, group.protocol=consumer: a partition in a late heartbeat response is never read."""

import sys
import time

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.shim.faults import Phase, Plan, Rule
from eos.testing.shim import ShimThread

HEARTBEAT_S, LATE_S = 1, 2.5
SHORT = {f"group.consumer.{what}heartbeat.interval.ms": HEARTBEAT_S * 1000 for what in ("", "min.")}
# Heartbeats of the second member after its first assignment: the broker applies them, and their responses are late.
PLAN = Plan([Rule("ConsumerGroupHeartbeat", "delay", Phase.AFTER_APPLY, nth=12, times=3, seconds=LATE_S)])


def member_of(servers: str) -> Consumer:
    member = Consumer({"bootstrap.servers": servers, "group.id": "group", "group.protocol": "consumer", "log_level": 0})
    member.subscribe(["in"], on_revoke=lambda *_: None)  # with a callback it revokes nothing until it polls
    return member


def given(admin: AdminClient) -> list[int]:
    """Return the number of partitions of each member, as the broker reports it."""
    group = admin.describe_consumer_groups(["group"])["group"].result()
    return sorted(len(member.assignment.topic_partitions) for member in group.members)


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION, config=SHORT) as kafka:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
    for future in admin.create_topics([NewTopic("in", 4), NewTopic("other", 1)]).values():
        future.result()
    first = member_of(kafka.bootstrap_servers)
    with ShimThread(kafka.bootstrap_servers, PLAN) as shim:
        second = member_of(shim.bootstrap_servers)
        while {len(first.assignment()), len(second.assignment())} != {2}:
            first.poll(0.1)
            second.poll(0.1)
        print(f"two members of four partitions; the broker: {given(admin)}")
        first.subscribe(["other"], on_revoke=lambda *_: None)  # the second one should get all four
        while not PLAN.fired:
            second.poll(0.1)
        deadline = time.monotonic() + 30 * HEARTBEAT_S
        while len(second.assignment()) < 4 and time.monotonic() < deadline:
            first.poll(0.1)  # only now it revokes them
            second.poll(0.1)
        mine, has = len(second.assignment()), given(admin)
print(f"three responses to heartbeats were {LATE_S} s late; thirty heartbeats after that the broker: {has}")
print(f"and the second member has {mine}")
seen = 4 in has and mine < 4
print("SEEN: the broker assigned partitions that the member does not know" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
