"""librdkafka: a consumer stands still for ever before a batch with a damaged length, and says nothing."""

import sys
import tempfile
import time

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka

LENGTH_AT = 61  # of a batch (magic 2) with one record: where the length of that begins


def read(servers: str, seconds: float, **settings: object) -> list[str]:
    """All that a reader is told within so many seconds, errors too; at most two things."""
    told: list[str] = []
    configuration = {"bootstrap.servers": servers, "group.id": "reader", "auto.offset.reset": "error"}
    reader = Consumer(configuration | settings | {"error_cb": lambda error: told.append(error.name())})
    reader.assign([TopicPartition("in", 0, 0)])
    deadline = time.monotonic() + seconds
    while len(told) < 2 and time.monotonic() < deadline:
        if (message := reader.poll(0.5)) is not None:
            told.append(message.error().name() if message.error() else message.value()[:3].decode())
    reader.close()
    return told


version = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION
with tempfile.TemporaryDirectory() as folder, LocalKafka(version=version, data=folder) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    producer = Producer({"bootstrap.servers": servers})
    for value in ("one", "two", "three"):
        producer.produce("in", value * 500, partition=0)
        assert producer.flush(30) == 0  # a batch of its own for each
    segment = kafka.log_path(0).parent / "data" / "in-0" / f"{0:020}.log"
    data = bytearray(segment.read_bytes())
    second = 12 + int.from_bytes(data[8:12])  # a batch begins with its offset (8 bytes) and its length (4)
    data[second + LENGTH_AT] ^= 1
    with segment.open("r+b") as file:
        file.write(data)
    told, checked = read(servers, 30), read(servers, 30, **{"check.crcs": True})
print(f"the second of three batches is damaged; told within 30 s: {told}")
print(f"with check.crcs=true: {checked}")
seen = told == ["one"]
print("SEEN: nothing comes any more, not even an error" if seen else "not seen: it is told")
sys.exit(0 if seen else 1)
