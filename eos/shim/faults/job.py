"""Count requests, inject a fault into those that are due, and hold frames until their event.

The job is alone in its own shim (eos/shim/chain.py). It is therefore nearest to the broker for requests and nearest to
the client for responses, so it can hold frames where a network would. It never sleeps: a frame that is an event waits
until the faults that it released are completed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Iterable
from typing import Any

from eos.shim import events
from eos.shim.faults import blackhole, delay, duplicate, error, reset, throttle
from eos.shim.faults.plan import Phase, Progress
from eos.shim.faults.said import Said, said
from eos.shim.faults.strike import Strike
from eos.shim.lane import Held
from eos.shim.pipeline import Exchange, Job

_ACTIONS: dict[str, Any] = {
    "reset": reset,
    "blackhole": blackhole,
    "delay": delay,
    "error": error,
    "duplicate": duplicate,
    "throttle": throttle,
}


class FaultJob(Job):
    """Apply rules to requests. Copies of requests use the TLS context `tls`."""

    def __init__(self, rules: Iterable[Progress], tls: ssl.SSLContext | None = None) -> None:
        self._rules = list(rules)
        self.tls = tls
        self._waiting: list[Strike] = []  # strikes that wait for a request of an API
        self._waiting_for_rules: list[Strike] = []
        self._tasks: set[asyncio.Task[None]] = set()
        keys = {each.rule.api_key for each in self._rules}
        events_of = [each.rule.until for each in self._rules if each.rule.until and each.rule.until.rule is None]
        self._keys = keys | {event.api_key for event in events_of}

    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key in self._keys

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key in self._keys

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        asked = said(frame, exchange.api_key, exchange.version)
        opened = self._events(asked, exchange)
        strike = self._strike(asked, exchange, frame)
        if strike is not None:
            events.info(
                "fault injected",
                rule=str(strike.rule),
                transactional_id=asked.transactional_id,
                connection=exchange.connection.number,
            )
            if strike.rule.until is not None:
                (self._waiting if strike.rule.until.rule is None else self._waiting_for_rules).append(strike)
            if strike.rule.phase is Phase.AFTER_APPLY:
                exchange.notes[self] = strike
            else:
                frame = _ACTIONS[strike.rule.action].request(strike, frame)
                strike.progress.made += 1
            self._open_what_waits_for_rules()
        if opened:
            frame = self._after(opened, frame)
        return frame

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        strike = exchange.notes.get(self)
        if isinstance(strike, Strike):
            frame = _ACTIONS[strike.rule.action].response(strike, frame)
            strike.progress.made += 1
            self._open_what_waits_for_rules()
        opened = exchange.notes.get(_ANSWERED, ())
        return self._after(opened, frame) if opened else frame

    def _open_what_waits_for_rules(self) -> None:
        for strike in list(self._waiting_for_rules):
            until = strike.rule.until
            assert until is not None
            assert until.rule is not None
            if self._number(until.rule).made >= until.nth:
                self._waiting_for_rules.remove(strike)
                strike.opened.set()

    def _number(self, number: int) -> Progress:
        return next(each for each in self._rules if each.number == number)

    def spawn(self, strike: Strike, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
                strike.progress.open -= 1
            except (OSError, EOFError) as failure:
                strike.progress.open -= 1
                strike.progress.failed.append(f"the copy got no response ({type(failure).__name__}: {failure})")
            finally:
                strike.done.set()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _strike(self, asked: Said, exchange: Exchange, frame: bytes) -> Strike | None:
        """Count the request in all matching rules, and return the strike of the first rule that is due."""
        found = None
        for each in self._rules:
            if not each.rule.fits(asked, exchange.connection):
                continue
            if each.rule.beside is not None and not self._number(each.rule.beside).is_beside(asked):
                continue
            if found is None and each.due():
                found = Strike(self, each, exchange, asked, frame)
        return found

    def _events(self, asked: Said, exchange: Exchange) -> list[Strike]:
        """Return the strikes whose event is the arrival of this request, and note those whose event is its response."""
        now, later = list[Strike](), list[Strike]()
        for strike in list(self._waiting):
            until = strike.rule.until
            assert until is not None
            if not until.fits(asked, strike.said):
                continue
            strike.events_left -= 1
            if strike.events_left == 0:
                self._waiting.remove(strike)
                (now if until.when == "arrives" else later).append(strike)
        if later:
            exchange.notes[_ANSWERED] = later
        return now

    def _after(self, opened: list[Strike], frame: bytes) -> bytes:
        """Hold `frame` until the strikes that it released are completed."""
        for strike in opened:
            strike.opened.set()
        if not frame:
            return frame
        held = frame if isinstance(frame, Held) else Held(frame)

        async def go_on() -> None:
            for strike in opened:
                await strike.done.wait()
            held.release()

        if held is not frame:
            task = asyncio.get_running_loop().create_task(go_on())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return held


# The key in `Exchange.notes` of the strikes that wait for the response.
_ANSWERED: Any = Job()
