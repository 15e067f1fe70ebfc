"""Reset the client's connection before the broker acts, after it, or with the request still in transit."""

from __future__ import annotations

from eos.shim.faults.injection import Injection
from eos.shim.faults.plan import Phase


def request(injection: Injection, frame: bytes) -> bytes:
    if injection.rule.phase is Phase.LATE:
        injection.start(_arrive_late(injection))
    # Earlier requests are sent and answered first. This request and later ones are never sent.
    return injection.hold(frame, lambda: injection.link.reset_before(injection.exchange))


def response(injection: Injection, frame: bytes) -> bytes:
    return injection.hold(frame, injection.link.reset)


async def _arrive_late(injection: Injection) -> None:
    await injection.opened.wait()
    await injection.deliver_copy("late copy")
