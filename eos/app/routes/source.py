"""Makes the decoder and the records of functions that get the rows of a table (eos/worker/sources.py reads them).

A row is handed to its function as a record of the topic that holds the position, so that results, error policies and
retries are those of records. Its offset is negative, because the offsets of that topic belong to the positions.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from eos.encoding.serde import Decode, DecodeError, annotation_name, encode_key
from eos.errors import ConfigurationError
from eos.records import Out, Record, is_topic_name
from eos.sql.outbox import Readable, SourceTable, TableRow

_PLAIN: Final = (dict, Mapping, Any, object)
PUBLISHED: Final = ("value",)
"""The columns that `publish` needs."""


def publish(row: dict[str, Any]) -> Out:
    """Return the record that a row describes by its columns value, key, topic and headers. Only value is required."""
    return Out(row["value"], key=row.get("key"), topic=row.get("topic"), headers=row.get("headers") or ())


def to_record(topic: str, row: TableRow) -> Record[Any]:
    """Return the record that hands a row to its function. The record's key is the column key, if the row has one."""
    return Record(topic, 0, -1 - abs(row["id"]), -1, encode_key(row.get("key")), cast("Any", row))


def row_decoder(annotation: object) -> Decode | None:
    """Return the function that converts a row to the annotated type; None if the annotation is Record.

    It raises DecodeError for a row that does not fit.
    """
    if annotation is Record:
        return None
    kind = typing.get_origin(annotation) or annotation
    if kind in _PLAIN:
        return cast("Decode", dict)
    name = annotation_name(annotation)

    def decode(row: Any) -> Any:
        try:
            return msgspec.convert(dict(row), type=annotation)
        except msgspec.ValidationError as error:
            raise DecodeError(f"{row} is no {name}: {error}") from error

    return cast("Decode", decode)


def position_topic(app_id: str, name: str) -> str:
    """Return the topic that holds the position of a source."""
    return f"{app_id}-{name.replace('.', '-')}-position"


def make_source_table(
    topic: str, database: object, table: object, delete: bool, function: Callable[..., object]
) -> SourceTable:
    """Return the table that the decorator names. Raises ConfigurationError."""
    if not callable(getattr(database, "table_reader", None)):
        raise ConfigurationError(
            f"rows of {database!r} cannot be read in the order of their commits: only eos.sql.Postgres can",
            remedy='for example app.source(Postgres("postgresql://..."), table="outbox", to="events")',
        )
    if not isinstance(table, str) or not all(table.split(".")):
        raise ConfigurationError(f"table={table!r} of a source must be the name of a table")
    if not is_topic_name(topic):
        raise ConfigurationError(
            f"the position of table {table} needs the topic {topic!r}, which Kafka does not accept: set a shorter name="
        )
    return SourceTable(cast("Readable", database), table, delete, PUBLISHED if function is publish else ())
