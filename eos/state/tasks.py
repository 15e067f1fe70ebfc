"""The values of one task, and what the open transaction has changed in them.

A task is a function and a partition of its source.
"""

from __future__ import annotations

from collections.abc import Iterator

from eos.app.state import Span, overlaid
from eos.state.cells import cell_of
from eos.state.values import InMemory, Value, Values


class Task:
    def __init__(self, values: Values | None = None) -> None:
        self.values: Values = InMemory() if values is None else values
        """What is committed."""
        self.changed: dict[bytes, Value] = {}
        """By the open transaction."""
        self._fields: dict[bytes, dict[bytes, Value]] = {}  # the same in maps, by row and field

    def read(self, store: str, key: bytes, field: bytes = b"") -> bytes | None:
        cell = cell_of(store, key, field)
        return self.changed[cell] if cell in self.changed else self.values.get(cell)

    def write(self, store: str, key: bytes, value: Value, field: bytes = b"") -> None:
        self.changed[cell_of(store, key, field)] = value
        if field:
            self._fields.setdefault(cell_of(store, key), {})[field] = value

    def scan(self, store: str, key: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        row = cell_of(store, key)
        return overlaid(self.values.scan(row, span), self._fields.get(row, {}), span)

    def committed(self, now: float) -> None:
        if self.changed:
            # How far that is in the changelog nobody has said: the place of before is right too, it only repeats.
            self.values.apply(self.changed, self.values.position, now)
        self.undone()

    def undone(self) -> None:
        self.changed, self._fields = {}, {}
