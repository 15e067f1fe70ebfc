"""Send a request to the broker twice, the copy on a separate connection.

before_apply: the copy arrives first, and the client's request is the duplicate. after_apply: the copy arrives second.
late: the client's request is forwarded, and the copy arrives at the time or event of the rule.
"""

from __future__ import annotations

from eos.shim.faults.plan import Phase
from eos.shim.faults.strike import Strike
from eos.shim.lane import Held


def request(strike: Strike, frame: bytes) -> bytes:
    if strike.rule.phase is Phase.LATE:
        strike.start(_late(strike))
        return frame
    held = strike.hold(frame)
    strike.start(_copy_first(strike, held))
    return held


def response(strike: Strike, frame: bytes) -> bytes:
    held = strike.hold(frame)
    strike.start(_copy_before_the_answer(strike, held))
    return held


async def _copy_first(strike: Strike, held: Held) -> None:
    await strike.deliver_copy("duplicate")
    await strike.let_go(held, "request of a closed connection after its duplicate")


async def _copy_before_the_answer(strike: Strike, held: Held) -> None:
    await strike.deliver_copy("duplicate")
    held.release()


async def _late(strike: Strike) -> None:
    await strike.opened.wait()
    await strike.deliver_copy("late duplicate")
