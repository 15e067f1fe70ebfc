"""`make bench-restore`: how long a killed process with a million keys stays away, beside Kafka Streams, in turns.

Each counts the records of each key (as count.py), is killed with SIGKILL under a steady load, and started again at
once: with its folder, and with an empty one. What counts is the time from the kill to the first output of a new
transaction, and what of it was reading the changelog, as the program itself says. All are static members of their
groups. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from rich.console import Console
from rich.table import Table

from benchmarks.peers.count import KIP_892
from benchmarks.peers.installed import streams_command
from benchmarks.peers.speed import HERE, STREAMS_THREADS, where
from benchmarks.worker_speed import PARTITIONS, create, load
from eos.broker import LocalKafka
from eos.testing.history import committed_offsets

RATE = 2_000  # records per second while it is killed
_LIMIT_S = 120.0
EOS, STREAMS, STREAMS_892 = "eos", "Kafka Streams", "Kafka Streams, KIP-892"
# Of each: a line for each time that something was restored, with the records and the seconds.
RESTORED = {
    EOS: re.compile(r"state restored .* read=(\d+) seconds=([\d.]+)"),
    STREAMS: re.compile(r"restored (\d+) ([\d.]+)"),
}
RESTORED[STREAMS_892] = RESTORED[STREAMS]


@dataclass
class Away:
    """Seconds from the kill to the first new output; changes that were read, and in how many seconds."""

    first_output: float
    read: int
    seconds: float


class Side:
    """One of them at work: its group, topics and folder."""

    def __init__(self, name: str, bootstrap: str, build: Path, keys: int) -> None:
        self.name, self._bootstrap = name, bootstrap
        self.group = f"restore-{uuid.uuid4().hex[:8]}"
        self.source, self._target = f"{self.group}-in", f"{self.group}-out"
        self._scratch = Path(tempfile.mkdtemp(prefix=self.group))
        self._folder, self._log = self._scratch / "state", self._scratch / "log"
        self._environment: Mapping[str, str] = os.environ
        if name == EOS:
            self._command = [
                sys.executable,
                "-m",
                "eos",
                "run",
                "benchmarks.peers.eos_count:app",
                "--instance",
                "bench",
            ]
            self._command += ["--bootstrap-servers", bootstrap, "-X", f"eos.state.dir={self._folder}"]
            names = {"APP": self.group, "SOURCE": self.source, "TARGET": self._target}
            self._environment = os.environ | {f"EOS_BENCH_{key}": value for key, value in names.items()}
        else:
            endless = str(2**62)
            more = (str(STREAMS_THREADS), str(self._folder), "0")
            self._command = [
                *streams_command(HERE / "StreamsCount.java", build),
                bootstrap,
                self.source,
                self._target,
                endless,
            ]
            self._command += [self.group, *more, *([KIP_892] if name == STREAMS_892 else [])]
        load(bootstrap, self.source, keys, 100, keys)
        create(bootstrap, self._target)

    def start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=log
            )

    def wait_until_counted(self, keys: int) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while sum(committed_offsets(self._bootstrap, self.group, self.source).values()) < keys:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not count {keys:,} records: {self._log.read_text()[-2_000:]}")
            time.sleep(0.2)

    def kill_and_start(self, keep_folder: bool) -> Away:
        self._process.kill()
        killed = time.monotonic()
        self._process.wait()
        if not keep_folder:
            shutil.rmtree(self._folder)
        reader, ends = self._reader_of_what_comes()
        self.start()
        first = self._first_output(reader, ends, killed)
        read, seconds = self._restored()
        return Away(first, read, seconds)

    def _reader_of_what_comes(self) -> tuple[Consumer, dict[int, int]]:
        settings = {"bootstrap.servers": self._bootstrap, "group.id": f"{self.group}-reader"}
        reader = Consumer(settings | {"isolation.level": "read_committed", "enable.auto.commit": False})
        places = [TopicPartition(self._target, partition) for partition in range(PARTITIONS)]
        ends = {place.partition: reader.get_watermark_offsets(place, timeout=10)[1] for place in places}
        reader.assign([TopicPartition(self._target, partition, end) for partition, end in ends.items()])
        return reader, ends

    def _first_output(self, reader: Consumer, ends: dict[int, int], killed: float) -> float:
        while time.monotonic() < killed + _LIMIT_S:
            message = reader.poll(0.5)
            if message is not None and message.error() is None and message.offset() >= ends[message.partition()]:
                reader.close()
                return time.monotonic() - killed
        raise SystemExit(f"{self.name}: no output in {_LIMIT_S:.0f} s: {self._log.read_text()[-2_000:]}")

    def _restored(self) -> tuple[int, float]:
        """Of the program's words; the last line of Kafka Streams has the sums."""
        found = [(int(read), float(seconds)) for read, seconds in RESTORED[self.name].findall(self._log.read_text())]
        if self.name != EOS:
            return found[-1] if found else (0, 0.0)
        return sum(read for read, _ in found), sum(seconds for _, seconds in found)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--build", type=Path, default=Path("build/bench/peers"), help="for the compiled Java class")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(where())
    table = Table("", "first new output: median", "all", "changes read", "records/s of the restore, median")
    for keep in (True, False):
        found: dict[str, list[Away]] = {}
        # One broker and one load at a time: a process that only waits takes processor time too.
        for name in (EOS, STREAMS, STREAMS_892):
            with LocalKafka(nodes=1) as kafka:
                found[name] = measure(name, kafka.bootstrap_servers, options.build, options.keys, options.rounds, keep)
        for name, aways in found.items():
            rates = [away.read / away.seconds for away in aways if away.seconds]
            table.add_row(
                f"{name}, {'its folder' if keep else 'an empty folder'}",
                f"{statistics.median(away.first_output for away in aways):.2f} s",
                " ".join(f"{away.first_output:.2f}" for away in aways),
                " ".join(f"{away.read:,}" for away in aways),
                f"{statistics.median(rates):,.0f}" if rates else "-",
            )
    console.print(table)


def measure(name: str, bootstrap: str, build: Path, keys: int, rounds: int, keep: bool) -> list[Away]:
    side = Side(name, bootstrap, build, keys)
    side.start()
    try:
        side.wait_until_counted(keys)
        feed = [sys.executable, "-m", "benchmarks.steady_source", bootstrap, side.source, str(RATE), "3600"]
        feeding = subprocess.Popen(feed, stdout=subprocess.DEVNULL)
        try:
            aways = []
            for _ in range(rounds):
                time.sleep(5)  # of outputs before the next kill
                aways.append(side.kill_and_start(keep))
            return aways
        finally:
            feeding.kill()
            feeding.wait()
    finally:
        side.end()


if __name__ == "__main__":
    main()
