"""Reads the columns of a table from the class of its rows, a msgspec Struct or a dataclass. Must never do I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from msgspec import inspect


class Kind(Enum):
    """Lists what a column can hold. Each database has a type for it."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    FLOAT = "float"
    DECIMAL = "decimal"
    TEXT = "text"
    BYTES = "bytes"
    TIMESTAMP = "timestamp"
    DATE = "date"
    TIME = "time"
    UUID = "uuid"
    JSON = "json"


class Column(NamedTuple):
    name: str
    kind: Kind
    nullable: bool


_KINDS: Final[Mapping[type[inspect.Type], Kind]] = {
    inspect.BoolType: Kind.BOOLEAN,
    inspect.IntType: Kind.INTEGER,
    inspect.FloatType: Kind.FLOAT,
    inspect.DecimalType: Kind.DECIMAL,
    inspect.StrType: Kind.TEXT,
    inspect.BytesType: Kind.BYTES,
    inspect.DateTimeType: Kind.TIMESTAMP,
    inspect.DateType: Kind.DATE,
    inspect.TimeType: Kind.TIME,
    inspect.UUIDType: Kind.UUID,
}


def columns_of(annotation: Any) -> tuple[Column, ...]:
    """Return the columns of the rows that a function with this result annotation returns; none if it names no class
    with fields."""
    try:
        found = _without_none(inspect.type_info(annotation))[0]
    except (TypeError, NameError, AttributeError):
        return ()  # msgspec does not know the type, or cannot resolve it
    if not isinstance(found, inspect.StructType | inspect.DataclassType):
        return ()
    return tuple(_column(field) for field in found.fields)


def _column(field: inspect.Field) -> Column:
    kind, nullable = _without_none(field.type)
    return Column(field.name, _kind_of(kind), nullable or field.default is None)


def _kind_of(found: inspect.Type) -> Kind:
    if isinstance(found, inspect.LiteralType):
        return Kind.INTEGER if all(type(value) is int for value in found.values) else Kind.TEXT
    return _KINDS.get(type(found), Kind.JSON)


def _without_none(found: inspect.Type) -> tuple[inspect.Type, bool]:
    """Return a type without None, and whether None was one of its alternatives."""
    if isinstance(found, inspect.Metadata):
        found = found.type
    if not isinstance(found, inspect.UnionType):
        return found, isinstance(found, inspect.NoneType)
    others = [one for one in found.types if not isinstance(one, inspect.NoneType)]
    nullable = len(others) < len(found.types)
    return (others[0] if len(others) == 1 else inspect.AnyType()), nullable
