"""Holds the SQL that databases share: the offsets table, savepoints and upserts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from eos.sql.columns import Column, Kind
from eos.sql.compare import EXPECTED, compare_by_key, compare_counts, describe_key
from eos.sql.database import (
    OFFSETS_TABLE,
    Cursor,
    DatabaseError,
    Fault,
    Partition,
    Stored,
    Table,
    WrongRow,
    decode_failed,
    encode_failed,
)
from eos.sql.quoting import quoted, quoted_table
from eos.sql.rows import Row

CREATE_OFFSETS: Final = f"""create table if not exists {OFFSETS_TABLE} (app text, topic text, partition integer,
  next_offset bigint, owner text not null, failed text not null default '', primary key (app, topic, partition))"""
_OFFSETS_KEYS: Final = Table(OFFSETS_TABLE, ("app", "topic", "partition"))
# Each ? is replaced by the driver's own mark of a parameter. `partition` is a reserved word of some databases.
_OWNED: Final = f"""select topic, "partition", next_offset, owner, failed from {OFFSETS_TABLE}{{}}
  where app = ? and owner = ? order by topic, "partition\""""
_OFFSETS: Final = (
    f'select topic, "partition", next_offset from {OFFSETS_TABLE} where app = ? and next_offset is not null'
)
# DuckDB refuses concurrent updates of the same column only, so this statement and a claim both set the owner.
_MOVE: Final = f"""update {OFFSETS_TABLE} set next_offset = ?, failed = ?, owner = ?
  where app = ? and topic = ? and "partition" = ?"""

_ROWS_AT_ONCE: Final = 5_000


class SqlConnection:
    """Is the base of connections that use these statements (see eos/sql/database.py `Connection`)."""

    _mark: str
    """The driver's mark of a parameter. Braces in it stand for the parameter's number."""
    _lock: str
    """The end of a select that locks its rows; empty if a transaction locks everything."""
    _hint: str = ""
    """The clause that names an index for the select of one owner's rows, if the database needs it."""
    _quote: str = '"'
    sends_ahead: bool = False
    can_compare: bool = True
    """Whether `find_wrong_rows` is possible."""
    _types: Mapping[Kind, str] = {}
    """The types of columns in tables that eos creates; none if it creates none."""
    _key_types: Mapping[Kind, str] = {}
    """Those that differ for columns of a key."""
    _cursor: Any

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Execute a statement and return the cursor. Raises DatabaseError."""
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    def _begin_snapshot(self) -> None:
        """Begin a transaction whose statements all see the same state of the database."""
        raise NotImplementedError

    def _as_text(self, columns: Sequence[str]) -> str:
        """Return SQL for one text of the values of quoted columns, which also tells NULLs apart."""
        raise NotImplementedError

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    def send(self, table: Table, rows: Sequence[Row]) -> None:
        self.write(table, rows)

    def commit(self) -> None:
        raise NotImplementedError

    def roll_back(self) -> None:
        raise NotImplementedError

    def _run(self, sql: str, *parameters: Any) -> Any:
        first, *others = sql.replace('"', self._quote).split("?")
        marked = (self._mark.format(number) + text for number, text in enumerate(others, 1))
        return self._execute(first + "".join(marked), parameters)

    def _fetch(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._run(sql, *parameters).fetchall()
        return found

    # ---- missing tables ---------------------------------------------------------------------------------------------

    def find_remedy(self, table: Table, columns: Sequence[Column]) -> str | None:
        name, key = quoted_table(table.name, self._quote), [quoted(one, self._quote) for one in table.key]
        if not self._can_run(f"select 1 from {name} where 1 = 0"):
            if not (self._types and columns):
                return None
            defined = [self._definition(column, column.name in table.key) for column in columns]
            primary = [f"primary key ({', '.join(key)})"] if key else []
            return f"create table {name} ({', '.join(defined + primary)})"
        for column in columns:
            if not self._can_run(f"select t.{quoted(column.name, self._quote)} from {name} t where 1 = 0"):
                if not self._types:
                    return None
                added = self._definition(column._replace(nullable=True), column.name in table.key)
                return f"alter table {name} add column {added}"
        index = quoted(f"{table.name.rpartition('.')[2]}_key", self._quote)
        return f"create unique index {index} on {name} ({', '.join(key)})" if key else None

    def _named(self, table: Table, columns: Sequence[Column]) -> str:
        """Return the columns of the key and these columns for a select from the table `t`; all if none are known."""
        names = dict.fromkeys((*table.key, *(column.name for column in columns)))
        # SQLite takes a quoted name without a table for a text if there is no such column.
        return ", ".join(f"t.{quoted(name, self._quote)}" for name in names) or "*"

    def _definition(self, column: Column, is_key: bool) -> str:
        kinds = self._types if not is_key else {**self._types, **self._key_types}
        needed = "" if column.nullable and not is_key else " not null"
        return f"{quoted(column.name, self._quote)} {kinds[column.kind]}{needed}"

    def _can_run(self, sql: str) -> bool:
        try:
            self._execute(sql).fetchall()
        except DatabaseError as error:
            if error.fault is Fault.AWAY:
                raise
            return False
        finally:
            self.roll_back()
        return True

    def create(self, statement: str) -> None:
        try:
            self._begin()
            self._execute(statement)
            self._commit_definition()
        except DatabaseError as error:
            self.roll_back()
            if error.fault in (Fault.AWAY, Fault.DENIED):
                raise

    def _commit_definition(self) -> None:
        self.commit()

    def offsets(self, app: str) -> dict[Partition, int]:
        found = self._read_offsets(app)
        self.roll_back()
        return found

    def _read_offsets(self, app: str) -> dict[Partition, int]:
        found = self._fetch(_OFFSETS, app)
        return {(topic, partition): next_offset for topic, partition, next_offset in found}

    def claim(self, app: str, owner: str, partitions: Collection[Partition]) -> dict[Partition, Stored]:
        self._begin()
        for topic, partition in sorted(partitions):
            self.write(_OFFSETS_KEYS, [{"app": app, "topic": topic, "partition": partition, "owner": owner}])
        owned = self._owned(app, owner)
        self.commit()
        return {partition: owned[partition] for partition in partitions}

    def begin(self, app: str, owner: str) -> dict[Partition, Stored]:
        self._begin()
        return self._owned(app, owner)

    def _owned(self, app: str, owner: str) -> dict[Partition, Stored]:
        """Lock the rows of this owner in the offsets table, and return them."""
        rows = self._fetch(_OWNED.format(self._hint) + self._lock, app, owner)
        return {(topic, part): Stored(at, its, decode_failed(failed)) for topic, part, at, its, failed in rows}

    def cursor(self) -> Cursor:
        cursor: Cursor = self._cursor
        return cursor

    def savepoint(self) -> None:
        self._execute("savepoint eos")

    def release_savepoint(self) -> None:
        self._execute("release savepoint eos")

    def roll_back_to_savepoint(self) -> None:
        self._execute("rollback to savepoint eos")

    def move(self, app: str, moved: Mapping[Partition, Stored]) -> None:
        for (topic, partition), stored in sorted(moved.items()):
            self._run(_MOVE, stored.next_offset, encode_failed(stored.failed), stored.owner, app, topic, partition)

    # ---- verification -----------------------------------------------------------------------------------------------

    def begin_reading(self, app: str) -> dict[Partition, int]:
        self._begin_snapshot()
        return self._read_offsets(app)

    def find_wrong_rows(self, table: Table, rows: Sequence[Row], exactly: bool) -> list[WrongRow]:
        name, columns = quoted_table(table.name, self._quote), [quoted(one, self._quote) for one in rows[0]]
        self._create_expected(
            f"create temporary table {EXPECTED} as select {', '.join(columns)} from {name} where 1 = 0"
        )
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            self._write_expected(rows[at : at + _ROWS_AT_ONCE])
        expected, stored = (self._as_text([f"{alias}.{column}" for column in columns]) for alias in ("e", "t"))
        if table.key:
            sql = compare_by_key(name, [quoted(one, self._quote) for one in table.key], expected, stored)
            found = [
                WrongRow(describe_key(table.key, row), "is missing" if row[-1] is None else "has other values")
                for row in self._read(sql)
            ]
        else:
            sql = compare_counts(name, expected, stored, "<>" if exactly else "<")
            found = [
                WrongRow(text, f"is there {there} times instead of {times}") for text, times, there in self._read(sql)
            ]
        self._execute(self._drop_expected)
        return found

    _drop_expected: str = f"drop table {EXPECTED}"

    def _read(self, sql: str) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._execute(sql).fetchall()
        return found

    def _create_expected(self, sql: str) -> None:
        self._execute(sql)

    def _write_expected(self, rows: Sequence[Row]) -> None:
        """Write the rows that the database accepts. It refused the others before, as failures of their records."""
        self.savepoint()
        try:
            self.write(Table(EXPECTED), rows)
            self.release_savepoint()
        except DatabaseError as error:
            if error.fault is not Fault.RECORD:
                raise
            self.roll_back_to_savepoint()
            middle = len(rows) // 2
            for half in (rows[:middle], rows[middle:]) if middle else ():
                self._write_expected(half)


def on_conflict(table: Table, columns: Sequence[str]) -> str:
    """Return the end of an insert that updates the row of the same key instead; empty for a table without a key."""
    if not table.key:
        return ""
    key = ", ".join(map(quoted, table.key))
    sets = ", ".join(f"{quoted(column)} = excluded.{quoted(column)}" for column in columns if column not in table.key)
    return f" on conflict ({key}) do update set {sets}" if sets else f" on conflict ({key}) do nothing"
