"""Kafka 4: a coordinator skips the marker of a partition without a leader: committed records there are lost."""

import sys
import time

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka

AWAY = 2


def visible(servers: str) -> list[str]:
    reader = Consumer({"bootstrap.servers": servers, "group.id": "reader", "isolation.level": "read_committed"})
    reader.assign([TopicPartition("out", 0, 0)])
    values = []
    while (message := reader.poll(8)) is not None:
        values.append(message.value().decode())
    reader.close()
    return values


with LocalKafka(nodes=3, version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    only_there = NewTopic("out", 1, replica_assignment=[[AWAY]], config={"min.insync.replicas": "1"})
    admin.create_topics([only_there])["out"].result()
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "tx", "log_level": 0})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("out", "one", partition=0)
    assert producer.flush(30) == 0
    kafka.stop(AWAY)
    deadline = time.monotonic() + 60
    while admin.list_topics("out", timeout=10).topics["out"].partitions[0].leader >= 0:
        assert time.monotonic() < deadline, "the partition still has a leader"
        time.sleep(0.2)
    producer.commit_transaction(60)  # no error
    time.sleep(5)  # time for the coordinator to look for the leader
    kafka.start(AWAY)
    kafka.wait_in_sync()
    committed = visible(servers)
    producer.begin_transaction()
    producer.produce("out", "two", partition=0)
    assert producer.flush(30) == 0
    producer.abort_transaction(60)
    aborted = visible(servers)
print(f"one committed while its partition had no leader, which is back: visible are {committed}")
print(f"two aborted by the same producer: visible are {aborted}")
seen = "one" not in committed and "one" not in aborted
print("SEEN: a committed record is lost" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
