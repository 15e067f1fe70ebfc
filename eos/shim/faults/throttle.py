"""throttle: the answer asks the client to wait, as a broker's quota does (throttle_time_ms)."""

from __future__ import annotations

from eos.shim.faults.strike import Strike
from eos.shim.wire import answers


def request(strike: Strike, frame: bytes) -> bytes:
    raise AssertionError("a request cannot be throttled")  # plan.ACTIONS does not let it come here


def response(strike: Strike, frame: bytes) -> bytes:
    exchange = strike.exchange
    return answers.throttled(frame, exchange.api_key, exchange.version, strike.rule.throttle_ms)
