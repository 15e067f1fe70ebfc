"""The yardstick of latency.py: a straight exactly-once loop with short transactions and a poll of 2 ms.

As straight_loop.py it has no recovery, no rebalance handling and no error policy. Run as a process:
`python -m benchmarks.steady_straight BOOTSTRAP SOURCE TARGET GROUP INTERVAL_MS`; SIGTERM ends it.
"""

from __future__ import annotations

import gc
import signal
import sys
import time

from confluent_kafka import TopicPartition

from benchmarks.clients import straight


def main(bootstrap: str, source: str, target: str, group: str, interval_s: float) -> None:
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    consumer, producer = straight(bootstrap, group)
    consumer.subscribe([source])
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    offsets: dict[int, int] = {}
    began = 0.0
    while not stopping:
        messages = consumer.consume(500, 0.002)
        if messages and not began:
            began = time.monotonic()
            producer.begin_transaction()
        for message in messages:
            producer.produce(target, message.value().upper(), message.key())
            offsets[message.partition()] = message.offset() + 1
        producer.poll(0)
        if began and time.monotonic() - began >= interval_s:
            producer.flush()
            positions = [TopicPartition(source, p, o) for p, o in offsets.items()]
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
            producer.commit_transaction()
            began, offsets = 0.0, {}
    consumer.close()


if __name__ == "__main__":
    servers, in_topic, out_topic, group_id, interval_ms = sys.argv[1:]
    main(servers, in_topic, out_topic, group_id, float(interval_ms) / 1000)
