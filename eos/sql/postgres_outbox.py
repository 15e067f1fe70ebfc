"""Reads the rows of a PostgreSQL table in the order of their transactions. Owns the SQL.

A sequence cannot serve as the position: a transaction draws a number, and may commit after a later number was read. So
each row stores the id of its transaction, and the reader stops before the first transaction that is still open.
"""

from __future__ import annotations

from typing import Any, Final

from eos import log
from eos.errors import ConfigurationError
from eos.sql.database import DatabaseError, Fault
from eos.sql.outbox import At, Held, Read, TableRow

_INTEGERS: Final = ("smallint", "integer", "bigint")
_NOW: Final = "pg_snapshot_xmin(pg_current_snapshot())"
# The snapshot and the rows must come from one statement: each statement has a snapshot of its own.
_READ: Final = """select pg_snapshot_xmin(s)::text, pg_snapshot_xmax(s)::text, o.*
  from pg_current_snapshot() s left join lateral (
    select * from {table} where xid < pg_snapshot_xmin(s) and (xid, id) > (%s::xid8, %s) order by xid, id limit %s
  ) o on true order by o.xid, o.id"""
_COLUMNS: Final = """select a.attname, format_type(a.atttypid, null), a.attnotnull,
    coalesce(pg_get_expr(d.adbin, d.adrelid), '') like '%%pg_current_xact_id()%%',
    exists (select from pg_index i where i.indrelid = a.attrelid and i.indkey[0] = a.attnum)
  from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
  where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped"""
_HELD: Final = f"""select (select count(*) from (select from {{table}} where xid >= {_NOW} limit 10000) waiting),
    pid, extract(epoch from clock_timestamp() - xact_start)
  from (values (0)) one left join (
    select pid, xact_start from pg_stat_activity where backend_xid is not null order by age(backend_xid) desc limit 1
  ) oldest on true"""


class PostgresTable:
    """Reads one table with a connection of its own (eos/sql/outbox.py `TableReader`)."""

    def __init__(self, connection: Any, table: str, quoted: str) -> None:
        self._connection, self._table, self._quoted = connection, table, quoted

    def _query(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement in a transaction of its own, and return its rows."""
        try:
            found: list[tuple[Any, ...]] = self._connection._execute(sql, parameters).fetchall()
            return found
        finally:
            # A transaction that stays open would hold rows back, and keep the server from cleaning up.
            self._connection.roll_back()

    def check(self, *, columns: tuple[str, ...], delete: bool) -> None:
        found = {name: more for name, *more in self._query(_COLUMNS, self._quoted)}
        index = f"create index on {self._quoted} (xid, id)"
        kind, is_required, has_default, is_indexed = found.get("xid", ("", False, False, False))
        if "xid" not in found:
            raise ConfigurationError(
                f"table {self._table} has no column xid with the transaction that wrote the row: the order of its "
                "numbers is not the order of commits, and rows would be lost",
                remedy=f"alter table {self._quoted} add column xid xid8 not null default pg_current_xact_id(); {index}",
            )
        if kind != "xid8" or not is_required or not has_default:
            raise ConfigurationError(
                f"the column xid of table {self._table} must be `xid8 not null default pg_current_xact_id()`",
                remedy=f"alter table {self._quoted} alter column xid type xid8, alter column xid set not null, "
                "alter column xid set default pg_current_xact_id()",
            )
        if found.get("id", ("",))[0] not in _INTEGERS:
            raise ConfigurationError(
                f"table {self._table} needs a column id of whole numbers, which orders the rows of one transaction",
                remedy=f"alter table {self._quoted} add column id bigint generated always as identity",
            )
        if missing := [name for name in columns if name not in found]:
            raise ConfigurationError(
                f"table {self._table} has no column {missing[0]}",
                remedy="add it, or decorate a function with @app.source(...) that makes the record from the row",
            )
        if not is_indexed:
            log.warning("table without an index on xid: each query reads all of it", table=self._table, remedy=index)
        self._query(f"select from {self._quoted} limit 0")
        if delete:
            self._query(f"explain delete from {self._quoted} where false")

    def identity(self) -> str:
        try:
            (found,) = self._query("select system_identifier || '/' || current_database() from pg_control_system()")
        except DatabaseError as error:
            if error.fault is not Fault.DENIED:
                raise
            (found,) = self._query("select '/' || current_database()")
        return str(found[0])

    def last(self) -> At | None:
        found = self._query(f"select xid::text, id from {self._quoted} order by xid desc, id desc limit 1")
        return At(int(found[0][0]), found[0][1]) if found else None

    def read(self, after: At, most: int) -> Read:
        found = self._query(_READ.format(table=self._quoted), str(after.xid), after.id, most)
        names = [column.name for column in self._connection.cursor().description[2:]]
        rows = [TableRow(dict(zip(names, values[2:], strict=True)), self._table) for values in found]
        xmin, xmax = found[0][:2]
        return Read([] if rows[0]["id"] is None else rows, int(xmin), int(xmax))

    def delete(self, until: At) -> None:
        statement = f"delete from {self._quoted} where (xid, id) <= (%s::xid8, %s)"
        self._connection._execute(statement, (str(until.xid), until.id))
        self._connection.commit()

    def held(self) -> Held:
        ((rows, pid, open_s),) = self._query(_HELD.format(table=self._quoted))
        return Held(rows, pid, None if open_s is None else float(open_s))

    def close(self) -> None:
        self._connection.close()
