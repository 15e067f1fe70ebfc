"""Answer the client with an error code, before the broker acts (before_apply) or after it (after_apply).

With after_apply the response may wait for a time or an event, and all later frames wait with it.
"""

from __future__ import annotations

from eos.shim.faults.injection import Injection
from eos.shim.wire import messages


def request(injection: Injection, frame: bytes) -> bytes:
    injection.exchange.answer = _answer(injection)
    return b""


def response(injection: Injection, frame: bytes) -> bytes:
    if injection.rule.until is None and injection.rule.seconds is None:
        return _answer(injection)
    return injection.hold_response(_answer(injection))


def _answer(injection: Injection) -> bytes:
    exchange = injection.exchange
    return messages.error_response(
        injection.frame, exchange.api_key, exchange.version, exchange.correlation_id, injection.rule.code
    )
