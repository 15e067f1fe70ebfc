"""`make bench-state`: the worker, Kafka Streams and Quix Streams count the records of each key, in turns.

An output for each record (of Kafka Streams with its cache for each key and commit, of one of ours for each key and
transaction), commits every 100 ms, exactly once; as benchmarks/peers/speed.py in all else. The ratio is to Kafka
Streams without a cache. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.clients import BROKER
from benchmarks.peers.installed import streams_command
from benchmarks.peers.speed import HERE, STREAMS_THREADS, Peer, compare, markdown, where
from eos.broker import LocalKafka

YARDSTICK = "Kafka Streams, no cache"
CACHE_BYTES = 10 << 20
KIP_892 = "enable.transactional.statestores=true"


def peers(build: Path, quix_python: Path, keys: int) -> list[Peer]:
    eos = [sys.executable, "-m", "benchmarks.peers.eos_count"]
    streams = streams_command(HERE / "StreamsCount.java", build)
    threads = str(STREAMS_THREADS)
    quix = [str(quix_python), "-W", "ignore", str(HERE / "quix_count.py")]
    return [
        Peer(YARDSTICK, streams, (threads, "{directory}", "0"), tells_second_half=True),
        Peer("Kafka Streams, cache", streams, (threads, "{directory}", str(CACHE_BYTES)), True, outputs=keys),
        Peer(
            "Kafka Streams, no cache, KIP-892", streams, (threads, "{directory}", "0", KIP_892), tells_second_half=True
        ),
        Peer("eos, State, LMDB", eos, ("record", "{directory}", "lmdb")),
        Peer("eos, State, RocksDB", eos, ("record", "{directory}", "rocksdb")),
        Peer("eos, State, memory", eos, ("record", "", "lmdb")),
        Peer("eos, batch, LMDB", eos, ("batch", "{directory}", "lmdb")),
        Peer("eos, an output per key and transaction", eos, ("keys", "{directory}", "lmdb"), outputs=keys),
        Peer("Quix Streams", quix, ("{directory}",), tells_second_half=True),
    ]


def main() -> None:
    compare_peers(str(__doc__), peers, YARDSTICK)


def compare_peers(
    description: str, peers: Callable[[Path, Path, int], list[Peer]], yardstick: str, span_ms: int = 0
) -> None:
    """Read the command line, run the peers in turns and print the table. `span_ms`: see worker_speed.load."""
    parser = argparse.ArgumentParser(description=description)
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
    found = [peer for peer in found if options.only in peer.name or peer.name == yardstick]
    with LocalKafka(nodes=1, config=BROKER) as kafka:
        lines = compare(
            *(console, kafka.bootstrap_servers, found, options.records, 100, options.rounds),
            yardstick=yardstick,
            keys=options.keys,
            span_ms=span_ms,
        )
    print(markdown(lines))


if __name__ == "__main__":
    main()
