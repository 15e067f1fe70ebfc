"""Which dead letters a command is about: by place, by exception, or as a file says; and that file's lines.

A line is JSON. `letter` says which one it is; key, value, headers and timestamp are the record's. Whoever mends a
letter changes them in an exported file, and the replay takes what stands there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eos.cli.written import bytes_of, json_of
from eos.errors import UsageError
from eos.worker.letters import Letter

Change = Mapping[str, Any]
"""Fields of a Record."""
_SAID = ("app", "function", "exception", "message", "trace")


class Choice:
    """Called with a letter: the letter, mended where a file says so, or None where it is not chosen. One that nothing
    is said of chooses all."""

    def __init__(
        self,
        places: Collection[str] = (),
        exceptions: Collection[str] = (),
        changes: Mapping[str, Change] | None = None,
    ) -> None:
        self._places, self._exceptions, self._changes = frozenset(places), frozenset(exceptions), changes
        self.is_of_all = not places and not exceptions and changes is None
        self.met = 0
        self.unmet = set(places or changes or ())
        """Places of which no letter waits, as far as letters were read."""

    def __call__(self, letter: Letter) -> Letter | None:
        names = {letter.place, letter.source}
        self.unmet -= names
        if self._places and not names & self._places:
            return None
        if self._exceptions and letter.exception not in self._exceptions:
            return None
        if self._changes is not None and letter.place not in self._changes:
            return None
        self.met += 1
        change = (self._changes or {}).get(letter.place, {})
        return dataclasses.replace(letter, record=msgspec.structs.replace(letter.record, **change))


def row_of(letter: Letter) -> dict[str, Any]:
    """Of a letter that waits, for a file."""
    record = letter.record
    told = {name: letter.told[name] for name in _SAID if name in letter.told}
    headers = [[name, json_of(value)] for name, value in record.headers]
    content = {"timestamp": record.timestamp, "key": json_of(record.key), "value": json_of(record.value)}
    row = {"letter": letter.place, "source": letter.source, "replays": letter.replays, **told, **content}
    return {**row, "headers": headers}


_KNOWN = frozenset({"letter", "source", "replays", *_SAID, "timestamp", "key", "value", "headers"})


def read_changes(name: str, file: Path) -> dict[str, Change]:
    """By the place of the letter. `name` is how the file is called in a UsageError."""
    found: dict[str, Change] = {}
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is no UTF-8: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            letter, change = _change(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name}, line {number}: {error}") from error
        if letter in found:
            raise UsageError(f"{name}, line {number}: {letter} stands on a line before already")
        found[letter] = change
    return found


def _change(line: str) -> tuple[str, Change]:
    """Raises ValueError."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("letter"), str):
        raise ValueError('an object with "letter" is expected, as `eos dlq export` writes it')
    if strange := row.keys() - _KNOWN:
        raise ValueError(f"unknown name {min(strange)!r}: there are {', '.join(sorted(_KNOWN))}")
    change: dict[str, Any] = {}
    for name in row.keys() & {"key", "value"}:
        change[name] = _read(name, row[name])
    if "timestamp" in row:
        if type(row["timestamp"]) is not int or not -1 <= row["timestamp"] < 1 << 63:
            raise ValueError("timestamp: milliseconds since the epoch are expected, -1 for none")
        change["timestamp"] = row["timestamp"]
    if "headers" in row:
        if not isinstance(row["headers"], list) or not all(map(_is_header, row["headers"])):
            raise ValueError("headers: a list of [NAME, VALUE] is expected")
        change["headers"] = [(name, _read(f"header {name}", value)) for name, value in row["headers"]]
    return row["letter"], change


def _is_header(given: object) -> bool:
    return isinstance(given, list) and len(given) == 2 and isinstance(given[0], str) and _is_text(given[0])


def _is_text(given: str) -> bool:
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in given)


def _read(name: str, given: object) -> bytes | None:
    try:
        return bytes_of(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
