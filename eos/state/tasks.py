"""The values of one task, and what the open transaction has changed in them.

A task is a function and a partition of its source. A cell is named by a store and a record's key, as one bytes: the
name of the store, a zero byte, the key's length (four bytes, big endian), the key. That is the changelog's key too.
"""

from __future__ import annotations

import struct

from eos.state.values import InMemory, Value, Values

_LENGTH = struct.Struct(">I")


def cell_of(store: str, key: bytes) -> bytes:
    return store.encode() + b"\0" + _LENGTH.pack(len(key)) + key


def named(cell: bytes) -> tuple[str, bytes]:
    """The store and the key. Raises ValueError for what is no cell's name."""
    store, zero, rest = cell.partition(b"\0")
    if not zero or len(rest) < _LENGTH.size or _LENGTH.unpack_from(rest)[0] != len(rest) - _LENGTH.size:
        raise ValueError(f"{cell!r} names no cell")
    return store.decode(), rest[_LENGTH.size :]


class Task:
    def __init__(self, values: Values | None = None) -> None:
        self.values: Values = InMemory() if values is None else values
        """What is committed."""
        self.changed: dict[bytes, Value] = {}
        """By the open transaction."""

    def read(self, store: str, key: bytes) -> bytes | None:
        cell = cell_of(store, key)
        return self.changed[cell] if cell in self.changed else self.values.get(cell)

    def write(self, store: str, key: bytes, value: Value) -> None:
        self.changed[cell_of(store, key)] = value

    def committed(self, now: float) -> None:
        if self.changed:
            # How far that is in the changelog nobody has said: the place of before is right too, it only repeats.
            self.values.apply(self.changed, self.values.position, now)
        self.changed = {}

    def undone(self) -> None:
        self.changed = {}
