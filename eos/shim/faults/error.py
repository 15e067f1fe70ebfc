"""Answer the client with an error code, before the broker acts (before_apply) or after it (after_apply).

With after_apply the response may wait for a time or an event, and all later frames wait with it.
"""

from __future__ import annotations

from eos.shim.faults.strike import Strike
from eos.shim.wire import answers


def request(strike: Strike, frame: bytes) -> bytes:
    strike.exchange.answer = _answer(strike)
    return b""


def response(strike: Strike, frame: bytes) -> bytes:
    if strike.rule.until is None and strike.rule.seconds is None:
        return _answer(strike)
    return strike.hold_answer(_answer(strike))


def _answer(strike: Strike) -> bytes:
    exchange = strike.exchange
    return answers.error_answer(
        strike.frame, exchange.api_key, exchange.version, exchange.correlation_id, strike.rule.code
    )
