"""`make bench-windows`: the worker, Kafka Streams and Quix Streams count per key and minute; and deduplication.

The records span 20 minutes of event time in order, so that the final counts of 19 windows of each key are sent. Commits
every 100 ms, exactly once; as benchmarks/peers/count.py in all else. The ratio is to Kafka Streams with suppress().
Nothing here asserts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.count import compare_peers
from benchmarks.peers.installed import streams_command
from benchmarks.peers.speed import HERE, STREAMS_THREADS, Peer

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
        Peer("eos, windows, LMDB, 2 workers", eos, ("windows", "{directory}", "lmdb", "2"), outputs=outputs),
        Peer("Quix Streams", quix, ("{directory}", WINDOW_MS), True, outputs),
        Peer("eos, once, LMDB", eos, ("once", "{directory}", "lmdb"), outputs=1),
        Peer("eos, once, LMDB, 2 workers", eos, ("once", "{directory}", "lmdb", "2"), outputs=1),
        Peer("eos, without once", eos, ("plain", "", "lmdb")),
    ]


def main() -> None:
    compare_peers(str(__doc__), peers, YARDSTICK, span_ms=MINUTES * 60_000)


if __name__ == "__main__":
    main()
