"""librdkafka: a record after an abort with a lost acknowledgement is acknowledged, committed and lost."""

import sys

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.shim.faults import Phase, Plan, Rule
from eos.testing.shim import ShimThread

delivered = []


def report(error: object, message: object) -> None:
    delivered.append("ok" if error is None else error.name())


def send(producer: Producer, value: str) -> None:
    producer.begin_transaction()
    producer.produce("out", value, partition=0, on_delivery=report)


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("out", 1)])["out"].result()
    lost_answer = Rule("Produce", "reset", Phase.AFTER_APPLY, nth=2)  # appended, but the response is lost
    with ShimThread(servers, Plan([lost_answer])) as shim:
        producer = Producer(
            {
                "bootstrap.servers": shim.bootstrap_servers,
                "transactional.id": "tx",
                "retry.backoff.ms": 10_000,  # time to abort before the record is sent again
                "retry.backoff.max.ms": 10_000,
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        producer.init_transactions()
        send(producer, "one")
        producer.commit_transaction()
        send(producer, "two")
        producer.poll(3)  # the client notices that its connection broke
        producer.abort_transaction()
        send(producer, "three")
        producer.commit_transaction()  # no error
    reader = Consumer({"bootstrap.servers": servers, "group.id": "reader", "isolation.level": "read_committed"})
    reader.assign([TopicPartition("out", 0, 0)])
    values = []
    while (message := reader.poll(5)) is not None:
        values.append(message.value().decode())
    reader.close()
print(f"one committed, two aborted, three committed; delivery reports {delivered}: visible are {values}")
seen = delivered[-1] == "ok" and "three" not in values
print("SEEN: three was acknowledged and committed, and is lost" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
