"""Holds the SQL that compares a table with the rows that it should have. It must never run a statement.

The expected rows are in a temporary table, whose columns are copies of the table's. So the database converts their
values as it converts those of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

EXPECTED: Final = "eos_expected"


def compare_by_key(name: str, key: Sequence[str], expected: str, stored: str) -> str:
    """Return a select of the keys of wrong rows, each with the stored row as text, NULL for one that is missing.

    `name`, `key`: quoted. `expected`, `stored`: SQL for a row of each table as text, `e` and `t`.
    """
    joined = " and ".join(f"e.{column} = t.{column}" for column in key)
    keys = ", ".join(f"e.{column}" for column in key)
    return (
        f"select {keys}, case when t.{key[0]} is null then null else {stored} end from {EXPECTED} e "
        f"left join {name} t on {joined} where t.{key[0]} is null or {expected} <> {stored}"
    )


def compare_counts(name: str, expected: str, stored: str, wrong: str) -> str:
    """Return a select of the wrong rows as text, with how often they are expected and found."""
    return (
        f"select e.one, e.times, coalesce(t.times, 0) "
        f"from (select {expected} as one, count(*) as times from {EXPECTED} e group by 1) e "
        f"left join (select {stored} as one, count(*) as times from {name} t group by 1) t on e.one = t.one "
        f"where coalesce(t.times, 0) {wrong} e.times"
    )


def describe_key(key: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(f"{column}={value}" for column, value in zip(key, values, strict=False))
