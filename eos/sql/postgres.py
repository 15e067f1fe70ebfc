"""Writes rows into PostgreSQL with psycopg 3. Owns the SQL, and the meaning of PostgreSQL's errors.

One statement writes thousands of rows, passed as one JSON parameter. PostgreSQL converts their values to the types of
the table's columns. Rows that leave out columns are written by a statement of their own. A connection keeps no state
between two transactions, so a pooler may run each transaction on another one (pgbouncer's transaction pooling).
"""

from __future__ import annotations

import math
from base64 import b16encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from eos.errors import ConfigurationError
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

if TYPE_CHECKING:
    import psycopg

_CREATE: Final = f"""create table if not exists {OFFSETS_TABLE} (app text, topic text, partition integer,
  next_offset bigint, owner text not null, failed text not null default '', primary key (app, topic, partition))"""
_CLAIM: Final = f"""insert into {OFFSETS_TABLE} as o (app, topic, partition, owner) values (%s, %s, %s, %s)
  on conflict (app, topic, partition) do update set owner = excluded.owner returning next_offset, failed"""
_LOCK: Final = f"""select topic, partition, next_offset, owner, failed from {OFFSETS_TABLE}
  where app = %s and owner = %s order by topic, partition for update"""
_OFFSETS: Final = f"""select topic, partition, next_offset from {OFFSETS_TABLE}
  where app = %s and next_offset is not null"""
_MOVE: Final = f"""update {OFFSETS_TABLE} set next_offset = %s, failed = %s
  where app = %s and topic = %s and partition = %s"""
# A suspended worker must not hold its locks for ever, and nobody waits for them for long.
_LIMITS: Final = "set local idle_in_transaction_session_timeout = '{idle_ms}'; set local lock_timeout = '{lock_ms}'"
_LOCK_TIMEOUT_MS, _IDLE_TIMEOUT_MS, _CONNECT_TIMEOUT_S = 5_000, 60_000, 5
# Classes and codes of SQLSTATE (PostgreSQL's appendix A).
_FAULTS: Final[Mapping[str, Fault]] = {
    **dict.fromkeys(("08", "53", "57", "58", "XX", "25P03", "55P03", "F0"), Fault.AWAY),
    **dict.fromkeys(("28", "3D", "42501"), Fault.DENIED),
    **dict.fromkeys(("40",), Fault.AGAIN),
    **dict.fromkeys(("21", "22", "23", "44", "P0"), Fault.RECORD),
    **dict.fromkeys(("42", "0A"), Fault.DEFINITION),
}


@dataclass(frozen=True)
class Postgres:
    """Describes a PostgreSQL database by its connection string: a URL, or `host=... dbname=...`.

    What the string leaves out comes from the environment (`PGHOST`, `PGPASSWORD`, ...) and from ~/.pgpass, as libpq
    documents. Passwords appear in no message.
    """

    conninfo: str = ""

    def __repr__(self) -> str:
        return f"Postgres({_without_secrets(self.conninfo)})"

    def connect(self) -> Connection:
        try:
            import psycopg
        except ModuleNotFoundError as error:
            raise ConfigurationError("Postgres needs psycopg", remedy="pip install 'eos-kafka[postgres]'") from error
        try:
            # A pooler does not know the prepared statements of another connection.
            connection = psycopg.connect(
                self.conninfo, prepare_threshold=None, connect_timeout=_CONNECT_TIMEOUT_S, application_name="eos"
            )
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(f"the connection string of Postgres is wrong: {_first_line(error)}") from error
        except psycopg.Error as error:
            denied = any(text in str(error) for text in ("password", "authentication", "does not exist", "pg_hba"))
            raise DatabaseError(Fault.DENIED if denied else Fault.AWAY, f"{self}: {_first_line(error)}") from error
        return Connection(self, connection)


class Connection:
    def __init__(self, database: Postgres, connection: psycopg.Connection[Any]) -> None:
        self._database, self._connection = database, connection
        self._cursor = connection.cursor()

    def _execute(self, sql: str, parameters: Sequence[Any] | None = None) -> Any:
        try:
            return self._cursor.execute(sql, parameters)
        except Exception as error:
            raise self.translate(error) or error from error

    def create_offsets(self) -> None:
        self._execute("select to_regclass(%s)", [OFFSETS_TABLE])
        if self._cursor.fetchone() == (None,):
            try:
                self._execute(_CREATE)
            except DatabaseError as error:
                self.roll_back()
                raise DatabaseError(
                    error.fault, f"{error}. Let somebody who may create tables run: {_CREATE}"
                ) from error
        self.commit()

    def check(self, table: Table) -> None:
        name, key = _quoted_table(table.name), ", ".join(map(_quoted, table.key))
        try:
            # Changes nothing, but needs the table, its columns and the rights.
            self._execute(f"select {key or '*'} from {name} limit 0")
            if table.key:
                self._execute(f"explain insert into {name} select * from {name} limit 0 on conflict ({key}) do nothing")
        finally:
            self.roll_back()

    def offsets(self, app: str) -> dict[Partition, int]:
        found = self._execute(_OFFSETS, [app]).fetchall()
        self.roll_back()
        return {(topic, partition): next_offset for topic, partition, next_offset in found}

    def claim(self, app: str, owner: str, partitions: Collection[Partition]) -> dict[Partition, Stored]:
        self._begin()
        found: dict[Partition, Stored] = {}
        for topic, partition in sorted(partitions):
            next_offset, failed = self._execute(_CLAIM, [app, topic, partition, owner]).fetchone()
            found[topic, partition] = Stored(next_offset, owner, decode_failed(failed))
        self.commit()
        return found

    def begin(self, app: str, owner: str) -> dict[Partition, Stored]:
        self._begin()
        rows = self._execute(_LOCK, [app, owner]).fetchall()
        return {(topic, part): Stored(at, its, decode_failed(failed)) for topic, part, at, its, failed in rows}

    def _begin(self) -> None:
        self._execute(_LIMITS.format(idle_ms=_IDLE_TIMEOUT_MS, lock_ms=_LOCK_TIMEOUT_MS))

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        for columns, run in split_by_columns(rows):
            self._execute(_write_statement(table, columns), [_to_json(run)])

    def cursor(self) -> Cursor:
        return self._cursor

    def savepoint(self) -> None:
        self._execute("savepoint eos")

    def release_savepoint(self) -> None:
        self._execute("set constraints all immediate")
        self._execute("release savepoint eos")

    def roll_back_to_savepoint(self) -> None:
        self._execute("rollback to savepoint eos")

    def move(self, app: str, moved: Mapping[Partition, Stored]) -> None:
        for (topic, partition), stored in sorted(moved.items()):
            self._execute(_MOVE, [stored.next_offset, encode_failed(stored.failed), app, topic, partition])

    def commit(self) -> None:
        try:
            self._connection.commit()
        except Exception as error:
            raise self.translate(error) or error from error

    def roll_back(self) -> None:
        try:
            self._connection.rollback()
        except Exception as error:
            raise self.translate(error) or error from error

    def close(self) -> None:
        self._connection.close()

    def translate(self, error: BaseException) -> DatabaseError | None:
        import psycopg

        if not isinstance(error, psycopg.Error):
            return None
        state = error.sqlstate or ""
        fault = _FAULTS.get(state) or _FAULTS.get(state[:2])
        if fault is None:  # an error of the client, and not of the server
            away = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or self._connection.closed
            fault = Fault.AWAY if away else Fault.RECORD
        return DatabaseError(fault, f"{self._database}: {_first_line(error)}")


def _write_statement(table: Table, columns: Sequence[str]) -> str:
    named = ", ".join(map(_quoted, columns))
    name = _quoted_table(table.name)
    sql = f"insert into {name} ({named}) select {named} from json_populate_recordset(null::{name}, %s::json)"
    if not table.key:
        return sql
    changed = [column for column in columns if column not in table.key]
    key = ", ".join(map(_quoted, table.key))
    if not changed:
        return f"{sql} on conflict ({key}) do nothing"
    sets = ", ".join(f"{_quoted(column)} = excluded.{_quoted(column)}" for column in changed)
    return f"{sql} on conflict ({key}) do update set {sets}"


def _to_json(rows: Sequence[Row]) -> str:
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


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quoted_table(name: str) -> str:
    """Return a table's name quoted, with its schema if it has one: `sales.orders`."""
    return ".".join(map(_quoted, name.split(".")))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _without_secrets(conninfo: str) -> str:
    """Return where a connection string leads, without user, password and options."""
    try:
        from psycopg.conninfo import conninfo_to_dict

        found = conninfo_to_dict(conninfo)
    except Exception:  # noqa: BLE001 - a wrong string may contain a password in any place
        return "..."
    return " ".join(f"{name}={found[name]}" for name in ("host", "port", "dbname") if found.get(name))
