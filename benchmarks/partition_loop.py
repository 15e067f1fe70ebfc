"""A copying loop of partitions.py in a process of its own, the worker or the loop by hand, measured from inside:
`python -m benchmarks.partition_loop LOOP BOOTSTRAP SOURCE TARGET COUNT GROUP STAY_S`.

Prints a Report as JSON. LOOP is one of LOOPS, STAY_S how long the worker runs at least.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import psutil
from confluent_kafka import TopicPartition

from benchmarks.clients import straight
from benchmarks.shapes import SHAPES, app_of
from benchmarks.straight_loop import NEW_TIMESTAMPS, copy
from eos import Settings
from eos.kafka.client.world import World
from eos.worker.running import prepare
from eos.worker.worker import Worker


class Report(msgspec.Struct):
    """What one process did from the start of its first transaction to its last commit."""

    records: int
    transactions: int
    seconds: float
    cpu_s: float
    first_commit_s: float
    """From the start of the process."""
    requests: int
    """Produce requests, of the whole run."""
    sent: int
    """Bytes of all requests that the producer sent."""
    connections: list[str]
    """The open connections of librdkafka's clients: client and broker."""
    sockets: int
    """All open TCP connections."""
    threads: dict[str, int]


class _Broker(msgspec.Struct):
    source: str
    state: str
    txbytes: int
    req: dict[str, int]


class _Statistics(msgspec.Struct):
    """The part of librdkafka's statistics (STATISTICS.md) that is read; `ts` is in microseconds of time.monotonic()."""

    type: str
    ts: int
    brokers: dict[str, _Broker]

    def connections(self) -> list[str]:
        return [f"{self.type}: {broker.source} {name}" for name, broker in self.brokers.items() if broker.state == "UP"]


class Probe:
    """Notes when transactions begin and end, and the clients' newest statistics."""

    def __init__(self) -> None:
        self.commits = 0
        self._began = self._ended = (0.0, 0.0)  # seconds, processor seconds
        self._first_commit_at = 0.0
        self._texts: dict[str, str] = {}

    def begin(self) -> None:
        if not self._began[0]:
            self._began = time.monotonic(), time.process_time()

    def commit(self) -> None:
        self._ended = time.monotonic(), time.process_time()
        self._first_commit_at = self._first_commit_at or time.time()
        self.commits += 1

    def step(self, step: str) -> None:
        """Take a step of the session's loop."""
        if step == "begin":
            self.begin()
        elif step == "committed":
            self.commit()

    def take_statistics(self, text: str) -> None:
        self._texts[text.split('"', 4)[3]] = text  # by the client's name, the first value; decoded at the end

    def has_all_statistics(self) -> bool:
        """Return whether the producer's statistics were emitted after the last commit."""
        return any(one.type == "producer" and one.ts > self._ended[0] * 1e6 for one in self._statistics())

    def _statistics(self) -> list[_Statistics]:
        return [msgspec.json.decode(text, type=_Statistics) for text in self._texts.values()]

    def report(self, records: int) -> Report:
        me, clients = psutil.Process(), self._statistics()
        brokers = [broker for client in clients if client.type == "producer" for broker in client.brokers.values()]
        return Report(
            records=records,
            transactions=self.commits,
            seconds=self._ended[0] - self._began[0],
            cpu_s=self._ended[1] - self._began[1],
            first_commit_s=self._first_commit_at - me.create_time(),
            requests=sum(broker.req.get("Produce", 0) for broker in brokers),
            sent=sum(broker.txbytes for broker in brokers),
            connections=[line for client in clients for line in client.connections()],
            sockets=sum(one.status == psutil.CONN_ESTABLISHED for one in me.net_connections("tcp")),
            threads=Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")),
        )


def by_hand(sender: str, bootstrap: str, source: str, target: str, count: int, group: str, stay_s: float) -> Report:
    probe = Probe()
    statistics = {"statistics.interval.ms": 1_000, "stats_cb": probe.take_statistics}
    consumer, producer = straight(bootstrap, group, "10", **statistics)

    def begin() -> None:
        probe.begin()
        producer.begin_transaction()

    def end(positions: list[TopicPartition]) -> None:
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
        producer.commit_transaction()
        probe.commit()

    copy((consumer, producer), source, target, count, sender, 0.1, begin, end)
    while not probe.has_all_statistics():
        producer.poll(0.1)
    return probe.report(count)


def by_eos(shape: str, bootstrap: str, source: str, target: str, count: int, group: str, stay_s: float) -> Report:
    probe, reports = Probe(), list[Report]()
    settings = Settings({"bootstrap.servers": bootstrap, "stats_cb": probe.take_statistics})
    worker = Worker(app_of(SHAPES[shape], group, source, target), settings, world=World(step=probe.step))
    session, deadline = worker.session, time.monotonic() + stay_s

    def stop_when_done() -> None:
        done = session.counters.records_in >= count and time.monotonic() > deadline
        if done and not reports and probe.has_all_statistics():
            reports.append(probe.report(session.counters.records_in))
            session.stop_requested = True

    worker.on_tick = stop_when_done
    prepare(worker)
    worker.run()
    return reports[0]


BY_HAND = "by hand"
# Each loop of eos comes after the loop by hand that does the same.
LOOPS: dict[str, Callable[[str, str, str, int, str, float], Report]] = {
    BY_HAND: partial(by_hand, "bytes"),
    "eos, function per record": partial(by_eos, "record"),
    f"{BY_HAND}, new timestamps": partial(by_hand, NEW_TIMESTAMPS),
    "eos, process_batch, new timestamps": partial(by_eos, "batch"),
}


def main(loop: str, bootstrap: str, source: str, target: str, count: str, group: str, stay_s: str) -> None:
    report = LOOPS[loop](bootstrap, source, target, int(count), group, float(stay_s))
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
