"""Check that a chain of speculative stages has exactly the output of the committed input.

A producer sends transactions to the first of three stages (speculative_stage.py) and aborts a third of them. The output
must have each committed record once, in the order of its key, and no other. Each stage prints how many transactions it
aborted. Exits with 1 if the output differs.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections import defaultdict
from itertools import pairwise

from confluent_kafka import Producer

from benchmarks.clients import BROKER, reader
from benchmarks.latency import start
from benchmarks.worker_speed import create
from eos.broker import LocalKafka

STAGES, KEYS, INTERVAL_MS, SILENCE_S, LIMIT_S = 3, 50, 100, 5.0, 120.0
Values = dict[bytes, list[bytes]]


def feed(bootstrap: str, topic: str, transactions: int, chance: random.Random) -> Values:
    """Send transactions of up to 40 records, and return the committed values by key."""
    committed: Values = defaultdict(list)
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "linger.ms": 1})
    producer.init_transactions()
    for number in range(transactions):
        producer.begin_transaction()
        sent = [(b"%d" % chance.randrange(KEYS), b"%d.%d" % (number, n)) for n in range(chance.randrange(1, 40))]
        for key, value in sent:
            producer.produce(topic, value, key)
        producer.flush()
        time.sleep(chance.random() * 2 * INTERVAL_MS / 1000)  # the stages read the records before their end
        if chance.random() < 1 / 3:
            producer.abort_transaction()
            continue
        producer.commit_transaction()
        for key, value in sent:
            committed[key].append(value)
    return committed


def collect(bootstrap: str, topic: str, count: int) -> Values:
    """Return the committed values by key: this many, and all that come in the seconds after them."""
    values: Values = defaultdict(list)
    consumer, seen, last = reader(bootstrap, topic), 0, time.monotonic()
    while time.monotonic() - last < (LIMIT_S if seen < count else SILENCE_S):
        message = consumer.poll(0.5)
        if message is not None and message.error() is None:
            values[message.key()].append(message.value())
            seen, last = seen + 1, time.monotonic()
    consumer.close()
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    topics = [f"checked-{number}" for number in range(STAGES + 1)]
    with LocalKafka(nodes=1, config=BROKER) as kafka:
        bootstrap = kafka.bootstrap_servers
        for topic in topics:
            create(bootstrap, topic)
        stages = [
            start("speculative stage", bootstrap, *pair, f"{pair[1]}-group", INTERVAL_MS) for pair in pairwise(topics)
        ]
        try:
            sent = feed(bootstrap, topics[0], options.transactions, random.Random(options.seed))
            count = sum(map(len, sent.values()))
            found = collect(bootstrap, topics[-1], count)
        finally:
            for stage in stages:
                stage.send_signal(signal.SIGTERM)
                stage.wait(60)
    equal = count > 0 and found == sent
    print(f"seed {options.seed}: {count} committed records, {sum(map(len, found.values()))} found, equal: {equal}")
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
