"""Runs the shim on its own thread, for tests: faults and protection between a client and any Kafka.

Owns the thread and its loop. A test reads the plan's result after the block: `plan.complaints()`.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from eos.shim import ShimSettings
from eos.shim.chain import Chain
from eos.shim.faults import Plan
from eos.shim.pipeline import Job
from eos.shim.protect import ProtectJob
from eos.shim.settings import parse_address

START_TIMEOUT_S = 60.0


class ShimThread:
    """Runs the shim for a block; clients inside connect to `bootstrap_servers`. Raises what `Shim` raises."""

    def __init__(self, upstream: str, plan: Plan | None = None, protect: bool = False) -> None:
        addresses = tuple(parse_address(part, "upstream") for part in upstream.split(","))
        self._settings = ShimSettings(addresses, ("127.0.0.1", 0), drain_timeout_s=2.0)
        self._jobs: list[Job] = [ProtectJob()] if protect else []
        self._plan = plan
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="eos-shim", daemon=True)
        self._chain: Chain | None = None

    @property
    def bootstrap_servers(self) -> str:
        assert self._chain is not None
        host, port = self._chain.addresses[0]
        return f"{host}:{port}"

    def __enter__(self) -> ShimThread:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        return self

    async def _start(self) -> None:
        self._chain = Chain(self._settings, self._jobs, self._plan)
        await self._chain.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._chain is not None
        try:
            asyncio.run_coroutine_threadsafe(self._chain.stop(), self._loop).result(START_TIMEOUT_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
