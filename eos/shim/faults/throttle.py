"""Ask the client to wait with the throttle_time_ms of a response, as a broker's quota does."""

from __future__ import annotations

from eos.shim.faults.injection import Injection
from eos.shim.wire import messages


def request(injection: Injection, frame: bytes) -> bytes:
    raise AssertionError("a request cannot be throttled")  # plan.ACTIONS rules this out


def response(injection: Injection, frame: bytes) -> bytes:
    exchange = injection.exchange
    return messages.with_throttle_time(frame, exchange.api_key, exchange.version, injection.rule.throttle_ms)
