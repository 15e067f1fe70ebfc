"""Hold a request or its response forever, and with it all later frames, while the connection stays open."""

from __future__ import annotations

from eos.shim.faults.injection import Injection


def request(injection: Injection, frame: bytes) -> bytes:
    return injection.hold(frame)


def response(injection: Injection, frame: bytes) -> bytes:
    return injection.hold(frame)
