"""Holds what MySQL and MariaDB need in place of standard SQL. DBAPI chooses it by asking the server.

`insert ... on duplicate key update` writes many rows in one statement, but follows every unique key of the table, and
not only the one that a sink names. So a table with a second one is refused. Tables of engines without transactions are
refused too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from eos.sql.columns import Column, Kind
from eos.sql.compare import EXPECTED
from eos.sql.database import OFFSETS_TABLE, DatabaseError, Fault, Table
from eos.sql.standard import Connection

_NAME: Final = "character set ascii collate ascii_bin not null"  # App ids and topics are ASCII, and compared exactly
# The index lets a worker lock its own rows without waiting for those of other workers.
_CREATE_OFFSETS: Final = f"""create table if not exists {OFFSETS_TABLE} (app varchar(249) {_NAME},
  topic varchar(249) {_NAME}, `partition` integer not null, next_offset bigint, owner varchar(32) {_NAME},
  failed longtext, primary key (app, topic, `partition`), index eos_owner (owner)) engine = InnoDB"""
_SESSION: Final = (
    "set session transaction isolation level read committed",
    # Times are sent in UTC. A value that does not fit its column is refused. A wait for a lock ends early.
    "set session time_zone = '+00:00', innodb_lock_wait_timeout = 5, "
    "sql_mode = concat(@@sql_mode, ',STRICT_TRANS_TABLES')",
)
_IDLE: Final = "set session idle_transaction_timeout = 60"  # MariaDB ends the transaction of a suspended worker
_WITHOUT_TRANSACTIONS: Final = """select t.engine
  from information_schema.tables t join information_schema.engines e on e.engine = t.engine
  where t.table_schema = coalesce(?, database()) and t.table_name = ? and e.transactions <> 'YES'"""
_COUNTED: Final = """select column_name from information_schema.columns
  where table_schema = coalesce(?, database()) and table_name = ? and locate('auto_increment', extra) > 0"""
_UNIQUE_KEYS: Final = """select index_name, column_name, sub_part from information_schema.statistics
  where table_schema = coalesce(?, database()) and table_name = ? and non_unique = 0"""


_TYPES: Final[Mapping[Kind, str]] = {
    Kind.BOOLEAN: "boolean",
    Kind.INTEGER: "bigint",
    Kind.FLOAT: "double",
    Kind.DECIMAL: "decimal(38, 9)",
    Kind.TEXT: "longtext",
    Kind.BYTES: "longblob",
    Kind.TIMESTAMP: "datetime(6)",
    Kind.DATE: "date",
    Kind.TIME: "time(6)",
    Kind.UUID: "char(36)",
    Kind.JSON: "json",
}
# Keys are compared exactly, and have a limited length.
_KEY_TYPES: Final[Mapping[Kind, str]] = {
    Kind.TEXT: "varchar(255) character set utf8mb4 collate utf8mb4_bin",
    Kind.BYTES: "varbinary(255)",
}


class MySQLConnection(Connection):
    _types = _TYPES
    _key_types = _KEY_TYPES
    _create, _hint, _quote, _is_mysql = _CREATE_OFFSETS, " force index (eos_owner)", "`", True

    can_compare = True
    _drop_expected = f"drop temporary table {EXPECTED}"  # without `temporary`, MySQL would commit

    def set_up(self) -> None:
        super().set_up()
        for statement in _SESSION:
            self._execute(statement)
        with contextlib.suppress(DatabaseError):  # MySQL has no such limit
            self._execute(_IDLE)
        self.roll_back()

    def create_offsets(self) -> None:
        super().create_offsets()
        self._check_engine(Table(OFFSETS_TABLE))
        self.roll_back()

    def check(self, table: Table, columns: Sequence[Column] = ()) -> None:
        super().check(table, columns)
        self._check_engine(table)
        self.roll_back()

    def _check_engine(self, table: Table) -> None:
        for (engine,) in self._fetch(_WITHOUT_TRANSACTIONS, *_schema_and_name(table)):
            raise DatabaseError(
                Fault.DEFINITION,
                f"{self._database}: {table.name} has the engine {engine}, which has no transactions: use InnoDB",
            )

    def _check_key(self, table: Table) -> None:
        super()._check_key(table)
        counted = {column.lower() for (column,) in self._fetch(_COUNTED, *_schema_and_name(table))}
        wanted = {column.lower() for column in table.key}
        for columns in self._unique_keys(table):
            if columns != wanted and not columns & counted:
                raise DatabaseError(
                    Fault.DEFINITION,
                    f"{self._database}: {table.name} has another unique key, {', '.join(sorted(columns))}: on a "
                    "conflict in it, MySQL would change another row. Make it an ordinary index, or write the row with "
                    "SQL of your own",
                )

    def _unique_keys(self, table: Table) -> list[set[str]]:
        keys: dict[str, set[str]] = {}
        for index, column, sub_part in self._fetch(_UNIQUE_KEYS, *_schema_and_name(table)):
            keys.setdefault(index, set()).add(column.lower() if sub_part is None else f"{column.lower()}({sub_part})")
        return list(keys.values())

    def _upsert(self, table: Table, columns: Sequence[str], values: Sequence[Sequence[Any]]) -> None:
        named = [self._quoted(column) for column in columns if column not in table.key]
        sets = ", ".join(f"{column} = values({column})" for column in named)
        first = self._quoted(table.key[0])
        sql = f"{self._insert(table, columns)} on duplicate key update {sets or f'{first} = {first}'}"
        self._write_many(sql, values)

    def _commit_definition(self) -> None:
        """Do nothing: `create table` has committed."""

    def _begin_snapshot(self) -> None:
        self._execute("set transaction isolation level repeatable read")
        self._execute("start transaction with consistent snapshot")

    def _as_text(self, columns: Sequence[str]) -> str:
        return f"cast(concat_ws(',', {', '.join(f'quote({column})' for column in columns)}) as binary)"

    def _read(self, sql: str) -> list[tuple[Any, ...]]:
        return self._fetch(sql)

    def plain(self, value: Any) -> Any:
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.astimezone(UTC).replace(tzinfo=None)
        return super().plain(value)


def _schema_and_name(table: Table) -> tuple[str | None, str]:
    schema, _, name = table.name.rpartition(".")
    return schema or None, name
