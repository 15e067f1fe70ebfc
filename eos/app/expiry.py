"""Expires state: a value of a store with a time-to-live expires that long after its last write.

The clock is the task's own time: the latest timestamp of its records so far. So the same records expire the same
values, whenever they are handled. In memory and on disk, the time of the write precedes such a value. The function does
not see this prefix. The changelog does not contain it either: there the time is the record's timestamp.
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
"""One time-to-live for all states of a function, or one for each by name."""

_TIME = struct.Struct(">Q")
TIME_BYTES: Final = _TIME.size
_MS = timedelta(milliseconds=1)


def add_write_time(time_ms: int, value: bytes) -> bytes:
    return _TIME.pack(time_ms) + value


def write_time(value: bytes) -> int:
    """Return the write time of a value, in milliseconds since the epoch."""
    time_ms: int = _TIME.unpack_from(value)[0]
    return time_ms


def split_write_time(value: bytes) -> tuple[int, bytes]:
    """Return the write time of a value, in milliseconds since the epoch, and the value itself."""
    return _TIME.unpack_from(value)[0], value[_TIME.size :]


def unexpired(value: bytes, ttl_ms: int, now_ms: int) -> bytes | None:
    """Return the value itself; None if it has expired."""
    written_ms, rest = split_write_time(value)
    return rest if now_ms < written_ms + ttl_ms else None


def with_ttl(function: str, stores: tuple[Store, ...], ttl: TimeToLive | None) -> tuple[Store, ...]:
    """Return the stores with the time-to-live that the function's `ttl=` gives them. Raise ConfigurationError."""
    if ttl is None:
        return stores
    names = [store.name for store in stores if store.is_kept]
    if not names:
        raise ConfigurationError(f"{function} has ttl= but no state: remove ttl=, or annotate a parameter as state")
    durations = ttl if isinstance(ttl, Mapping) else dict.fromkeys(names, ttl)
    for name, duration in durations.items():
        if name not in names:
            raise ConfigurationError(f"ttl= of {function} names {name!r}, but its state is {', '.join(names)}")
        if not isinstance(duration, timedelta) or duration < _MS:
            raise ConfigurationError(
                f"ttl= of {function} is {duration!r}: it must be a timedelta of at least a millisecond, or a dict from "
                "names of its state to such timedeltas"
            )
    return tuple(
        store._replace(ttl_ms=durations[store.name] // _MS) if store.name in durations else store for store in stores
    )


def ttls_of(stores: Iterable[Store]) -> dict[bytes, int]:
    """Return the time-to-live of the stores that have one, in milliseconds, by their names in the changelog."""
    return {store.stored_name.encode(): store.ttl_ms for store in stores if store.ttl_ms is not None}


class UnexpiredCells:
    """Shows the cells of a task at one time, without expired values.

    `ttls`: milliseconds by the name of a store. A value that is put gets this time as the time of its write.
    """

    def __init__(self, below: Cells, ttls: Mapping[bytes, int], now_ms: int) -> None:
        self._lower_cells, self._ttls, self._now_ms = below, ttls, now_ms

    def get(self, cell: bytes) -> bytes | None:
        value, ttl_ms = self._lower_cells.get(cell), self._ttls.get(store_of(cell))
        return value if value is None or ttl_ms is None else unexpired(value, ttl_ms, self._now_ms)

    def put(self, cell: bytes, value: Value) -> None:
        if value is not None and store_of(cell) in self._ttls:
            value = add_write_time(self._now_ms, value)
        self._lower_cells.put(cell, value)

    def write(self, row: bytes, changes: Mapping[bytes, Value], bounds: Bounds | None) -> None:
        if store_of(row) in self._ttls:
            changes = {
                f: None if value is None else add_write_time(self._now_ms, value) for f, value in changes.items()
            }
        self._lower_cells.write(row, changes, bounds)

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, Value]]:
        found, ttl_ms = self._lower_cells.scan(row, span), self._ttls.get(store_of(row))
        if ttl_ms is None:
            return found
        return ((field, value and unexpired(value, ttl_ms, self._now_ms)) for field, value in found)

    def bounds(self, row: bytes) -> Bounds | None:
        return self._lower_cells.bounds(row)
