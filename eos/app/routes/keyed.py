"""Runs `async def` functions that take one record and have state."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eos.app import concurrent
from eos.app.layers import Layer
from eos.app.results import Normalise
from eos.app.routes.feeds import feed_from
from eos.app.stores import Stores
from eos.encoding.serde import Decode, underlying
from eos.records import Record, Send


class Keyed:
    """Runs an `async def` function that takes one record and has state.

    Records of one key run one after the other, and their changes are written when their outputs are yielded. After a
    failed record the later records of its key wait.
    """

    def __init__(
        self,
        stores: Stores,
        function: Callable[[Any], Any],
        decode: Decode | None,
        finish: Callable[[Any], Any] | None,
        normalise: Normalise,
    ) -> None:
        is_generator = inspect.isasyncgenfunction(underlying(function))

        async def result_of(given: Any, *held: Any) -> Any:
            running = function(given, *held)
            return [item async for item in running] if is_generator else await running

        self._stores, self._run = stores, stores.concurrent(result_of)
        self._decode, self._finish, self._normalise = decode, finish, normalise
        # The results of the records after a failed one, each with its record and the time of its task. These records
        # will be handed out again.
        self._later_results: list[tuple[Record, concurrent.Outcome, int]] = []
        self.feed = feed_from(self.each)

    def _make_outputs(self, record: Record, result: Any) -> Sequence[Send]:
        return self._normalise(record, result if self._finish is None else self._finish(result))

    async def _run_one(self, record: Record, seen: Layer, now: int) -> tuple[Any, list[Any]]:
        given = record if self._decode is None else self._decode(record.value)
        return await self._run(record, given, self._make_outputs, seen, now)

    async def _chain(
        self, records: list[Record], known: dict[int, concurrent.Outcome], times: Mapping[int, int]
    ) -> None:
        """Run the records of one key, up to the first that fails."""
        seen = Layer(self._stores.task_of(records[0]))
        for record in records:
            now = times.get(id(record), 0)
            if id(record) not in known:
                known[id(record)] = await concurrent.outcome_of(self._run_one(record, seen, now))
            if isinstance(outcome := known[id(record)], BaseException):
                return
            if record is not records[-1]:
                self._stores.write(outcome[1], seen, now)

    def each(self, records: list[Record]) -> Iterator[Sequence[Send]]:
        stores, wanted = self._stores, set(map(id, records))
        times = stores.times_of(records)
        chains: dict[tuple[int, bytes | None], list[Record]] = {}
        for record in records:
            chains.setdefault((record.partition, record.key), []).append(record)
        # A stored result is used only if its record still has the same event time. A failed record does not advance the
        # time, so the time may differ now. Then the record runs again, and so do the later records of its key, because
        # they read the state that it wrote.
        current = {
            id(record): outcome for record, outcome, now in self._later_results if times.get(id(record), 0) == now
        }
        known = {
            id(record): current[id(record)]
            for few in chains.values()
            for record in itertools.takewhile(lambda record: id(record) in current, few)
        }
        self._later_results = [kept for kept in self._later_results if id(kept[0]) not in wanted]
        waiting = [
            self._chain(few, known, times) for few in chains.values() if any(id(record) not in known for record in few)
        ]
        for outcome in concurrent.run_all(waiting) if waiting else ():
            if isinstance(outcome, BaseException):
                raise outcome  # the function did not raise it: `_chain` stores the function's exceptions as outcomes
        for number, record in enumerate(records):
            outcome = known[id(record)]
            if isinstance(outcome, BaseException):
                later = [other for other in records[number + 1 :] if id(other) in known]
                if later:
                    self._later_results = [(other, known[id(other)], times.get(id(other), 0)) for other in later]
                raise outcome
            sends, held = outcome
            task = stores.task_of(record)
            stores.write(held, task, times.get(id(record), 0))
            if times:
                task.time_ms = times[id(record)]
            yield sends

    def outputs(self, record: Record) -> Sequence[Send]:
        (sends,) = self.each([record])
        return sends
