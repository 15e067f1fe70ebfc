"""`make bench-chain`: how old a record is when a read_committed consumer sees it after a chain of stages.

Each stage is a worker process (`eos run`) that reads the output of the stage before as read_committed. The source, the
age of a record and the broker are those of latency.py. The chains run in turns, in another order each round. Prints
percentiles per round, and the medians of the rounds. `--loops` also measures the stages by hand of
speculative_stage.py. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.clients import BROKER, describe_run
from benchmarks.latency import BROKER_WARM_UP_S, measure
from eos.broker import LocalKafka

PERCENTILES = (50, 99)
FIRST = {"eos": "eos", "committed stage": "committed stage", "speculative stage": "committed stage"}
"""The first stage of each loop's chain. The source has no transactions, so its reader has nothing to speculate on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=25.0, help="of one run, the first 5 are not measured")
    parser.add_argument("--rate", type=int, default=1_000, help="records per second")
    parser.add_argument("--intervals-ms", type=int, nargs="+", default=[20, 100], help="of a transaction")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--loops", nargs="+", default=["eos"], choices=FIRST)
    options = parser.parse_args()
    console = Console(width=110)
    console.print(describe_run("chain"))
    chains = list(product(options.intervals_ms, options.stages, options.loops))
    measured: dict[tuple[int, int, str], list[list[float]]] = defaultdict(list)
    with LocalKafka(nodes=1, config=BROKER) as kafka:
        measure(kafka.bootstrap_servers, ["straight loop"], options.rate, BROKER_WARM_UP_S, options.intervals_ms[0])
        for turn in range(options.rounds):
            first = turn % len(chains)
            for chain in chains[first:] + chains[:first]:
                interval_ms, stages, loop = chain
                loops = [FIRST[loop]] + [loop] * (stages - 1)
                load = os.getloadavg()[0]
                ages, cpu = measure(kafka.bootstrap_servers, loops, options.rate, options.seconds, interval_ms)
                p50, p99 = np.percentile(ages, PERCENTILES)
                measured[chain].append([p50, p99, cpu])
                console.print(
                    f"  round {turn + 1}, {interval_ms} ms, {stages} x {loop}: p50 {p50:.0f} ms, p99 {p99:.0f} ms, "
                    f"cpu {cpu:.2f}, {len(ages):,} records, load before {load:.1f}"
                )
    table = Table(
        "transactions", "stages", "loop", "p50 ms", "p99 ms", "cpu", title=f"{options.rate:,} records/s, medians"
    )
    for (interval_ms, stages, loop), rounds in measured.items():
        p50, p99, cpu = np.median(rounds, axis=0)
        table.add_row(f"{interval_ms} ms", str(stages), loop, f"{p50:.0f}", f"{p99:.0f}", f"{cpu:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
