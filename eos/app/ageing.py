"""State that is forgotten: a value of a store with a time-to-live is there for so long behind its last write.

Time is the task's own: the latest timestamp of its records so far. So the same records forget the same values, whenever
they are handled. Such a value carries the time of its write in front, which neither the function sees nor the
changelog, whose record has it as its timestamp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final

from eos.app.cells import store_of
from eos.app.layers import Bounds, Span, Value
from eos.app.state import Cells, Store
from eos.errors import ConfigurationError

TimeToLive = timedelta | Mapping[str, timedelta]
"""Of all stores of a function, or by their names."""

_TIME = struct.Struct(">Q")
TIME_BYTES: Final = _TIME.size
_MS = timedelta(milliseconds=1)


def stamped(time_ms: int, value: bytes) -> bytes:
    return _TIME.pack(time_ms) + value


def apart(value: bytes) -> tuple[int, bytes]:
    """When it was written, in milliseconds since the epoch, and the value itself."""
    return _TIME.unpack_from(value)[0], value[_TIME.size :]


def living(value: bytes, ttl_ms: int, now_ms: int) -> bytes | None:
    """The value itself; None if it is over."""
    written_ms, rest = apart(value)
    return rest if now_ms < written_ms + ttl_ms else None


def with_ttl(function: str, stores: tuple[Store, ...], ttl: TimeToLive | None) -> tuple[Store, ...]:
    """The same stores, with what a function's definition says of their time-to-live. Raises ConfigurationError."""
    if ttl is None:
        return stores
    names = [store.name for store in stores]
    if not names:
        raise ConfigurationError(f"ttl= of {function} says how long state is kept, and it has none")
    of = ttl if isinstance(ttl, Mapping) else dict.fromkeys(names, ttl)
    for name, long in of.items():
        if name not in names:
            raise ConfigurationError(f"ttl= of {function} names {name!r}, and its state is {', '.join(names)}")
        if not isinstance(long, timedelta) or long < _MS:
            raise ConfigurationError(
                f"ttl= of {function} is {long!r}: it must be a timedelta of a millisecond or more, or a dict from "
                "names of its state to that"
            )
    return tuple(store._replace(ttl_ms=of[store.name] // _MS) if store.name in of else store for store in stores)


def ttls_of(stores: Iterable[Store]) -> dict[bytes, int]:
    """Return the time-to-live of those that have one, in milliseconds, by their names in the changelog."""
    return {store.kept_as.encode(): store.ttl_ms for store in stores if store.ttl_ms is not None}


class Aged:
    """The cells of a task at one time: of stores with a time-to-live, by their names, what is over is not there. What
    is put there is written at that time."""

    def __init__(self, below: Cells, ttls: Mapping[bytes, int], now_ms: int) -> None:
        self._below, self._ttls, self._now_ms = below, ttls, now_ms

    def get(self, cell: bytes) -> bytes | None:
        value, ttl_ms = self._below.get(cell), self._ttls.get(store_of(cell))
        return value if value is None or ttl_ms is None else living(value, ttl_ms, self._now_ms)

    def put(self, cell: bytes, value: Value) -> None:
        if value is not None and store_of(cell) in self._ttls:
            value = stamped(self._now_ms, value)
        self._below.put(cell, value)

    def write(self, row: bytes, changes: Mapping[bytes, Value], bounds: Bounds | None) -> None:
        if store_of(row) in self._ttls:
            changes = {f: None if value is None else stamped(self._now_ms, value) for f, value in changes.items()}
        self._below.write(row, changes, bounds)

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, Value]]:
        found, ttl_ms = self._below.scan(row, span), self._ttls.get(store_of(row))
        if ttl_ms is None:
            return found
        return ((field, value and living(value, ttl_ms, self._now_ms)) for field, value in found)

    def bounds(self, row: bytes) -> Bounds | None:
        return self._below.bounds(row)
