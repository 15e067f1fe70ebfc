"""librdkafka: an EndTxn that arrives late ends the next transaction of the same producer, without an error."""

import sys

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.shim.faults import Event, Phase, Plan, Rule
from eos.testing.shim import ShimThread


def late(transactional_id: str) -> Rule:
    """Cut off the first EndTxn from the client; it arrives after the next transaction's first record."""
    return Rule("EndTxn", "reset", Phase.LATE, transactional_id=transactional_id, until=Event("Produce"))


def producer_of(servers: str, transactional_id: str) -> Producer:
    producer = Producer({"bootstrap.servers": servers, "transactional.id": transactional_id, "log_level": 0})
    producer.init_transactions()
    return producer


def send(producer: Producer, topic: str, value: str, partition: int = 0) -> None:
    producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0


def visible(servers: str, topic: str) -> list[str]:
    reader = Consumer({"bootstrap.servers": servers, "group.id": "reader", "isolation.level": "read_committed"})
    reader.assign([TopicPartition(topic, partition, 0) for partition in range(2)])
    values = []
    while (message := reader.poll(5)) is not None:
        values.append(message.value().decode())
    reader.close()
    return values


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in admin.create_topics([NewTopic(name, 2) for name in ("torn", "lost")]).values():
        future.result()
    with ShimThread(kafka.bootstrap_servers, Plan([late("commits"), late("aborts")])) as shim:
        for transactional_id, topic in (("commits", "torn"), ("aborts", "lost")):
            producer = producer_of(shim.bootstrap_servers, transactional_id)
            ends = [producer.commit_transaction, producer.abort_transaction]
            first, second = ends if topic == "torn" else reversed(ends)
            producer.begin_transaction()
            send(producer, topic, "one")
            first()  # no error: the client sent its EndTxn again
            producer.begin_transaction()
            send(producer, topic, "two, first half", 0)
            send(producer, topic, "two, second half", 1)
            second()  # no error
    torn, lost = visible(kafka.bootstrap_servers, "torn"), visible(kafka.bootstrap_servers, "lost")
print(f"one committed, two aborted, every call ok: visible are {torn}")
print(f"one aborted, two committed, every call ok: visible are {lost}")
seen = "two, first half" in torn and "two, first half" not in lost
print("SEEN: half of the aborted one is visible, half of the committed one is not" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
