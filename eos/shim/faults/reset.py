"""Reset the client's connection before the broker acts, after it, or with the request still in transit."""

from __future__ import annotations

from eos.shim.faults.plan import Phase
from eos.shim.faults.strike import Strike


def request(strike: Strike, frame: bytes) -> bytes:
    if strike.rule.phase is Phase.LATE:
        strike.start(_arrive_late(strike))
    # Earlier requests are sent and answered first. This request and later ones are never sent.
    return strike.hold(frame, lambda: strike.link.reset_before(strike.exchange))


def response(strike: Strike, frame: bytes) -> bytes:
    return strike.hold(frame, strike.link.reset)


async def _arrive_late(strike: Strike) -> None:
    await strike.opened.wait()
    await strike.deliver_copy("late copy")
