"""delay: the request, or its answer, waits for a time or an event, and what is behind it too.

A request whose client gave up meanwhile arrives all the same, as on a slow network.
"""

from __future__ import annotations

from eos.shim.faults.strike import Strike
from eos.shim.lane import Held


def request(strike: Strike, frame: bytes) -> bytes:
    held = strike.hold(frame)
    strike.start(_let_go(strike, held, True))
    return held


def response(strike: Strike, frame: bytes) -> bytes:
    held = strike.hold(frame)
    strike.start(_let_go(strike, held, False))
    return held


async def _let_go(strike: Strike, held: Held, is_request: bool) -> None:
    await strike.opened.wait()
    if is_request and strike.connection_gone:
        await strike.deliver_copy("delayed request of a client that is gone")
    else:
        held.release()
