"""Builds and parses the names of cells; a cell is one entry of a function's state.

A cell's name consists of a store (the name of the state), a record's key and, in a map or list, a field. As bytes it is
the store's name, a zero byte, the key's length (four bytes, big endian), the key and the field. The same bytes are the
cell's key in the changelog. The part before the field names the cell's row, which holds all entries of a key in one
store.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from eos import hotloop

_LENGTH = struct.Struct(">I")
TIME: Final = b"\0" + _LENGTH.pack(0)
"""The cell of the task's own time, which belongs to no store; used if a store has a time-to-live."""
HEADER: Final = TIME + b"header"
"""The cell of the changelog's header, which belongs to no store (eos/state/notes.py)."""
EVENT_TIMERS: Final = "@timers"
"""The store of the timers of event time. A key's timer is an entry whose field is the timer's name (eos/app/timers.py).
No state can have such a name, because `@` is part of no identifier."""
CLOCK_TIMERS: Final = "@clock-timers"
"""The store of the timers of the wall clock."""
OPEN_SESSIONS: Final = "@sessions"
"""The store of the open session windows of each key (eos/app/windows.py)."""
SEEN_IDS: Final = "@once"
"""The store of the ids of records that were handled, for deduplication."""
MAX_FIELD_BYTES: Final = 401
"""The maximum number of bytes that a map's key takes in a cell's name (eos/app/state.py)."""


def store_prefix(store: str) -> bytes:
    """Return the prefix of the names of all cells of a store."""
    return store.encode() + b"\0"


def store_of(cell: bytes) -> bytes:
    """Return the name of a cell's store; b"" if the bytes do not name a cell."""
    return cell.partition(b"\0")[0]


encode_key: Final = hotloop.encode_key
"""Returns the part of a row's name that follows the store's prefix, given the key."""


def decode_key(suffix: bytes) -> bytes:
    """Return the key whose part of a row's name this is, as `encode_key` makes it."""
    return suffix[_LENGTH.size :]


def split_suffix(cell: bytes, prefix: bytes) -> tuple[bytes, bytes]:
    """Return the part of a cell's name that comes from the key, and its field. `prefix`: that of the cell's store."""
    start = len(prefix)
    end = start + _LENGTH.size + _LENGTH.unpack_from(cell, start)[0]
    return cell[start:end], cell[end:]


def cell_of(store: str, key: bytes, field: bytes = b"") -> bytes:
    return store_prefix(store) + encode_key(key) + field


def row_length(cell: bytes) -> int:
    """Return the length of the row's name in a cell's name. Raise ValueError if the bytes do not name a cell."""
    key_at = cell.index(b"\0") + 1 + _LENGTH.size
    if len(cell) >= key_at:
        end: int = key_at + _LENGTH.unpack_from(cell, key_at - _LENGTH.size)[0]
        if len(cell) >= end:
            return end
    raise ValueError(f"{cell!r} names no cell")


def find_foreign_cell(cells: Sequence[bytes]) -> int | None:
    """Return the index of the first changelog key that eos did not write; None if there is none.

    One call for many keys, because a restore checks each."""
    read_length, header, at = _LENGTH.unpack_from, 1 + _LENGTH.size, 0
    try:
        for at, cell in enumerate(cells):
            store = cell.index(0)
            # What is left is the field's length.
            if not 0 <= len(cell) - store - header - read_length(cell, store + 1)[0] <= MAX_FIELD_BYTES:
                return at
    except (ValueError, struct.error):  # no zero byte, or not four bytes after it
        return at
    return None


def parse_cell(cell: bytes) -> tuple[str, bytes, bytes]:
    """Return a cell's store, key and field. Raise ValueError if the bytes do not name a cell."""
    end = row_length(cell)
    store, _, rest = cell[:end].partition(b"\0")
    return store.decode(), rest[_LENGTH.size :], cell[end:]
