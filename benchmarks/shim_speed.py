"""`make bench-shim`: transactions through the shim against the same ones direct, interleaved in one run.

Prints per size the records/s of every round and the median of the rounds' ratios, the p50 of a transaction with one
record, the shim's CPU seconds per GB, and its memory over 10,000 connections and with 1,000 open. Ratios can be
trusted, absolute rates are this machine's: client, shim and broker share its cores. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from benchmarks.clients import describe_run
from eos.broker import LocalKafka

PARTITIONS = 4
# (what, records per transaction, transactions per round, bytes per record)
SIZES = [("100 B x 20,000", 20_000, 8, 100), ("1 KB x 5,000", 5_000, 8, 1_000)]
# ApiVersions v0 with correlation id 1 and an empty client id.
_API_VERSIONS = bytes.fromhex("0000000a00120000000000010000")


class ShimProcess:
    """`eos shim` as users run it; `servers` is its first port."""

    def __init__(self, process: subprocess.Popen[str], servers: str) -> None:
        self.process, self.servers = process, servers
        self._watched = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        return float(self._watched.memory_info().rss) / 1e6


@contextmanager
def shim(upstream: str, options: list[str]) -> Iterator[ShimProcess]:
    command = [sys.executable, "-m", "eos", "shim", "--upstream", upstream, "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"listening.*address=(\S+)", line)
            if found:
                yield ShimProcess(process, found[1])
                return
        raise RuntimeError(f"the shim ended with {process.wait()}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def producer_of(servers: str) -> Producer:
    settings = {"bootstrap.servers": servers, "transactional.id": f"bench-{uuid.uuid4().hex[:8]}", "linger.ms": 5}
    producer = Producer(settings | {"queue.buffering.max.messages": 500_000})
    producer.init_transactions(30)
    return producer


def transactions(servers: str, topic: str, records: int, count: int, size: int) -> float:
    """Seconds for `count` transactions of `records`, the first one (connections, metadata) not counted."""
    producer, value = producer_of(servers), bytes(size)
    began = 0.0
    for number in range(count + 1):
        if number == 1:
            began = time.perf_counter()
        producer.begin_transaction()
        for at in range(records):
            producer.produce(topic, value, partition=at % PARTITIONS)
            if at % 1_000 == 0:
                producer.poll(0)
        producer.commit_transaction(60)
    took = time.perf_counter() - began
    producer.close()
    return took


def small_ms(servers: str, topic: str, count: int) -> list[float]:
    """Milliseconds of each of `count` transactions with one record."""
    producer, found = producer_of(servers), []
    for _ in range(count):
        began = time.perf_counter()
        producer.begin_transaction()
        producer.produce(topic, b"x", partition=0)
        producer.commit_transaction(30)
        found.append(1000 * (time.perf_counter() - began))
    producer.close()
    return found[10:]


def new_topic(bootstrap: str) -> str:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})  # must outlive the call
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(30)
    return name


def drop(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(30)


def throughput(console: Console, bootstrap: str, shim_: ShimProcess, rounds: int, scale: float) -> None:
    for what, records, count, size in SIZES:
        count = max(2, int(count * scale))
        ways = {"direct": bootstrap, "shim": shim_.servers}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        cpu_s = 0.0
        for turn in range(rounds):
            for way in list(ways) if turn % 2 else list(ways)[::-1]:
                topic, before = new_topic(bootstrap), shim_.cpu_s()
                rates[way].append(records * count / transactions(ways[way], topic, records, count, size))
                cpu_s += shim_.cpu_s() - before if way == "shim" else 0.0
                drop(bootstrap, topic)
        ratios = [mine / its for mine, its in zip(rates["shim"], rates["direct"], strict=True)]
        table = Table("way", "median records/s", "all rounds", title=f"{what} per transaction")
        for way, all_rates in rates.items():
            table.add_row(
                way, f"{statistics.median(all_rates):,.0f}", " ".join(f"{rate / 1000:.0f}k" for rate in all_rates)
            )
        console.print(table)
        moved_gb = records * (count + 1) * size * rounds / 1e9
        console.print(
            f"shim / direct, median of the rounds: {statistics.median(ratios):.2f} "
            f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}); "
            f"{cpu_s / moved_gb:.1f} CPU-s of the shim per GB of values"
        )


def latency(console: Console, bootstrap: str, shim_: ShimProcess, rounds: int, count: int) -> None:
    topic = new_topic(bootstrap)
    found: dict[str, list[float]] = {"direct": [], "shim": []}
    for _ in range(rounds):
        found["direct"] += small_ms(bootstrap, topic, count)
        found["shim"] += small_ms(shim_.servers, topic, count)
    direct, through = (statistics.median(found[way]) for way in ("direct", "shim"))
    console.print(
        f"a transaction with one record, p50 of {len(found['shim'])}: direct {direct:.2f} ms, shim {through:.2f} ms, "
        f"{through - direct:+.2f} ms"
    )


def _ask(address: tuple[str, int]) -> socket.socket:
    """A connection that has been answered once."""
    made = socket.create_connection(address, 30)
    made.sendall(_API_VERSIONS)
    if not made.recv(4):
        raise RuntimeError("the shim closed the connection")
    return made


def memory(console: Console, shim_: ShimProcess, connections: int, at_once: int) -> None:
    host, port = shim_.servers.split(":")
    address = (host, int(port))
    sizes = []
    for number in range(connections):
        _ask(address).close()
        if number % (connections // 10) == connections // 10 - 1:
            sizes.append(shim_.rss_mb())
    console.print(f"{connections:,} connections opened and closed: " + " ".join(f"{mb:.1f}" for mb in sizes) + " MB")
    before = shim_.rss_mb()
    for turn in range(4):
        held = [_ask(address) for _ in range(at_once)]
        during = shim_.rss_mb()
        for each in held:
            each.close()
        time.sleep(1)
        console.print(f"{at_once:,} at once, time {turn + 1}: {before:.1f} -> {during:.1f} -> {shim_.rss_mb():.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the records, to try the script out")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--options", nargs="*", default=["--protect"], help="of the shim")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(describe_run("shim_speed", f"shim {' '.join(options.options)}"))
    with LocalKafka() as kafka, shim(kafka.bootstrap_servers, options.options) as through:
        latency(console, kafka.bootstrap_servers, through, 2, max(50, int(300 * options.scale)))
        throughput(console, kafka.bootstrap_servers, through, options.rounds, options.scale)
        memory(console, through, options.connections, min(1_000, options.connections))


if __name__ == "__main__":
    main()
