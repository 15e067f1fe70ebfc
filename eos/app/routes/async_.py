"""Runs an `async def` that takes one record, on many records at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from eos.app import concurrent
from eos.app.results import Normalise
from eos.app.routes.feeds import feed_from
from eos.encoding.serde import Decode, underlying
from eos.records import Record, Send


class Async:
    """Runs an `async def` that takes one record. The outputs keep the order of the records."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        decode: Decode | None,
        finish: Callable[[Any], Any] | None,
        normalise: Normalise,
    ) -> None:
        self._function, self._decode, self._finish, self._normalise = function, decode, finish, normalise
        self._is_generator = inspect.isasyncgenfunction(underlying(function))
        # The results of the records after a failed one, each with its record. These records are handed out again, and a
        # stored result avoids a second call of the function, with its external effects. The reference to the record
        # keeps its id() from being reused.
        self._later_results: list[tuple[Record, concurrent.Outcome]] = []
        self.feed = feed_from(self.each)

    async def _run(self, record: Record) -> Sequence[Send]:
        given = record if self._decode is None else self._decode(record.value)
        running = self._function(given)
        result = [item async for item in running] if self._is_generator else await running
        return self._normalise(record, result if self._finish is None else self._finish(result))

    def each(self, records: list[Record]) -> Iterator[Sequence[Send]]:
        wanted = set(map(id, records))
        known = {id(record): outcome for record, outcome in self._later_results if id(record) in wanted}
        self._later_results = [kept for kept in self._later_results if id(kept[0]) not in wanted]
        unknown = [record for record in records if id(record) not in known]
        known |= zip(map(id, unknown), concurrent.run_all(map(self._run, unknown)) if unknown else (), strict=True)
        for number, record in enumerate(records):
            outcome = known[id(record)]
            if isinstance(outcome, BaseException):
                if later := [(other, known[id(other)]) for other in records[number + 1 :]]:
                    self._later_results = later  # replaces older results, whose records may never come again
                raise outcome
            yield outcome

    def outputs(self, record: Record) -> Sequence[Send]:
        return cast("Sequence[Send]", concurrent.run_one(self._run(record)))
