"""confluent-kafka: a callback that raises inside consume() destroys the messages that consume() had taken."""

import sys
import threading

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka

COUNT = 600
armed = threading.Event()


def statistics(text: str) -> None:
    if armed.is_set():
        armed.clear()
        raise KeyboardInterrupt  # like a signal at this moment; any exception has the same effect


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    producer = Producer({"bootstrap.servers": servers})
    for number in range(COUNT):
        producer.produce("in", str(number), partition=0)
    assert producer.flush(30) == 0
    settings = {"bootstrap.servers": servers, "group.id": "group", "statistics.interval.ms": 50}
    consumer = Consumer(settings | {"stats_cb": statistics})
    consumer.assign([TopicPartition("in", 0, 0)])
    values: list[str] = []
    threading.Timer(5, armed.set).start()  # consume() has all of them by then and waits for more
    for _ in range(2):
        try:
            values += [message.value().decode() for message in consumer.consume(2 * COUNT, timeout=10)]
        except KeyboardInterrupt:
            print("consume() was interrupted, and is called again")
    (place,) = consumer.position([TopicPartition("in", 0)])
    consumer.close()
print(f"{COUNT} messages in the topic: consume() gave {len(values)}, its position is {place.offset}")
seen = place.offset == COUNT and len(values) < COUNT
print(f"SEEN: {COUNT - len(values)} messages are lost" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
