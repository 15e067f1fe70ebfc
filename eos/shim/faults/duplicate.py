"""Send a request to the broker twice, the copy on a separate connection.

before_apply: the copy arrives first, and the client's request is the duplicate. after_apply: the copy arrives second.
late: the client's request is forwarded, and the copy arrives at the time or event of the rule.
"""

from __future__ import annotations

from eos.shim.faults.injection import Injection
from eos.shim.faults.plan import Phase
from eos.shim.send_queue import HeldFrame


def request(injection: Injection, frame: bytes) -> bytes:
    if injection.rule.phase is Phase.LATE:
        injection.start(_send_late_copy(injection))
        return frame
    held = injection.hold(frame)
    injection.start(_copy_first(injection, held))
    return held


def response(injection: Injection, frame: bytes) -> bytes:
    held = injection.hold(frame)
    injection.start(_copy_before_response(injection, held))
    return held


async def _copy_first(injection: Injection, held: HeldFrame) -> None:
    await injection.deliver_copy("duplicate")
    await injection.send_held(held, "held request")


async def _copy_before_response(injection: Injection, held: HeldFrame) -> None:
    await injection.deliver_copy("duplicate")
    held.release()


async def _send_late_copy(injection: Injection) -> None:
    await injection.opened.wait()
    await injection.deliver_copy("late duplicate")
