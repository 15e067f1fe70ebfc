"""Carry out one fault of one request, with operations that the fault modules use.

The module owns the time from the choice of a request to the completion of its fault. It must never choose: rules do.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from eos.codes import error_name
from eos.shim import events
from eos.shim.addresses.book import Address
from eos.shim.faults.facts import RequestFacts
from eos.shim.faults.plan import Progress
from eos.shim.pipeline import Exchange
from eos.shim.send_queue import HeldFrame
from eos.shim.wire import messages


class Runner(Protocol):
    """Runs the work of injections in the background: a FaultJob."""

    tls: ssl.SSLContext | None
    """The TLS context of the connections that carry copies of requests."""

    def spawn(self, injection: Injection, work: Coroutine[Any, Any, None]) -> None: ...


class Injection:
    """Hold one request with a fault. `frame` is its bytes; `opened` is set when its time or event has come."""

    def __init__(self, job: Runner, progress: Progress, exchange: Exchange, facts: RequestFacts, frame: bytes) -> None:
        self.job, self.progress, self.exchange, self.facts, self.frame = job, progress, exchange, facts, frame
        self.rule = progress.rule
        self.opened = asyncio.Event()
        self.done = asyncio.Event()
        self.events_left = self.rule.until.nth if self.rule.until else 0
        progress.injected += 1
        progress.first = progress.first or facts

    @property
    def link(self) -> Any:
        return self.exchange.connection.link

    def hold(self, frame: bytes, on_turn: Callable[[], None] | None = None) -> HeldFrame:
        held = HeldFrame(frame)
        held.on_turn = on_turn
        return held

    def hold_response(self, frame: bytes) -> HeldFrame:
        """Hold a response until the rule's time or event."""
        held = self.hold(frame)
        self.start(self._release_response(held))
        return held

    async def _release_response(self, held: HeldFrame) -> None:
        await self.opened.wait()
        held.release()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background. If it raises an exception, the run fails."""
        self.progress.open += 1
        if self.rule.seconds is not None:
            asyncio.get_running_loop().call_later(self.rule.seconds, self.opened.set)
        self.job.spawn(self, work)

    async def send_held(self, held: HeldFrame, what: str) -> None:
        """Send the request on its client's connection, or on a separate one if that connection has closed."""
        if self.link.can_send_requests:
            held.release()
        else:
            await self.deliver_copy(what)

    async def deliver_copy(self, what: str) -> None:
        """Send the request's bytes on a separate connection, and log the response."""
        exchange = self.exchange
        answer = await _exchange(exchange.connection.link.endpoint.upstream, self.job.tls, self.frame)
        codes = messages.error_codes(answer, exchange.api_key, exchange.version)
        error = next((code for code in codes if code), 0)
        events.info(
            f"{what} delivered",
            rule=str(self.rule),
            transactional_id=self.facts.transactional_id,
            answer=error_name(error),
        )


# A healthy broker answers within this time; otherwise the rule has failed.
ANSWER_TIMEOUT_S = 30.0


async def _exchange(upstream: Address, context: ssl.SSLContext | None, frame: bytes) -> bytes:
    """Return the frame of the response. Raises OSError or IncompleteReadError if none arrives."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*upstream, ssl=context)
        try:
            writer.write(frame)
            await writer.drain()
            size = await reader.readexactly(4)
            return size + await reader.readexactly(int.from_bytes(size, "big"))
        finally:
            writer.close()
