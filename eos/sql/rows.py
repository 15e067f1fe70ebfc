"""Turns the results of functions into rows, and merges the rows of one batch. Must never do I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec

Row = Mapping[str, Any]


def to_row(result: object, function: str) -> Row | None:
    """Return a function's result as a row; it is a dict, a msgspec Struct, a dataclass, or None for no row.

    Raises TypeError for everything else.
    """
    if result is None:
        return None
    if isinstance(result, msgspec.Struct):
        return msgspec.structs.asdict(result)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {one.name: getattr(result, one.name) for one in dataclasses.fields(result)}
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{function} returned {type(result).__name__}, but a row is a dict, a Struct or a dataclass; None is no row"
        )
    if not result or not all(type(name) is str for name in result):
        raise TypeError(
            f"{function} returned a row whose columns are {list(result)!r}: name at least one, each as a str"
        )
    return result


def check_key(row: Row, key: Sequence[str], function: str) -> None:
    """Raise ValueError for a row without a value in a column of its key."""
    for column in key:
        if row.get(column) is None:
            raise ValueError(f"{function} returned a row without a value for {column}, a column of the table's key")


def merge_by_key(rows: Sequence[Row], key: Sequence[str]) -> Sequence[Row]:
    """Return one row for each key, in the order of their first appearance.

    One statement cannot change a row twice. A later row of a key replaces the columns that it has, as a second
    statement would.
    """
    values_of = itemgetter(*key)
    merged: dict[Any, Row] = {values_of(row): row for row in rows}
    if len(merged) == len(rows):
        return rows
    merged = {}
    for row in rows:
        values = values_of(row)
        before = merged.get(values)
        merged[values] = row if before is None or before.keys() == row.keys() else {**before, **row}
    return list(merged.values())


def split_by_columns(rows: Iterable[Row]) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Yield consecutive rows with the same columns together. A write must not change columns that a row lacks."""
    columns: tuple[str, ...] = ()
    run: list[Row] = []
    for row in rows:
        if run and row.keys() != run[-1].keys():
            yield columns, run
            run = []
        if not run:
            columns = tuple(row)
        run.append(row)
    if run:
        yield columns, run
