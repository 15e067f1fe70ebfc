"""Hold a request or its response forever, and with it all later frames, while the connection stays open."""

from __future__ import annotations

from eos.shim.faults.strike import Strike


def request(strike: Strike, frame: bytes) -> bytes:
    return strike.hold(frame)


def response(strike: Strike, frame: bytes) -> bytes:
    return strike.hold(frame)
