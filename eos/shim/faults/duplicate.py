"""duplicate: the broker gets the request twice, the copy on a connection of its own.

before_apply: the copy is first and the client's own request the duplicate; after_apply: the other way round; late: the
client's request passes and the copy arrives at its time.
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
    await strike.let_go(held, "request whose duplicate was first, of a client that is gone")


async def _copy_before_the_answer(strike: Strike, held: Held) -> None:
    await strike.deliver_copy("duplicate")
    held.release()


async def _late(strike: Strike) -> None:
    await strike.opened.wait()
    await strike.deliver_copy("late duplicate")
