"""Defines the interface to a database, and the offsets table that eos keeps in it.

The transaction that writes rows also writes the next offset of each partition into that table. A worker compares these
offsets before each change, so rows are written once, whatever happens between the database and Kafka. The group's
committed offsets follow those in the database. This module must never do I/O.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from eos.sql.columns import Column
from eos.sql.rows import Row

OFFSETS_TABLE: Final = "eos_offsets"
Partition = tuple[str, int]


class Cursor(Protocol):
    """Runs your own SQL in the transaction that also stores the offsets. Do not commit or roll back in it."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any: ...

    def executemany(self, sql: str, parameters: Any, /) -> Any: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Table(NamedTuple):
    """Names the table that gets the rows, and the columns of its key. Without a key every row is inserted."""

    name: str
    key: tuple[str, ...] = ()


class Fault(Enum):
    """Lists what an error of a database means for a sink."""

    AWAY = "the database cannot be reached, or has no resources: wait and try again"
    AGAIN = "the database gave the transaction up: try it again"
    RECORD = "the row or the function's SQL is wrong"
    DEFINITION = "a table or column is missing, or the SQL of eos is refused"
    DENIED = "a right is missing"


class DatabaseError(Exception):
    """Reports an error of a database, with its meaning for a sink. The message never contains a password."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Stored(NamedTuple):
    """Holds the offsets row of one partition."""

    next_offset: int | None
    """The offset after the last record whose rows are written; None if the partition has no such record yet."""
    owner: str
    """The token of the worker that last took over the partition."""
    failed: Mapping[int, str]
    """The errors of records that an error policy left out, by offset, until the group has committed past them."""


def encode_failed(failed: Mapping[int, str]) -> str:
    return json.dumps(failed) if failed else ""


def decode_failed(text: str | None) -> dict[int, str]:
    return {int(offset): error for offset, error in json.loads(text or "{}").items()}


class WrongRow(NamedTuple):
    """Describes a row of a table that is not as expected: which row, and what is wrong with it."""

    row: str
    what: str

    def __str__(self) -> str:
        return f"{self.row} {self.what}"


class Connection(Protocol):
    """Runs the transactions of one worker. All methods raise DatabaseError."""

    def create_offsets(self) -> None:
        """Create the offsets table if it is missing."""

    def check(self, table: Table, columns: Sequence[Column] = ()) -> None:
        """Check that the table exists, with these columns, a unique key and the rights that its rows need."""

    def find_remedy(self, table: Table, columns: Sequence[Column]) -> str | None:
        """Return the statement after which `check` succeeds: it creates the table, a column or a unique key.

        None if there is no such statement. `columns`: those of the function's rows, none if they are unknown."""

    def create(self, statement: str) -> None:
        """Run a statement that `find_remedy` returned. Another worker may have run it already."""

    def offsets(self, app: str) -> dict[Partition, int]:
        """Return the next offsets of all partitions of an App that have one."""

    can_compare: bool
    """Whether `find_wrong_rows` is possible."""

    def begin_reading(self, app: str) -> dict[Partition, int]:
        """Begin a transaction that sees one state of the database, and return the same offsets as `offsets` in it."""

    def find_wrong_rows(self, table: Table, rows: Sequence[Row], exactly: bool) -> list[WrongRow]:
        """Return which of these rows, all with the same columns, the table does not have; call `begin_reading` before.

        Without a key, a row that is expected n times must be there n times, or with `exactly` false at least n times.
        """

    def claim(self, app: str, owner: str, partitions: Collection[Partition]) -> dict[Partition, Stored]:
        """Take over partitions in a separate transaction, and return their rows of the offsets table.

        Waits until the open transaction of the previous owner has ended."""

    def begin(self, app: str, owner: str) -> dict[Partition, Stored]:
        """Begin a transaction, lock this owner's rows of the offsets table, and return them."""

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert the rows; if the table has a key, update the rows that exist. No two rows have the same key."""

    sends_ahead: bool
    """Whether `send` lets the database write rows while functions run."""

    def send(self, table: Table, rows: Sequence[Row]) -> None:
        """Write as `write` does, perhaps without waiting. Later calls, and at last `commit`, raise its error."""

    def cursor(self) -> Cursor: ...

    def savepoint(self) -> None: ...

    def release_savepoint(self) -> None:
        """Check deferred constraints, and keep the changes since the savepoint."""

    def roll_back_to_savepoint(self) -> None: ...

    def move(self, app: str, moved: Mapping[Partition, Stored]) -> None:
        """Change the next offsets and the errors of these partitions in the offsets table."""

    def commit(self) -> None: ...

    def roll_back(self) -> None: ...

    def close(self) -> None: ...

    def translate(self, error: BaseException) -> DatabaseError | None:
        """Return the driver's exception as a DatabaseError, or None if the database did not cause it."""


class Database(Protocol):
    """Describes a database that gets rows. Objects that are equal share one connection of a worker."""

    def connect(self) -> Connection:
        """Open a connection. Raises DatabaseError, and ConfigurationError if the driver is not installed."""


class SinkTarget(NamedTuple):
    """Names the database and table for a function's rows. Without a table, the function runs its own SQL."""

    database: Database
    table: Table | None = None
    columns: tuple[Column, ...] = ()
    """The columns of the rows, if the function's annotation names a class with fields."""
