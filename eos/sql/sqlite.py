"""Writes rows into SQLite with Python's sqlite3, for tutorials, tests and small services. Owns the SQL, and the meaning
of SQLite's errors."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from eos.sql.database import (
    OFFSETS_TABLE,
    Cursor,
    DatabaseError,
    Fault,
    Partition,
    Stored,
    Table,
    decode_failed,
    encode_failed,
)
from eos.sql.rows import Row, split_by_columns

_CREATE: Final = f"""create table if not exists {OFFSETS_TABLE} (app text, topic text, partition integer,
  next_offset integer, owner text not null, failed text not null default '', primary key (app, topic, partition))"""
_CLAIM: Final = f"""insert into {OFFSETS_TABLE} (app, topic, partition, owner) values (?, ?, ?, ?)
  on conflict (app, topic, partition) do update set owner = excluded.owner returning next_offset, failed"""
_READ: Final = f"select topic, partition, next_offset, owner, failed from {OFFSETS_TABLE} where app = ? and owner = ?"
_OFFSETS: Final = f"""select topic, partition, next_offset from {OFFSETS_TABLE}
  where app = ? and next_offset is not null"""
_MOVE: Final = f"update {OFFSETS_TABLE} set next_offset = ?, failed = ? where app = ? and topic = ? and partition = ?"
_LOCKED_TIMEOUT_S = 5.0
_MISSING: Final = ("no such table", "no such column", "has no column", "syntax error", "ON CONFLICT clause does not")


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


class Connection:
    def __init__(self, database: SQLite, connection: sqlite3.Connection) -> None:
        self._database, self._connection = database, connection
        self._cursor = connection.cursor()

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._cursor.execute(sql, parameters)
        except sqlite3.Error as error:
            raise self.translate(error) or error from error

    def create_offsets(self) -> None:
        self._execute(_CREATE)

    def check(self, table: Table) -> None:
        self._execute(f"select {', '.join(map(_quoted, table.key)) or '*'} from {_quoted(table.name)} limit 0")
        if table.key:
            self._execute(f"explain {_write_statement(table, table.key)}", [None] * len(table.key))

    def offsets(self, app: str) -> dict[Partition, int]:
        found = self._execute(_OFFSETS, [app]).fetchall()
        return {(topic, partition): next_offset for topic, partition, next_offset in found}

    def claim(self, app: str, owner: str, partitions: Collection[Partition]) -> dict[Partition, Stored]:
        self._execute("begin immediate")
        found: dict[Partition, Stored] = {}
        for topic, partition in sorted(partitions):
            ((next_offset, failed),) = self._execute(_CLAIM, [app, topic, partition, owner]).fetchall()
            found[topic, partition] = Stored(next_offset, owner, decode_failed(failed))
        self.commit()
        return found

    def begin(self, app: str, owner: str) -> dict[Partition, Stored]:
        self._execute("begin immediate")
        rows = self._execute(_READ, [app, owner]).fetchall()
        return {(topic, part): Stored(at, its, decode_failed(failed)) for topic, part, at, its, failed in rows}

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        for columns, run in split_by_columns(rows):
            values = [[_plain(row[column]) for column in columns] for row in run]
            try:
                self._cursor.executemany(_write_statement(table, columns), values)
            except (sqlite3.Error, OverflowError) as error:
                raise self.translate(error) or error from error

    def cursor(self) -> Cursor:
        return self._cursor

    def savepoint(self) -> None:
        self._execute("savepoint eos")

    def release_savepoint(self) -> None:
        self._execute("release eos")

    def roll_back_to_savepoint(self) -> None:
        self._execute("rollback to eos")

    def move(self, app: str, moved: Mapping[Partition, Stored]) -> None:
        for (topic, partition), stored in sorted(moved.items()):
            self._execute(_MOVE, [stored.next_offset, encode_failed(stored.failed), app, topic, partition])

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
    sql = f"insert into {_quoted(table.name)} ({', '.join(map(_quoted, columns))}) values ({marks})"
    if not table.key:
        return sql
    key = ", ".join(map(_quoted, table.key))
    changed = [column for column in columns if column not in table.key]
    if not changed:
        return f"{sql} on conflict ({key}) do nothing"
    sets = ", ".join(f"{_quoted(column)} = excluded.{_quoted(column)}" for column in changed)
    return f"{sql} on conflict ({key}) do update set {sets}"


def _plain(value: Any) -> Any:
    """Return a value as SQLite stores it: times in ISO 8601, decimals as text, lists and dicts as JSON."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
