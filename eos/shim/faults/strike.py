"""Carry out one fault of one request, with operations that the fault modules use.

The module owns the time from the choice of a request to the completion of its fault. It must never choose: rules do.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from eos.codes import error_name
from eos.shim import events
from eos.shim.addresses.book import Address
from eos.shim.faults.plan import Progress
from eos.shim.faults.said import Said
from eos.shim.lane import Held
from eos.shim.pipeline import Exchange
from eos.shim.wire import answers

if TYPE_CHECKING:
    from eos.shim.faults.job import FaultJob


class Strike:
    """Hold one request with a fault. `frame` is its bytes; `opened` is set when its time or event has come."""

    def __init__(self, job: FaultJob, progress: Progress, exchange: Exchange, said: Said, frame: bytes) -> None:
        self.job, self.progress, self.exchange, self.said, self.frame = job, progress, exchange, said, frame
        self.rule = progress.rule
        self.opened = asyncio.Event()
        self.done = asyncio.Event()
        self.events_left = self.rule.until.nth if self.rule.until else 0
        progress.struck += 1
        progress.first = progress.first or said

    @property
    def link(self) -> Any:
        return self.exchange.connection.link

    def hold(self, frame: bytes, reached: Callable[[], None] | None = None) -> Held:
        held = Held(frame)
        held.reached = reached
        return held

    def hold_answer(self, frame: bytes) -> Held:
        """Hold a response until the rule's time or event."""
        held = self.hold(frame)
        self.start(self._let_answer_go(held))
        return held

    async def _let_answer_go(self, held: Held) -> None:
        await self.opened.wait()
        held.release()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background. If it raises an exception, the run fails."""
        self.progress.open += 1
        if self.rule.seconds is not None:
            asyncio.get_running_loop().call_later(self.rule.seconds, self.opened.set)
        self.job.spawn(self, work)

    async def let_go(self, held: Held, what: str) -> None:
        """Send the request on its client's connection, or on a separate one if that connection has closed."""
        if self.link.takes_requests:
            held.release()
        else:
            await self.deliver_copy(what)

    async def deliver_copy(self, what: str) -> None:
        """Send the request's bytes on a separate connection, and log the response."""
        exchange = self.exchange
        answer = await _exchanged(exchange.connection.link.endpoint.upstream, self.job.tls, self.frame)
        codes = answers.errors_of(answer, exchange.api_key, exchange.version)
        error = next((code for code in codes if code), 0)
        events.info(
            f"{what} delivered",
            rule=str(self.rule),
            transactional_id=self.said.transactional_id,
            answer=error_name(error),
        )


# A healthy broker answers within this time; otherwise the rule has failed.
ANSWER_TIMEOUT_S = 30.0


async def _exchanged(upstream: Address, context: ssl.SSLContext | None, frame: bytes) -> bytes:
    """Return the frame of the response. Raises OSError or IncompleteReadError without one."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*upstream, ssl=context)
        try:
            writer.write(frame)
            await writer.drain()
            size = await reader.readexactly(4)
            return size + await reader.readexactly(int.from_bytes(size, "big"))
        finally:
            writer.close()
