"""`make bench-partitions`: topics of many partitions, the worker beside the loop by hand.

Four parts: speed, requests and processor seconds by the number of partitions; processor seconds by the number of
workers; connections and threads of one worker; resident size of a worker whose function is slow. The input is written
with the outputs' partitioner. Processor seconds are steadier than rates on a busy machine. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import msgspec
import numpy as np
import psutil
from confluent_kafka.admin import AdminClient
from rich.console import Console
from rich.table import Table

from benchmarks.clients import BROKER, cpu_s_of_children, describe_run
from benchmarks.partition_loop import BY_HAND, LOOPS, Report
from benchmarks.worker_speed import create, load
from eos.broker import LocalKafka

SIZE = 100
SLOW_PARTITIONS, SLOW_RECORDS, SLOW_SIZE = 200, 300_000, 1_000
WORKER_COUNTS = (1, 2, 4)
SLEEPS_S = (0.02, 10.0)
STAY_S = 15.0  # of a worker whose connections are counted: periodic checks have run by then
QUIET = 0.05  # of a processor
TABLE_COLUMNS = ("loop", "records/s", "CPU s per million", "broker's", "requests", "B per request", "first commit, s")


class Measured(msgspec.Struct):
    """A loop's own report, and what the broker took for it. `logins`: all connections that the process opened."""

    report: Report
    broker_cpu_s: float
    logins: int

    def figures(self) -> list[float]:
        """The figures of TABLE_COLUMNS."""
        one, millions = self.report, self.report.records / 1e6
        sent = one.sent / one.requests
        cpu = one.cpu_s / millions
        return [one.records / one.seconds, cpu, self.broker_cpu_s / millions, one.requests, sent, one.first_commit_s]


class Bench:
    """The broker, the console and the input topics."""

    def __init__(self, kafka: LocalKafka, console: Console) -> None:
        self.bootstrap, self.console = kafka.bootstrap_servers, console
        self._broker = psutil.Process(kafka.pid(0))
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap})

    def load(self, count: int, partitions: int, size: int = SIZE) -> str:
        """Return the name of a new topic with this input."""
        topic = f"in-{uuid.uuid4().hex[:6]}"
        load(self.bootstrap, topic, count, size, partitions=partitions, partitioner="murmur2_random")
        return topic

    @contextmanager
    def target(self, partitions: int) -> Iterator[str]:
        """A new output topic, deleted afterwards. The broker has nothing else to do before and after."""
        topic = f"out-{uuid.uuid4().hex[:6]}"
        create(self.bootstrap, topic, partitions)
        self._wait_until_quiet()
        yield topic
        self._admin.delete_topics([topic])[topic].result()
        self._wait_until_quiet()

    def _wait_until_quiet(self) -> None:
        self._broker.cpu_percent()
        while self._broker.cpu_percent(0.5) > 100 * QUIET:
            pass

    def broker_cpu_s(self) -> float:
        times = self._broker.cpu_times()
        return times.user + times.system

    def measure(self, loop: str, source: str, partitions: int, count: int, stay_s: float = 0) -> Measured:
        """Run the loop once. Only with `stay_s` its logins are counted, because that takes processor time."""
        with self.target(partitions) as target:
            before = self.broker_cpu_s()
            process = self.start(loop, source, target, count, stay_s)
            logins = ports_until_end(process) if stay_s else set[int]()
            return Measured(report_of(process), self.broker_cpu_s() - before, len(logins))

    def start(self, loop: str, source: str, target: str, count: int, stay_s: float = 0) -> subprocess.Popen[bytes]:
        command = [loop, self.bootstrap, source, target, str(count), f"{source}-{target}", str(stay_s)]
        return subprocess.Popen([sys.executable, "-m", "benchmarks.partition_loop", *command], stdout=subprocess.PIPE)

    @contextmanager
    def worker(self, source: str, partitions: int, *options: str, **names: str) -> Iterator[subprocess.Popen[bytes]]:
        """`eos run` with these options, ended with SIGTERM."""
        with self.target(partitions) as target:
            names |= {"EOS_BENCH_APP": f"{target}-app", "EOS_BENCH_SOURCE": source, "EOS_BENCH_TARGET": target}
            command = ["run", "benchmarks.steady_app:app", "--instance", "bench", "--bootstrap-servers", self.bootstrap]
            process = subprocess.Popen(
                [sys.executable, "-m", "eos", *command, "--log-level", "warning", *options], env=os.environ | names
            )
            yield process
            process.terminate()
            process.wait(60)


def report_of(process: subprocess.Popen[bytes]) -> Report:
    """Wait for the loop's end and return what it printed."""
    return msgspec.json.decode(process.communicate()[0].splitlines()[-1], type=Report)


def ports_until_end(process: subprocess.Popen[bytes]) -> set[int]:
    """The local ports of all connections that the process has until it ends."""
    watched, ports = psutil.Process(process.pid), set[int]()
    while process.poll() is None:
        with_remote = (one for one in watched.net_connections("tcp") if one.raddr)
        ports |= {one.laddr.port for one in with_remote}
        time.sleep(0.01)
    return ports


def speed(bench: Bench, partitions: int, count: int, rounds: int) -> None:
    source = bench.load(count, partitions)
    runs: dict[str, list[list[float]]] = {loop: [] for loop in LOOPS}
    for turn in range(rounds + 1):
        for at in range(len(LOOPS)):
            loop = list(LOOPS)[(turn + at) % len(LOOPS)]
            runs[loop].append(bench.measure(loop, source, partitions, count).figures())
    table = Table(*TABLE_COLUMNS, title=f"{partitions:,} partitions, {count:,} records of {SIZE} B, medians and ratios")
    figures = {loop: np.array(rounds[1:]) for loop, rounds in runs.items()}  # the first one warms the broker up
    baseline = figures[BY_HAND]
    for loop, one in figures.items():
        if loop.startswith(BY_HAND):
            baseline = one
        ratios = one / baseline
        table.add_row(loop, *map(rounded, np.median(one, axis=0)))
        table.add_row("  ratio to the loop by hand", *map(rounded, np.median(ratios, axis=0)))
        bench.console.print(f"{loop}, ratios of records/s:", *map(rounded, ratios[:, 0]))
    bench.console.print(table)


def workers(bench: Bench, partitions: int, count: int, rounds: int) -> None:
    """Run to the end of the input and of an empty topic; the difference is what the records cost.

    Beside it as many loops by hand at once, each with its share of the input's partitions and records: what processes
    that share the cores, the caches and the broker cost without eos. Like the workers, all write to one topic of all
    partitions, so their batches are smaller than those of one process.
    """
    sources = {number: bench.load(number, partitions) for number in (count, 0)}
    shares = {n: [bench.load(count // n, partitions // n) for _ in range(n)] for n in WORKER_COUNTS}
    columns = ("workers", "CPU s, start and stop", "CPU s per million", "by hand", "all rounds", "by hand")
    table = Table(*columns, title=f"{partitions} partitions, {count:,} records")
    taken: dict[tuple[int, int], list[float]] = {(n, records): [] for n in WORKER_COUNTS for records in sources}
    by_hand: dict[int, list[float]] = {n: [] for n in WORKER_COUNTS}
    for _ in range(rounds):
        for number, records in taken:
            taken[number, records].append(cpu_to_the_end(bench, sources[records], partitions, number))
        for number, its in shares.items():
            by_hand[number].append(cpu_by_hand(bench, its, partitions, count // number) / count * 1e6)
    for number in WORKER_COUNTS:
        empty = median(taken[number, 0])
        rates = [(whole - empty) / count * 1e6 for whole in taken[number, count]]
        all_rounds = (" ".join(map(rounded, each)) for each in (rates, by_hand[number]))
        table.add_row(str(number), *map(rounded, (empty, median(rates), median(by_hand[number]))), *all_rounds)
    bench.console.print(table)


def cpu_by_hand(bench: Bench, sources: list[str], partitions: int, count: int) -> float:
    """Return the CPU seconds of loops by hand that run at the same time, one per source, and share an output topic."""
    with bench.target(partitions) as target:
        started = [bench.start(BY_HAND, source, target, count) for source in sources]
        return sum(report_of(process).cpu_s for process in started)


def cpu_to_the_end(bench: Bench, source: str, partitions: int, number: int) -> float:
    """Processor seconds of all processes of `eos run --workers --until-end`."""
    before = cpu_s_of_children()
    with bench.worker(source, partitions, "--workers", str(number), "--until-end") as process:
        process.wait(300)
    return cpu_s_of_children() - before


def connections(bench: Bench, partitions: int) -> None:
    """The loop by hand has closed its consumer at the end. A socket of the worker without a line is its watcher's."""
    source = bench.load(100_000, partitions)
    for loop in LOOPS:
        seen = bench.measure(loop, source, partitions, 100_000, STAY_S)
        bench.console.print(f"{loop}: {seen.logins} connections opened, {seen.report.sockets} at the end")
        for line in sorted(seen.report.connections):
            bench.console.print(f"  {line}")
        bench.console.print(f"  threads: {sum(seen.report.threads.values())} {seen.report.threads}")


def memory(bench: Bench, seconds: float) -> None:
    """The resident size under a backlog that no client can hold."""
    source = bench.load(SLOW_RECORDS, SLOW_PARTITIONS, SLOW_SIZE)
    table = Table("a call takes", "resident MB at 10 s", "50 %", "100 %", "slope of the last 80 %, MB per minute")
    for sleep_s in SLEEPS_S:
        with bench.worker(source, SLOW_PARTITIONS, EOS_BENCH_SLEEP_S=str(sleep_s)) as process:
            times, sizes = resident(process.pid, seconds)
        late = times > seconds * 0.2
        slope = 60 * np.polyfit(times[late], sizes[late], 1)[0]
        at = [sizes[np.searchsorted(times, moment)] for moment in (10.0, seconds / 2, times[-1])]
        table.add_row(f"{sleep_s} s", *(f"{size:.1f}" for size in at), f"{slope:+.2f}")
    bench.console.print(table)


def resident(pid: int, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and megabytes, sampled twice a second."""
    watched, began, samples = psutil.Process(pid), time.monotonic(), []
    while (now := time.monotonic() - began) < seconds:
        samples.append((now, watched.memory_info().rss / 1e6))
        time.sleep(0.5)
    times, sizes = np.array(samples).T
    return times, sizes


def rounded(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, nargs="+", default=[8, 100, 300, 1_000])
    parser.add_argument("--count", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker-partitions", type=int, default=100, help="of the topics of 1, 2 and 4 workers")
    parser.add_argument("--memory-seconds", type=float, default=120.0)
    parser.add_argument("--only", nargs="+", choices=["speed", "workers", "connections", "memory"])
    options = parser.parse_args()
    console = Console(width=130)
    console.print(describe_run("partitions"))
    parts = {
        "speed": lambda bench: [speed(bench, n, options.count, options.rounds) for n in options.partitions],
        "workers": partial(
            workers, partitions=options.worker_partitions, count=2 * options.count, rounds=options.rounds
        ),
        "connections": partial(connections, partitions=options.worker_partitions),
        "memory": partial(memory, seconds=options.memory_seconds),
    }
    for name in options.only or parts:
        with LocalKafka(nodes=1, config=BROKER) as kafka:
            parts[name](Bench(kafka, console))


if __name__ == "__main__":
    main()
