"""librdkafka: a record that the broker refuses makes the NEXT transaction fail too, after a successful abort."""

import sys

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka


def transaction(producer: Producer, value: bytes) -> str:
    producer.begin_transaction()
    try:
        producer.produce("out", value, partition=0)
        producer.commit_transaction(30)
    except KafkaException as error:
        producer.abort_transaction(30)
        return f"{error.args[0].name()}: {error.args[0].str()}"
    return "ok"


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    topic = NewTopic("out", 1, config={"max.message.bytes": "1000"})
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([topic])["out"].result()
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "tx", "log_level": 0})
    producer.init_transactions()
    ends = [transaction(producer, b"x" * size) for size in (10, 5_000, 10, 10)]
for size, end in zip(("small", "too large, aborted", "small", "small"), ends, strict=True):
    print(f"a transaction with a record that is {size}: {end}")
seen = ends[0] == "ok" and ends[1] != "ok" and ends[2] != "ok"
print("SEEN: the transaction after the aborted one failed" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
