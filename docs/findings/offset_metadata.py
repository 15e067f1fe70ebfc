"""confluent-kafka: offset metadata that another client wrote is read past its end."""

import sys

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from kafka.structs import OffsetAndMetadata

from eos.broker import DEFAULT_VERSION, LocalKafka

WRITTEN = "x" * 40  # the heap's own data follows it; after other lengths, old content follows


def read(consumer: Consumer) -> str:
    (found,) = consumer.committed([TopicPartition("in", 0)], timeout=10)
    try:
        return str(found.metadata)
    except UnicodeDecodeError as error:
        return repr(error.object)


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    other = KafkaConsumer(bootstrap_servers=servers, group_id="group", enable_auto_commit=False)
    other.commit({Place("in", 0): OffsetAndMetadata(5, WRITTEN, -1)})
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "group"})
    values = {read(consumer) for _ in range(20)}
    consumer.commit(offsets=[TopicPartition("in", 0, 5, "text")], asynchronous=False)
    there = other.committed(Place("in", 0), metadata=True).metadata
    other.close()
    consumer.close()
print(f"another client wrote {WRITTEN!r}; read: {sorted(values)}")
print(f"confluent-kafka wrote 'text'; another client reads: {there!r}")
seen = values != {WRITTEN}
print("SEEN: bytes of this process follow the text" if seen else "not seen: the text is read as it was written")
sys.exit(0 if seen else 1)
