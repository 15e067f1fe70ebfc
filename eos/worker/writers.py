"""Writes the rows of an App into its databases, as participants in the transactions of a worker's session.

The offsets in the database decide, and the group's offsets follow. In each Kafka transaction the functions first make
rows. Then one database transaction writes the rows and the next offsets, provided that the database still has the
offsets and the owner that this writer knows. At last Kafka commits the group's offsets and the dead letters. Without
dead letters or other outputs, the session may leave these offsets to a later transaction. If a worker stops between the
two commits, its records are handed out again, and the database's offsets show that their rows are written.

All rows of a transaction are written together. If the database refuses them, the records are handed out again, and each
is written within a savepoint of its own. The error then belongs to that record. After a lost connection, it is unknown
whether the last COMMIT succeeded. So the writer reads the offsets again, which waits until that COMMIT has ended.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from eos import log
from eos.app.definition import App
from eos.errors import (
    Action,
    CallFailed,
    ConfigurationError,
    Fenced,
    NotAuthorised,
    Unavailable,
)
from eos.kafka.admin import preflight
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Committed, Record, SendAll, format_position
from eos.sql.columns import Column
from eos.sql.database import (
    OFFSETS_TABLE,
    Connection,
    Cursor,
    Database,
    DatabaseError,
    Fault,
    Partition,
    SinkTarget,
    Stored,
    Table,
)
from eos.sql.rows import Row, merge_by_key
from eos.worker.waits import DatabaseWaits, start_error

_MOST_ERROR_CHARACTERS = 300
_ROWS_AT_ONCE = 1_000  # rows of a table that are sent ahead


class FailedBefore(Exception):
    """Stands for the error of a record whose rows are missing because an error policy left the record out."""


class DatabaseWriter:
    """Writes into one database.

    `sources`: the topics of the functions whose rows go into the database. `timeout_s`: how long the database may be
    unavailable.
    """

    topics: Collection[str] = ()  # a writer writes to no topics

    def __init__(
        self, app_id: str, database: Database, sources: Collection[str], timeout_s: float, world: World
    ) -> None:
        self._app_id, self._database, self._sources = app_id, database, frozenset(sources)
        self._owner = uuid.uuid4().hex
        self._connection: Connection | None = None
        self._stored: dict[Partition, Stored] = {}
        self._rows: dict[Table, list[Row]] = {}  # the rows to write when the open transaction ends
        self._failed: dict[Partition, dict[int, str]] = {}  # by offset: the errors of records that failed
        self._offsets: Mapping[Partition, int] = {}  # the offsets that the open transaction commits to the group
        self._behind: Mapping[Partition, int] = {}  # the group's offsets at the start that the database has not reached
        self._is_begun = False  # a transaction is open in the database
        self._uses_savepoints = False  # each record is written within a savepoint of its own
        self._is_stale = False  # the offsets in the database may differ from the known ones
        self._waits = DatabaseWaits(database, timeout_s, world)

    # ---- the start ----------------------------------------------------------------------------------------------

    def prepare(self, targets: Iterable[SinkTarget], group: Mapping[Partition, int], create: bool) -> None:
        """Create the offsets table if it is missing, and check the tables; with `create`, create these too.

        `group`: the committed offsets of the group. Raises ConfigurationError, NotAuthorised, Unavailable.
        """
        try:
            connection = self._connect()
            _check_tables(connection, targets, create)
            stored = connection.offsets(self._app_id)
            self._behind = {p: offset for p, offset in group.items() if p in stored and stored[p] < offset}
        except DatabaseError as error:
            raise start_error(error) from error

    def has_caught_up(self) -> bool:
        """Return whether the database has reached the offsets that the group had at the start."""
        if self._behind:
            try:
                stored = self._guarded(lambda connection: connection.offsets(self._app_id))
            except DatabaseError as error:
                self._waits.note_away(error)
                return False
            self._behind = {p: offset for p, offset in self._behind.items() if stored.get(p, 0) < offset}
        return not self._behind

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = self._database.connect()
        return self._connection

    def keeps_offset(self, partition: Partition) -> bool:
        return partition in self._stored

    def take_over(self, starts: Mapping[Partition, int]) -> dict[Partition, int]:
        """Take over the partitions of this writer's sources, and return the earlier offsets at which some must start.

        `starts`: the offsets at which the group starts, negative without a committed offset. The offsets of a
        database that was restored from a backup are lower, so its missing rows are written again. Raises Unavailable.
        """
        mine = [partition for partition in starts if partition[0] in self._sources]
        if not mine:
            return {}
        try:
            claimed = self._guarded(lambda connection: connection.claim(self._app_id, self._owner, mine))
        except DatabaseError as error:
            self._waits.note_away(error)
            raise Unavailable(str(error)) from error
        self._stored |= claimed
        earlier: dict[Partition, int] = {}
        for partition, stored in claimed.items():
            self._failed[partition] = dict(stored.failed)
            at, start = stored.next_offset, starts[partition]
            if at is not None and start < 0:
                # Start at the first failed record, because its dead letter was perhaps not committed.
                earlier[partition] = min([at, *stored.failed])
            elif at is not None and at < start:
                earlier[partition] = at
            if at is not None and start >= 0 and at != start:
                # Deferred commits and crashes leave the database ahead of the group. A restore leaves it behind.
                (log.info if at > start else log.warning)(
                    "group offset differs from the database's, which is used",
                    partition=format_position(*partition),
                    group=start,
                    database=at,
                )
        return earlier

    def _guarded(self, call: Callable[[Connection], Any]) -> Any:
        """Return the call's result; drop the connection if it fails. Raises DatabaseError."""
        try:
            return call(self._connect())
        except DatabaseError:
            self._drop_connection()
            raise

    def _drop_connection(self) -> None:
        """Close the connection, which rolls back. Whether its last statement or commit took effect remains unknown."""
        connection, self._connection = self._connection, None
        self._is_stale = True
        if connection is not None:
            connection.close()

    # ---- before a transaction -----------------------------------------------------------------------------------

    def wait_s(self) -> float:
        """Return 0 if records can be handled now, otherwise the seconds until the next attempt.

        Raises Temporary once the database has been unavailable for too long, Fenced, NotAuthorised, ConfigurationError.
        """
        if not self._is_stale:
            return 0.0
        try:
            found = self._guarded(self._read_offsets)
        except DatabaseError as error:
            return self._waits.note_away(error)
        self._waits.note_answer()
        self._is_stale = False
        for partition in list(self._stored):
            self._stored[partition] = self._require_own(partition, found)
        return 0.0

    def _read_offsets(self, connection: Connection) -> dict[Partition, Stored]:
        found = connection.begin(self._app_id, self._owner)
        connection.roll_back()
        return found

    def _require_own(self, partition: Partition, found: Mapping[Partition, Stored]) -> Stored:
        if (stored := found.get(partition)) is None:
            raise Fenced(
                f"another worker of {self._app_id} has taken over {format_position(*partition)} in {self._database}",
                remedy="nothing was written twice; a supervisor may start this worker again",
            )
        return stored

    # ---- records ------------------------------------------------------------------------------------------------

    def is_written(self, record: Record) -> bool:
        """Return whether the database has the rows of this record already.

        Raise FailedBefore if the database is past this record but left out its rows, because the record failed."""
        partition = record.topic, record.partition
        at = self._stored[partition].next_offset
        if at is None or record.offset >= at:
            return False
        if (error := self._failed.get(partition, {}).get(record.offset)) is not None:
            name, _, message = error.partition(": ")
            raise type(name, (FailedBefore,), {})(message)
        return True

    def add(self, table: Table, row: Row) -> None:
        """Add a row to the open transaction. Raises CallFailed, and with savepoints the row's own error."""
        if self._uses_savepoints:
            self._within_savepoint(lambda connection: connection.write(table, [row]))
            return
        rows = self._rows.setdefault(table, [])
        rows.append(row)
        if len(rows) >= _ROWS_AT_ONCE and (self._connection is None or self._connection.sends_ahead):
            self._send_ahead(table)

    def _send_ahead(self, table: Table) -> None:
        """Send the rows of a table, so that the database writes them while functions run. Raises CallFailed."""
        connection = self._begin()
        try:
            self._send(connection, table, self._rows.pop(table))
        except (DatabaseError, TypeError, ValueError) as error:
            raise self._write_failure(error) from error

    def _send(self, connection: Connection, table: Table, rows: Sequence[Row]) -> None:
        connection.send(table, merge_by_key(rows, table.key) if table.key else rows)

    def run(self, call: Callable[[Cursor], object]) -> None:
        """Run a user's function with a cursor. Raises CallFailed, and with savepoints the function's own error."""
        if self._uses_savepoints:
            self._within_savepoint(lambda connection: call(connection.cursor()))
            return
        try:
            call(self._begin().cursor())
        except CallFailed:
            raise
        except Exception as error:
            raise self._abort_and_use_savepoints(error) from error

    def _within_savepoint(self, call: Callable[[Connection], object]) -> None:
        connection = self._begin()
        try:
            connection.savepoint()
            call(connection)
            connection.release_savepoint()
        except Exception as error:
            found = error if isinstance(error, DatabaseError) else connection.translate(error)
            if found is not None and found.fault is not Fault.RECORD:
                raise self._failure(found) from error
            try:
                connection.roll_back_to_savepoint()
            except DatabaseError as worse:
                raise self._failure(worse) from worse
            if isinstance(error, DatabaseError) and error.__cause__ is not None:
                raise error.__cause__ from error  # the driver's own exception, which error policies can name
            raise

    def _begin(self) -> Connection:
        """Begin a transaction in the database, unless one is open."""
        if self._is_stale:  # the open transaction has lost its connection, and must not continue on another one
            raise CallFailed("database", Action.ABORT, ConnectionError("the connection was lost"))
        try:
            connection = self._connect()
            if not self._is_begun:
                self._is_begun = True
                self._check_offsets(connection.begin(self._app_id, self._owner))
        except DatabaseError as error:
            raise self._failure(error) from error
        return connection

    def _check_offsets(self, found: Mapping[Partition, Stored]) -> None:
        for partition, known in self._stored.items():
            stored = self._require_own(partition, found)
            if stored.next_offset != known.next_offset:
                raise Fenced(
                    f"the offset of {format_position(*partition)} in {self._database} is {stored.next_offset}, but "
                    f"this worker wrote {known.next_offset}",
                    remedy="somebody changed the table eos_offsets: start the worker again to continue from there",
                )

    def note_failed(self, record: Record, error: BaseException) -> None:
        """Keep a record's error, in case its error policy leaves the record out."""
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:_MOST_ERROR_CHARACTERS].replace("\0", "")
        self._failed.setdefault((record.topic, record.partition), {})[record.offset] = text

    def note_written(self, record: Record) -> None:
        """Drop the error of a record that did not fail this time."""
        if (failed := self._failed.get((record.topic, record.partition))) is not None:
            failed.pop(record.offset, None)

    # ---- a participant of the session (eos/session/outcomes.py) ---------------------------------------------------

    def forget(self, revoked: Collection[Partition]) -> None:
        for partition in revoked:
            self._stored.pop(partition, None)
            self._failed.pop(partition, None)

    def restore(
        self, starts: Mapping[Partition, Committed], uncommitted: Collection[Partition]
    ) -> Collection[Partition]:
        return starts.keys()

    def changed_partitions(self) -> Collection[Partition]:
        return ()

    def before_flush(self, send: SendAll, offsets: Mapping[Partition, int]) -> None:
        """Write the rows and the next offsets, and commit in the database. Raises CallFailed, Fenced."""
        self._offsets = offsets
        moved = {p: offset for p, offset in offsets.items() if p in self._stored and self._is_ahead(p, offset)}
        if not moved and not self._is_begun:
            return
        connection = self._begin()
        changes = {p: Stored(offset, self._owner, self._failed_before(p, offset)) for p, offset in moved.items()}
        try:
            for table, rows in self._rows.items():
                self._send(connection, table, rows)
            connection.move(self._app_id, changes)
            connection.commit()
        except (DatabaseError, TypeError, ValueError) as error:
            if self._uses_savepoints and _is_of_a_row(error):
                raise ConfigurationError(
                    f"the database refuses to commit, although it accepted each row: {error}",
                    remedy="look for triggers and deferred constraints on the tables",
                ) from error
            raise self._write_failure(error) from error
        self._stored |= changes
        self._uses_savepoints = False
        self._clear()

    def _is_ahead(self, partition: Partition, offset: int) -> bool:
        at = self._stored[partition].next_offset
        return at is None or offset > at

    def _failed_before(self, partition: Partition, offset: int) -> dict[int, str]:
        return {at: error for at, error in self._failed.get(partition, {}).items() if at < offset}

    def _failure(self, error: DatabaseError) -> Exception:
        """Return the exception that ends the transaction or the worker because of this error."""
        self._drop_connection()
        if error.fault in (Fault.AWAY, Fault.AGAIN):
            return CallFailed("database", Action.ABORT, error)
        return start_error(error)

    def _write_failure(self, error: Exception) -> Exception:
        """Return the exception for an error of rows that were written together."""
        if isinstance(error, DatabaseError) and not _is_of_a_row(error):
            return self._failure(error)
        return self._abort_and_use_savepoints(error)

    def _abort_and_use_savepoints(self, error: Exception) -> CallFailed:
        """Return the exception that aborts the transaction. Its records are handed out again, then with savepoints."""
        self._uses_savepoints = True
        self._drop_connection()
        return CallFailed("database", Action.ABORT, error)

    def offset_metadata(self, partition: Partition) -> Mapping[str, object]:
        return {}

    def committed(self) -> None:
        """Drop the errors of records that the group has committed past."""
        for partition, next_offset in self._offsets.items():
            if (failed := self._failed.get(partition)) is not None:
                self._failed[partition] = {offset: error for offset, error in failed.items() if offset >= next_offset}

    def aborted(self) -> None:
        if self._is_begun:
            self._drop_connection()
        self._clear()

    def _clear(self) -> None:
        self._rows, self._is_begun = {}, False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_of_a_row(error: Exception) -> bool:
    return not isinstance(error, DatabaseError) or error.fault is Fault.RECORD


def databases_of(app: App) -> dict[Database, list[SinkTarget]]:
    """Return the databases that functions of the App write to, each with what they write there."""
    found: dict[Database, list[SinkTarget]] = {}
    for route in app.functions:
        if route.sink is not None:
            found.setdefault(route.sink.database, []).append(route.sink)
    return found


def check_database(database: Database, targets: Iterable[SinkTarget]) -> None:
    """Create the offsets table if it is missing, and check the tables.

    Raises ConfigurationError, NotAuthorised, Unavailable.
    """
    try:
        connection = database.connect()
        try:
            _check_tables(connection, targets)
        finally:
            connection.close()
    except DatabaseError as error:
        raise start_error(error) from error


def _check_tables(connection: Connection, targets: Iterable[SinkTarget], create: bool = False) -> None:
    """Check the tables. With `create`, create what is missing. Raises DatabaseError, ConfigurationError,
    NotAuthorised."""
    connection.create_offsets()
    for target in targets:
        if target.table is not None:
            _check_table(connection, target.table, target.columns, create)


def _check_table(connection: Connection, table: Table, columns: Sequence[Column], create: bool) -> None:
    for _ in range(len(columns) + 2):  # the table, each column, and the key
        try:
            return connection.check(table, columns)
        except DatabaseError as error:
            if error.fault is Fault.DENIED:
                right = f"grant select, insert, update on {table.name} and {OFFSETS_TABLE} to the worker's user"
                raise NotAuthorised(str(error), remedy=right) from error
            if error.fault is not Fault.DEFINITION or (statement := connection.find_remedy(table, columns)) is None:
                raise
            if not create:
                remedy = f"run this, or let `eos run --create-tables` run it: {statement}"
                raise ConfigurationError(str(error), remedy=remedy) from error
        connection.create(statement)
        log.info("table changed", statement=statement)
    return connection.check(table, columns)


def make_writers(app: App, settings: Settings, world: World) -> dict[Database, DatabaseWriter]:
    sources: dict[Database, list[str]] = {}
    for topic, route in app.routes.items():
        if route.sink is not None:
            sources.setdefault(route.sink.database, []).append(topic)
    timeout_s = settings["eos.database.timeout.ms"] / 1000
    return {
        database: DatabaseWriter(app.id, database, topics, timeout_s, world) for database, topics in sources.items()
    }


def prepare_writers(app: App, writers: Mapping[Database, DatabaseWriter], settings: Settings, world: World) -> None:
    """Check the tables of each database before the first record.

    Raises ConfigurationError, NotAuthorised, Unavailable.
    """
    if not writers:
        return

    def query() -> Mapping[Partition, int]:
        with world.admin(settings) as admin:
            return {partition: offset for partition, (offset, _) in admin.committed_offsets(app.id).items()}

    group = preflight.retry_while_unavailable(settings, query, world)
    for database, writer in writers.items():
        writer.prepare(databases_of(app)[database], group, settings["eos.create.tables"])


def move_offsets(app: App, offsets: Mapping[Partition, int]) -> int:
    """Set the next offsets of these input partitions in their databases, and return how many were set.

    No worker may run meanwhile.

    Raises ConfigurationError, NotAuthorised, Unavailable.
    """
    moved: dict[Database, dict[Partition, Stored]] = {}
    owner = uuid.uuid4().hex
    for partition, offset in offsets.items():
        if (target := app.routes[partition[0]].sink) is not None:
            moved.setdefault(target.database, {})[partition] = Stored(offset, owner, {})
    for database, changes in moved.items():
        try:
            connection = database.connect()
            connection.create_offsets()
            connection.claim(app.id, owner, changes)
            connection.begin(app.id, owner)
            connection.move(app.id, changes)
            connection.commit()
            connection.close()
        except DatabaseError as error:
            raise start_error(error) from error
    return sum(map(len, moved.values()))
