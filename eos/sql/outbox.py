"""Defines the interface to a table whose rows are sent to Kafka, and the position of a reader in it. Must never do I/O.

Rows are read in the order of (xid, id): the transaction that wrote a row, then the row's number. A row is read only
after every transaction with a lower xid has ended, so no row can appear before the position later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class TableRow(dict[str, Any]):
    """Holds a row by the names of its columns. `table` names its table in messages."""

    __slots__ = ("table",)

    def __init__(self, values: Mapping[str, Any], table: str) -> None:
        super().__init__(values)
        self.table = table

    @property
    def at(self) -> At:
        return At(int(self["xid"]), int(self["id"]))

    def __str__(self) -> str:
        return f"the row with id {self['id']} of table {self.table}"


class At(NamedTuple):
    """Holds the place of a row in the order in which rows are read. The first row is after START."""

    xid: int
    id: int


START = At(0, 0)


class Read(NamedTuple):
    """Holds the rows that one query returned.

    `xmin`: all transactions below it have ended. `xmax`: the next transaction id, or a lower bound of it.
    """

    rows: list[TableRow]
    xmin: int
    xmax: int


class Held(NamedTuple):
    """Describes the transaction that has been open for longest.

    `rows`: how many rows wait until it ends, at most 10,000. `open_s`: how long it has been open, in seconds; None if
    this is not visible to the worker."""

    rows: int
    pid: int | None
    open_s: float | None


class TableReader(Protocol):
    """Reads one table. All methods raise DatabaseError."""

    def check(self, *, columns: tuple[str, ...], delete: bool) -> None:
        """Check that the table has the columns and that rows may be read, and deleted with `delete`.

        Raises ConfigurationError."""

    def identity(self) -> str:
        """Return a text that differs between databases. A copy or a restored backup may have the same."""

    def last(self) -> At | None:
        """Return the last row that is visible now, or None if there is none."""

    def read(self, after: At, most: int) -> Read:
        """Return the next rows in order."""

    def delete(self, until: At) -> None:
        """Delete the rows up to and including this one."""

    def held(self) -> Held:
        """Return what holds rows back now."""

    def close(self) -> None: ...


class Readable(Protocol):
    """Describes a database whose tables can be read in the order of commits."""

    def table_reader(self, table: str) -> TableReader:
        """Connect. Raises DatabaseError, and ConfigurationError if the driver is not installed."""


class SourceTable(NamedTuple):
    """Names the table that a function's rows come from. `delete`: delete the rows once they are in Kafka."""

    database: Readable
    table: str
    delete: bool
    columns: tuple[str, ...] = ()
    """Columns that the table must have besides `id` and `xid`."""
