"""Shows the same fault without transactions: a plain at-least-once loop is killed and duplicates records.

Owns the loop (its own process: `python -m eos.demo.contrast SERVERS RECORDS_PER_COMMIT`) and its fault. It must never
use eos' engine: it is the loop that people write by hand.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from eos.demo import topics
from eos.demo.faults import MAX_ATTEMPTS, NotProven
from eos.demo.process import Child
from eos.testing.history import committed_offsets, end_offsets, read_topic

PARTITIONS = (0, 1)  # a quarter of the flights is enough to show the effect
_COMMITS = 800  # commits of the whole loop, for any number of flights, so that a kill comes between two commits


def at_least_once(servers: str, commit_every: int) -> None:
    """Consume, transform, produce, flush, and commit last, so that no record is lost."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": topics.CONTRAST_GROUP,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    consumer.assign([TopicPartition(topics.FLIGHTS, partition) for partition in PARTITIONS])
    at_end: set[int | None] = set()
    while len(at_end) < len(PARTITIONS):
        for message in consumer.consume(commit_every, 0.5):
            error = message.error()
            if error is None:
                flight = json.loads(message.value() or b"")
                delay = {name: flight[name] for name in ("carrier", "dest")} | {"minutes": flight["dep_delay"] or 0}
                producer.produce(topics.CONTRAST, json.dumps(delay), message.key())
            elif error.code() == KafkaError._PARTITION_EOF:
                at_end.add(message.partition())
            else:
                raise KafkaException(error)
        producer.flush()
        consumer.commit(asynchronous=False)
    consumer.close()


@dataclass(frozen=True)
class Contrast:
    """Holds the results of the at-least-once loop."""

    flights: int
    records: int
    doubled: int
    kills: int


def flights(servers: str) -> int:
    """Return how many flights the loop gets."""
    return sum(
        end for (_, p), end in end_offsets(servers, topics.FLIGHTS, topics.QUIET).stable.items() if p in PARTITIONS
    )


def run(servers: str, directory: Path, total: int, progress: Callable[[int], None]) -> Contrast:
    """Kill the loop until it will repeat records, let it finish, and count the duplicates.

    Raises NotProven if no kill has that effect.
    """
    with Child("at-least-once", ["eos.demo.contrast", servers, str(max(1, total // _COMMITS))], directory) as loop:
        kills = 0
        while True:
            loop.start()
            _wait_for_output(servers, loop, progress)
            loop.kill()
            kills += 1
            if _written(servers) > _committed(servers):
                break
            if kills == MAX_ATTEMPTS:
                raise NotProven(f"{kills} SIGKILLs did not make the at-least-once loop repeat a record")
        loop.start()
        while (code := loop.exit_code()) is None:
            progress(_committed(servers))
            time.sleep(0.1)
        if code != 0:
            raise NotProven(f"the at-least-once loop failed with exit code {code}: {loop.log_path}")
    keys = read_topic(servers, topics.CONTRAST, config=topics.QUIET).keys
    return Contrast(total, len(keys), len(keys) - len(set(keys)), kills)


def _wait_for_output(servers: str, loop: Child, progress: Callable[[int], None]) -> None:
    """Wait until the loop has written and committed records since its last start."""
    before, deadline = _committed(servers), time.monotonic() + 30
    while (now := _committed(servers)) <= before:
        progress(now)
        if loop.exit_code() is not None or time.monotonic() > deadline:
            raise NotProven(f"the at-least-once loop finished before a kill hit it: {loop.log_path}")


def _written(servers: str) -> int:
    return sum(end_offsets(servers, topics.CONTRAST, topics.QUIET).log_end.values())


def _committed(servers: str) -> int:
    return sum(committed_offsets(servers, topics.CONTRAST_GROUP, topics.FLIGHTS, topics.QUIET).values())


if __name__ == "__main__":
    at_least_once(sys.argv[1], int(sys.argv[2]))
