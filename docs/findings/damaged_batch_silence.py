"""librdkafka: a consumer stops forever at a batch with a damaged length, without an error."""

import sys
import tempfile
import time

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka

LENGTH_AT = 61  # offset of the record's length in a batch (magic 2) with one record


def read(servers: str, seconds: float, **settings: object) -> list[str]:
    """Return the values and errors that a reader gets within this many seconds, at most two."""
    received: list[str] = []
    configuration = {"bootstrap.servers": servers, "group.id": "reader", "auto.offset.reset": "error"}
    reader = Consumer(configuration | settings | {"error_cb": lambda error: received.append(error.name())})
    reader.assign([TopicPartition("in", 0, 0)])
    deadline = time.monotonic() + seconds
    while len(received) < 2 and time.monotonic() < deadline:
        if (message := reader.poll(0.5)) is not None:
            received.append(message.error().name() if message.error() else message.value()[:3].decode())
    reader.close()
    return received


version = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION
with tempfile.TemporaryDirectory() as folder, LocalKafka(version=version, data=folder) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    producer = Producer({"bootstrap.servers": servers})
    for value in ("one", "two", "three"):
        producer.produce("in", value * 500, partition=0)
        assert producer.flush(30) == 0  # one batch for each
    segment = kafka.log_path(0).parent / "data" / "in-0" / f"{0:020}.log"
    data = bytearray(segment.read_bytes())
    second = 12 + int.from_bytes(data[8:12])  # a batch begins with its offset (8 bytes) and its length (4)
    data[second + LENGTH_AT] ^= 1
    with segment.open("r+b") as file:
        file.write(data)
    received, checked = read(servers, 30), read(servers, 30, **{"check.crcs": True})
print(f"the second of three batches is damaged; received within 30 s: {received}")
print(f"with check.crcs=true: {checked}")
seen = received == ["one"]
print("SEEN: no record and no error arrives any more" if seen else "not seen: the error is reported")
sys.exit(0 if seen else 1)
