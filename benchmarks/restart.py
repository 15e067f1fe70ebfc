"""`make bench-restart`: how long a killed worker's outputs stay away when it is started again under the same name.

A source sends records at a steady rate, a worker (`eos run`) handles them, a read_committed consumer reads the output.
The worker gets SIGKILL in the middle of its transactions and is started again at once. What counts is the time from the
kill to the first output of a record that was due after the kill: the start of Python, the preflight, the end of the
predecessor's open transactions, the return into the group, and one transaction; with `--keys` also what of the state's
changelog the worker's folder does not have. Prints each repetition with its steps, median and worst. Nothing here
asserts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.clients import reader
from benchmarks.worker_speed import create, load
from eos.broker import LocalKafka

GOAL_S = 2.0
RATE = 5_000  # so that a transaction is open nearly all the time
SETTLE_S = 2.0  # of outputs without a pause before the next kill
_LIMIT_S = 60.0
# Lines of the worker's log; what comes before the first one is Python's start, the imports and the preflight.
STEPS = ("session started", "partitions assigned")


class Reader:
    """Reads the output as committed; each value is the moment at which its record was due."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = reader(bootstrap, topic)

    def first_due_after(self, moment_ns: int) -> float:
        """Seconds from `moment_ns` until the first record that was due after it is read."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.5)
            if message is not None and message.error() is None and int(message.value()[:19]) > moment_ns:
                return (time.monotonic_ns() - moment_ns) / 1e9
        raise TimeoutError(f"no output came within {_LIMIT_S:.0f} s")

    def close(self) -> None:
        self._consumer.close()


def start(bootstrap: str, names: dict[str, str], settings: list[str], log: Path) -> subprocess.Popen[bytes]:
    flags = [word for setting in settings for word in ("-X", setting)]
    command = ["run", "benchmarks.steady_app:app", "--instance", "bench", "--bootstrap-servers", bootstrap, *flags]
    # As pip installs it: with bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | names
    with log.open("wb") as lines:
        return subprocess.Popen(
            [sys.executable, "-m", "eos", *command, "--log-format", "json"], env=environment, stderr=lines
        )


def steps(log: Path, killed_at: float) -> list[float]:
    """Seconds after the kill (time.time()) at which each of STEPS was logged."""
    found = {}
    for text in log.read_text().splitlines():
        line = json.loads(text)
        if line["event"] in STEPS:
            found.setdefault(line["event"], datetime.fromisoformat(line["time"]).timestamp() - killed_at)
    return [found.get(step, float("nan")) for step in STEPS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("-X", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="of the worker")
    parser.add_argument("--keys", type=int, default=0, help="the worker remembers so many, loaded before")
    parser.add_argument("--logs", type=Path, default=Path("build/bench/restart"))
    options = parser.parse_args()
    console = Console(width=110)
    console.print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {psutil.cpu_count()} cores, Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f}, command: python -m benchmarks.restart "
        f"{' '.join(sys.argv[1:])}"
    )
    options.logs.mkdir(parents=True, exist_ok=True)
    table = Table("kill", *STEPS, "first new output", "worker's cpu until then")
    away: list[float] = []
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
        feed = [sys.executable, "-m", "benchmarks.steady_source", bootstrap, f"{group}-in", str(RATE), str(longest_s)]
        feeding = subprocess.Popen(feed, stdout=subprocess.DEVNULL)
        worker = start(bootstrap, names, options.settings, options.logs / "0.log")
        reader = Reader(bootstrap, f"{group}-out")
        try:
            reader.first_due_after(time.monotonic_ns())
            for number in range(1, options.repetitions + 1):
                reader.first_due_after(time.monotonic_ns() + int((SETTLE_S + random.random()) * 1e9))
                log = options.logs / f"{number}.log"
                worker.kill()
                killed_ns, killed_at = time.monotonic_ns(), time.time()
                worker.wait()
                worker = start(bootstrap, names, options.settings, log)
                away.append(reader.first_due_after(killed_ns))
                took = psutil.Process(worker.pid).cpu_times()
                times = [*steps(log, killed_at), away[-1], took.user + took.system]
                table.add_row(str(number), *(f"{seconds:.2f} s" for seconds in times))
        finally:
            feeding.terminate()
            feeding.wait(30)
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
            reader.close()
    console.print(table)
    console.print(
        f"first new output after the kill: median {statistics.median(away):.2f} s, worst {max(away):.2f} s (goal: "
        f"below {GOAL_S:.0f} s), {len(away)} kills at {RATE:,} records/s"
    )


if __name__ == "__main__":
    main()
