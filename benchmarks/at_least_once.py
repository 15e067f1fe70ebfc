"""What exactly-once is paid against: a straight, tuned loop that flushes, then commits offsets, without transactions.

`python -m benchmarks.at_least_once BOOTSTRAP SOURCE TARGET COUNT GROUP [SENDER]`, a sender of straight_loop.py.
"""

from __future__ import annotations

import sys

from confluent_kafka import TopicPartition

from benchmarks.clients import at_least_once
from benchmarks.straight_loop import NEW_TIMESTAMPS, copy

INTERVAL_S = 0.1  # as often as the others end a transaction


def main(bootstrap: str, source: str, target: str, count: int, group: str, sender: str = NEW_TIMESTAMPS) -> None:
    consumer, producer = at_least_once(bootstrap, group)

    def end(positions: list[TopicPartition]) -> None:
        consumer.commit(offsets=positions, asynchronous=False)

    copy((consumer, producer), source, target, count, sender, INTERVAL_S, lambda: None, end)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
