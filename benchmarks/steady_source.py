"""Records at a steady rate, each with the moment at which it was due in its value.

Run as a process: `python -m benchmarks.steady_source BOOTSTRAP TOPIC PER_SECOND SECONDS`; prints how many it sent and
by how many milliseconds it was late at most. A record that is sent late still carries the moment at which it was due:
what holds the source up counts as latency instead of being left out.
"""

from __future__ import annotations

import sys
import time

from confluent_kafka import Producer

SIZE = 100
TICK_S = 0.001
LINGER_MS = 1


def main(bootstrap: str, topic: str, per_second: int, seconds: float) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": LINGER_MS})
    padding = b"x" * (SIZE - 19)
    began_ns = time.monotonic_ns()
    step_ns = 10**9 // per_second
    count, sent, latest_ns = int(per_second * seconds), 0, 0
    while sent < count:
        now_ns = time.monotonic_ns()
        due = min(count, (now_ns - began_ns) // step_ns + 1)
        latest_ns = max(latest_ns, now_ns - (began_ns + sent * step_ns))
        for number in range(sent, due):
            producer.produce(topic, b"%019d" % (began_ns + number * step_ns) + padding, b"key-%08d" % (number % 10_000))
        sent = due
        producer.poll(0)
        time.sleep(TICK_S)
    producer.flush()
    print(f"{sent} {latest_ns / 1e6:.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
