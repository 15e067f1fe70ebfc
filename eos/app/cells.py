"""How a cell is named: by a store, a record's key and, in a map, a field.

As one bytes it is the name of the store, a zero byte, the key's length (four bytes, big endian), the key, the field.
That is the changelog's key too. All before the field is the cell's row: what a key has in one store.
"""

from __future__ import annotations

import struct
from typing import Final

_LENGTH = struct.Struct(">I")
TIME: Final = b"\0" + _LENGTH.pack(0)
"""Of no store, and of the task itself: what time it is there, where a store has a time-to-live."""
HEADER: Final = TIME + b"header"
"""The same: whose changelog it is, and of which kind each store is (eos/state/notes.py)."""
LONGEST_FIELD: Final = 401
"""Bytes of a map's key in a cell's name (eos/app/state.py)."""


def begin_of(store: str) -> bytes:
    """Of the names of all its cells."""
    return store.encode() + b"\0"


def store_of(cell: bytes) -> bytes:
    """The name of its store; what is no cell's name is of none."""
    return cell.partition(b"\0")[0]


def rest_of(key: bytes) -> bytes:
    """What follows there in the row of a key."""
    return _LENGTH.pack(len(key)) + key


def cell_of(store: str, key: bytes, field: bytes = b"") -> bytes:
    return begin_of(store) + rest_of(key) + field


def row_length(cell: bytes) -> int:
    """Raises ValueError for what is no cell's name."""
    key_at = cell.index(b"\0") + 1 + _LENGTH.size
    if len(cell) >= key_at:
        end: int = key_at + _LENGTH.unpack_from(cell, key_at - _LENGTH.size)[0]
        if len(cell) >= end:
            return end
    raise ValueError(f"{cell!r} names no cell")


def check_cell(cell: bytes) -> None:
    """Raise ValueError for a changelog's key that no function of ours wrote."""
    key_at = cell.find(b"\0") + 1 + _LENGTH.size
    field = len(cell) - key_at - int.from_bytes(cell[key_at - _LENGTH.size : key_at], "big")  # how long it is
    if key_at == _LENGTH.size or not 0 <= field <= LONGEST_FIELD:
        raise ValueError(f"{cell[:50]!r} names no cell")


def named(cell: bytes) -> tuple[str, bytes, bytes]:
    """The store, the key and the field. Raises ValueError for what is no cell's name."""
    end = row_length(cell)
    store, _, rest = cell[:end].partition(b"\0")
    return store.decode(), rest[_LENGTH.size :], cell[end:]
