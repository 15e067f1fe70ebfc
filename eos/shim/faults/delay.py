"""delay: the request, or its answer, waits for a time or an event, and what is behind it too.

A request whose client gave up meanwhile arrives all the same, as on a slow network.
"""

from __future__ import annotations

from eos.shim.faults.strike import Strike
from eos.shim.lane import Held


def request(strike: Strike, frame: bytes) -> bytes:
    held = strike.hold(frame)
    strike.start(_request_goes_on(strike, held))
    return held


def response(strike: Strike, frame: bytes) -> bytes:
    return strike.hold_answer(frame)


async def _request_goes_on(strike: Strike, held: Held) -> None:
    await strike.opened.wait()
    await strike.let_go(held, "delayed request of a client that is gone")
