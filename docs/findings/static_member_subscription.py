"""Kafka: a static member of a classic group that returns with other topics gets its old ones."""

import sys
import time

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka


def assigned(servers: str, strategy: str, topic: str) -> list[str]:
    """Return the assignment of the group's only member within ten seconds, subscribed to this topic."""
    member = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": strategy,
            "group.instance.id": "one",
            "partition.assignment.strategy": strategy,
        }
    )
    member.subscribe([topic])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        member.poll(0.2)
    topics = [place.topic for place in member.assignment()]
    member.close()  # a static member stays in its group
    return topics


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic("old", 1), NewTopic("new", 1)]).values():
        future.result()
    found = {}
    for strategy in ("range", "cooperative-sticky"):
        first = assigned(servers, strategy, "old")
        found[strategy] = assigned(servers, strategy, "new")
        print(f"{strategy}: subscribed to old, assigned {first}; back, subscribed to new, assigned {found[strategy]}")
seen = [strategy for strategy, topics in found.items() if topics == ["old"]]
print(f"SEEN: it reads topics to which it is not subscribed ({', '.join(seen)})" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
