"""What a function's result suggests that its author did not mean, said once.

Owns those sentences and that each is said once for a function in a process: Spark makes a Route anew for each task. It
must never change what a result means, and never cost a record anything whose result is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eos import log
from eos.app.serde import function_name, underlying

if TYPE_CHECKING:
    from eos.records import Record

# By where a function is defined, not by the function: a copy that was pickled is the same one.
_said: set[tuple[object, ...]] = set()

_TOMBSTONE = (
    "the function returned None for a record whose value is None, and None means no output: to pass tombstones on "
    "return Out(None), or record.out(record.value); to drop them without this line return ()"
)
_PAIR = (
    "each item of a returned tuple is a record of its own: for one record with a key return Out(value, key=key); for "
    "several without this line return a list"
)


class Hints:
    """Of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = getattr(underlying(function), "__code__", None)
        self._name = function_name(function)
        self._done: set[str] = set()  # what needs no look at more than this
        self._defined = (self._name, getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", 0))

    def tombstone(self, record: Record) -> None:
        """None came of a record without a value."""
        self._say("a tombstone led to no output", _TOMBSTONE, record)

    def pair(self, record: Record) -> None:
        """A tuple was returned that looks like a key and a value."""
        self._say("a tuple is not a key and a value", _PAIR, record)

    def _say(self, event: str, why: str, record: Record) -> None:
        if event in self._done:
            return
        self._done.add(event)
        if (event, *self._defined) not in _said:
            _said.add((event, *self._defined))
            where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            log.warning(event, function=self._name, **where, why=why)
