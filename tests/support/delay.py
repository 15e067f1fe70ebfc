"""Delay TCP traffic to a broker, as on a long line of any bandwidth.

Each side receives the other's bytes in order, `each_way_ms` later, and any number of bytes may be on their way. The
proxy must never look at the bytes. The broker's second listener advertises the proxy's port, as for
tests/support/proxy.py, which may come next: client -> Delay -> HoldingProxy -> broker.

Runs as a separate process too, so that a benchmark's client does not share its interpreter: `python -m
tests.support.delay LISTEN_PORT UPSTREAM_HOST:PORT MILLISECONDS`, until its input ends.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections import deque
from types import TracebackType

_STARTED_S = 10.0


class Delay:
    """Listen on 127.0.0.1:`listen_port`, and delay the traffic to and from `upstream` by `each_way_ms`."""

    def __init__(self, listen_port: int, upstream: tuple[str, int], each_way_ms: float) -> None:
        self.listen_port, self.upstream, self.each_way_ms = listen_port, upstream, each_way_ms
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay", daemon=True)

    def __enter__(self) -> Delay:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_STARTED_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_STARTED_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STARTED_S)
        assert not self._thread.is_alive(), "the proxy's thread did not end"
        self._loop.close()

    async def _listen(self) -> None:
        self._ends: set[_End] = set()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.listen_port))
        self._server = await self._loop.create_server(lambda: _End(self, accepted=True), sock=listener)

    async def _close(self) -> None:
        self._server.close()
        for end in list(self._ends):
            end.transport.abort()
        await asyncio.sleep(0)


class _End(asyncio.Protocol):
    """Hold the connection of one side, whose bytes go to `other` later."""

    transport: asyncio.Transport

    def __init__(self, delay: Delay, accepted: bool) -> None:
        self.delay, self.accepted = delay, accepted
        self.loop = asyncio.get_running_loop()
        self.other: _End | None = None
        # (when due, bytes); None instead of bytes: this side has closed
        self.under_way: deque[tuple[float, bytes | None]] = deque()
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.delay._ends.add(self)
        if self.accepted:
            self.task = self.loop.create_task(self._reach_upstream())
        else:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def _reach_upstream(self) -> None:
        try:
            _, other = await self.loop.create_connection(lambda: _End(self.delay, False), *self.delay.upstream)
        except OSError:
            self.transport.abort()
            return
        self.other, other.other = other, self
        self._deliver()

    def data_received(self, data: bytes) -> None:
        self._send_off(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.delay._ends.discard(self)
        self._send_off(None)

    def _send_off(self, data: bytes | None) -> None:
        self.under_way.append((self.loop.time() + self.delay.each_way_ms / 1000, data))
        if self.timer is None:
            self._deliver()

    def _deliver(self) -> None:
        """Deliver the bytes that are due. A single timer waits for the next ones, because two timers could change
        their order."""
        self.timer = None
        if self.other is None:
            return
        now = self.loop.time()
        while self.under_way and self.under_way[0][0] <= now:
            _, data = self.under_way.popleft()
            if data is None:
                self.other.transport.close()
                return
            self.other.transport.write(data)
        if self.under_way:
            self.timer = self.loop.call_at(self.under_way[0][0], self._deliver)


def main(listen_port: str, upstream: str, each_way_ms: str) -> None:
    host, port = upstream.rsplit(":", 1)
    with Delay(int(listen_port), (host, int(port)), float(each_way_ms)):
        print("listening", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
