"""Delay a request or its response for a time or until an event, and with it all later frames.

A request still arrives if its client has disconnected meanwhile, as on a slow network.
"""

from __future__ import annotations

from eos.shim.faults.injection import Injection
from eos.shim.send_queue import HeldFrame


def request(injection: Injection, frame: bytes) -> bytes:
    held = injection.hold(frame)
    injection.start(_release_request(injection, held))
    return held


def response(injection: Injection, frame: bytes) -> bytes:
    return injection.hold_response(frame)


async def _release_request(injection: Injection, held: HeldFrame) -> None:
    await injection.opened.wait()
    await injection.send_held(held, "delayed request of a closed connection")
