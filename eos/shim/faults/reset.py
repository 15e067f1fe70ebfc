"""reset: the client's connection breaks before the broker acted, after it, or with the request still on its way."""

from __future__ import annotations

from eos.shim.faults.plan import Phase
from eos.shim.faults.strike import Strike


def request(strike: Strike, frame: bytes) -> bytes:
    if strike.rule.phase is Phase.LATE:
        strike.start(_arrive_late(strike))
    # Requests before it leave and are answered first; this one and what is behind it never leave.
    return strike.hold(frame, lambda: strike.link.reset_before(strike.exchange))


def response(strike: Strike, frame: bytes) -> bytes:
    return strike.hold(frame, strike.link.reset)


async def _arrive_late(strike: Strike) -> None:
    await strike.opened.wait()
    await strike.deliver_copy("late copy")
