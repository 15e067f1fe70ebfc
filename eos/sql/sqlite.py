"""Writes rows into SQLite with Python's sqlite3, for tutorials, tests and small services. Owns the SQL, and the meaning
of SQLite's errors."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from eos.sql.columns import Column, Kind
from eos.sql.database import DatabaseError, Fault, Table
from eos.sql.quoting import quoted
from eos.sql.rows import Row, split_by_columns
from eos.sql.statements import CREATE_OFFSETS, SqlConnection, on_conflict

_LOCKED_TIMEOUT_S = 5.0
_MISSING: Final = ("no such table", "no such column", "has no column", "syntax error", "ON CONFLICT clause does not")


# SQLite has few types; times, decimals and JSON are stored as text.
_TYPES: Final[Mapping[Kind, str]] = dict.fromkeys(Kind, "text") | {
    Kind.BOOLEAN: "integer",
    Kind.INTEGER: "integer",
    Kind.FLOAT: "real",
    Kind.BYTES: "blob",
}


@dataclass(frozen=True)
class SQLite:
    """Describes an SQLite database by the path of its file, which is created if it is missing."""

    path: str

    def connect(self) -> Connection:
        try:
            connection = sqlite3.connect(
                Path(self.path).expanduser(), _LOCKED_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
        except sqlite3.Error as error:
            raise DatabaseError(Fault.AWAY, f"{self}: {error}") from error
        return Connection(self, connection)


class Connection(SqlConnection):
    _types = _TYPES
    _mark, _lock = "?", ""

    def __init__(self, database: SQLite, connection: sqlite3.Connection) -> None:
        self._database, self._connection = database, connection
        self._cursor = connection.cursor()

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        try:
            return self._cursor.execute(sql, parameters)
        except sqlite3.Error as error:
            raise self.translate(error) or error from error

    def create_offsets(self) -> None:
        self._execute(CREATE_OFFSETS)

    def check(self, table: Table, columns: Sequence[Column] = ()) -> None:
        self._execute(f"select {self._named(table, columns)} from {quoted(table.name)} t limit 0")
        if table.key:
            self._execute(f"explain {_write_statement(table, table.key)}", [None] * len(table.key))

    def _begin(self) -> None:
        self._execute("begin immediate")

    def _begin_snapshot(self) -> None:
        self._execute("begin")

    def _as_text(self, columns: Sequence[str]) -> str:
        return " || ',' || ".join(f"quote({column})" for column in columns)

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        for columns, run in split_by_columns(rows):
            values = [[_plain(row[column]) for column in columns] for row in run]
            try:
                self._cursor.executemany(_write_statement(table, columns), values)
            except (sqlite3.Error, OverflowError) as error:
                raise self.translate(error) or error from error

    def commit(self) -> None:
        self._execute("commit")

    def roll_back(self) -> None:
        if self._connection.in_transaction:
            self._execute("rollback")

    def close(self) -> None:
        # An unfinished statement would keep the file locked after close().
        self._cursor.close()
        with contextlib.suppress(sqlite3.Error):
            self._connection.rollback()
        self._connection.close()

    def translate(self, error: BaseException) -> DatabaseError | None:
        if isinstance(error, OverflowError):
            return DatabaseError(Fault.RECORD, f"{self._database}: {error}")
        if not isinstance(error, sqlite3.Error):
            return None
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_PERM):
            fault = Fault.DENIED
        elif any(text in str(error) for text in _MISSING):
            fault = Fault.DEFINITION
        elif isinstance(error, sqlite3.OperationalError):  # locked, full, cannot be opened, disk I/O error
            fault = Fault.AWAY
        else:
            fault = Fault.RECORD
        return DatabaseError(fault, f"{self._database}: {error}")


def _write_statement(table: Table, columns: Sequence[str]) -> str:
    marks = ", ".join("?" * len(columns))
    sql = f"insert into {quoted(table.name)} ({', '.join(map(quoted, columns))}) values ({marks})"
    return sql + on_conflict(table, columns)


def _plain(value: Any) -> Any:
    """Return a value as SQLite stores it: times in ISO 8601, decimals as text, lists and dicts as JSON."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value
