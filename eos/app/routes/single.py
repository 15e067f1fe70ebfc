"""Runs functions that take one record, one record after the other, with or without state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from eos.app.results import Normalise
from eos.app.routes.feeds import make_feed, one_by_one
from eos.app.stores import Finish
from eos.encoding.serde import Decode
from eos.hotloop.python import END_OF_TIME, Target
from eos.records import Record, Send


class Single:
    """Runs a function that takes one record."""

    def __init__(
        self, function: Callable[[Any], Any], decode: Decode | None, normalise: Normalise, target: Target | None
    ) -> None:
        self._function, self._decode, self._normalise = function, decode, normalise
        self.takes_values = decode is not None
        self.feed = make_feed(function, decode, target, normalise)
        self.each = one_by_one(self.outputs)

    def outputs(self, record: Record) -> Sequence[Send]:
        given = record if self._decode is None else self._decode(record.value)
        return self._normalise(record, self._function(given))


class UnusualOutputs(list[Send]):
    """Holds outputs of a record that the hot loop cannot send itself."""


def make_finish(normalise: Normalise, encoder: Callable[[Any], Any] | None) -> Callable[[Record, Any], Sequence[Send]]:
    """Return a function that turns a result into outputs; the user's own `encoder` encodes the result first, if there
    is one."""

    def make_outputs(record: Record, result: Any) -> Sequence[Send]:
        return normalise(record, result if encoder is None else encoder(result))

    return make_outputs


def make_hot_loop_finish(finish: Finish, is_encoded: bool, target: Target | None) -> Finish:
    """Return a Finish that leaves results of the usual types to the hot loop, and makes UnusualOutputs of all others.

    `finish` turns any result into outputs. `is_encoded`: the user's own encoder encodes all results, and the hot loop
    does not call it, so all outputs are UnusualOutputs.
    """

    def usual(record: Record, result: Any) -> bytes | UnusualOutputs | None:
        if not is_encoded and target is not None and record.timestamp < END_OF_TIME:
            if type(result) is bytes or (result is None and record.value is not None and target[-1]):
                return result
            if type(result) is str:
                return result.encode()
        return UnusualOutputs(finish(record, result))

    return usual


def as_sends(record: Record, outputs: Any) -> Sequence[Send]:
    return cast("UnusualOutputs", outputs)


class Stateful:
    """Runs a function of one record with state. Its changes take effect once the outputs are made."""

    def __init__(
        self,
        run: Callable[[Finish, Record], Any],
        encoder: Callable[[Any], Any] | None,
        normalise: Normalise,
        target: Target | None,
    ) -> None:
        make_outputs = make_finish(normalise, encoder)
        usual = make_hot_loop_finish(make_outputs, encoder is not None, target)
        self.outputs: Callable[[Record], Sequence[Send]] = functools.partial(run, make_outputs)
        self.feed = make_feed(functools.partial(run, usual), None, target, as_sends)
        self.each = one_by_one(self.outputs)
