"""`make bench-far`: the worker and a straight loop through a proxy that only delays, in turns: another region.

For each delay the rates, the median of the rounds' ratios, and how often a healthy producer was replaced (goal: never).
Both end a transaction after the same interval. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from benchmarks.clients import BROKER
from benchmarks.worker_speed import create, delete, load
from eos.broker import LocalKafka
from eos.broker.node import free_ports

STRAIGHT = "straight loop"


@contextmanager
def delayed(kafka: LocalKafka, each_way_ms: int) -> Iterator[str]:
    """The broker's address from so far away."""
    port, upstream = kafka.proxied_servers.rpartition(":")[2], "{}:{}".format(*kafka.proxied_upstream)
    command = [sys.executable, "-m", "tests.support.delay", port, upstream, str(each_way_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        assert proxy.stdout.readline(), "the proxy did not start"
        try:
            yield kafka.proxied_servers
        finally:
            proxy.communicate()


def run(near: str, far: str, loop: list[str], source: str, count: int) -> list[float]:
    """One process, one new group, one new target topic; what the loop prints."""
    group = f"far-{uuid.uuid4().hex[:8]}"
    create(near, f"{group}-out")
    module, *more = loop
    command = [sys.executable, "-m", module, far, source, f"{group}-out", str(count), group, *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=600)
    delete(near, f"{group}-out")
    return [float(part) for part in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--interval-ms", type=int, default=200)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 5, 20, 40, 60, 100], help="milliseconds each way")
    parser.add_argument("settings", nargs="*", help="more settings of the worker, NAME=VALUE")
    options = parser.parse_args()
    loops = {
        STRAIGHT: ["benchmarks.straight_loop", "10", str(options.interval_ms)],
        "eos, process_batch": [
            "benchmarks.eos_loop",
            "batch",
            f"eos.transaction.interval.ms={options.interval_ms}",
            *options.settings,
        ],
    }
    console = Console(width=110)
    console.print(f"command: python -m benchmarks.far {' '.join(sys.argv[1:])}")
    table = Table("ms each way", "loop", "median records/s", "ratio", "ms/transaction", "transactions", "replaced")
    port = free_ports(1)[0]
    with LocalKafka(nodes=1, proxied_port=port, config=BROKER) as kafka:
        near, source = kafka.bootstrap_servers, f"in-{uuid.uuid4().hex[:6]}"
        load(near, source, options.records, 100)
        for delay in options.delays:
            results: dict[str, list[list[float]]] = {loop: [] for loop in loops}
            with delayed(kafka, delay) as far:
                for turn in range(options.rounds):
                    for loop in list(loops)[:: 1 if turn % 2 else -1]:
                        results[loop].append(run(near, far, loops[loop], source, options.records))
            straight = [done[0] / done[1] for done in results[STRAIGHT]]
            for loop, runs in results.items():
                rates = [done[0] / done[1] for done in runs]
                table.add_row(
                    str(delay),
                    loop,
                    f"{statistics.median(rates):,.0f}",
                    f"{statistics.median(mine / its for mine, its in zip(rates, straight, strict=True)):.2f}",
                    f"{statistics.median(1000 * done[1] / done[2] for done in runs):.0f}",
                    f"{sum(done[2] for done in runs):.0f}",
                    "" if loop == STRAIGHT else f"{sum(done[3] for done in runs):.0f}",
                )
            console.print(table)


if __name__ == "__main__":
    main()
