"""Writes rows through a DB-API connection (PEP 249) to a database with `select ... for update` and savepoints.

Uses standard SQL only, and looks for a row before it inserts or updates it. eos/sql/mysql.py has faster statements for
MySQL and MariaDB. The driver's module says how parameters are marked, and which exceptions are the driver's.

A driver that connects again by itself, and a function that commits, end a transaction without an error, and with it the
lock on the offsets. So each transaction begins with a savepoint, which must still exist before the commit.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from eos.errors import raise_if_interrupted
from eos.sql.columns import Column
from eos.sql.database import DatabaseError, Fault, Table
from eos.sql.faults import fault_of, first_line
from eos.sql.quoting import quoted, quoted_table
from eos.sql.rows import Row, split_by_columns
from eos.sql.statements import CREATE_OFFSETS, SqlConnection

MARKS: Final[Mapping[str, str]] = {
    "qmark": "?",
    "format": "%s",
    "pyformat": "%(p{})s",
    "numeric": ":{}",
    "named": ":p{}",
}
_BY_NAME: Final = ("pyformat", "named")
_UNIQUE_KEYS: Final = """select c.constraint_name, k.column_name
  from information_schema.table_constraints c join information_schema.key_column_usage k
  on k.constraint_name = c.constraint_name and k.table_schema = c.table_schema and k.table_name = c.table_name
  where c.constraint_type in ('PRIMARY KEY', 'UNIQUE') and c.table_name = ? and (c.table_schema = ? or ? = '')"""


class Connection(SqlConnection):
    _lock = " for update"
    _create = CREATE_OFFSETS
    _is_mysql = False
    can_compare = False  # standard SQL has no text of a whole row

    def __init__(self, database: object, connection: Any, driver: Any) -> None:
        self._database, self._connection, self._driver = database, connection, driver
        self._mark = MARKS[driver.paramstyle]
        self._cursor = self._guarded(connection.cursor)

    def set_up(self) -> None:
        """Turn autocommit off, which PEP 249 leaves to a method or an attribute of each driver."""
        switch = getattr(self._connection, "autocommit", None)
        if callable(switch):
            self._guarded(switch, False)
        elif switch:
            self._guarded(setattr, self._connection, "autocommit", False)

    # ---- statements -----------------------------------------------------------------------------------------------

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        self._guarded(self._cursor.execute, sql, *([self._bound(parameters)] if parameters else []))
        return self._cursor

    def _fetch(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return rows as tuples of str and int, whatever kind of cursor the function configured."""
        found = self._guarded(self._run(sql, *parameters).fetchall)
        return [tuple(map(_decoded, row.values() if isinstance(row, Mapping) else row)) for row in found]

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            raise_if_interrupted(error)
            raise self.explain(error) from error

    def explain(self, error: Exception) -> DatabaseError:
        """Return an error that a call of the driver raised: its own, one of its socket, or one about a value."""
        if (known := self.translate(error)) is not None:
            return known
        fault = Fault.AWAY if isinstance(error, OSError) else Fault.RECORD
        return DatabaseError(fault, f"{self._database}: {type(error).__name__}: {first_line(error)}")

    def translate(self, error: BaseException) -> DatabaseError | None:
        if not isinstance(error, self._driver.Error):
            return None
        return DatabaseError(fault_of(error, self._is_mysql), f"{self._database}: {first_line(error)}")

    def _bound(self, values: Sequence[Any]) -> Any:
        """Return parameters in the form that the driver takes."""
        if self._driver.paramstyle in _BY_NAME:
            return {f"p{number}": value for number, value in enumerate(values, 1)}
        return tuple(values)

    def _marks(self, count: int) -> list[str]:
        return [self._mark.format(number) for number in range(1, count + 1)]

    def _quoted(self, name: str) -> str:
        return self._without_marks(quoted(name, self._quote))

    def _quoted_table(self, table: Table) -> str:
        return self._without_marks(quoted_table(table.name, self._quote))

    def _without_marks(self, text: str) -> str:
        return text.replace("%", "%%") if "%" in self._mark else text

    def _equal(self, columns: Iterable[str], marks: Iterable[str]) -> list[str]:
        return [f"{self._quoted(column)} = {mark}" for column, mark in zip(columns, marks, strict=False)]

    # ---- the start --------------------------------------------------------------------------------------------------

    def create_offsets(self) -> None:
        try:
            return self._try_offsets()
        except DatabaseError as error:
            if error.fault is not Fault.DEFINITION:
                raise
            self.roll_back()
        try:
            self._execute(self._create)
            self._guarded(self._connection.commit)
        except DatabaseError as refused:
            self.roll_back()
            try:
                return self._try_offsets()  # another worker may have created it meanwhile
            except DatabaseError:
                text = f"{refused}. Let somebody who may create tables run: {self._create}"
                raise DatabaseError(refused.fault, text) from refused
        return self._try_offsets()

    def _try_offsets(self) -> None:
        """Lock no row of the offsets table in a transaction with a savepoint. Raises DatabaseError."""
        self._begin()
        self._owned("", "")
        self._release_beginning()
        self.roll_back()

    def check(self, table: Table, columns: Sequence[Column] = ()) -> None:
        name, named = self._quoted_table(table), self._without_marks(self._named(table, columns))
        try:
            self._execute(f"select {named} from {name} t where 1 = {self._mark.format(1)}", [0])
            self._cursor.fetchall()
            if table.key:
                self._check_key(table)
        finally:
            self.roll_back()

    def _check_key(self, table: Table) -> None:
        """Check that the columns are unique, if the database has the standard's views of its constraints."""
        try:
            keys = self._unique_keys(table)
        except DatabaseError as error:
            if error.fault is Fault.AWAY:
                raise
            return
        if {column.lower() for column in table.key} not in keys:
            columns = ", ".join(table.key)
            raise DatabaseError(
                Fault.DEFINITION, f"{self._database}: {table.name} has no primary key or unique constraint on {columns}"
            )

    def _unique_keys(self, table: Table) -> list[set[str]]:
        """Return the columns of each primary key and unique constraint, in lower case."""
        schema, _, name = table.name.rpartition(".")
        keys: dict[str, set[str]] = {}
        for constraint, column in self._fetch(_UNIQUE_KEYS, name, schema, schema):
            keys.setdefault(constraint, set()).add(column.lower())
        return list(keys.values())

    # ---- transactions -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._execute("savepoint eos_begin")

    def _release_beginning(self) -> None:
        self._execute("release savepoint eos_begin")

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        for columns, run in split_by_columns(rows):
            values = [[self.plain(row[column]) for column in columns] for row in run]
            if table.key:
                self._upsert(table, columns, values)
            else:
                self._write_many(self._insert(table, columns), values)

    def _upsert(self, table: Table, columns: Sequence[str], values: Sequence[Sequence[Any]]) -> None:
        """Update each row that exists, and insert the others.

        If another transaction inserts the key meanwhile, a row by itself is updated then. With many rows, they are
        written again one by one (eos/worker/writers.py).
        """
        for row in values:
            found = dict(zip(columns, row, strict=True))
            if self._update(table, found):
                continue
            if len(values) > 1:
                self._execute(self._insert(table, columns), row)
                continue
            self._execute("savepoint eos_row")
            try:
                self._execute(self._insert(table, columns), row)
            except DatabaseError as error:
                if error.fault is not Fault.RECORD:
                    raise
                self._execute("rollback to savepoint eos_row")
                if not self._update(table, found):
                    raise

    def _update(self, table: Table, row: Row) -> bool:
        """Update the row of this key, and return whether it exists."""
        name, keys = self._quoted_table(table), [row[column] for column in table.key]
        where = " and ".join(self._equal(table.key, self._marks(len(keys))))
        self._execute(f"select 1 from {name} where {where}{self._lock}", keys)
        if not self._guarded(self._cursor.fetchall):
            return False
        if others := [column for column in row if column not in table.key]:
            marks = self._marks(len(row))
            sets = ", ".join(self._equal(others, marks))
            where = " and ".join(self._equal(table.key, marks[len(others) :]))
            self._execute(f"update {name} set {sets} where {where}", [*(row[column] for column in others), *keys])
        return True

    def _insert(self, table: Table, columns: Sequence[str]) -> str:
        named, marks = ", ".join(map(self._quoted, columns)), ", ".join(self._marks(len(columns)))
        return f"insert into {self._quoted_table(table)} ({named}) values ({marks})"

    def _write_many(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        self._guarded(self._cursor.executemany, sql, [self._bound(row) for row in values])

    def plain(self, value: Any) -> Any:
        """Return a value that drivers can send: UUIDs as text, lists and dicts as JSON."""
        if isinstance(value, list | tuple | dict):
            return msgspec.json.encode(value).decode()
        return str(value) if isinstance(value, uuid.UUID) else value

    def commit(self) -> None:
        try:
            self._release_beginning()
        except DatabaseError as error:
            if error.fault in (Fault.AWAY, Fault.AGAIN):
                raise
            raise DatabaseError(
                Fault.DEFINITION,
                f"{error}: the transaction ended before its commit. A function must not commit, nor run statements "
                "that do (create table in MySQL), nor ignore a deadlock. The driver must not connect again by itself",
            ) from error
        self._guarded(self._connection.commit)

    def roll_back(self) -> None:
        self._guarded(self._connection.rollback)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a lost connection
            self._connection.close()


def _decoded(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes | bytearray) else value
