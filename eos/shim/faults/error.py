"""error: the client is answered with an error code, whether the broker acted (after_apply) or not (before_apply)."""

from __future__ import annotations

from eos.shim.faults.strike import Strike
from eos.shim.wire import answers


def request(strike: Strike, frame: bytes) -> bytes:
    strike.exchange.answer = _answer(strike)
    return b""


def response(strike: Strike, frame: bytes) -> bytes:
    return _answer(strike)


def _answer(strike: Strike) -> bytes:
    exchange = strike.exchange
    return answers.error_answer(
        strike.frame, exchange.api_key, exchange.version, exchange.correlation_id, strike.rule.code
    )
