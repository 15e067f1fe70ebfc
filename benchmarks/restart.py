"""`make bench-restart`: how long a killed worker's outputs stay away when it is started again under the same name.

A source sends records at a steady rate, a worker (`eos run`) handles them, a read_committed consumer reads the output.
The worker gets SIGKILL in the middle of its transactions and is started again at once. What counts is the time from the
kill to the first output of a record that was due after the kill: the start of Python, the preflight, the end of the
predecessor's open transactions, the return into the group, and one transaction; with `--keys` also what of the state's
changelog the worker's folder does not have. Prints how long each part of each start took, median and worst. Nothing
here asserts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.clients import describe_run, reader
from benchmarks.worker_speed import create, load
from eos.broker import LocalKafka

GOAL_S = 0.5
RATE = 2_000  # records/s
SETTLE_S = 2.0  # of outputs before the next kill
BACKLOG_S = 0.5  # a worker that lacks the outputs of more seconds is still catching up, and is not killed
_LIMIT_S = 60.0
# The parts of a start, by the step of benchmarks/restart_worker.py at which each begins; the first begins at the kill.
PARTS = {
    "": "kill, Python",
    "imports": "imports",
    "preflight": "preflight",
    "connect": "connections",
    "abort of predecessor": "abort of the predecessor's transaction",
    "init": "inits",
    "join": "join",
    "committed offsets": "committed offsets",
    "fetch": "first fetch",
    "begin": "first transaction",
    "committed": "",
}


class Reader:
    """Reads the output as committed; each value is the moment at which its record was due."""

    def __init__(self, bootstrap: str, topic: str, rate: int) -> None:
        self._consumer, self._rate = reader(bootstrap, topic), rate
        self._dues = 0, math.inf  # how many outputs were read, and when the first of their records was due

    def first_due_after(self, moment_ns: int) -> float:
        """Seconds from `moment_ns` until the first record that was due after it is read."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            if self._read() > moment_ns:
                return (time.monotonic_ns() - moment_ns) / 1e9
        raise TimeoutError(f"no output came within {_LIMIT_S:.0f} s")

    def settle(self, seconds: float) -> None:
        """Read for some seconds, and then until the worker has caught up in all partitions. The first worker starts
        with a backlog, because the source does not wait for the new cluster's first groups."""
        began = time.monotonic()
        while time.monotonic() < began + seconds or self._backlog_s() > BACKLOG_S:
            self._read()
            if time.monotonic() > began + seconds + _LIMIT_S:
                raise SystemExit(
                    f"{self._backlog_s():.1f} s of outputs are missing after {_LIMIT_S:.0f} s: this machine is too "
                    f"slow for {self._rate:,} records/s (--rate)"
                )

    def _backlog_s(self) -> float:
        count, first_ns = self._dues
        return (time.monotonic_ns() - first_ns) / 1e9 - count / self._rate if count else math.inf

    def _read(self) -> int:
        """Return when the next output's record was due (time.monotonic_ns()); 0: none came."""
        message = self._consumer.poll(0.5)
        if message is None or message.error() is not None:
            return 0
        due_ns = int(message.value()[:19])
        count, first_ns = self._dues
        self._dues = count + 1, min(first_ns, due_ns)
        return due_ns

    def close(self) -> None:
        self._consumer.close()


def start(bootstrap: str, names: dict[str, str], settings: list[str], log: Path) -> subprocess.Popen[bytes]:
    flags = [word for setting in settings for word in ("-X", setting)]
    command = ["run", "benchmarks.steady_app:app", "--instance", "bench", "--bootstrap-servers", bootstrap, *flags]
    times = log.with_suffix(".json")
    times.unlink(missing_ok=True)
    # As pip installs it: with bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | names
    with log.open("wb") as lines:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.restart_worker", str(times), *command], env=environment, stderr=lines
        )


def parts(log: Path, killed_at: float) -> list[float]:
    """How many seconds each of PARTS took, from the kill (time.time()) to the first commit."""
    times, deadline = log.with_suffix(".json"), time.monotonic() + 5
    while not times.exists() and time.monotonic() < deadline:  # the output can be visible before the commit returns
        time.sleep(0.01)
    began: dict[str, float] = {"": killed_at} | json.loads(times.read_text())
    return [began[end] - began[part] for part, end in itertools.pairwise(PARTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("-X", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="of the worker")
    parser.add_argument("--rate", type=int, default=RATE, help="records per second")
    parser.add_argument("--keys", type=int, default=0, help="the worker remembers so many, loaded before")
    parser.add_argument("--logs", type=Path, default=Path("build/bench/restart"))
    options = parser.parse_args()
    console = Console(width=110)
    console.print(describe_run("restart"))
    options.logs.mkdir(parents=True, exist_ok=True)
    away: list[float] = []
    took: list[list[float]] = []
    cpu: list[float] = []
    with LocalKafka(nodes=1) as kafka, tempfile.TemporaryDirectory() as state:
        bootstrap = kafka.bootstrap_servers
        group = f"restart-{uuid.uuid4().hex[:8]}"
        names = {"EOS_BENCH_APP": group, "EOS_BENCH_SOURCE": f"{group}-in", "EOS_BENCH_TARGET": f"{group}-out"}
        if options.keys:
            names |= {"EOS_BENCH_STATE": "1"}
            options.settings += [f"eos.state.dir={state}"]
            load(bootstrap, f"{group}-in", options.keys, 100, options.keys)
        else:
            create(bootstrap, f"{group}-in")
        create(bootstrap, f"{group}-out")
        longest_s = options.repetitions * _LIMIT_S
        feed = [sys.executable, "-m", "benchmarks.steady_source", bootstrap, f"{group}-in"]
        feed += [str(options.rate), str(longest_s)]
        feeding = subprocess.Popen(feed, stdout=subprocess.DEVNULL)
        worker = start(bootstrap, names, options.settings, options.logs / "0.log")
        reader = Reader(bootstrap, f"{group}-out", options.rate)
        try:
            for number in range(1, options.repetitions + 1):
                reader.settle(SETTLE_S + random.random())
                log = options.logs / f"{number}.log"
                worker.kill()
                killed_ns, killed_at = time.monotonic_ns(), time.time()
                worker.wait()
                worker = start(bootstrap, names, options.settings, log)
                away.append(reader.first_due_after(killed_ns))
                used = psutil.Process(worker.pid).cpu_times()
                cpu.append(used.user + used.system)
                took.append(parts(log, killed_at))
        finally:
            feeding.terminate()
            feeding.wait(30)
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
            reader.close()
    table = Table("part of a start", "median", "worst")
    for name, seconds in zip(filter(None, PARTS.values()), zip(*took, strict=True), strict=True):
        table.add_row(name, *(f"{1000 * value:.0f} ms" for value in (statistics.median(seconds), max(seconds))))
    table.add_row("worker's processor time until the first output", f"{1000 * statistics.median(cpu):.0f} ms", "")
    console.print(table, " ".join(f"{seconds:.2f}" for seconds in away))
    console.print(
        f"first new output after the kill: median {statistics.median(away):.2f} s, worst {max(away):.2f} s (goal: "
        f"below {GOAL_S} s), {len(away)} kills at {options.rate:,} records/s"
    )


if __name__ == "__main__":
    main()
