"""Writes rows into a DuckDB file. Owns the SQL, and the meaning of DuckDB's errors.

One process at a time can open the file, so a second worker waits. DuckDB has no savepoints, and an error ends the
transaction. To go back to a savepoint, the connection rolls back, begins again, and repeats the statements of the
accepted records. Each must return the same rows as before, because a function may have used them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from eos.errors import ConfigurationError
from eos.sql.columns import Column, Kind
from eos.sql.database import Cursor, DatabaseError, Fault, Partition, Stored, Table
from eos.sql.faults import fault_of, first_line
from eos.sql.quoting import quoted, quoted_table
from eos.sql.rows import Row, split_by_columns
from eos.sql.statements import CREATE_OFFSETS, SqlConnection, on_conflict

if TYPE_CHECKING:
    import duckdb

_MOST_PARAMETERS: Final = 2_000
_FAULTS: Final[Mapping[str, Fault]] = {
    "TransactionException": Fault.AGAIN,  # another connection of this process changed the row
    "FatalException": Fault.AWAY,
    "PermissionException": Fault.DENIED,
    "InvalidInputException": Fault.RECORD,
    "InvalidTypeException": Fault.RECORD,
    "NotImplementedException": Fault.RECORD,  # a value whose class DuckDB cannot convert
}


_TYPES: Final[Mapping[Kind, str]] = {
    Kind.BOOLEAN: "boolean",
    Kind.INTEGER: "bigint",
    Kind.FLOAT: "double",
    Kind.DECIMAL: "decimal(38, 9)",
    Kind.TEXT: "varchar",
    Kind.BYTES: "blob",
    Kind.TIMESTAMP: "timestamptz",
    Kind.DATE: "date",
    Kind.TIME: "time",
    Kind.UUID: "uuid",
    Kind.JSON: "json",
}


@dataclass(frozen=True)
class DuckDB:
    """Describes a DuckDB database by the path of its file, which is created if it is missing.

    No other process can open the file while a worker is connected.
    """

    path: str

    def connect(self) -> Connection:
        try:
            import duckdb
        except ModuleNotFoundError as error:
            raise ConfigurationError("DuckDB needs duckdb", remedy="pip install 'eos-kafka[duckdb]'") from error
        try:
            return Connection(self, duckdb.connect(Path(self.path).expanduser()))
        except duckdb.Error as error:
            raise DatabaseError(Fault.AWAY, f"{self}: {first_line(error)}") from error


class _Statement(NamedTuple):
    """Holds a statement of the open transaction, and what it returned."""

    sql: str
    parameters: Any
    is_many: bool
    rows: list[Any]


class _RecordingCursor:
    """Runs a function's statements, and keeps them for the case that they must run again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: list[Any] = []

    def execute(self, sql: str, parameters: Any = None, /) -> _RecordingCursor:
        self._rows = list(self._connection.run(sql, parameters, is_many=False))
        return self

    def executemany(self, sql: str, parameters: Any, /) -> _RecordingCursor:
        self._rows = list(self._connection.run(sql, parameters, is_many=True))
        return self

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows


class Connection(SqlConnection):
    _types = _TYPES
    _mark, _lock = "?", ""  # a transaction that changes rows another one changed meanwhile is refused

    def __init__(self, database: DuckDB, connection: duckdb.DuckDBPyConnection) -> None:
        self._database, self._connection = database, connection
        self._cursor = connection  # its cursor() would be another connection
        self._recording = _RecordingCursor(self)
        self._statements: list[_Statement] = []  # of the open transaction
        self._accepted = 0  # how many of them were run before the savepoint
        self._begun: tuple[str, str, dict[Partition, Stored]] = "", "", {}

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        try:
            return self._connection.execute(sql, list(parameters))
        except Exception as error:
            raise self.translate(error) or error from error

    def cursor(self) -> Cursor:
        return self._recording

    def run(self, sql: str, parameters: Any, is_many: bool) -> list[Any]:
        """Run a statement and return its rows. Raises the driver's exception."""
        copied = parameters if parameters is None else type(parameters)(parameters)
        call = self._connection.executemany if is_many else self._connection.execute
        call(sql, parameters)
        rows = self._connection.fetchall() if self._connection.description else []
        self._statements.append(_Statement(sql, copied, is_many, rows))
        return rows

    def create_offsets(self) -> None:
        self._execute(CREATE_OFFSETS)

    def check(self, table: Table, columns: Sequence[Column] = ()) -> None:
        name = quoted_table(table.name)
        self._execute(f"select {self._named(table, columns)} from {name} t limit 0")
        if table.key:
            self._execute(f"explain {_insert(table, table.key, 1)}", [None] * len(table.key))

    def _begin(self) -> None:
        self._execute("begin transaction")
        self._statements, self._accepted = [], 0

    def _begin_snapshot(self) -> None:
        self._begin()

    def _as_text(self, columns: Sequence[str]) -> str:
        return f"cast(row({', '.join(columns)}) as varchar)"

    def _create_expected(self, sql: str) -> None:
        self.run(sql, None, is_many=False)

    def begin(self, app: str, owner: str) -> dict[Partition, Stored]:
        found = super().begin(app, owner)
        self._begun = app, owner, found
        return found

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        for columns, run in split_by_columns(rows):
            size = max(1, _MOST_PARAMETERS // len(columns))
            for start in range(0, len(run), size):
                part = run[start : start + size]
                values = list(chain.from_iterable([row[column] for column in columns] for row in part))
                try:
                    self.run(_insert(table, columns, len(part)), values, is_many=False)
                except Exception as error:
                    raise self.translate(error) or error from error

    def savepoint(self) -> None:
        self._accepted = len(self._statements)

    def release_savepoint(self) -> None:
        """Check that a function has not ignored an error, which ends the transaction."""
        self._execute("select 1")

    def roll_back_to_savepoint(self) -> None:
        accepted = self._statements[: self._accepted]
        app, owner, before = self._begun
        self.roll_back()
        if self.begin(app, owner) != before:
            raise DatabaseError(Fault.AGAIN, f"{self._database}: the offsets changed meanwhile")
        for statement in accepted:
            try:
                rows = self.run(*statement[:3])
            except Exception as error:
                raise self.translate(error) or error from error
            if rows != statement.rows:
                raise DatabaseError(
                    Fault.DEFINITION,
                    f"{self._database}: this statement returned something else when it was run again after the refusal "
                    f"of another record: {statement.sql}",
                )

    def commit(self) -> None:
        self._execute("select 1")  # the commit of a transaction that an error ended reports success
        try:
            self._execute("commit")  # the driver's commit() reports success without a transaction
        except DatabaseError as error:
            if "no transaction is active" in str(error):
                raise DatabaseError(Fault.DEFINITION, f"{error}. A function must not commit or roll back") from error
            raise

    def roll_back(self) -> None:
        with contextlib.suppress(DatabaseError):  # no transaction is open
            self._execute("rollback")

    def close(self) -> None:
        self._connection.close()

    def translate(self, error: BaseException) -> DatabaseError | None:
        import duckdb

        if not isinstance(error, duckdb.Error):
            return None
        fault = _FAULTS.get(type(error).__name__) or fault_of(error)
        if "Current transaction is aborted" in str(error):  # by an error that a function ignored
            fault = Fault.RECORD
        return DatabaseError(fault, f"{self._database}: {first_line(error)}")


def _insert(table: Table, columns: Sequence[str], count: int) -> str:
    """Return the statement that writes this many rows."""
    row = f"({', '.join('?' * len(columns))})"
    sql = (
        f"insert into {quoted_table(table.name)} ({', '.join(map(quoted, columns))}) values {', '.join([row] * count)}"
    )
    return sql + on_conflict(table, columns)
