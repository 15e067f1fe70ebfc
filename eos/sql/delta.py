"""Writes rows into a Delta Lake table, one commit for each Kafka transaction.

The commit that adds the rows also sets two transaction identifiers for each partition (the `txn` action of Delta's
protocol): one has the next offset as its version, the other a number of the owner. Delta refuses a commit if another
one has set the same identifier since the table was read. So a worker that lost a partition cannot commit.

Rows stay in memory until the commit. Each is converted to the table's types when it is added, which finds its errors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from eos.errors import ConfigurationError
from eos.sql.columns import Column
from eos.sql.database import Cursor, DatabaseError, Fault, Partition, Stored, Table, WrongRow, decode_failed
from eos.sql.faults import first_line
from eos.sql.rows import Row, merge_by_key

if TYPE_CHECKING:
    import pyarrow
    from deltalake import CommitProperties, DeltaTable

_FAILED: Final = "eos.failed"  # the key of the errors in a commit's information
_MOST_COMMITS: Final = 1_000  # in which the errors of a partition are looked for
_MOST_CLAIMS: Final = 10
_EXPIRY: Final = "delta.setTransactionRetentionDuration"
_DENIALS: Final = ("403", "401", "AccessDenied", "Unauthorized", "Forbidden", "permission denied", "Permission denied")


@dataclass(frozen=True, eq=False)
class Delta:
    """Describes a Delta Lake table by its URI. Functions that share one must have the same key.

    `storage_options`: credentials and settings of the object store, as the package deltalake documents them. They
    appear in no message.
    """

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    claimed: dict[tuple[str, str], set[Partition]] = field(default_factory=dict, init=False, repr=False)
    """The partitions that this process has taken over, by App and owner. Delta cannot list a table's identifiers."""

    @property
    def table(self) -> str:
        """The table's name, which a function does not need to repeat."""
        return self.uri.rstrip("/").rpartition("/")[2]

    def connect(self) -> Connection:
        try:
            import deltalake  # noqa: F401 - with pyarrow, at the first use
            import pyarrow  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigurationError("Delta needs deltalake", remedy="pip install 'eos-kafka[delta]'") from error
        connection = Connection(self)
        connection.load()
        return connection


class Connection:
    sends_ahead = can_compare = False

    def __init__(self, database: Delta) -> None:
        self._database = database
        self._table: DeltaTable | None = None  # as it was when the transaction began
        self._owner = self._app = ""
        self._rows: list[Row] = []
        self._key: tuple[str, ...] | None = None
        self._moved: dict[Partition, Stored] = {}
        self._kept = 0  # how many rows there were at the savepoint

    def load(self) -> DeltaTable:
        """Read the newest version of the table."""
        from deltalake import DeltaTable

        options = dict(self._database.storage_options)
        table: DeltaTable = self._run(lambda: DeltaTable(self._database.uri, storage_options=options))
        return table

    def create_offsets(self) -> None:
        """Do nothing: the offsets are in the table's log."""

    def check(self, table: Table, columns: Sequence[Column] = ()) -> None:
        loaded = self.load()
        missing = [column for column in table.key if column not in _schema(loaded).names]
        if missing:
            self._refuse(f"the table has no column {missing[0]}")
        if self._key not in (None, table.key):
            self._refuse("functions with different keys write to it: give each of them a Delta of its own")
        self._key = table.key
        if _EXPIRY in loaded.metadata().configuration:
            self._refuse(f"the table has {_EXPIRY}, after which Delta would forget the offsets: unset it")

    def _refuse(self, why: str) -> NoReturn:
        raise DatabaseError(Fault.DEFINITION, f"{self._database}: {why}")

    def find_remedy(self, table: Table, columns: Sequence[Column]) -> str | None:
        return None

    def create(self, statement: str) -> None: ...

    def offsets(self, app: str) -> dict[Partition, int]:
        """Return the offsets of partitions that this process has taken over."""
        table = self.load()
        known = {one for (id, _), partitions in self._database.claimed.items() if id == app for one in partitions}
        found = {partition: table.transaction_version(_offset_id(app, partition)) for partition in known}
        return {partition: offset for partition, offset in found.items() if offset is not None}

    def claim(self, app: str, owner: str, partitions: Collection[Partition]) -> dict[Partition, Stored]:
        """Set the owner of the partitions in a commit without rows, after the last one of their previous owner."""
        number = _number(owner)
        for attempt in range(1, _MOST_CLAIMS + 1):
            table = self.load()
            try:
                self._append(table, [], {_owner_id(app, one): number for one in partitions}, {})
                break
            except DatabaseError as error:
                if error.fault is not Fault.AGAIN or attempt == _MOST_CLAIMS:
                    raise
        self._database.claimed.setdefault((app, owner), set()).update(partitions)
        table = self.load()
        failed = self._read_failed(table, app, partitions)
        return {one: Stored(table.transaction_version(_offset_id(app, one)), owner, failed[one]) for one in partitions}

    def _read_failed(
        self, table: DeltaTable, app: str, partitions: Collection[Partition]
    ) -> dict[Partition, dict[int, str]]:
        """Return the errors in the newest commit that moved each partition's offset."""
        found: dict[Partition, dict[int, str]] = {}
        for commit in self._run(lambda: table.history(_MOST_COMMITS)):
            errors = json.loads(commit.get(_FAILED, "{}"))
            for one in partitions:
                if one not in found and (text := errors.get(_offset_id(app, one))) is not None:
                    found[one] = decode_failed(text)
        return {one: found.get(one, {}) for one in partitions}

    def begin(self, app: str, owner: str) -> dict[Partition, Stored]:
        self.roll_back()
        self._table, self._app, self._owner = self.load(), app, owner
        return {
            one: Stored(self._table.transaction_version(_offset_id(app, one)), owner, {})
            for one in self._database.claimed.get((app, owner), ())
            if self._table.transaction_version(_owner_id(app, one)) == _number(owner)
        }

    def write(self, table: Table, rows: Sequence[Row]) -> None:
        schema = _schema(self._begun())
        for row in rows:
            if unknown := [column for column in row if column not in schema.names]:
                self._refuse(f"the table has no column {unknown[0]}")
            for one in schema:
                if not one.nullable and row.get(one.name) is None:
                    raise DatabaseError(Fault.RECORD, f"{self._database}: {one.name} must not be null")
        self._to_arrow(rows, schema)
        self._rows += rows
        self._key = table.key

    send = write

    def begin_reading(self, app: str) -> dict[Partition, int]:
        self._refuse("rows of Delta Lake cannot be compared")

    def find_wrong_rows(self, table: Table, rows: Sequence[Row], exactly: bool) -> list[WrongRow]:
        self._refuse("rows of Delta Lake cannot be compared")

    def _begun(self) -> DeltaTable:
        assert self._table is not None, "a transaction begins with begin()"
        return self._table

    def _to_arrow(self, rows: Sequence[Row], schema: pyarrow.Schema) -> pyarrow.Table:
        import pyarrow

        try:
            return pyarrow.Table.from_pylist([dict(row) for row in rows], schema=schema)
        except (pyarrow.ArrowException, TypeError, ValueError, ArithmeticError) as error:
            raise DatabaseError(Fault.RECORD, f"{self._database}: {first_line(error)}") from error

    def cursor(self) -> Cursor:
        self._refuse("Delta Lake has no cursor: return rows")

    def savepoint(self) -> None:
        self._kept = len(self._rows)

    def release_savepoint(self) -> None:
        """Do nothing: rows were converted when they were added."""

    def roll_back_to_savepoint(self) -> None:
        del self._rows[self._kept :]

    def move(self, app: str, moved: Mapping[Partition, Stored]) -> None:
        self._moved |= moved

    def commit(self) -> None:
        table, owner = self._begun(), _number(self._owner)
        versions = {_owner_id(self._app, one): owner for one in self._moved}
        failed: dict[str, str] = {}
        for one, stored in self._moved.items():
            if stored.next_offset is not None:
                versions[_offset_id(self._app, one)] = stored.next_offset
                failed[_offset_id(self._app, one)] = json.dumps(stored.failed)
        if self._key and self._rows:
            self._merge(table, merge_by_key(self._rows, self._key), versions, failed)
        else:
            self._append(table, self._rows, versions, failed)
        self.roll_back()

    def _append(
        self, table: DeltaTable, rows: Sequence[Row], versions: Mapping[str, int], failed: Mapping[str, str]
    ) -> None:
        from deltalake import write_deltalake

        data = self._to_arrow(rows, _schema(table))
        self._run(lambda: write_deltalake(table, data, mode="append", commit_properties=_properties(versions, failed)))

    def _merge(
        self, table: DeltaTable, rows: Sequence[Row], versions: Mapping[str, int], failed: Mapping[str, str]
    ) -> None:
        """Update the rows of the same keys, and insert the others. A row changes only the columns that it has."""
        import pyarrow

        schema, key = _schema(table), self._key or ()
        columns = list(dict.fromkeys(column for row in rows for column in row))
        partial = [column for column in columns if any(column not in row for row in rows)]
        flags = [pyarrow.field(_flag(column), pyarrow.bool_()) for column in partial]
        source = pyarrow.schema([*(schema.field(column).with_nullable(True) for column in columns), *flags])
        data = self._to_arrow([{**row, **{_flag(one): one in row for one in partial}} for row in rows], source)
        inserted = {_quoted(column): f"s.{_quoted(column)}" for column in columns}
        updated = {_quoted(one): _value(one, one in partial) for one in columns if one not in key}
        merging = table.merge(
            data,
            " and ".join(f"t.{_quoted(column)} = s.{_quoted(column)}" for column in key),
            source_alias="s",
            target_alias="t",
            commit_properties=_properties(versions, failed),
        )
        if updated:
            merging = merging.when_matched_update(updated)
        self._run(merging.when_not_matched_insert(inserted).execute)

    def _run(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise self.translate(error) or error from error

    def roll_back(self) -> None:
        self._table, self._rows, self._moved, self._kept = None, [], {}, 0

    def close(self) -> None:
        self.roll_back()

    def translate(self, error: BaseException) -> DatabaseError | None:
        from deltalake import exceptions

        if not isinstance(error, exceptions.DeltaError | OSError):
            return None
        text = str(error)
        if isinstance(error, exceptions.CommitFailedError):
            fault = Fault.AGAIN
        elif isinstance(error, exceptions.SchemaMismatchError | exceptions.TableNotFoundError):
            fault = Fault.DEFINITION
        elif "Invalid data found" in text or "Invariant" in text:
            fault = Fault.RECORD
        else:
            fault = Fault.DENIED if any(denial in text for denial in _DENIALS) else Fault.AWAY
        return DatabaseError(fault, f"{self._database}: {first_line(error)}")


def _properties(versions: Mapping[str, int], failed: Mapping[str, str]) -> CommitProperties:
    from deltalake import CommitProperties, Transaction

    return CommitProperties(
        app_transactions=[Transaction(app_id=id, version=version) for id, version in versions.items()],
        custom_metadata={_FAILED: json.dumps(failed)} if failed else None,
    )


def _schema(table: DeltaTable) -> pyarrow.Schema:
    import pyarrow

    return pyarrow.schema(table.schema().to_arrow())


def _offset_id(app: str, partition: Partition) -> str:
    return f"eos/{app}/{partition[0]}/{partition[1]}"


def _owner_id(app: str, partition: Partition) -> str:
    return f"{_offset_id(app, partition)}/owner"


def _number(owner: str) -> int:
    """Return an owner's token as a version, which is a number of 64 bits with a sign."""
    return int.from_bytes(hashlib.sha256(owner.encode()).digest()[:7])


def _flag(column: str) -> str:
    return f"has {column}"


def _value(column: str, is_partial: bool) -> str:
    value = f"s.{_quoted(column)}"
    return f"case when s.{_quoted(_flag(column))} then {value} else t.{_quoted(column)} end" if is_partial else value


def _quoted(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'
