"""Verifies the tables of an App: does each committed record have its row there, once and with its values?

The functions run again over the records that the database's offsets cover, and the rows that they return are compared
with the tables in one snapshot of the database, so workers may go on writing. The module must never write into a table
of the user. What it cannot decide becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eos.app.definition import App
from eos.app.routes import Route
from eos.encoding.dead_letters import dead_letter_topic
from eos.kafka.admin import facts, tail
from eos.kafka.client.settings import Settings
from eos.records import Record, format_position
from eos.sql.database import Connection, Cursor, Database, DatabaseError, Partition, Table, WrongRow
from eos.sql.rows import Row
from eos.worker.dead_letters import read_dead_letters
from eos.worker.waits import start_error

_CONNECT_S = 10.0
_CANNOT_COMPARE = "only rows in PostgreSQL, SQLite, DuckDB, MySQL and MariaDB can be compared"
Key = tuple[Any, ...]
Position = tuple[str, int, int]


@dataclass(frozen=True)
class Verified:
    """Holds the result for one table. `records`: how many committed records were read. `rows`: how many rows they are
    expected to have left."""

    database: Database
    table: Table
    records: int
    rows: int
    wrong: tuple[WrongRow, ...]
    notes: tuple[str, ...]


@dataclass
class _Expected:
    """Collects the rows that a table is expected to have."""

    table: Table
    records: int = 0
    failed: int = 0
    is_complete: bool = True
    """Whether no record was removed by retention."""
    notes: list[str] = field(default_factory=list)
    _inserted: list[Row] = field(default_factory=list)
    _by_key: dict[Key, tuple[Row, Partition | None]] = field(default_factory=dict)

    def add(self, row: Row, record: Record) -> None:
        if not self.table.key:
            self._inserted.append(row)
            return
        key, place = tuple(row[column] for column in self.table.key), (record.topic, record.partition)
        before, earlier = self._by_key.get(key, ({}, place))
        # The order of records in different partitions is unknown, and with it the last values.
        self._by_key[key] = ({**before, **row}, place) if earlier == place else (row, None)

    def by_columns(self) -> Iterable[list[Row]]:
        """Return the expected rows, those with the same columns together."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self._inserted:
            found.setdefault(tuple(sorted(row)), []).append(row)
        for row, place in self._by_key.values():
            known = row if place is not None else {column: row[column] for column in self.table.key}
            found.setdefault(tuple(sorted(known)), []).append(known)
        return found.values()

    @property
    def has_optional_columns(self) -> bool:
        return len({frozenset(row) for row in self._inserted}) > 1

    def all_notes(self) -> Iterator[str]:
        yield from self.notes
        if self.failed:
            yield f"{self.failed:,} records fail in their function, so they are expected to have no row"
        if undecided := sum(place is None for _, place in self._by_key.values()):
            yield (
                f"{undecided:,} keys have records in several partitions, whose order is unknown: only the existence of "
                "their rows is examined"
            )


class _RowKeeper:
    """Takes the row of one record (eos/app/routes/sink.py `Writer`)."""

    row: Row | None = None

    def is_written(self, record: Record) -> bool:
        return False

    def add(self, table: Table, row: Row) -> None:
        self.row = row

    def run(self, call: Callable[[Cursor], object]) -> None:
        raise NotImplementedError("a function with its own SQL is not run again")

    def note_failed(self, record: Record, error: BaseException) -> None: ...

    def note_written(self, record: Record) -> None: ...


def verify_rows(
    app: App, settings: Settings, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> list[Verified]:
    """Verify the tables as they are now. `progress(topic, done, total)` is called while a topic is read.

    Raises ConfigurationError, NotAuthorised, Unavailable.
    """
    routes: dict[Database, dict[Table, list[Route]]] = {}
    for route in app.functions:
        if route.sink is not None and route.sink.table is not None:
            routes.setdefault(route.sink.database, {}).setdefault(route.sink.table, []).append(route)
    found: list[Verified] = []
    for database, tables in routes.items():
        try:
            connection = database.connect()
            try:
                if not connection.can_compare:
                    found += [Verified(database, table, 0, 0, (), (_CANNOT_COMPARE,)) for table in tables]
                    continue
                offsets = connection.begin_reading(app.id)
                for table, functions in tables.items():
                    expected = _expect(app, settings, table, functions, offsets, progress)
                    found.append(_compare(database, connection, expected))
            finally:
                connection.close()
        except DatabaseError as error:
            raise start_error(error) from error
    return found


def _compare(database: Database, connection: Connection, expected: _Expected) -> Verified:
    exactly = expected.is_complete and not expected.has_optional_columns
    wrong: list[WrongRow] = []
    rows = 0
    for some in expected.by_columns():
        rows += len(some)
        wrong += connection.find_wrong_rows(expected.table, some, exactly)
    return Verified(database, expected.table, expected.records, rows, tuple(wrong), tuple(expected.all_notes()))


def _expect(
    app: App,
    settings: Settings,
    table: Table,
    routes: Iterable[Route],
    offsets: Mapping[Partition, int],
    progress: Callable[[str, int, int], None],
) -> _Expected:
    """Run the functions of a table over the records that are written according to the database's offsets."""
    expected = _Expected(table)
    for route in routes:
        keeper = _RowKeeper()
        outputs = route.bind(writer=keeper).outputs
        for source in route.sources:
            left_out = _dead_lettered(app, settings, route, source)
            ends = {partition: offset for (topic, partition), offset in offsets.items() if topic == source}
            for record in _read(settings, source, ends, expected, progress):
                expected.records += 1
                if (record.topic, record.partition, record.offset) in left_out:
                    continue
                keeper.row = None
                try:
                    outputs(record)
                except Exception:  # noqa: BLE001 - the worker's error policy has left the record out
                    expected.failed += 1
                if keeper.row is not None:
                    expected.add(keeper.row, record)
    return expected


def _dead_lettered(app: App, settings: Settings, route: Route, source: str) -> set[Position]:
    """Return the positions of a topic's records that are dead letters of this App."""
    if route.on_error.verdict != "dlq":
        return set()
    topic = dead_letter_topic(source)
    if not facts.describe_topic(facts.connect(settings, _CONNECT_S), topic).exists:
        return set()
    letters = read_dead_letters(settings, topic, None)
    return {(one.record.topic, one.record.partition, one.record.offset) for one in letters if one.is_of(app.id)}


def _read(
    settings: Settings,
    topic: str,
    ends: Mapping[int, int],
    expected: _Expected,
    progress: Callable[[str, int, int], None],
) -> Iterator[Record]:
    """Yield the committed records of a topic before these offsets. Note what is there no more."""
    if not ends:
        return
    there = tail.topic_offsets(settings, topic, _CONNECT_S)
    starts: dict[int, int] = {}
    for partition, end in ends.items():
        where = format_position(topic, partition)
        if partition not in there or there[partition].end < end:
            expected.notes.append(
                f"the database has offset {end} of {where}, which Kafka does not have: was the topic deleted and "
                "created again?"
            )
            continue
        starts[partition] = low = min(there[partition].low, end)
        if low:
            expected.is_complete = False
            expected.notes.append(f"records of {where} before offset {low} were removed: their rows are not examined")
    total, done = sum(ends[partition] - low for partition, low in starts.items()), 0
    if not total:
        return
    with tail.TopicReader(settings, topic, starts, uncommitted=False) as reader:
        for batch in tail.read_batches_until(reader, {partition: ends[partition] for partition in starts}):
            yield from (seen.record for seen in batch)
            done += len(batch)
            progress(topic, done, total)
