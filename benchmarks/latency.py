"""`make bench-latency`: how old a record is when a read_committed consumer of the output sees it, at a steady rate.

A source sends records at a fixed rate; each value is the moment at which it was due. A real worker process (`eos run`)
and a straight loop handle them in turns with transactions of 20 ms, on one local broker that shares the cores with all
of them. Prints percentiles per round and of all rounds, and plots the distributions. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
from confluent_kafka import Producer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.clients import describe_run, reader
from benchmarks.worker_speed import create
from eos.broker import LocalKafka

GOALS_MS = {50: 50, 99: 150}
PERCENTILES = (50, 90, 99, 99.9)
LOOPS = ("eos", "straight loop")
BY_HAND = {
    "straight loop": ["benchmarks.steady_straight"],
    "committed stage": ["benchmarks.speculative_stage", "read_committed"],
    "speculative stage": ["benchmarks.speculative_stage", "read_uncommitted"],
}
"""The loops over confluent-kafka: module and further arguments."""
BROKER_WARM_UP_S = 20.0
WARM_UP_S = 5.0  # of the source, not measured: connections to all partitions are made
START_LIMIT_S = 60.0
Ages = NDArray[np.float64]


def command_of(loop: str, bootstrap: str, source: str, target: str, group: str, interval_ms: int) -> list[str]:
    if loop in BY_HAND:
        module, *more = BY_HAND[loop]
        return [sys.executable, "-m", module, bootstrap, source, target, group, str(interval_ms), *more]
    worker = ["run", "benchmarks.steady_app:app", "--instance", "bench", "--log-level", "warning"]
    flags = ["--bootstrap-servers", bootstrap, "-X", f"eos.transaction.interval.ms={interval_ms}"]
    return [sys.executable, "-m", "eos", *worker, *flags]


def measure(
    bootstrap: str, stages: Sequence[str], per_second: int, seconds: float, interval_ms: int
) -> tuple[Ages, float]:
    """Ages in milliseconds of one run's records after these stages, and the processor seconds that the stages took per
    second. Each stage is a loop in a process with a group of its own."""
    group = f"latency-{uuid.uuid4().hex[:8]}"
    topics = [f"{group}-{number}" for number in range(len(stages) + 1)]
    for topic in topics:
        create(bootstrap, topic)
    workers = [
        start(loop, bootstrap, source, target, f"{target}-group", interval_ms)
        for loop, (source, target) in zip(stages, pairwise(topics), strict=True)
    ]
    reader = Reader(bootstrap, topics[-1])
    feeding: subprocess.Popen[bytes] | None = None
    try:
        # One record on its own first: how long a process takes to start is not what is measured here.
        probe = Producer({"bootstrap.servers": bootstrap})
        probe.produce(topics[0], b"%019d" % time.monotonic_ns(), b"probe")
        probe.flush()
        reader.ages(1, START_LIMIT_S)
        before = cpu_seconds(workers)
        feed = [sys.executable, "-m", "benchmarks.steady_source", bootstrap, topics[0], str(per_second), str(seconds)]
        feeding = subprocess.Popen(feed, stdout=subprocess.DEVNULL)
        ages = reader.ages(int(per_second * seconds), seconds + START_LIMIT_S)
        took = cpu_seconds(workers) - before
    finally:
        for process in (feeding, *workers):
            if process is not None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        reader.close()
    return ages[int(per_second * WARM_UP_S) :], took / seconds


def start(loop: str, bootstrap: str, source: str, target: str, group: str, interval_ms: int) -> subprocess.Popen[bytes]:
    names = {"EOS_BENCH_APP": group, "EOS_BENCH_SOURCE": source, "EOS_BENCH_TARGET": target}
    return subprocess.Popen(command_of(loop, bootstrap, source, target, group, interval_ms), env=os.environ | names)


def cpu_seconds(processes: list[subprocess.Popen[bytes]]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


class Reader:
    """A read_committed consumer of the output; each value is the moment at which its record was due."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = reader(bootstrap, topic)

    def ages(self, count: int, limit_s: float) -> Ages:
        """The age in milliseconds of each of the next `count` records when it came, in the order of coming."""
        ages = np.empty(count)
        seen, deadline = 0, time.monotonic() + limit_s
        while seen < count:
            # One by one: consume(n, timeout) would wait for n of them.
            message = self._consumer.poll(0.5)
            now_ns = time.monotonic_ns()
            if message is not None and message.error() is None:
                ages[seen] = (now_ns - int(message.value()[:19])) / 1e6
                seen += 1
            elif now_ns / 1e9 > deadline:
                raise TimeoutError(f"{seen} of {count} records came")
        return ages

    def close(self) -> None:
        self._consumer.close()


def row(loop: str, ages: Ages, cpu: str) -> list[str]:
    return [
        loop,
        f"{len(ages):,}",
        *(f"{np.percentile(ages, p):.0f}" for p in PERCENTILES),
        f"{ages.max():.0f}",
        cpu,
    ]


def plot(path: Path, title: str, ages: dict[str, Ages]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for loop, all_ages in ages.items():
        # Exceedance on two logarithmic axes: the tail is what a mean hides.
        axes.plot(np.sort(all_ages)[::-1], np.arange(1, len(all_ages) + 1) / len(all_ages), label=loop)
    for percentile, goal_ms in GOALS_MS.items():
        axes.plot(goal_ms, 1 - percentile / 100, "kx")
        where = (goal_ms, 1 - percentile / 100)
        axes.annotate(f"goal: p{percentile} < {goal_ms} ms", where, (-6, 4), textcoords="offset points", ha="right")
    axes.set(
        xscale="log", yscale="log", xlabel="age when a reader sees it, ms", ylabel="part of the records that is older"
    )
    axes.set(title=title, ylim=(1e-5, 1.2))
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=35.0, help="of one run, the first 5 are not measured")
    parser.add_argument("--rate", type=int, default=5_000, help="records per second")
    parser.add_argument("--interval-ms", type=int, default=20, help="of a transaction")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    parser.add_argument("--plot", type=Path, default=Path("build/bench/latency.png"))
    options = parser.parse_args()
    console = Console(width=110)
    console.print(describe_run("latency"))
    title = f"{options.rate:,} records/s of 100 B, transactions of {options.interval_ms} ms"
    every: dict[str, list[Ages]] = {loop: [] for loop in options.loops}
    cpu: dict[str, list[float]] = {loop: [] for loop in options.loops}
    with LocalKafka(nodes=1) as kafka:
        # A broker that has just started answers slowly: whoever comes first would fall behind by seconds.
        measure(kafka.bootstrap_servers, ["straight loop"], options.rate, BROKER_WARM_UP_S, options.interval_ms)
        for turn in range(options.rounds):
            for at in range(len(options.loops)):
                loop = options.loops[(turn + at) % len(options.loops)]
                ages, took = measure(
                    kafka.bootstrap_servers, [loop], options.rate, options.seconds, options.interval_ms
                )
                every[loop].append(ages)
                cpu[loop].append(took)
                console.print("  " + "  ".join(row(f"round {turn + 1}, {loop}:", ages, f"cpu {took:.2f}")))
    together = {loop: np.concatenate(rounds) for loop, rounds in every.items()}
    table = Table("loop", "records", *(f"p{p} ms" for p in PERCENTILES), "max", "worker's cpu", title=title)
    for loop, ages in together.items():
        table.add_row(*row(loop, ages, f"{np.median(cpu[loop]):.2f}"))
    console.print(table)
    goals = ", ".join(f"p{percentile} < {goal} ms" for percentile, goal in GOALS_MS.items())
    console.print(f"goals: {goals}; plot: {options.plot}")
    plot(options.plot, title, together)


if __name__ == "__main__":
    main()
