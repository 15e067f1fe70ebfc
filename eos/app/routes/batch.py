"""Runs functions that take many records at once, with or without state."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from eos import hotloop
from eos.app import concurrent
from eos.app.results import Hints, hot_loop_target
from eos.app.routes.feeds import one_by_one, send_to
from eos.app.stores import Stores
from eos.encoding.sends import out_converter
from eos.encoding.serde import underlying
from eos.errors import raise_if_interrupted
from eos.records import FeedResult, Out, Record, Send, Sink

_timestamp = operator.attrgetter("timestamp")


class Batch:
    """Runs a function that takes many records at once."""

    def __init__(
        self,
        function: Callable[..., Any],
        finish: Callable[[Any], Any] | None,
        name: str,
        destinations: tuple[str, ...],
        hints: Hints,
    ) -> None:
        self._function, self._finish, self._name, self._hints = function, finish, name, hints
        self._convert = out_converter(name, destinations)
        self._target = hot_loop_target(name, destinations, hints)
        self.each = one_by_one(self.outputs)

    def outputs(self, record: Record) -> Sequence[Send]:
        return self.outputs_batch([record])

    def outputs_batch(self, records: list[Record]) -> list[Send]:
        return self._converted(self._run(records), _latest_ms(records))

    def feed(self, records: list[Record], sink: Sink) -> FeedResult:
        sent, culprit = 0, records[0] if len(records) == 1 else None
        try:
            outs = self._run(records)
            # Check before the first send, so that either all outputs of the batch are sent or none.
            find_latest = functools.partial(_latest_ms, records)
            fed = None
            if self._target is not None:
                fed = hotloop.feed_outs(outs, self._target, find_latest, sink.produce, sink.on_produce_error)
            if fed is not None:
                sent, failed = fed
                return FeedResult(sent, len(records), None) if failed is None else FeedResult(sent, 0, failed, culprit)
            for send in self._converted(outs, find_latest()):
                send_to(send, sink)
                sent += 1
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            raise_if_interrupted(error)
            return FeedResult(sent, 0, error, culprit)
        return FeedResult(sent, len(records), None)

    def _run(self, records: list[Record]) -> list[Any]:
        # The function gets a copy, because it may change the list.
        return self._checked(self._function(records.copy()), records)

    def _checked(self, result: Any, records: list[Record]) -> list[Any]:
        if result is None:
            if not self._hints.allows_none:
                self._hints.warn_about_none(records[0])
            return []
        if isinstance(result, (Out, str, bytes, bytearray, Mapping)) or not isinstance(result, Iterable):
            raise TypeError(
                f"{self._name} returned a {type(result).__name__}: a batch function returns an iterable of Out, made "
                "by record.out(value) or Out(value, key=...)"
            )
        outs = result if type(result) is list else list(result)
        return outs if self._finish is None else cast("list[Any]", self._finish(outs))

    def _converted(self, outs: list[Any], latest_ms: int) -> list[Send]:
        sends: list[Send] = []
        for out in outs:
            if type(out) is Out:
                sends.append(self._convert(out, None, latest_ms))
            elif out is not None:
                raise TypeError(
                    f"{self._name} gave a bare {type(out).__name__}, which has no key in a batch function; use "
                    "record.out(value) or Out(value, key=...)"
                )
        return sends


class StatefulBatch(Batch):
    """Runs a batch function with state. Its changes take effect once all outputs are made."""

    def __init__(
        self,
        function: Callable[..., Any],
        finish: Callable[[Any], Any] | None,
        name: str,
        destinations: tuple[str, ...],
        hints: Hints,
        stores: Stores,
    ) -> None:
        super().__init__(function, finish, name, destinations, hints)
        self._keyed = stores.batch(function)

    def outputs_batch(self, records: list[Record]) -> list[Send]:
        return self._keyed(records, lambda result: self._converted(self._checked(result, records), _latest_ms(records)))

    def feed(self, records: list[Record], sink: Sink) -> FeedResult:
        try:
            sends = self.outputs_batch(records)
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            raise_if_interrupted(error)
            return FeedResult(0, 0, error, records[0] if len(records) == 1 else None)
        for send in sends:
            send_to(send, sink)
        return FeedResult(len(sends), len(records), None)


def blocking(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a blocking function for an `async def` of a batch."""
    is_generator = inspect.isasyncgenfunction(underlying(function))

    async def run(*given: Any) -> Any:
        running = function(*given)
        return [item async for item in running] if is_generator else await running

    return lambda *given: concurrent.run_one(run(*given))


def _latest_ms(records: list[Record]) -> int:
    """Return the default timestamp in ms of a batch function's outputs; 0: the time of producing."""
    return max(0, max(map(_timestamp, records), default=0))
