"""librdkafka: one damaged byte in an lz4 batch ends each process that reads it, by a failed assertion."""

import subprocess
import sys
import tempfile

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka

RECORDS_AT = 61  # after the head of a batch (magic 2)
BLOCK_SIZE_AT = 8  # in LZ4's frame: the second byte of its first block's size


def read(servers: str) -> None:
    reader = Consumer({"bootstrap.servers": servers, "group.id": "reader", "log_level": 0})
    reader.assign([TopicPartition("in", 0, 0)])
    for _ in range(20):
        if (message := reader.poll(0.5)) is not None:
            print(message.error() or f"read: {message.value()[:3]!r}...", flush=True)
    reader.close()


if sys.argv[1:2] == ["--read"]:
    read(sys.argv[2])
    sys.exit()

version = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION
with tempfile.TemporaryDirectory() as folder, LocalKafka(version=version, data=folder) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    producer = Producer({"bootstrap.servers": servers, "compression.type": "lz4"})
    producer.produce("in", "one" * 500, partition=0)
    assert producer.flush(30) == 0
    segment = kafka.log_path(0).parent / "data" / "in-0" / f"{0:020}.log"
    with segment.open("r+b") as file:
        file.seek(RECORDS_AT + BLOCK_SIZE_AT)
        there = file.read(1)[0]
        file.seek(RECORDS_AT + BLOCK_SIZE_AT)
        file.write(bytes([there ^ 1]))
    reading = [sys.executable, __file__, "--read", servers]
    ended = subprocess.run(reading, capture_output=True, text=True, timeout=60, check=False)
print(ended.stdout + ended.stderr, end="")
seen = ended.returncode < 0
print(f"SEEN: signal {-ended.returncode} ended the process" if seen else "not seen: the process continued")
sys.exit(0 if seen else 1)
