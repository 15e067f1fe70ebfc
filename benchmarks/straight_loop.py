"""The yardstick: a straight, tuned confluent-kafka exactly-once loop, as short as it can be.

It has no recovery, no rebalance handling and no error policy: what a careful person writes by hand for speed.
Run as a process by worker_speed.py and far.py:
`python -m benchmarks.straight_loop BOOTSTRAP SOURCE TARGET COUNT GROUP [LINGER [INTERVAL_MS [filter]]]`; as a filter it
sends nothing.
"""

from __future__ import annotations

import gc
import sys
import time

from confluent_kafka import TopicPartition

from benchmarks.clients import straight

# 100 ms transactions need chunks well below 100 ms of work; larger ones only make larger transactions.
CHUNK = 2_000


def main(
    bootstrap: str,
    source: str,
    target: str,
    count: int,
    group: str,
    linger_ms: str = "5",
    ms: str = "100",
    kind: str = "",
) -> None:
    consumer, producer = straight(bootstrap, group, linger_ms)
    consumer.subscribe([source])
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    produce, done, offsets, interval_s = producer.produce, 0, {}, int(ms) / 1000
    began = first = 0.0
    transactions = 0
    while done < count:
        messages = consumer.consume(CHUNK, 0.05)
        if messages and not began:
            first = first or time.monotonic()
            began = time.monotonic()
            producer.begin_transaction()
        for message in messages:
            if message.error() is not None:  # its value() would be the error's text, and go out as a record
                raise SystemExit(str(message.error()))
            while kind != "filter":
                try:
                    produce(target, message.value().upper(), message.key())
                    break
                except BufferError:
                    producer.poll(0.05)
            offsets[message.partition()] = message.offset() + 1
        done += len(messages)
        producer.poll(0)
        if began and (time.monotonic() - began >= interval_s or done >= count):
            producer.flush()
            positions = [TopicPartition(source, p, o) for p, o in offsets.items()]
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
            producer.commit_transaction()
            began, offsets = 0.0, {}
            transactions += 1
    print(f"{done} {time.monotonic() - first:.4f} {transactions}", flush=True)
    consumer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
