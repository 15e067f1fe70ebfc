"""`make bench-windows`: the worker, Kafka Streams and Quix Streams count per key and minute; and deduplication.

The records span 20 minutes of event time in order, so that the final counts of 19 windows of each key are sent. Commits
every 100 ms, exactly once; as benchmarks/peers/count.py in all else. The ratio is to Kafka Streams with suppress().
Nothing here asserts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.clients import BROKER
from benchmarks.peers.installed import streams_command
from benchmarks.peers.speed import HERE, STREAMS_THREADS, Peer, compare, markdown, where
from eos.broker import LocalKafka

YARDSTICK = "Kafka Streams, suppress"
MINUTES = 20
WINDOW_MS = "60000"


def peers(build: Path, quix_python: Path, keys: int) -> list[Peer]:
    eos = [sys.executable, "-m", "benchmarks.peers.eos_windows"]
    streams = streams_command(HERE / "StreamsCount.java", build)
    quix = [str(quix_python), "-W", "ignore", str(HERE / "quix_count.py")]
    outputs = (MINUTES - 1) * keys
    return [
        Peer(YARDSTICK, streams, (str(STREAMS_THREADS), "{directory}", str(10 << 20), WINDOW_MS), True, outputs),
        Peer("eos, windows, LMDB", eos, ("windows", "{directory}", "lmdb"), outputs=outputs),
        Peer("eos, windows, memory", eos, ("windows", "", "lmdb"), outputs=outputs),
        Peer("Quix Streams", quix, ("{directory}", WINDOW_MS), True, outputs),
        Peer("eos, once, LMDB", eos, ("once", "{directory}", "lmdb"), outputs=1),
        Peer("eos, without once", eos, ("plain", "", "lmdb")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--only", default="", help="peers whose name has this in it, and the yardstick")
    parser.add_argument("--quix-python", type=Path, required=True, help="of a virtual environment with quixstreams")
    parser.add_argument("--build", type=Path, default=Path("build/bench/peers"), help="for the compiled Java class")
    options = parser.parse_args()
    console = Console(width=200)
    console.print(where(options.quix_python))
    found = peers(options.build, options.quix_python, options.keys)
    found = [peer for peer in found if options.only in peer.name or peer.name == YARDSTICK]
    with LocalKafka(nodes=1, config=BROKER) as kafka:
        lines = compare(
            *(console, kafka.bootstrap_servers, found, options.records, 100, options.rounds),
            yardstick=YARDSTICK,
            keys=options.keys,
            span_ms=MINUTES * 60_000,
        )
    print(markdown(lines))


if __name__ == "__main__":
    main()
