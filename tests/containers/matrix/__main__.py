"""Run the cells of the matrix one after the other (`make matrix`), resume an earlier run, and write the table.

Each cell's result is saved as a JSON file as soon as it is known. A cell with a result for the same seed is not run
again (`--again` deletes all results, `--failed` those of failed cells). Exit code 1 if a cell failed. A cell that the
backend cannot run, or that fails by a known defect of its Kafka, is reported as "not run" with the reason, and never as
passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from confluent_kafka.admin import AdminClient
from rich.console import Console
from rich.table import Table

from eos.errors import EosError
from eos.testing.clusters import Choice, Cluster, NotSupported, choose
from tests.containers.matrix.cells import Cell, pairwise, product
from tests.containers.matrix.faults import SESSION_TIMEOUT_S
from tests.containers.matrix.run import Run, Size

CONFIG = {
    "group.initial.rebalance.delay.ms": 0,
    # With the consumer protocol the brokers set the session timeout. It equals the classic one, so that pauses can
    # exceed it.
    "group.consumer.session.timeout.ms": int(SESSION_TIMEOUT_S * 1000),
    "group.consumer.heartbeat.interval.ms": 1000,
}
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
TO_BE_RUN = "its turn has not come"
BUDGET_S = 180.0


@dataclasses.dataclass
class Result:
    """Hold one line of the table. `reason`: why the cell failed or was not run."""

    cell: str
    column: str
    result: str
    seed: int
    backend: str
    date: str
    seconds: float = 0.0
    records: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    in_transaction: int = 0
    restarts: list[str] = dataclasses.field(default_factory=list)
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    slow: list[str] = dataclasses.field(default_factory=list)
    reason: str = ""


class Clusters:
    """Own one cluster at a time: keep it while cells use its version, and delete it after a failure."""

    def __init__(self, wanted: str | None, nodes: int = 3) -> None:
        self._wanted, self._nodes = wanted, nodes
        self._stack = ExitStack()
        self._version: str | None = None
        self._cluster: Cluster | None = None
        self._choices: dict[str, Choice] = {}

    def choice(self, version: str) -> Choice:
        """Return the backend, chosen once: an engine that disappears later is a failure and does not change the
        backend."""
        if version not in self._choices:
            self._choices[version] = choose(self._wanted, version)
        return self._choices[version]

    def of(self, version: str) -> Cluster:
        """Return the cluster of a version, with all nodes up and in sync."""
        if self._cluster is not None and self._version == version:
            try:
                self._cluster.repair()
                self._cluster.wait_in_sync()
                return self._cluster
            except (EosError, OSError):
                pass  # Damage of the previous cell must not affect this one, so start a new cluster.
        self.close()
        self._cluster = cluster = self._stack.enter_context(self.choice(version).cluster(self._nodes, version, CONFIG))
        self._version = version
        cluster.wait_in_sync()
        return cluster

    def forget(self, topics: list[str]) -> None:
        """Delete topics that are no longer read, because a killed node reads all its logs before it answers."""
        if self._cluster is not None:
            admin = AdminClient({"bootstrap.servers": self._cluster.bootstrap_servers, "log_level": 0})
            for future in admin.delete_topics(topics, operation_timeout=30).values():
                future.result(60)

    def save_logs(self, directory: Path) -> None:
        if self._cluster is not None:
            self._cluster.save_logs(directory)

    def close(self) -> None:
        self._cluster = None
        self._stack.close()


def play(clusters: Clusters, cell: Cell, seed: int, size: Size, directory: Path) -> Result:
    began = time.monotonic()
    result = Result(cell.name, cell.column, PASSED, seed, "", time.strftime("%Y-%m-%d"))
    directory.mkdir(parents=True)
    run: Run | None = None
    try:
        if cell.why_not:
            raise NotSupported(cell.why_not)
        result.backend = clusters.choice(cell.version).backend
        run = Run(clusters.of(cell.version), cell, seed, prefix_of(cell, seed), directory)
        outcome = run.play(size)
        result.records, result.in_transaction, result.phases = outcome.records, outcome.in_transaction, outcome.phases
        if not outcome.ok:
            result.result, result.reason = FAILED, f"{outcome.report}\n{outcome.explanation}"
        elif outcome.records < size.records or len(outcome.faults) < size.faults:
            result.result, result.reason = FAILED, "held, but too small to count"
        else:
            try_to(lambda: clusters.forget(run.topics))
    except NotSupported as why:
        result.result, result.reason = NOT_RUN, str(why)
    except Exception as error:  # noqa: BLE001 - any error belongs to this cell, and the next cell runs
        result.result, result.reason = FAILED, f"{type(error).__name__}: {error}"
        (directory / "traceback.txt").write_text(traceback.format_exc())
        if run is not None:
            try_to(lambda: (directory / "explanation.txt").write_text(run.keep()))
        try_to(lambda: clusters.save_logs(directory))
        try_to(clusters.close)
    if run is not None:
        result.faults, result.slow = [str(fault) for fault in run.faults.made], run.faults.slow
        result.restarts = run.workers.ends
    result.seconds = round(time.monotonic() - began, 1)
    if result.result == PASSED:
        shutil.rmtree(directory)  # Logs and histories are kept for failures only.
    return result


def prefix_of(cell: Cell, seed: int) -> str:
    """Return the prefix of a cell's names, which decide the coordinators: the same seed leads to the same faults."""
    return f"m{zlib.crc32(f'{cell.name} {seed}'.encode()):08x}"


def try_to(tidy: Callable[[], object]) -> None:
    """Run a cleanup that must not change the result of a run."""
    try:
        tidy()
    except Exception:  # noqa: BLE001 - any error is only logged
        traceback.print_exc()


def table(results: list[Result]) -> Table:
    shown = Table("cell", "column", "result", "seed", "records", "faults", "in a transaction", "s", "why")
    for r in results:
        colour = {PASSED: "green", FAILED: "bold red", NOT_RUN: "yellow"}[r.result]
        why = r.reason.partition("\n")[0].replace("[", r"\[")
        lines = (r.cell, r.column, f"[{colour}]{r.result}[/]", r.seed, f"{r.records:,}", len(r.faults))
        shown.add_row(*map(str, (*lines, r.in_transaction, r.seconds, why)))
    return shown


def markdown(results: list[Result]) -> Iterator[str]:
    yield "| cell | column | result | backend | seed | records | faults | in a transaction | seconds | why not |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for r in results:
        why = r.reason.partition("\n")[0].replace("|", "/")[:300]
        slow = f"a broker was slow to come back {len(r.slow)} times" if r.slow else ""
        long = "longer than three minutes" if r.seconds > BUDGET_S else ""
        yield (
            f"| {r.cell} | {r.column} | {r.result} | {r.backend} | {r.seed} | {r.records:,} | {len(r.faults)} | "
            f"{r.in_transaction} | {r.seconds:.0f} | {'; '.join(filter(None, (why, slow, long)))} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("--full", action="store_true", help="run all combinations instead of the pairwise cover")
    parser.add_argument("--only", default="", help="run only cells whose name contains this")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="start no cell after this many minutes; a later call continues"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=Size.faults)
    parser.add_argument("--records", type=int, default=Size.records)
    parser.add_argument("--kafka", help="container or jvm; default: containers if an engine answers")
    parser.add_argument("--again", action="store_true", help="delete earlier results and run all cells")
    parser.add_argument("--failed", action="store_true", help="run failed cells again")
    parser.add_argument("--directory", type=Path, default=Path("build/matrix"))
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    directory: Path = options.directory
    if options.again:
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    if options.failed:
        for file in directory.glob("*.json"):
            if json.loads(file.read_text())["result"] == FAILED:
                file.unlink()
    cells = [cell for cell in (product() if options.full else pairwise()) if options.only in cell.name]
    size = Size(options.records, options.faults)
    until = time.monotonic() + options.minutes * 60
    # As after an interrupt, everything started is stopped, and the table shows the results so far.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with closing(Clusters(options.kafka)) as clusters:
            for version in sorted({cell.version for cell in cells}):
                console.print(f"{version}: {clusters.choice(version).reason}", highlight=False)
            for number, cell in enumerate(cells, 1):
                if time.monotonic() > until or was_run(known(directory, cell, options.seed), size):
                    continue
                console.print(f"{time.strftime('%H:%M:%S')} {number} of {len(cells)}: {cell.name} ...", highlight=False)
                logs = directory / f"{cell.name}-{time.strftime('%H%M%S')}"
                result = play(clusters, cell, options.seed, size, logs)
                (directory / f"{cell.name}.json").write_text(json.dumps(dataclasses.asdict(result), indent=1))
                write_table(directory, cells, options.seed)
                print_result(console, result, logs)
    finally:
        results = write_table(directory, cells, options.seed)
        console.print(table(results))
        counts = {kind: sum(r.result == kind for r in results) for kind in (PASSED, FAILED, NOT_RUN)}
        console.print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    left = any(r.reason == TO_BE_RUN for r in results)
    return 1 if counts[FAILED] or left or not counts[PASSED] else 0


def print_result(console: Console, result: Result, logs: Path) -> None:
    phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in result.phases.items())
    lines = [f"{result.result} in {result.seconds:.0f} s ({phases}), {result.records:,} records"]
    lines += [f"slow: {broker}" for broker in result.slow]
    if result.reason:
        lines += [result.reason, f"kept: {logs}"]
    console.print("\n".join(f"  {line}" for line in lines), markup=False, highlight=False)


def known(directory: Path, cell: Cell, seed: int) -> Result | None:
    """Return the earlier result of this cell with this seed."""
    file = directory / f"{cell.name}.json"
    found = Result(**json.loads(file.read_text())) if file.exists() else None
    return found if found is not None and found.seed == seed else None


def was_run(result: Result | None, size: Size) -> bool:
    """Return whether a result counts: cells that could not run, or ran with fewer records or faults, run again."""
    if result is None or result.result == NOT_RUN:
        return False
    return result.result == FAILED or (result.records >= size.records and len(result.faults) >= size.faults)


def write_table(directory: Path, cells: Sequence[Cell], seed: int) -> list[Result]:
    """Write a row for every cell, including those that are still to be run."""
    results = []
    for cell in cells:
        missing = Result(cell.name, cell.column, NOT_RUN, seed, "", "", reason=TO_BE_RUN)
        results.append(known(directory, cell, seed) or missing)
    (directory / "table.md").write_text("\n".join(markdown(results)) + "\n")
    return results


if __name__ == "__main__":
    sys.exit(main())
