"""One fault that happens to one request: what the files of faults are given.

Owns the moment between "this request is struck" and "it is dealt with". It must never choose: that is the rule's part.
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
    """`frame` is the request's; `opened` is set when the time or the event it waits for has come."""

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
        """Until its time or event has come."""
        held = self.hold(frame)
        self.start(self._let_answer_go(held))
        return held

    async def _let_answer_go(self, held: Held) -> None:
        await self.opened.wait()
        held.release()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Goes on in the background; an exception of it makes the run fail."""
        self.progress.open += 1
        if self.rule.seconds is not None:
            asyncio.get_running_loop().call_later(self.rule.seconds, self.opened.set)
        self.job.spawn(self, work)

    async def let_go(self, held: Held, what: str) -> None:
        """The request leaves on its client's connection or, if that leads nowhere any more, on one of its own."""
        if self.link.takes_requests:
            held.release()
        else:
            await self.deliver_copy(what)

    async def deliver_copy(self, what: str) -> None:
        """The request's bytes on a connection of their own, and the answer into the log."""
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


# A bound for a healthy broker; past it the rule failed.
ANSWER_TIMEOUT_S = 30.0


async def _exchanged(upstream: Address, context: ssl.SSLContext | None, frame: bytes) -> bytes:
    """The answer's frame. Raises OSError or IncompleteReadError when there is none."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*upstream, ssl=context)
        try:
            writer.write(frame)
            await writer.drain()
            size = await reader.readexactly(4)
            return size + await reader.readexactly(int.from_bytes(size, "big"))
        finally:
            writer.close()
