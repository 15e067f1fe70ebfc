"""Turns a function's result into the records to send, and warns about results that look like a mistake.

Owns the meaning of a result; eos/encoding/sends.py makes its bytes and refuses results that cannot be sent. Each
warning is logged once per function and process. The hot loop (eos/hotloop) handles results of the expected types itself
and calls this module for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from eos import log
from eos.app.annotations import may_return_none
from eos.encoding.sends import NEVER_SENT, check_timestamp, key_bytes, out_converter, value_bytes
from eos.encoding.serde import IS_JSON, JSON, Encode, function_name, underlying
from eos.hotloop.python import HOLDS_SEVERAL, Target, looks_like_a_pair
from eos.records import KEEP, Header, Out, Record, Send

# Converts the result of a function of one record into the records to send.
Normalise = Callable[["Record", object], Sequence[Send]]


def hot_loop_target(
    name: str, destinations: tuple[str, ...], hints: Hints, passing: frozenset[str] = frozenset()
) -> Target | None:
    """Return the hot loop's target for results of the expected types; None for a function without a destination."""
    if not destinations:
        return None
    json, json_types = JSON.encode, set[type]()

    def value_of(value: object) -> bytes | None:
        kind = type(value)
        if kind not in json_types and IS_JSON[kind] and kind not in NEVER_SENT:
            json_types.add(kind)
        try:
            # This does the same as `value_bytes`, in one Python call instead of three.
            return json(value) if kind in json_types else value_bytes(value, name)
        except TypeError:
            return value_bytes(value, name)  # raises an error that explains the problem

    # The compiled loop calls `bare` for values of `types`, and `value_of` if that raises TypeError.
    value_of.__dict__.update(bare=json, types=json_types)

    def key_of(key: object) -> bytes | None:
        return key_bytes(key, name)

    return destinations[0], frozenset(destinations), passing or None, Out, KEEP, value_of, key_of, hints.allows_none


def encode_result(encode: Encode, result: Any) -> Any:
    """Return a function's result with all its values encoded by the user's own encoder."""

    def one(item: Any) -> Any:
        if item is None:
            return None
        value = item.value if type(item) is Out else item
        if type(value) is Record or type(value) is Out:
            return item  # the rules for all results refuse this item
        return msgspec.structs.replace(item, value=encode(value)) if type(item) is Out else encode(value)

    return [one(item) for item in result] if HOLDS_SEVERAL[type(result)] else one(result)


def make_normaliser(name: str, destinations: tuple[str, ...], hints: Hints, passing: frozenset[str]) -> Normalise:
    """Return a function that converts the result of a function of one record into Sends."""
    convert = out_converter(name, destinations)
    topic = destinations[0] if destinations else None

    def one(record: Record, item: object) -> Send:
        if type(item) is Out:
            send = convert(item, record, record.timestamp)
        elif topic is None:
            send = convert(Out(item), record, 0)  # raises: there is no destination
        else:
            value = item if type(item) is bytes else value_bytes(item, name)
            send = topic, value, record.key, -1, check_timestamp(max(record.timestamp, 0), name), None
        return _with_passed_headers(send, record.headers, passing) if record.headers and passing else send

    def normalise(record: Record, result: object) -> Sequence[Send]:
        if result is None:
            if destinations and record.value is None:
                hints.warn_tombstone(record)
            elif not hints.allows_none:
                hints.warn_about_none(record)
            return ()
        if not HOLDS_SEVERAL[type(result)]:
            return (one(record, result),)
        # Make a list first, so that either all outputs are sent or none, even if the user's generator raises in the
        # middle.
        items: list[Any] = result if type(result) is list else list(cast("Iterable[Any]", result))
        if type(result) is tuple and looks_like_a_pair(items, Out):
            hints.warn_about_pair(record)
        sends = [one(record, item) for item in items if item is not None]
        if record.value is None and len(sends) < len(items):
            hints.warn_tombstone(record)
        return sends

    return normalise


def _with_passed_headers(send: Send, headers: Sequence[Header], passing: frozenset[str]) -> Send:
    """Return the output with the input's headers that are passed on, placed before its own."""
    own = send[5] or []
    given = {name for name, _ in own}
    passed = [(name, value) for name, value in headers if name in passing and name not in given]
    return (*send[:5], passed + own) if passed else send


# A key says where a function is defined. The function itself is no key, because its pickled copy is another object.
_warned: set[tuple[object, ...]] = set()

_TOMBSTONE = (
    "the function returned None for a record whose value is None, and None means no output: to pass tombstones on "
    "return Out(None), or record.out(record.value); to drop them without this warning return ()"
)
_NOTHING = (
    "its return annotation does not include None, so a `return` may be missing: None means no output; if that is "
    "intended, annotate `| None`"
)
_PAIR = (
    "each item of a returned tuple is a record of its own: for one record with a key return Out(value, key=key); for "
    "several records without this warning return a list"
)


class Hints:
    """Warns about the results of one function, once per process for each kind of warning."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = getattr(underlying(function), "__code__", None)
        self._name = function_name(function)
        self.allows_none = may_return_none(function)
        self._logged: set[str] = set()  # events that were logged or checked already
        self._location = (self._name, getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", 0))

    def warn_tombstone(self, record: Record) -> None:
        """Warn that the result None dropped a tombstone."""
        self._warn_once("tombstone dropped", _TOMBSTONE, record)

    def warn_about_none(self, record: Record) -> None:
        """Warn that a function returned None against its annotation."""
        self._warn_once("function returned None against its annotation", _NOTHING, record)

    def warn_about_pair(self, record: Record) -> None:
        """Warn that a returned tuple looks like a key and a value."""
        self._warn_once("tuple sent as separate records", _PAIR, record)

    def _warn_once(self, event: str, why: str, record: Record) -> None:
        if event in self._logged:
            return
        self._logged.add(event)
        if (event, *self._location) not in _warned:
            _warned.add((event, *self._location))
            where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            log.warning(event, function=self._name, **where, reason=why)
