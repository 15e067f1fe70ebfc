"""`make bench-peers`: the worker, a straight loop, Kafka Streams and Quix Streams on the same job, in turns.

Upper-casing, commits every 100 ms, exactly once, the same input topic for all, a new group and a new target topic for
each run. The parts are processes of their own; each says how long it took from its first record to its last commit,
and a read_committed reader counts what is in the target afterwards. Prints a table, also as Markdown, and plots it.
Ratios can be trusted, absolute rates are this machine's. Nothing here asserts a speed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
from confluent_kafka import Consumer
from rich.console import Console

from benchmarks.clients import BROKER, cpu_s_of_children
from benchmarks.peers.installed import streams_command
from benchmarks.worker_speed import create, delete, load
from eos.broker import LocalKafka
from eos.broker.jars import DEFAULT_VERSION

HERE = Path(__file__).parent
STREAMS_THREADS = 2
LOADS = [(2_000_000, 100), (600_000, 1_000)]  # records, bytes of each
STRAIGHT = "straight loop"
"""Keeps the timestamp of each record, as all but the loops with new timestamps do."""
_LIMIT_S = 300


@dataclass(frozen=True)
class Peer:
    """`command` is followed by BOOTSTRAP SOURCE TARGET COUNT GROUP and `more`; `{directory}` is one for this run.

    It prints the number of records and the seconds; with `tells_second_half` those of the second half behind them.
    """

    name: str
    command: list[str]
    more: tuple[str, ...] = ()
    tells_second_half: bool = False
    outputs: int | None = None
    """How many it leaves at least; None: one for each record."""


@dataclass(frozen=True)
class Run:
    """Rates in records per second; `cpu_s` is the process's processor time from start to end, per million records."""

    rate: float
    second_half: float | None
    cpu_s: float


def peers(build: Path, quix_python: Path) -> list[Peer]:
    python = [sys.executable, "-m"]
    streams = f"Kafka Streams, {STREAMS_THREADS} threads"
    quix = [str(quix_python), "-W", "ignore", str(HERE / "quix_upper.py")]
    return [
        Peer(STRAIGHT, [*python, "benchmarks.straight_loop"], ("5", "100", "bytes")),
        Peer("straight loop, new timestamps", [*python, "benchmarks.straight_loop"]),
        Peer("eos, Record handler", [*python, "benchmarks.eos_loop"], ("record",)),
        Peer("eos, process_batch, new timestamps", [*python, "benchmarks.eos_loop"], ("batch",)),
        Peer(
            streams,
            streams_command(HERE / "StreamsUpper.java", build),
            (str(STREAMS_THREADS), "{directory}"),
            tells_second_half=True,
        ),
        Peer("Quix Streams", quix, ("{directory}",), tells_second_half=True),
    ]


def run(bootstrap: str, peer: Peer, source: str, count: int) -> Run | None:
    """One process, one new group, one new target topic; what is in the target afterwards is counted. None if the peer
    did not finish in time."""
    group = f"peer-{uuid.uuid4().hex[:8]}"
    target = f"{group}-out"
    create(bootstrap, target)
    before = cpu_s_of_children()
    with tempfile.TemporaryDirectory(prefix=group) as directory:
        more = [word.format(directory=directory) for word in peer.more]
        command = [*peer.command, bootstrap, source, target, str(count), group, *more]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
    cpu_s = cpu_s_of_children() - before
    handled, seconds, *others = (float(word) for word in done.stdout.split())
    expected = count if peer.outputs is None else peer.outputs
    found = count_committed(bootstrap, target, expected)
    # A framework stops at a batch's end: it may have handled a few more than it was asked for, never fewer.
    if handled < count or found < expected:
        raise RuntimeError(f"{peer.name} handled {handled:.0f} and {found} of {expected} records are in its target")
    delete(bootstrap, target)
    second_half = count / 2 / others[0] if peer.tells_second_half else None
    return Run(handled / seconds, second_half, cpu_s / handled * 1e6)


def count_committed(bootstrap: str, topic: str, expected: int) -> int:
    """How many committed records the topic holds; gives up when none came for ten seconds."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-count",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 5,
        }
    )
    consumer.subscribe([topic])
    found, last = 0, time.monotonic()
    while found < expected and time.monotonic() - last < 10:
        messages = consumer.consume(10_000, 0.1)
        found += sum(message.error() is None for message in messages)
        last = time.monotonic() if messages else last
    consumer.close()
    return found


@dataclass(frozen=True)
class Line:
    """One row of the table: medians over the rounds. The ratio is the median of the rounds' own ratios."""

    load: str
    peer: str
    rate: float
    ratio: float
    second_half: float | None
    cpu_s: float
    rates: list[float]

    def cells(self) -> list[str]:
        second = "" if self.second_half is None else f"{self.second_half:,.0f}"
        return [self.load, self.peer, f"{self.rate:,.0f}", f"{self.ratio:.2f}", second, f"{self.cpu_s:.1f}"]


HEADER = ["load", "loop", "median records/s", "ratio", "second half, records/s", "cpu s per million, with start"]


def compare(
    console: Console,
    bootstrap: str,
    peers: list[Peer],
    count: int,
    size: int,
    rounds: int,
    yardstick: str = STRAIGHT,
    keys: int = 10_000,
    span_ms: int = 0,
) -> list[Line]:
    name = f"{count:,} x {size:,} B"
    source = f"in-{size}-{uuid.uuid4().hex[:6]}"
    console.print(f"{name}: loading")
    load(bootstrap, source, count, size, keys, span_ms)
    runs: dict[str, list[Run]] = {peer.name: [] for peer in peers}
    for turn in range(rounds):
        # Each in another place each round: the disk is slower behind a neighbour's writes.
        for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
            if peer.name not in runs:
                continue
            if (found := run(bootstrap, peer, source, count)) is None:
                late = f"{peer.name} did not finish in {_LIMIT_S} s"
                if peer.name == yardstick:
                    raise SystemExit(f"{late}: without it there are no ratios")
                console.print(f"  {late} and is left out")
                del runs[peer.name]
            else:
                runs[peer.name].append(found)
        console.print(f"  round {turn + 1}: " + ", ".join(f"{peer} {of[-1].rate:,.0f}/s" for peer, of in runs.items()))
    straight = [one.rate for one in runs[yardstick]]
    return [
        Line(
            name,
            peer,
            statistics.median(one.rate for one in of),
            statistics.median(one.rate / its for one, its in zip(of, straight, strict=True)),
            statistics.median(one.second_half for one in of if one.second_half is not None)
            if of[0].second_half is not None
            else None,
            statistics.median(one.cpu_s for one in of),
            [one.rate for one in of],
        )
        for peer, of in runs.items()
    ]


def markdown(lines: list[Line]) -> str:
    rows = [HEADER, ["---"] * len(HEADER), *(line.cells() for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def where(quix_python: Path | None = None) -> str:
    """The machine and the versions."""
    quix = ""
    if quix_python is not None:
        told = (
            "import quixstreams as q, confluent_kafka as c; print(f'{q.__version__} (confluent-kafka {c.__version__})')"
        )
        done = subprocess.run([quix_python, "-c", told], stdout=subprocess.PIPE, check=True, text=True)
        quix = f", Quix Streams {done.stdout.strip()}"
    return (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {psutil.cpu_count()} cores, Kafka {DEFAULT_VERSION}, "
        f"Python {platform.python_version()}{quix}"
    )


def plot(path: Path, title: str, lines: list[Line]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    loads = list(dict.fromkeys(line.load for line in lines))
    figure, every = pyplot.subplots(1, len(loads), figsize=(10, 3.6), layout="constrained", squeeze=False)
    for axes, load_name in zip(every[0], loads, strict=True):
        mine = [line for line in lines if line.load == load_name][::-1]
        axes.barh([line.peer for line in mine], [line.rate / 1000 for line in mine], color="#4c78a8", height=0.6)
        for place, line in enumerate(mine):
            # Each round a dot: how far the machine wandered belongs to the picture.
            axes.plot([rate / 1000 for rate in line.rates], [place] * len(line.rates), "k.", markersize=4)
            axes.annotate(f" {line.rate / 1000:,.0f}k ", (0, place), va="center", color="white", fontsize=9)
        axes.set(title=load_name, xlabel="thousand records per second")
        axes.set_xlim(left=0)
    for axes in every[0][1:]:
        axes.set_yticklabels([])
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the records, to try the script out")
    parser.add_argument("--quix-python", type=Path, required=True, help="of a virtual environment with quixstreams")
    parser.add_argument("--build", type=Path, default=Path("build/bench/peers"), help="for the compiled Java class")
    parser.add_argument("--plot", type=Path, default=Path("build/bench/peers.png"))
    options = parser.parse_args()
    console = Console(width=200)
    found = peers(options.build, options.quix_python)
    machine = where(options.quix_python)
    console.print(f"{machine}, load {os.getloadavg()[0]:.1f}")
    console.print(f"command: python -m benchmarks.peers.speed {' '.join(sys.argv[1:])}")
    lines: list[Line] = []
    with LocalKafka(nodes=1, config=BROKER) as kafka:
        for whole, size in LOADS:
            count = int(whole * options.scale)
            lines += compare(console, kafka.bootstrap_servers, found, count, size, options.rounds)
    print(markdown(lines))
    plot(
        options.plot,
        f"exactly once, upper-casing, commits every 100 ms; medians of {options.rounds} rounds\n{machine}",
        lines,
    )
    console.print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
