"""Check in the machine's TCP connections that only the shim was connected to a broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from eos.broker import LocalKafka
from tests.shim.shims import RunningShim, eventually


class Watch:
    """Record connections to brokers: `by_shim` those of the shim, `direct` those of other processes except brokers."""

    def __init__(self, ports: set[int], allowed: set[int], shim: int) -> None:
        self.by_shim: set[tuple[int, int]] = set()
        self.direct: set[tuple[int | None, int, int]] = set()
        self.examinations = 0
        self._ports, self._allowed, self._shim = ports, allowed, shim
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.examine()

    def examine(self) -> None:
        for connection in psutil.net_connections("tcp"):
            if not connection.raddr or connection.raddr.port not in self._ports:
                continue
            ends = (connection.laddr.port, connection.raddr.port)
            if connection.pid == self._shim:
                self.by_shim.add(ends)
            elif connection.pid is not None and connection.pid not in self._allowed:
                self.direct.add((connection.pid, *ends))
        self.examinations += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join(10)


@contextmanager
def only_through(shim: RunningShim, kafka: LocalKafka) -> Iterator[Watch]:
    """Fail if a process other than the shim and the brokers connects to a broker's client port inside the block.

    The block must keep its clients open until its end; otherwise a missing observation proves nothing.
    """
    ports = {int(server.rsplit(":", 1)[1]) for server in kafka.bootstrap_servers.split(",")}
    brokers = {kafka.pid(i) for i in range(len(ports))}
    # Clients of earlier tests and of the readiness check may still be closing.
    watch = Watch(ports, brokers, shim.process.pid)
    try:
        eventually(lambda: watch.examinations >= 1)
        before = set(watch.direct)
        yield watch
        watch.examine()
    finally:
        watch.end()
    assert watch.examinations >= 2, "no connections were examined"
    assert watch.by_shim, "the shim was never seen connected to a broker"
    assert not watch.direct - before, f"connected to a broker past the shim (pid, from, to): {watch.direct - before}"
