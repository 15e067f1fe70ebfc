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
from eos.shim.faults.facts import RequestFacts, read_facts
from eos.shim.faults.injection import Injection
from eos.shim.faults.plan import Phase, Progress
from eos.shim.pipeline import Exchange, Job
from eos.shim.send_queue import HeldFrame

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
        self._waiting: list[Injection] = []  # injections that wait for a request of an API
        self._awaiting_rules: list[Injection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        keys = {each.rule.api_key for each in self._rules}
        events_of = [each.rule.until for each in self._rules if each.rule.until and each.rule.until.rule is None]
        self._keys = keys | {event.api_key for event in events_of}

    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key in self._keys

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key in self._keys

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        facts = read_facts(frame, exchange.api_key, exchange.version)
        opened = self._released_by(facts, exchange)
        injection = self._inject(facts, exchange, frame)
        if injection is not None:
            events.info(
                "fault injected",
                rule=str(injection.rule),
                transactional_id=facts.transactional_id,
                connection=exchange.connection.number,
            )
            if injection.rule.until is not None:
                (self._waiting if injection.rule.until.rule is None else self._awaiting_rules).append(injection)
            if injection.rule.phase is Phase.AFTER_APPLY:
                exchange.notes[self] = injection
            else:
                frame = _ACTIONS[injection.rule.action].request(injection, frame)
                injection.progress.completed += 1
            self._release_by_rules()
        if opened:
            frame = self._hold_until_done(opened, frame)
        return frame

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        injection = exchange.notes.get(self)
        if isinstance(injection, Injection):
            frame = _ACTIONS[injection.rule.action].response(injection, frame)
            injection.progress.completed += 1
            self._release_by_rules()
        opened = exchange.notes.get(_ANSWERED, ())
        return self._hold_until_done(opened, frame) if opened else frame

    def _release_by_rules(self) -> None:
        for injection in list(self._awaiting_rules):
            until = injection.rule.until
            assert until is not None
            assert until.rule is not None
            if self._progress_of(until.rule).completed >= until.nth:
                self._awaiting_rules.remove(injection)
                injection.opened.set()

    def _progress_of(self, number: int) -> Progress:
        return next(each for each in self._rules if each.number == number)

    def spawn(self, injection: Injection, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
                injection.progress.open -= 1
            except (OSError, EOFError) as failure:
                injection.progress.open -= 1
                injection.progress.failed.append(f"the copy got no response ({type(failure).__name__}: {failure})")
            finally:
                injection.done.set()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _inject(self, facts: RequestFacts, exchange: Exchange, frame: bytes) -> Injection | None:
        """Count the request in all matching rules, and return the injection of the first rule that is due."""
        found = None
        for each in self._rules:
            if not each.rule.matches(facts, exchange.connection):
                continue
            if each.rule.beside is not None and not self._progress_of(each.rule.beside).is_on_other_partitions(facts):
                continue
            if found is None and each.count_match():
                found = Injection(self, each, exchange, facts, frame)
        return found

    def _released_by(self, facts: RequestFacts, exchange: Exchange) -> list[Injection]:
        """Return the injections that this request releases on arrival, and note those that its response releases."""
        now, later = list[Injection](), list[Injection]()
        for injection in list(self._waiting):
            until = injection.rule.until
            assert until is not None
            if not until.matches(facts, injection.facts):
                continue
            injection.events_left -= 1
            if injection.events_left == 0:
                self._waiting.remove(injection)
                (now if until.when == "arrives" else later).append(injection)
        if later:
            exchange.notes[_ANSWERED] = later
        return now

    def _hold_until_done(self, opened: list[Injection], frame: bytes) -> bytes:
        """Hold `frame` until the injections that it released are completed."""
        for injection in opened:
            injection.opened.set()
        if not frame:
            return frame
        held = frame if isinstance(frame, HeldFrame) else HeldFrame(frame)

        async def release_later() -> None:
            for injection in opened:
                await injection.done.wait()
            held.release()

        if held is not frame:
            task = asyncio.get_running_loop().create_task(release_later())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return held


# The key in `Exchange.notes` of the injections that wait for the response.
_ANSWERED: Any = Job()
