"""Reads the rows of tables for functions of an App, as participants in the transactions of a worker's session.

Each Kafka transaction contains the outputs of some rows, the position after them (eos/worker/positions.py), and the
unchanged offset of the position's partition. So the group refuses the transaction of a worker that has lost the
partition: only one worker reads a source, and the others stand by. A new owner reads the position once no transaction
with a position is open.

Rows are read again after every abort. The database is never written to, except to delete rows that are in Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from eos import log
from eos.app.definition import App
from eos.app.routes import Route
from eos.app.routes.source import to_record
from eos.errors import Action, CallFailed, ConfigurationError, InputGone, Unavailable
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Committed, Record, SendAll
from eos.sql.database import DatabaseError
from eos.sql.outbox import START, At, TableReader, TableRow
from eos.worker.positions import Position, read_position, restart_remedy
from eos.worker.waits import DatabaseWaits, start_error

Partition = tuple[str, int]
T = TypeVar("T")
_ROWS: Final = 2_000  # rows of one query
_POLL_S, _RETRY_S, _LONG_S, _LOG_INTERVAL_S = 0.1, 0.5, 5.0, 10.0


class RowSource:
    """Reads one table."""

    topics: Collection[str] = ()  # only changelogs belong here

    def __init__(self, app: App, topic: str, route: Route, settings: Settings, world: World) -> None:
        assert route.source is not None
        self.route, self.position_topic = route, topic
        self._table, self._group, self._settings, self._world = route.source, app.id, settings, world
        self._waits = DatabaseWaits(self._table.database, settings["eos.database.timeout.ms"] / 1000, world)
        self._reader: TableReader | None = None
        self._identity = ""
        self._is_owner = False
        self._position = START  # the last row whose transaction is committed
        self._handled = START  # the last row whose outputs are in the open transaction
        self._handled_before = START  # `_handled` before the last call of `take`
        self._sent: At | None = None  # the position that the open transaction contains
        self._database = ""  # the identity of the database to which the position belongs
        self._deleted = START
        self._is_written = False  # the topic holds a position
        self._rows: list[TableRow] = []  # read, and not handled yet
        self._read_to = START
        self._next_read_at = 0.0
        self._all_ended_before = 0  # rows of all transactions below this one are read
        self._target: At | None = None  # the last row that was visible at the start
        self._next_look_at = 0.0
        self._held, self._waiting = log.Reminder(world.now, _LOG_INTERVAL_S), log.Reminder(world.now, _LONG_S)

    # ---- the database -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Check the table, and note the last row that is visible now.

        Raises ConfigurationError, NotAuthorised, Unavailable.
        """
        try:
            reader = self._connect()
            reader.check(columns=self._table.columns, delete=self._table.delete)
            self._target = reader.last()
        except DatabaseError as error:
            raise start_error(error) from error

    def _connect(self) -> TableReader:
        if self._reader is None:
            self._reader = self._table.database.table_reader(self._table.table)
            self._identity = self._reader.identity()
        return self._reader

    def _guarded(self, call: Callable[[TableReader], T]) -> T | None:
        """Return the call's result, or None while the database is away.

        Raises Temporary once it has been away for too long, NotAuthorised, ConfigurationError.
        """
        try:
            found = call(self._connect())
        except DatabaseError as error:
            self.close()
            self._next_read_at = self._world.now() + self._waits.note_away(error)
            return None
        self._waits.note_answer()
        return found

    def _read(self) -> None:
        """Read the next rows, unless the last query found no more a moment ago."""
        now = self._world.now()
        if now < self._next_read_at:
            return
        found = self._guarded(lambda reader: reader.read(self._read_to, _ROWS))
        if found is None:
            return
        self._require_known_database(found.xmax)  # before anything is deleted
        if self._table.delete and self._deleted < self._position:
            self._guarded(lambda reader: reader.delete(self._position))
            self._deleted = self._position
        self._rows = found.rows
        if found.rows:
            self._read_to = found.rows[-1].at
        if len(found.rows) < _ROWS:
            self._next_read_at, self._all_ended_before = now + _POLL_S, found.xmin
            self._warn_of_held_rows()

    def _require_known_database(self, xmax: int) -> None:
        """Raise InputGone if this is not the database of the position, or if its state is older than the position."""
        known, (system, _, name) = self._database, self._identity.partition("/")
        known_system, _, known_name = known.partition("/")
        is_other = bool(known) and (name != known_name or (system and known_system and system != known_system))
        if not is_other and xmax > self._position.xid:
            return
        what = (
            f"its position belongs to the database {known}, and this one is {self._identity}"
            if is_other
            else f"the last row in Kafka is of transaction {self._position.xid}, and the next one here is {xmax}: the "
            "database was restored from a backup, or a replica without the last transactions took over"
        )
        raise InputGone(
            f"the position in table {self._table.table} is not valid in this database: {what}. Rows would be lost",
            remedy=restart_remedy(self.position_topic),
        )

    def _warn_of_held_rows(self) -> None:
        if not self._held.tick() or (held := self._guarded(lambda reader: reader.held())) is None:
            return
        if held.rows and (held.open_s is None or held.open_s > _LONG_S):
            log.warning(
                "rows held back by an open transaction",
                table=self._table.table,
                rows=held.rows,
                pid=held.pid,
                open_s=None if held.open_s is None else round(held.open_s),
            )

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # ---- rows of a transaction ----------------------------------------------------------------------------------

    def has_rows(self) -> bool:
        """Return whether rows wait. Raises Temporary, InputGone, NotAuthorised, ConfigurationError."""
        if self._is_owner and not self._rows:
            self._read()
        return self._is_owner and bool(self._rows)

    def take(self, most: int) -> list[Record]:
        """Return at most `most` next rows as records. They belong to the open transaction from now on."""
        if most <= 0 or not self.has_rows():
            return []
        taken, self._rows = self._rows[:most], self._rows[most:]
        self._handled_before, self._handled = self._handled, taken[-1].at
        return [to_record(self.position_topic, row) for row in taken]

    def give_back(self, records: Sequence[Record[Any]], handled: int) -> None:
        """Hand out the records taken last again, except for the first `handled` ones."""
        rows: list[TableRow] = [record.value for record in records]
        self._rows = rows[handled:] + self._rows
        self._handled = rows[handled - 1].at if handled else self._handled_before

    def has_caught_up(self) -> bool:
        """Return whether all rows that were visible at the start are in Kafka."""
        if self._target is None:
            return True
        if not self._is_owner:
            self._look_at_position()
        elif not self._rows and self._all_ended_before > self._target.xid:
            self._target = None  # everything up to there was read, even if the last rows were deleted meanwhile
        if self._target is not None and self._position >= self._target:
            self._target = None
        return self._target is None

    def _look_at_position(self) -> None:
        if self._world.now() < self._next_look_at:
            return
        self._next_look_at = self._world.now() + _RETRY_S
        try:
            found = read_position(self._settings, self.position_topic, self._group, self._world)
        except Unavailable as error:
            log.debug("position unknown", topic=self.position_topic, error=str(error))
            return
        self._position = self._position if found is None else found.at

    # ---- a participant of the session (eos/session/outcomes.py) ---------------------------------------------------

    @property
    def _partition(self) -> Partition:
        return self.position_topic, 0

    def forget(self, revoked: Collection[Partition]) -> None:
        if self._partition in revoked:
            self._is_owner = False
            self._go_back()

    def restore(
        self, starts: Mapping[Partition, Committed], uncommitted: Collection[Partition]
    ) -> Collection[Partition]:
        if self._partition not in starts or self._is_owner:
            return starts.keys()
        now = self._world.now()
        if now >= self._next_look_at:
            self._next_look_at = now + _RETRY_S
            try:
                found = read_position(self._settings, self.position_topic, self._group, self._world)
            except Unavailable as error:
                if self._waiting.tick():
                    log.info("waiting for the position", topic=self.position_topic, error=str(error))
            else:
                self._own(found)
                return starts.keys()
        return starts.keys() - {self._partition}

    def _own(self, found: Position | None) -> None:
        self._is_owner, self._is_written = True, found is not None
        position = found or Position()
        self._position, self._database = position.at, position.database
        self._deleted = START
        self._go_back()
        log.info("table assigned", table=self._table.table, xid=position.at.xid, id=position.at.id)

    def _go_back(self) -> None:
        self._rows, self._handled, self._read_to, self._sent = [], self._position, self._position, None
        self._all_ended_before = 0
        self._next_read_at = 0.0 if self._reader is not None else self._next_read_at

    def changed_partitions(self) -> Collection[Partition]:
        is_changed = self._is_owner and (self._handled != self._position or not self._is_written)
        return [self._partition] if is_changed else []

    def before_flush(self, send: SendAll, offsets: Mapping[Partition, int]) -> None:
        """Send the position. Raises CallFailed if another worker may own the source."""
        if not self.changed_partitions():
            return
        if self._partition in offsets:
            self._database = self._database or self._identity
            self._sent = self._handled
            send([Position(self._sent, self._database).send(self.position_topic)])
        elif self._handled != self._position:
            raise CallFailed("database", Action.ABORT, RuntimeError(f"{self.position_topic} was revoked"))

    def offset_metadata(self, partition: Partition) -> Mapping[str, object]:
        return {}

    def committed(self) -> None:
        if self._sent is not None:
            self._position, self._is_written, self._sent = self._sent, True, None

    def aborted(self) -> None:
        self._go_back()


def make_sources(app: App, settings: Settings, world: World) -> dict[str, RowSource]:
    """Return the readers of the App's tables by the topics that hold their positions."""
    if app.sources and settings["eos.lineage"]:
        raise ConfigurationError("eos.lineage=true does not cover the rows of a table: unset it for this App")
    return {topic: RowSource(app, topic, route, settings, world) for topic, route in app.sources.items()}


def check_source(route: Route) -> None:
    """Check the table of a source. Raises ConfigurationError, NotAuthorised, Unavailable."""
    assert route.source is not None
    try:
        reader = route.source.database.table_reader(route.source.table)
        try:
            reader.check(columns=route.source.columns, delete=route.source.delete)
        finally:
            reader.close()
    except DatabaseError as error:
        raise start_error(error) from error
