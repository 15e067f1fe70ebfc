"""The values of one task, and what the open transaction has changed in them.

A task is a function and a partition of its source.
"""

from __future__ import annotations

from collections.abc import Iterator

from eos.app.cells import row_length
from eos.app.state import Span, overlaid
from eos.state.values import InMemory, Value, Values


class Task:
    def __init__(self, values: Values | None = None) -> None:
        self.values: Values = InMemory() if values is None else values
        """What is committed."""
        self.changed: dict[bytes, Value] = {}
        """By the open transaction."""
        self._fields: dict[bytes, dict[bytes, Value]] | None = None  # the same by row and field, once one was scanned

    def get(self, cell: bytes) -> bytes | None:
        return self.changed[cell] if cell in self.changed else self.values.get(cell)

    def put(self, cell: bytes, value: Value) -> None:
        self.changed[cell] = value
        if self._fields is not None:
            self._note(cell, value)

    def _note(self, cell: bytes, value: Value) -> None:
        assert self._fields is not None
        end = row_length(cell)
        self._fields.setdefault(cell[:end], {})[cell[end:]] = value

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        if self._fields is None:
            self._fields = {}
            for cell, value in self.changed.items():
                self._note(cell, value)
        return overlaid(self.values.scan(row, span), self._fields.get(row, {}), span)

    def committed(self, now: float) -> None:
        if self.changed:
            # How far that is in the changelog nobody has said: the place of before is right too, it only repeats.
            self.values.apply(self.changed, self.values.position, now)
        self.undone()

    def undone(self) -> None:
        self.changed, self._fields = {}, None
