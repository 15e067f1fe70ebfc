"""Cause random faults on three brokers until the time is over (`make soak MINUTES=60`), then judge all records.

The soak is one long cell of the matrix: the seed decides about faults and their targets, members join and leave, and
the memory of each worker is recorded every second. It writes report.json and soak.png to build/soak/. Exit code 1 if a
record was lost or duplicated, or if any other rule failed.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from rich.console import Console

from eos.state.engines import ENGINES
from eos.testing.clusters import choose
from tests.containers.matrix.__main__ import CONFIG, try_to
from tests.containers.matrix.cells import PROTOCOLS, STAGES, Cell
from tests.containers.matrix.run import FAN_OUT, Outcome, Run, Size

SAMPLE_S = 1.0
GROWN_UP_S = 30.0  # a younger process is still filling its caches


@dataclass(frozen=True)
class Sample:
    """Hold the memory of one worker's process. `at_s`: since the run began; `age_s`: of the process."""

    at_s: float
    worker: str
    age_s: float
    rss_mib: float


class Sampler:
    """Record the workers' memory and the number of outputs in a thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.memory: list[Sample] = []
        self.outputs: list[tuple[float, int]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)

    def _sample(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            at_s = time.monotonic() - self._run.faults.began
            self.outputs.append((at_s, self._run.outputs_seen))
            for member in list(self._run.workers.members):
                process = member.process
                if process is None or not process.running:
                    continue
                try:
                    seen = psutil.Process(process.pid)
                    age_s, rss = time.time() - seen.create_time(), seen.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                self.memory.append(Sample(at_s, member.name, age_s, rss / (1 << 20)))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(10)


def memory_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Return MiB of a worker's process: medians of the first and last fifth of the run, and the maximum."""
    grown = [sample for sample in samples if sample.age_s >= GROWN_UP_S]
    if not grown:
        return {}
    end_s = max(sample.at_s for sample in grown)
    first = [s.rss_mib for s in grown if s.at_s <= end_s / 5] or [grown[0].rss_mib]
    last = [s.rss_mib for s in grown if s.at_s >= end_s * 4 / 5]
    return {
        "samples": len(grown),
        "first_fifth_mib": round(statistics.median(first), 1),
        "last_fifth_mib": round(statistics.median(last), 1),
        "most_mib": round(max(sample.rss_mib for sample in samples), 1),
    }


def plot(file: Path, run: Run, sampler: Sampler, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(12, 7), layout="constrained")
    figure.suptitle(title)
    above.plot([at / 60 for at, _ in sampler.outputs], [count / FAN_OUT for _, count in sampler.outputs])
    above.set_ylabel("inputs handled and visible")
    # Temporary members join and leave with their own names: dozens in an hour.
    names = {sample.worker: re.sub(r"guest-\d+", "guests", sample.worker) for sample in sampler.memory}
    for worker in sorted(set(names.values())):
        mine = [sample for sample in sampler.memory if names[sample.worker] == worker]
        dots = [sample.at_s / 60 for sample in mine], [sample.rss_mib for sample in mine]
        below.plot(*dots, ".", markersize=2, label=worker)
    below.set_ylabel("resident memory of a worker, MiB")
    below.set_ylim(bottom=0)
    below.set_xlabel("minutes; each line is a fault")
    below.legend(loc="lower right", markerscale=4, fontsize="small")
    for fault in run.faults.made:
        for axes in (above, below):
            axes.axvline(fault.at_s / 60, color="tab:red", alpha=0.3, linewidth=0.8)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def report(outcome: Outcome, sampler: Sampler) -> dict[str, object]:
    counts = {verdict.rule: verdict.violations for verdict in outcome.report.verdicts}
    return {
        "ok": outcome.ok,
        "seconds": round(sum(outcome.phases.values()), 1),
        "slow_brokers": outcome.slow,
        "records": outcome.records,
        "lost": counts["no_losses"],
        "doubled": counts["no_duplicates"],
        "violated": list(outcome.report.violated),
        "faults": len(outcome.faults),
        "faults_by_kind": dict(Counter(fault.partition(": ")[2].split(" ")[0] for fault in outcome.faults)),
        "in_a_transaction": outcome.in_transaction,
        "ended_and_started_again": outcome.restarts,
        "memory": memory_of(sampler.memory),
        "all_faults": outcome.faults,
    }


def broken_off(run: Run, sampler: Sampler, error: BaseException) -> dict[str, object]:
    """Report a run that could not be judged: neither held nor violated."""
    return {
        "ok": False,
        "broke_off": f"{type(error).__name__}: {error}",
        "outputs_seen": run.outputs_seen,
        "slow_brokers": run.faults.slow,
        "ended_and_started_again": run.workers.ends,
        "memory": memory_of(sampler.memory),
        "all_faults": [str(fault) for fault in run.faults.made],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records-per-s", type=int, default=500)
    parser.add_argument("--protocol", choices=PROTOCOLS, default="classic-4.4.0")
    parser.add_argument("--stages", type=int, choices=STAGES, default=1)
    parser.add_argument("--state", action="store_true", help="let the last stage's function count by key")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="lmdb", help="the storage of that state")
    parser.add_argument("--kafka", help="container or jvm; default: containers if an engine answers")
    options = parser.parse_args()
    console = Console()
    directory = Path("build/soak") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-seed-{options.seed}"
    directory.mkdir(parents=True)
    cell = Cell("random", "any", options.protocol, options.stages, options.state)
    choice = choose(options.kafka, cell.version)
    console.print(f"{options.minutes:g} minutes, seed {options.seed}; {choice.reason}; {directory}", highlight=False)
    result: dict[str, object] = {"minutes": options.minutes, "seed": options.seed, "backend": choice.backend}
    outcome = None
    # As after an interrupt, everything started is stopped, and the results so far are reported.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with choice.cluster(3, cell.version, CONFIG) as cluster:
        settings = {"eos.state.engine": options.engine}
        run = Run(cluster, cell, options.seed, f"s{uuid.uuid4().hex[:8]}", directory, settings=settings)
        with Sampler(run) as sampler:
            try:
                outcome = run.play(Size(0, 1, options.minutes, options.records_per_s))
                result |= report(outcome, sampler)
            except BaseException as error:
                result |= broken_off(run, sampler, error)
                try_to(lambda: (directory / "explanation.txt").write_text(run.keep()))
                cluster.save_logs(directory)
                raise
            finally:
                (directory / "report.json").write_text(json.dumps(result, indent=1))
                plot(directory / "soak.png", run, sampler, f"seed {options.seed}, {len(run.faults.made)} faults")
    for name, value in result.items():
        if name != "all_faults":
            console.print(f"{name}: {value}", highlight=False)
    if not outcome.ok:
        console.print(f"{outcome.report}\n{outcome.explanation}", markup=False)
        return 1
    for left in (*directory.glob("*.steps"), *directory.glob("*.log")):
        left.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
