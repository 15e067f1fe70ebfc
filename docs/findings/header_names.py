"""confluent-kafka: a header name that is not UTF-8 ends the process of its reader, and a NUL cuts a name."""

import subprocess
import sys

from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaProducer

from eos.broker import DEFAULT_VERSION, LocalKafka

READER = """
import sys
from confluent_kafka import Consumer, TopicPartition
consumer = Consumer({"bootstrap.servers": sys.argv[1], "group.id": "group"})
consumer.assign([TopicPartition("in", 0, 0)])
for message in consumer.consume(2, timeout=20):
    try:
        print(f"headers: {message.headers()}", flush=True)
    except Exception as error:
        print(f"headers: {error!r}, caused by {error.__cause__!r}", flush=True)
    print(f"a second call: {len(message.headers())} headers", flush=True)
    print(f"the first name: {message.headers()[0][0]}", flush=True)
"""


class Raw(str):
    """A name that this client writes as these bytes: Latin-1, as a program without UTF-8 would, or a NUL."""

    def encode(self, *_: str) -> bytes:
        return str.encode(self, "latin-1")


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    producer = KafkaProducer(bootstrap_servers=servers)
    for name in ("one\0two", "größe"):
        producer.send("in", b"value", headers=[(Raw(name), b"12")]).get(20)
    producer.close()
    ended = subprocess.run([sys.executable, "-c", READER, servers], capture_output=True, text=True, timeout=60)
print(ended.stdout, end="")
print(f"the reader ended with {ended.returncode}")
seen = "SystemError" in ended.stdout and ended.returncode < 0 and "headers: [('one', b'12')]" in ended.stdout
print("SEEN: one name is cut, the other one ends the reader" if seen else "not seen: both names are read")
sys.exit(0 if seen else 1)
