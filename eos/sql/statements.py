"""Holds the SQL that PostgreSQL and SQLite share: the offsets table, savepoints and upserts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

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
from eos.sql.rows import Row

CREATE_OFFSETS: Final = f"""create table if not exists {OFFSETS_TABLE} (app text, topic text, partition integer,
  next_offset bigint, owner text not null, failed text not null default '', primary key (app, topic, partition))"""
# Each ? is replaced by the driver's own mark of a parameter.
_CLAIM: Final = f"""insert into {OFFSETS_TABLE} (app, topic, partition, owner) values (?, ?, ?, ?)
  on conflict (app, topic, partition) do update set owner = excluded.owner returning next_offset, failed"""
_OWNED: Final = f"""select topic, partition, next_offset, owner, failed from {OFFSETS_TABLE}
  where app = ? and owner = ? order by topic, partition"""
_OFFSETS: Final = f"select topic, partition, next_offset from {OFFSETS_TABLE} where app = ? and next_offset is not null"
_MOVE: Final = f"update {OFFSETS_TABLE} set next_offset = ?, failed = ? where app = ? and topic = ? and partition = ?"
# The table that `find_wrong_rows` fills. A copy of the columns converts the values as the table itself does.
_EXPECTED: Final = Table("eos_expected")
_ROWS_AT_ONCE: Final = 5_000


class SqlConnection:
    """Is the base of connections that use these statements (see eos/sql/database.py `Connection`)."""

    _mark: ClassVar[str]
    """The driver's mark of a parameter."""
    _lock: ClassVar[str]
    """The end of a select that locks its rows; empty if a transaction locks everything."""
    _cursor: Any

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Execute a statement and return the cursor. Raises DatabaseError."""
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    def _begin_snapshot(self) -> None:
        """Begin a transaction whose statements all see the same state of the database."""
        raise NotImplementedError

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    def _as_text(self, table: str, columns: Sequence[str]) -> str:
        """Return SQL for these columns of a table as one text that can be compared; NULLs too."""
        raise NotImplementedError

    def _quoted_table(self, name: str) -> str:
        return quoted(name)

    def commit(self) -> None:
        raise NotImplementedError

    def roll_back(self) -> None:
        raise NotImplementedError

    def _run(self, sql: str, *parameters: Any) -> Any:
        return self._execute(sql.replace("?", self._mark), parameters)

    def offsets(self, app: str) -> dict[Partition, int]:
        found = self._read_offsets(app)
        self.roll_back()
        return found

    def _read_offsets(self, app: str) -> dict[Partition, int]:
        found = self._run(_OFFSETS, app).fetchall()
        return {(topic, partition): next_offset for topic, partition, next_offset in found}

    def begin_reading(self, app: str) -> dict[Partition, int]:
        self._begin_snapshot()
        return self._read_offsets(app)

    def find_wrong_rows(self, table: Table, rows: Sequence[Row], exactly: bool) -> list[WrongRow]:
        name, columns = self._quoted_table(table.name), tuple(rows[0])
        expected = quoted(_EXPECTED.name)
        self._execute(
            f"create temporary table {expected} as select {', '.join(map(quoted, columns))} from {name} limit 0"
        )
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            self._write_expected(rows[at : at + _ROWS_AT_ONCE])
        expected_text, stored_text = self._as_text("e", columns), self._as_text("t", columns)
        if table.key:
            wrong = self._execute(_compare_by_key(name, table.key, expected_text, stored_text)).fetchall()
            found = [
                WrongRow(_describe_key(table.key, row), "is missing" if row[-1] is None else "has other values")
                for row in wrong
            ]
        else:
            wrong = self._execute(
                _compare_counts(name, expected_text, stored_text, "<>" if exactly else "<")
            ).fetchall()
            found = [WrongRow(text, f"is there {there} times instead of {times}") for text, times, there in wrong]
        self._execute(f"drop table {expected}")
        return found

    def _write_expected(self, rows: Sequence[Row]) -> None:
        """Write the rows that the database accepts. It refused the others before, as failures of their records."""
        self.savepoint()
        try:
            self.write(_EXPECTED, rows)
            self.release_savepoint()
        except DatabaseError as error:
            if error.fault is not Fault.RECORD:
                raise
            self.roll_back_to_savepoint()
            middle = len(rows) // 2
            for half in (rows[:middle], rows[middle:]) if middle else ():
                self._write_expected(half)

    def claim(self, app: str, owner: str, partitions: Collection[Partition]) -> dict[Partition, Stored]:
        self._begin()
        found: dict[Partition, Stored] = {}
        for topic, partition in sorted(partitions):
            ((next_offset, failed),) = self._run(_CLAIM, app, topic, partition, owner).fetchall()
            found[topic, partition] = Stored(next_offset, owner, decode_failed(failed))
        self.commit()
        return found

    def begin(self, app: str, owner: str) -> dict[Partition, Stored]:
        self._begin()
        rows = self._run(_OWNED + self._lock, app, owner).fetchall()
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
            self._run(_MOVE, stored.next_offset, encode_failed(stored.failed), app, topic, partition)


def _compare_by_key(name: str, key: Sequence[str], expected: str, stored: str) -> str:
    """Return a select of the keys of wrong rows, each with the row as text, NULL for one that is missing."""
    joined = " and ".join(f"e.{quoted(column)} = t.{quoted(column)}" for column in key)
    found = f"case when t.{quoted(key[0])} is null then null else {stored} end"
    keys = ", ".join(f"e.{quoted(column)}" for column in key)
    return (
        f"select {keys}, {found} from {quoted(_EXPECTED.name)} e left join {name} t on {joined} "
        f"where t.{quoted(key[0])} is null or {expected} <> {stored}"
    )


def _compare_counts(name: str, expected: str, stored: str, wrong: str) -> str:
    """Return a select of the wrong rows as text, with how often they are expected and found."""
    return (
        f"select e.one, e.times, coalesce(t.times, 0) "
        f"from (select {expected} as one, count(*) as times from {quoted(_EXPECTED.name)} e group by 1) e "
        f"left join (select {stored} as one, count(*) as times from {name} t group by 1) t on e.one = t.one "
        f"where coalesce(t.times, 0) {wrong} e.times"
    )


def _describe_key(key: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(f"{column}={value}" for column, value in zip(key, values, strict=False))


def on_conflict(table: Table, columns: Sequence[str]) -> str:
    """Return the end of an insert that updates the row of the same key instead; empty for a table without a key."""
    if not table.key:
        return ""
    key = ", ".join(map(quoted, table.key))
    sets = ", ".join(f"{quoted(column)} = excluded.{quoted(column)}" for column in columns if column not in table.key)
    return f" on conflict ({key}) do update set {sets}" if sets else f" on conflict ({key}) do nothing"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
