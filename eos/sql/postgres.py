"""Writes rows into PostgreSQL with psycopg 3. Owns the SQL, and the meaning of PostgreSQL's errors.

One statement writes thousands of rows, passed as one JSON parameter. PostgreSQL converts their values to the types of
the table's columns. Rows that leave out columns are written by a statement of their own. A connection through a pooler
keeps no state between two transactions, so each may run on another connection of the server (pgbouncer's transaction
pooling). A direct connection keeps prepared statements.
"""

from __future__ import annotations

import contextlib
import math
import re
import uuid
from base64 import b16encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec

from eos.errors import ConfigurationError
from eos.sql.columns import Column, Kind
from eos.sql.database import OFFSETS_TABLE, Cursor, DatabaseError, Fault, Table
from eos.sql.faults import fault_of_state, first_line, says_denied
from eos.sql.outbox import TableReader
from eos.sql.quoting import quoted, quoted_table
from eos.sql.rows import Row, split_by_columns
from eos.sql.statements import CREATE_OFFSETS, SqlConnection, on_conflict

if TYPE_CHECKING:
    import psycopg

# The server ends the transaction of a suspended worker, and a wait for a lock ends early.
_LIMITS: Final = "set local idle_in_transaction_session_timeout = '{idle_ms}'; set local lock_timeout = '{lock_ms}'"
# A statement that was executed this often on a connection is prepared. This saves a fifth of its time
# (`make bench-rows`).
_PREPARE_AFTER: Final = 5
_LOCK_TIMEOUT_MS, _IDLE_TIMEOUT_MS, _CONNECT_TIMEOUT_S = 5_000, 60_000, 5

_QUOTING: Final = (
    "check the names of its parameters; in a URL, write special characters of a password as %2F (/), %40 (@) and "
    "so on; otherwise, quote a value with spaces: password='...'"
)
# Parts of error messages about the connection string, or the files that it names. These errors have no SQLSTATE.
_WRONG_SETTINGS: Final = (
    *("certificate file", "private key file", "sslmode", "connection option", "port number"),
    "startup parameter",  # which a pooler does not accept
)

# Values of these classes arrive unchanged through JSON.
_JSON_KINDS: Final = frozenset((bool, date, datetime, Decimal, int, str, time, uuid.UUID, type(None)))


_TYPES: Final[Mapping[Kind, str]] = {
    Kind.BOOLEAN: "boolean",
    Kind.INTEGER: "bigint",
    Kind.FLOAT: "double precision",
    Kind.DECIMAL: "numeric",
    Kind.TEXT: "text",
    Kind.BYTES: "bytea",
    Kind.TIMESTAMP: "timestamptz",
    Kind.DATE: "date",
    Kind.TIME: "time",
    Kind.UUID: "uuid",
    Kind.JSON: "jsonb",
}


@dataclass(frozen=True)
class Postgres:
    """Describes a PostgreSQL database by its connection string: a URL, or `host=... dbname=...`.

    What the string leaves out comes from the environment (`PGHOST`, `PGPASSWORD`, ...) and from ~/.pgpass, as libpq
    documents. Passwords appear in no message.
    """

    conninfo: str = ""

    def __repr__(self) -> str:
        where = _without_secrets(self.conninfo)
        return f"Postgres({'...' if where is None else where})"

    def connect(self) -> Connection:
        try:
            import psycopg
        except ModuleNotFoundError as error:
            raise ConfigurationError("Postgres needs psycopg", remedy="pip install 'eos-kafka[postgres]'") from error
        if _without_secrets(self.conninfo) is None:
            raise ConfigurationError("the connection string of Postgres is wrong", remedy=_QUOTING)
        try:
            connection = psycopg.connect(
                self.conninfo, prepare_threshold=None, connect_timeout=_CONNECT_TIMEOUT_S, application_name="eos"
            )
            if _is_direct(connection):
                connection.prepare_threshold = _PREPARE_AFTER
        except psycopg.Error as error:
            if any(text in str(error) for text in _WRONG_SETTINGS):
                remedy = "correct the connection string, or the variable PG... of the environment"
                raise ConfigurationError(f"{self}: {first_line(error)}", remedy=remedy) from error
            fault = Fault.DENIED if says_denied(error) else Fault.AWAY
            raise DatabaseError(fault, f"{self}: {first_line(error)}") from error
        return Connection(self, connection)

    def table_reader(self, table: str) -> TableReader:
        from eos.sql.postgres_outbox import PostgresTable

        return PostgresTable(self.connect(), table, quoted_table(table))


class Connection(SqlConnection):
    _types = _TYPES
    _mark, _lock = "%s", " for update"
    _pipeline: AbstractContextManager[object] | None = None
    """The open pipeline, which sends statements without waiting for their results."""

    def __init__(self, database: Postgres, connection: psycopg.Connection[Any]) -> None:
        self._database, self._connection = database, connection
        self._cursor = connection.cursor()
        self.sends_ahead = _has_pipelines()

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        try:
            # Without parameters, several statements may be sent at once.
            return self._cursor.execute(sql, parameters or None)
        except Exception as error:
            raise self.translate(error) or error from error

    def create_offsets(self) -> None:
        self._execute("select to_regclass(%s)", [OFFSETS_TABLE])
        if self._cursor.fetchone() == (None,):
            try:
                self._execute(CREATE_OFFSETS)
            except DatabaseError as error:
                self.roll_back()
                raise DatabaseError(
                    error.fault, f"{error}. Let somebody who may create tables run: {CREATE_OFFSETS}"
                ) from error
        self.commit()

    def check(self, table: Table, columns: Sequence[Column] = ()) -> None:
        name, key = quoted_table(table.name), ", ".join(map(quoted, table.key))
        try:
            # Changes nothing, but needs the table, its columns and the rights.
            self._execute(f"select {self._named(table, columns)} from {name} t limit 0")
            if table.key:
                self._execute(f"explain insert into {name} select * from {name} limit 0 on conflict ({key}) do nothing")
        finally:
            self.roll_back()

    def _begin(self) -> None:
        self._execute(_LIMITS.format(idle_ms=_IDLE_TIMEOUT_MS, lock_ms=_LOCK_TIMEOUT_MS))

    def _begin_snapshot(self) -> None:
        self._execute("set transaction isolation level repeatable read")

    def _as_text(self, columns: Sequence[str]) -> str:
        return f"row({', '.join(columns)})::text"

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        for columns, run in split_by_columns(rows):
            self._execute(_write_statement(table, columns), [_to_json(run)])

    def send(self, table: Table, rows: Sequence[Row]) -> None:
        if self._pipeline is None and self.sends_ahead:
            self._pipeline = self._connection.pipeline()
            self._pipeline.__enter__()
        self.write(table, rows)

    def _leave_pipeline(self) -> None:
        """Wait for the results of all statements. Raises the error of the first that failed."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.__exit__(None, None, None)

    def cursor(self) -> Cursor:
        self._guarded(self._leave_pipeline)
        return super().cursor()

    def savepoint(self) -> None:
        self._guarded(self._leave_pipeline)
        super().savepoint()

    def release_savepoint(self) -> None:
        self._execute("set constraints all immediate")
        super().release_savepoint()

    def commit(self) -> None:
        # In a pipeline the server skips the commit if a statement before it has failed.
        self._guarded(self._connection.commit)
        self._guarded(self._leave_pipeline)

    def roll_back(self) -> None:
        with contextlib.suppress(DatabaseError):  # of a statement that is rolled back
            self._guarded(self._leave_pipeline)
        self._guarded(self._connection.rollback)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            raise self.translate(error) or error from error

    def close(self) -> None:
        self._connection.close()
        # A pipeline that is not left would log a warning. On a closed connection, leaving it only raises.
        with contextlib.suppress(Exception):
            self._leave_pipeline()

    def translate(self, error: BaseException) -> DatabaseError | None:
        import psycopg

        if not isinstance(error, psycopg.Error):
            return None
        fault = fault_of_state(error.sqlstate or "")
        if error.sqlstate == "0A000" and "cached plan" in str(error):
            fault = Fault.AGAIN  # a prepared statement selects from a table that was altered: a new connection helps
        if fault is None:  # an error of the client, and not of the server
            away = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or self._connection.closed
            fault = Fault.AWAY if away else Fault.RECORD
        return DatabaseError(fault, f"{self._database}: {first_line(error)}")


def _is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Return whether no pooler is between us and the server. A pooler reports another process id than the server's.

    Behind a pooler, each transaction may run on a different connection to the server, and a statement exists only on
    the connection that prepared it."""
    found = connection.execute("select pg_backend_pid()").fetchone()
    connection.rollback()
    return found == (connection.info.backend_pid,)


def _has_pipelines() -> bool:
    """Return whether the client library has pipelines (libpq 14)."""
    from psycopg import Pipeline

    return Pipeline.is_supported()


def _write_statement(table: Table, columns: Sequence[str]) -> str:
    named = ", ".join(map(quoted, columns))
    name = quoted_table(table.name)
    sql = f"insert into {name} ({named}) select {named} from json_populate_recordset(null::{name}, %s::json)"
    return sql + on_conflict(table, columns)


def _to_json(rows: Sequence[Row]) -> str:
    kinds = {type(value) for row in rows for value in row.values()}
    if kinds <= _JSON_KINDS:
        return msgspec.json.encode(rows).decode()
    return msgspec.json.encode([{c: _json_value(v) for c, v in row.items()} for row in rows]).decode()


def _json_value(value: Any) -> Any:
    """Return a JSON value that PostgreSQL reads as the given value: bytes as hexadecimal text, NaN as text."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return str(value)
    if kind is bytes or kind is bytearray or kind is memoryview:
        return "\\x" + b16encode(value).decode()
    if kind is list or kind is tuple:
        return [_json_value(one) for one in value]
    return value


def _without_secrets(conninfo: str) -> str | None:
    """Return where a connection string leads, without user, password and options; None if the string is wrong.

    A wrong string may have a part of the password in any place: `user:pass/word@host` has a port that is no number.
    """
    try:
        from psycopg.conninfo import conninfo_to_dict

        found = conninfo_to_dict(conninfo)
    except Exception:  # noqa: BLE001 - psycopg is missing, or its message may contain a password
        return None
    shown = {name: str(found[name]) for name in ("host", "port", "dbname") if found.get(name)}
    if "@" in shown.get("host", "")[1:] or re.search(r"[^\d,]", shown.get("port", "")):
        return None
    return " ".join(f"{name}={value}" for name, value in shown.items() if name != "dbname" or "@" not in value)
