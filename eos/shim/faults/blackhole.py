"""blackhole: no answer ever comes and the connection stays; what is behind the request waits with it."""

from __future__ import annotations

from eos.shim.faults.strike import Strike


def request(strike: Strike, frame: bytes) -> bytes:
    return strike.hold(frame)


def response(strike: Strike, frame: bytes) -> bytes:
    return strike.hold(frame)
