"""Runs functions that write rows into a database, one record at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol, cast

from eos.app.annotations import result_annotation
from eos.app.routes.feeds import one_by_one
from eos.encoding.serde import Decode, function_name
from eos.errors import CallFailed, ConfigurationError, EosError, raise_if_interrupted
from eos.records import FeedResult, Record, Send, Sink
from eos.sql.columns import columns_of
from eos.sql.database import Cursor, Database, SinkTarget, Table
from eos.sql.rows import Row, check_key, to_row


class Writer(Protocol):
    """Takes the rows of the open transaction (eos/worker/writers.py)."""

    def is_written(self, record: Record) -> bool: ...

    def add(self, table: Table, row: Row) -> None: ...

    def run(self, call: Callable[[Cursor], object]) -> None: ...

    def note_failed(self, record: Record, error: BaseException) -> None: ...

    def note_written(self, record: Record) -> None: ...


class RowSink:
    """Runs a function that returns a row, or runs its own SQL with a cursor."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        decode: Decode | None,
        target: SinkTarget,
        writer: Writer | None,
    ) -> None:
        self._name, self._function, self._decode, self._target = name, function, decode, target
        self._writer = writer
        self.each = one_by_one(self.outputs)

    def outputs(self, record: Record) -> Sequence[Send]:
        self._write(record)
        return ()

    def feed(self, records: list[Record], sink: Sink) -> FeedResult:
        for handled, record in enumerate(records):
            try:
                self._write(record)
            except CallFailed as failure:
                return FeedResult(0, handled, failure)
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                raise_if_interrupted(error)
                return FeedResult(0, handled, error, record)
        return FeedResult(0, len(records), None)

    def _write(self, record: Record) -> None:
        writer = self._writer or self._refuse_to_run()
        if writer.is_written(record):
            return
        try:
            self._run(writer, record)
        except (CallFailed, EosError):
            raise
        except Exception as error:
            writer.note_failed(record, error)
            raise
        writer.note_written(record)

    def _run(self, writer: Writer, record: Record) -> None:
        given = record if self._decode is None else self._decode(record.value)
        table = self._target.table
        if table is None:
            writer.run(lambda cursor: self._function(given, cursor))
        elif (row := to_row(self._function(given), self._name)) is not None:
            check_key(row, table.key, self._name)
            writer.add(table, row)

    def _refuse_to_run(self) -> NoReturn:
        raise ConfigurationError(
            f"{self._name} writes rows, but this run opens no database: run it with `eos run` or `eos.run`",
            remedy="in a test call the function itself, or give the App an SQLite database",
        )


def make_sink_target(
    function: Callable[..., object],
    database: object,
    table: object,
    key: tuple[object, ...],
    frame: FrameType | None = None,
) -> SinkTarget:
    """Return the database and table that the function's decorator names. Raises ConfigurationError."""
    name = function_name(function)
    if not callable(getattr(database, "connect", None)):
        raise ConfigurationError(
            f"{name} writes to {database!r}, which is no database",
            remedy='for example @app.sink("orders", eos.sql.Postgres("postgresql://..."), table="orders", key="id")',
        )
    own = getattr(database, "table", None)  # only eos.sql.Delta has this attribute: it is a single table
    if own is not None and table not in (None, own):
        raise ConfigurationError(f"{name} has table={table!r}, but {database!r} is a table already: leave out table=")
    table = own if table is None else table
    parameters = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    if table is None:
        if key:
            raise ConfigurationError(f"{name} has key= but no table=: name the table that gets the rows")
        if len(parameters) != 2:
            raise ConfigurationError(
                f"{name} has no table=, so it must have two parameters, the value and a cursor: "
                f"def {name}(value: Order, db: Cursor)",
                remedy='or name the table of the rows that it returns: table="orders"',
            )
        return SinkTarget(cast("Database", database))
    if not isinstance(table, str) or not all(table.split(".")):
        raise ConfigurationError(f"table= of {name} is {table!r}: it must be the name of a table")
    if not all(isinstance(column, str) and column for column in key):
        raise ConfigurationError(f"key= of {name} is {key!r}: it must be the name of a column, or a list of such names")
    if len(parameters) != 1:
        raise ConfigurationError(
            f"{name} has table=, so it gets the value only and returns a row: remove its other parameters, or table="
        )
    columns = columns_of(result_annotation(function, frame))
    return SinkTarget(cast("Database", database), Table(table, cast("tuple[str, ...]", key)), columns)
