"""Ask the client to wait with the throttle_time_ms of a response, as a broker's quota does."""

from __future__ import annotations

from eos.shim.faults.strike import Strike
from eos.shim.wire import answers


def request(strike: Strike, frame: bytes) -> bytes:
    raise AssertionError("a request cannot be throttled")  # plan.ACTIONS rules this out


def response(strike: Strike, frame: bytes) -> bytes:
    exchange = strike.exchange
    return answers.throttled(frame, exchange.api_key, exchange.version, strike.rule.throttle_ms)
