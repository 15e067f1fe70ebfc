"""How fast the checker judges: prints records per second for the whole report and for each rule.

    python benchmarks/bench_checker.py [RECORDS]

Prints, asserts nothing about speed. The history is a correct one: 8 input and 8 output partitions over two topics each,
offset gaps, fan-out 1, outputs interleaved as a consumer would return them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from eos.testing.checker import (
    CommitSeries,
    Ends,
    Inputs,
    Outputs,
    Verdict,
    atomic_transactions,
    check,
    join,
    no_aborted_seen,
    no_duplicates,
    no_losses,
    no_unexpected_outputs,
    offsets_match_outputs,
    order,
)
from eos.testing.lineage import stamp, unstamp_many

PARTITIONS = 4
CHUNK = 500  # records of one partition that a consumer returns in a row


def interleaved(records: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Topic, partition and offset (with a control marker every 97 records) in chunks over all partitions."""
    lane = (np.arange(records) // CHUNK) % (2 * PARTITIONS)
    counts = np.zeros(records, np.int64)
    for one in range(2 * PARTITIONS):
        mine = lane == one
        counts[mine] = np.arange(np.count_nonzero(mine))
    return lane // PARTITIONS, lane % PARTITIONS, counts + counts // 97


def timed(label: str, records: int, run: Callable[[], object]) -> None:
    started = time.perf_counter()
    run()
    took_s = time.perf_counter() - started
    print(f"{label:32} {took_s:7.3f} s {records / took_s / 1e6:8.1f} M inputs/s")


def main(records: int) -> None:
    topic, partition, offset = interleaved(records)
    transaction = np.arange(records) // 5_000
    inputs = Inputs(topics=("a", "b"), topic=topic, partition=partition, offset=offset, transaction=transaction)
    outputs = Outputs(
        topics=("x", "y"),
        topic=topic,
        partition=partition,
        offset=offset + 3,
        source_topic=topic,
        source_partition=partition,
        source_offset=offset,
        copy=np.zeros(records, np.int64),
    )
    lanes = [(t, p) for t in range(2) for p in range(PARTITIONS)]
    committed = {(inputs.topics[t], p): int(offset[(topic == t) & (partition == p)].max()) + 1 for t, p in lanes}
    ends = Ends({at: end + 1 for at, end in committed.items()}, {at: end + 1 for at, end in committed.items()})
    commits = CommitSeries(topics=inputs.topics, topic=topic, partition=partition, offset=offset)

    joined = join(inputs, outputs)
    rules: dict[str, Callable[[], Verdict]] = {
        "no_duplicates": lambda: no_duplicates(joined),
        "no_losses": lambda: no_losses(joined, committed),
        "no_unexpected_outputs": lambda: no_unexpected_outputs(joined),
        "order": lambda: order(joined),
        "atomic_transactions": lambda: atomic_transactions(joined),
        "offsets_match_outputs": lambda: offsets_match_outputs(joined, committed),
        "no_aborted_seen": lambda: no_aborted_seen(outputs, outputs),
    }
    timed("join", records, lambda: join(inputs, outputs))
    for name, rule in rules.items():
        timed(name, records, rule)
    timed("check: outputs only", records, lambda: check(inputs, outputs, complete=True))

    def everything() -> None:
        report = check(inputs, outputs, committed=committed, complete=True, ends=ends, seen=outputs, commits=commits)
        print(report)

    timed("check: every rule", records, everything)
    stamps = [stamp(0, 0, i) + b"payload" for i in range(min(records, 1_000_000))]
    timed("unstamp_many", len(stamps), lambda: unstamp_many(stamps))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000_000)
