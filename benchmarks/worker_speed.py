"""`make bench`: the worker against a straight, tuned confluent-kafka exactly-once loop, interleaved in one run.

Prints records/s per round, medians and ratios, the processor seconds of each process with its start, how often a
healthy producer was replaced, and the slope of the resident size over a long run. Ratios can be trusted, absolute rates
are this machine's. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import uuid

import numpy as np
import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from benchmarks.clients import BROKER, cpu_s_of_children, describe_run
from benchmarks.shapes import SHAPES
from benchmarks.straight_loop import SENDERS
from eos import hotloop
from eos.broker import LocalKafka

PARTITIONS = 8
LOOPS = {
    "straight loop": ["benchmarks.straight_loop"],
    "straight loop, keeping timestamps": ["benchmarks.straight_loop", "5", "100", "bytes"],
    "eos, Record handler": ["benchmarks.eos_loop", "record"],
    "eos, process_batch": ["benchmarks.eos_loop", "batch"],
}
# What exactly-once costs: each pair does the same, the first without transactions.
COST = {
    "by hand, at least once: new timestamps": ["benchmarks.at_least_once"],
    "by hand, at least once: bytes": ["benchmarks.at_least_once", "bytes"],
    "eos, exactly once: bytes": ["benchmarks.eos_loop", "bytes"],
    "by hand, at least once: json": ["benchmarks.at_least_once", "json"],
    "eos, exactly once: struct": ["benchmarks.eos_loop", "struct"],
}
PARTS = ("loops", "cost", "shapes", "memory")


def shapes() -> dict[str, list[str]]:
    """Every shape of benchmarks/shapes.py after the loop that does the same by hand."""
    loops: dict[str, list[str]] = {}
    for sender in SENDERS:
        loops[f"by hand: {sender}"] = ["benchmarks.straight_loop", "10", "100", sender]
        loops |= {name: ["benchmarks.eos_loop", name] for name, shape in SHAPES.items() if shape.by_hand == sender}
    # Transactions that have nothing but offsets: their first request meets the markers of the one before.
    loops["filter"].append("eos.transaction.interval.ms=100")
    return loops


def load(
    bootstrap: str,
    topic: str,
    count: int,
    size: int,
    keys: int = 10_000,
    span_ms: int = 0,
    partitions: int = PARTITIONS,
    partitioner: str = "consistent_random",
) -> None:
    """Write `count` records of `size` bytes (12-byte keys, values that are JSON) into a new topic.

    Their timestamps are the last `span_ms` in order, or the time of sending if it is 0.
    """
    begin_ms = int(time.time() * 1000) - span_ms
    create(bootstrap, topic, partitions)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "partitioner": partitioner,
            "linger.ms": 20,
            "queue.buffering.max.messages": 500_000,
            "enable.idempotence": True,  # in order
        }
    )
    rest = b',"text":"%s"}'
    rest %= b"x" * (size - len(rest) + len(b"%s") - len(b'{"n":') - 10)
    for number in range(count):
        time_ms = begin_ms + number * span_ms // count if span_ms else 0
        while True:
            try:
                value, key = b'{"n":1%09d' % number + rest, b"key-%08d" % (number % keys)
                producer.produce(topic, value, key, timestamp=time_ms)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def create(bootstrap: str, topic: str, partitions: int = PARTITIONS) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()


def delete(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result()  # without it, the client may end before it has sent the request


def run(bootstrap: str, loop: list[str], source: str, count: int) -> tuple[list[float], float]:
    """One process, one new group, one new target topic. Return [records, seconds, ...] as the loop prints them, and the
    processor seconds of the process."""
    module, *kind = loop
    group = f"bench-{uuid.uuid4().hex[:8]}"
    create(bootstrap, f"{group}-out")
    command = [sys.executable, "-m", module, bootstrap, source, f"{group}-out", str(count), group, *kind]
    before = cpu_s_of_children()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=150)
    cpu_s = cpu_s_of_children() - before
    delete(bootstrap, f"{group}-out")
    return [float(part) for part in done.stdout.split()], cpu_s


def compare(
    console: Console, bootstrap: str, name: str, loops: dict[str, list[str]], count: int, size: int, rounds: int
) -> None:
    """In turns; ratios are to the last straight loop before each of `loops`."""
    source = f"in-{size}-{uuid.uuid4().hex[:6]}"
    console.print(f"[bold]{name}[/]: loading {count:,} records of {size} B")
    load(bootstrap, source, count, size)
    rates: dict[str, list[float]] = {loop: [] for loop in loops}
    sizes: dict[str, list[float]] = {loop: [] for loop in loops}
    cpu_per_million: dict[str, list[float]] = {loop: [] for loop in loops}
    transactions = replaced = 0
    for turn in range(rounds):
        order = list(loops)
        # Each loop runs first, second, third and last as often: the disk is slower behind a neighbour's writes.
        for loop in order[turn % len(order) :] + order[: turn % len(order)]:
            (records, seconds, ended, *more), cpu_s = run(bootstrap, loops[loop], source, count)
            rates[loop].append(records / seconds)
            sizes[loop].append(1000 * seconds / ended)
            cpu_per_million[loop].append(cpu_s / records * 1e6)
            if more:
                transactions, replaced = transactions + int(ended), replaced + int(more[0])
        console.print(f"  round {turn + 1}: " + ", ".join(f"{loop} {r[-1]:,.0f}/s" for loop, r in rates.items()))
    straight: list[float] = []
    columns = "median records/s", "median of the rounds' ratios", "CPU s per million", "ms/transaction", "all rounds"
    table = Table("loop", *columns, title=name)
    for loop, all_rates in rates.items():
        if not straight or loop.startswith("by hand"):
            straight = all_rates
        median = statistics.median(all_rates)
        table.add_row(
            loop,
            f"{median:,.0f}",
            # Round by round: the machine changes from minute to minute (what the disk has to write back, neighbours).
            f"{statistics.median(mine / its for mine, its in zip(all_rates, straight, strict=True)):.2f}",
            f"{statistics.median(cpu_per_million[loop]):.2f}",
            f"{statistics.median(sizes[loop]):.0f}",
            " ".join(f"{r / 1000:.0f}k" for r in all_rates),
        )
    console.print(table)
    console.print(f"replaced producers on this healthy broker: {replaced} in {transactions} transactions\n")


def memory(console: Console, bootstrap: str, millions: int) -> None:
    """Slope of the resident size over the last 80 % of a long run, whose input is loaded and read once."""
    source = f"in-memory-{uuid.uuid4().hex[:6]}"
    load(bootstrap, source, millions * 1_000_000, 100)
    group = f"bench-{uuid.uuid4().hex[:8]}"
    create(bootstrap, f"{group}-out")
    count = millions * 1_000_000
    command = [
        sys.executable,
        "-m",
        "benchmarks.eos_loop",
        bootstrap,
        source,
        f"{group}-out",
        str(count),
        group,
        "record",
    ]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watched, samples = psutil.Process(process.pid), []
    while process.poll() is None:
        try:
            samples.append((time.monotonic() - began, watched.memory_info().rss))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.2)
    assert process.stdout is not None
    records, seconds, *_ = (float(part) for part in process.stdout.read().split())
    times, sizes = np.array([t for t, _ in samples]), np.array([s for _, s in samples])
    late = times > times[-1] * 0.2
    per_second = np.polyfit(times[late], sizes[late], 1)[0]
    slope = per_second * seconds / (records / 1e6) / 1e6
    console.print(
        f"memory: {records:,.0f} records in {seconds:.0f} s, resident {sizes[late].min() / 1e6:.0f} to "
        f"{sizes[late].max() / 1e6:.0f} MB, slope over the last 80 %: {slope:+.2f} MB per million records"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--memory-millions", type=int, default=10)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; repeatable")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the records, to try the script out")
    options = parser.parse_args()
    console = Console(width=130)
    loop = "compiled" if hotloop.COMPILED else "in Python"
    console.print(describe_run("worker_speed", f"hot loop {loop}"))
    with LocalKafka(nodes=1, config=BROKER) as kafka:
        bootstrap = kafka.bootstrap_servers
        asked = options.only or PARTS

        def compared(part: str, name: str, loops: dict[str, list[str]], count: int, size: int) -> None:
            if part in asked:
                compare(console, bootstrap, name, loops, int(count * options.scale), size, options.rounds)

        compared("loops", "2M x 100 B", LOOPS, 2_000_000, 100)
        compared("loops", "600k x 1 KB", LOOPS, 600_000, 1_000)
        compared("cost", "what exactly-once costs, 2M x 100 B", COST, 2_000_000, 100)
        # Each process has a slower first transaction, which would be a tenth of a run of 500k.
        compared("shapes", "each shape, 2M x 100 B", shapes(), 2_000_000, 100)
        if options.memory_millions and "memory" in asked:
            memory(console, bootstrap, options.memory_millions)


if __name__ == "__main__":
    main()
