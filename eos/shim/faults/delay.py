"""Delay a request or its response for a time or until an event, and with it all later frames.

A request still arrives if its client has disconnected meanwhile, as on a slow network.
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
    await strike.let_go(held, "delayed request of a closed connection")
