"""Connect hostile clients to a shim, and time the responses to an honest client at the same time.

`python -m tests.shim.hostile_clients --minutes 10` sends random frames for that long to a shim with its own broker. It
prints the honest client's longest wait, the shim's largest memory and the number of its log lines. Every hostile client
has its own address (127.0.0.x), so that log lines identify it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Producer
from hypothesis import HealthCheck, given, settings
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

from eos.shim.wire import api
from tests.shim.shims import RunningShim, running
from tests.support.reading import TooSlow, create_topic
from tests.support.wire import Wire
from tests.unit.shim.test_unreadable import KEYS, damaged

MIB = 1024 * 1024
LONGEST_ANSWER_S = 1.0
LARGEST_RSS_BYTES = 400 * MIB


def head(api_key: int, version: int, size: int, correlation_id: int = 1) -> bytes:
    """Return the beginning of a request that announces `size` bytes and has a null client id."""
    return struct.pack(">ihhih", size, api_key, version, correlation_id, -1)


def frame(api_key: int, version: int, body: bytes, correlation_id: int = 1) -> bytes:
    return head(api_key, version, 10 + len(body), correlation_id) + body


def connect(shim: RunningShim, host: str) -> socket.socket:
    address, port = shim.bootstrap_servers.rsplit(":", 1)
    return socket.create_connection((address, int(port)), 15, source_address=(host, 0))


def send_until_closed(connection: socket.socket, first: bytes, piece: bytes, total: int) -> int:
    """Send `total` bytes, and return how many were accepted before the shim closed."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        connection.sendall(first)
        while sent < total:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def send_until_full(connection: socket.socket, data: bytes, total: int) -> int:
    """Send until the shim accepts nothing for a second or closes, without reading; return the number of bytes."""
    connection.settimeout(1.0)
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        while sent < total:
            sent += connection.send(data[sent % len(data) :])
    return sent


def peak_rss(pid: int) -> int:
    """Return the peak memory of this process in bytes."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Honest:
    """Send requests repeatedly on kept and new connections, produce, and query the broker directly for comparison.

    Times are in seconds; `asked` counts the requests.
    """

    def __init__(self, shim: RunningShim, broker: str, topic: str) -> None:
        self.slowest_s, self.slowest_direct_s, self.asked = 0.0, 0.0, 0
        self.failure: BaseException | None = None
        self._shim, self._broker, self._topic = shim, broker, topic
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._ask, self._compare)]

    def __enter__(self) -> Honest:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        assert self.failure is None, f"the honest client failed: {self.failure!r}"
        assert self.asked >= 3
        limit_s = LONGEST_ANSWER_S + self.slowest_direct_s
        if self.slowest_s >= limit_s:  # A loaded machine makes a client wait once, a blocked shim makes it wait always.
            raise TooSlow(f"an honest client waited {self.slowest_s:.2f} s ({limit_s:.2f} s allowed)")
        peak = peak_rss(self._shim.process.pid)
        assert peak < LARGEST_RSS_BYTES, f"the shim took {peak / MIB:.0f} MiB"

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - `check` reports it
            self.failure = error

    def _ask(self) -> None:
        producer = Producer({"bootstrap.servers": self._shim.bootstrap_servers, "linger.ms": 0})
        producer.produce(self._topic, b"connects")
        assert producer.flush(30) == 0
        with Wire(self._shim.bootstrap_servers) as kept:
            while not self._stop.wait(0.02):
                began = time.monotonic()
                assert kept.ask(MetadataRequest(version=4, topics=[])).brokers
                self._took(began)
                with Wire(self._shim.bootstrap_servers) as new:
                    began = time.monotonic()
                    assert new.ask(ApiVersionsRequest(version=0)).api_keys
                self._took(began)
                began = time.monotonic()
                producer.produce(self._topic, bytes(100_000))
                assert producer.flush(30) == 0
                self._took(began)

    def _took(self, began: float) -> None:
        self.asked += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _compare(self) -> None:
        with Wire(self._broker) as wire:
            while not self._stop.wait(0.05):
                began = time.monotonic()
                wire.ask(MetadataRequest(version=4, topics=[]))
                self.slowest_direct_s = max(self.slowest_direct_s, time.monotonic() - began)


def some_frames(per_key: int) -> list[bytes]:
    """Yield damaged requests of every API that the shim reads, as the unit tests make them."""
    found: list[bytes] = []
    for key in KEYS:

        @settings(max_examples=per_key, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(damaged(key))
        def collect(made: tuple[int, bytes]) -> None:
            found.append(made[1])

        collect()
    return found


def send_random_frames(shim: RunningShim, host: str, frames: Sequence[bytes], seed: int, until: float) -> int:
    """Send random frames on one connection after the other until the time is over, and return their number."""
    chance, frames_sent = random.Random(seed), 0
    hello = frame(api.API_VERSIONS, 0, b"")
    while time.monotonic() < until:
        with contextlib.suppress(OSError), connect(shim, host) as connection:
            connection.settimeout(0.2)
            connection.sendall(hello * chance.randint(0, 2))
            for _ in range(chance.randint(1, 60)):
                data = bytearray(chance.choice(frames) * chance.choice((1, 1, 1, 50, 2_000)))
                for _ in range(chance.choice((0, 0, 1, 3))):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                frames_sent += 1
                while data:
                    size = chance.choice((1, 7, 100, 5_000, 1_000_000))
                    connection.sendall(data[:size])
                    del data[:size]
                if chance.random() < 0.3:
                    connection.recv(chance.choice((10, 100_000)))
    return frames_sent


def random_frames(shim: RunningShim, seconds: float, per_key: int, seed: int = 1) -> int:
    """Send random frames from four clients at once, and return the number of frames."""
    frames = some_frames(per_key)
    until = time.monotonic() + seconds
    frames_sent: list[int] = []
    threads = [
        threading.Thread(
            target=lambda n=n: frames_sent.append(
                send_random_frames(shim, f"127.0.0.{20 + n}", frames, seed + n, until)
            )
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(frames_sent)


@contextmanager
def guarded_shim(upstream: str, directory: Path) -> Iterator[RunningShim]:
    """Start a shim with everything that reads requests: protection, a policy, the trace and the counts."""
    policy = directory / "policy.toml"
    policy.write_text(
        '[[topic]]\nname = "guarded-*"\ntransactional_only = true\nread_committed_only = true\n'
        '[[principal]]\nname = "ANONYMOUS"\ntransactional_id_prefixes = ["a", "p", "t"]\n'
    )
    options = ("--policy", str(policy), "--trace-html", str(directory / "t.html"), "--http", "127.0.0.1:0")
    with running(upstream, *options) as shim:
        yield shim


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without policy, trace and counts")
    arguments = parser.parse_args()
    import tempfile

    from eos.broker import LocalKafka

    with tempfile.TemporaryDirectory() as directory, LocalKafka() as kafka:
        upstream = kafka.bootstrap_servers
        made = running(upstream) if arguments.plain else guarded_shim(upstream, Path(directory))
        create_topic(upstream, "honest")
        with made as shim, Honest(shim, upstream, "honest") as honest:
            frames_sent = random_frames(shim, arguments.minutes * 60, 400, arguments.seed)
            print(
                f"{frames_sent} bursts of random frames in {arguments.minutes:g} min; honest answers: {honest.asked}, "
                f"slowest {honest.slowest_s:.2f} s (broker itself: {honest.slowest_direct_s:.2f} s); the shim's peak "
                f"{peak_rss(shim.process.pid) / MIB:.0f} MiB; {len(shim.events)} log lines",
                flush=True,
            )
            honest.check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
