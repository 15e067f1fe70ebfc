"""Holds the SQL that PostgreSQL and SQLite share: the offsets table, savepoints and upserts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

from eos.sql.database import OFFSETS_TABLE, Cursor, Partition, Stored, Table, decode_failed, encode_failed

CREATE_OFFSETS: Final = f"""create table if not exists {OFFSETS_TABLE} (app text, topic text, partition integer,
  next_offset bigint, owner text not null, failed text not null default '', primary key (app, topic, partition))"""
# Each ? is replaced by the driver's own mark of a parameter.
_CLAIM: Final = f"""insert into {OFFSETS_TABLE} (app, topic, partition, owner) values (?, ?, ?, ?)
  on conflict (app, topic, partition) do update set owner = excluded.owner returning next_offset, failed"""
_OWNED: Final = f"""select topic, partition, next_offset, owner, failed from {OFFSETS_TABLE}
  where app = ? and owner = ? order by topic, partition"""
_OFFSETS: Final = f"select topic, partition, next_offset from {OFFSETS_TABLE} where app = ? and next_offset is not null"
_MOVE: Final = f"update {OFFSETS_TABLE} set next_offset = ?, failed = ? where app = ? and topic = ? and partition = ?"


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

    def commit(self) -> None:
        raise NotImplementedError

    def roll_back(self) -> None:
        raise NotImplementedError

    def _run(self, sql: str, *parameters: Any) -> Any:
        return self._execute(sql.replace("?", self._mark), parameters)

    def offsets(self, app: str) -> dict[Partition, int]:
        found = self._run(_OFFSETS, app).fetchall()
        self.roll_back()
        return {(topic, partition): next_offset for topic, partition, next_offset in found}

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


def on_conflict(table: Table, columns: Sequence[str]) -> str:
    """Return the end of an insert that updates the row of the same key instead; empty for a table without a key."""
    if not table.key:
        return ""
    key = ", ".join(map(quoted, table.key))
    sets = ", ".join(f"{quoted(column)} = excluded.{quoted(column)}" for column in columns if column not in table.key)
    return f" on conflict ({key}) do update set {sets}" if sets else f" on conflict ({key}) do nothing"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
