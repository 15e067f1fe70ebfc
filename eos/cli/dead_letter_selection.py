"""Select the dead letters of a command by record, by exception or by an exported file, and read and write such files.

Each line of an exported file is JSON. `letter` names the dead-letter record; key, value, headers and timestamp are the
record's content. A user repairs a dead letter by editing them in the file, and the replay uses the edited content.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eos.cli.rendering import bytes_as_json, bytes_from_json
from eos.errors import UsageError
from eos.worker.dead_letters import DeadLetter

Change = Mapping[str, Any]
"""The changed fields of a Record."""
_FAILURE_FIELDS = ("app", "function", "exception", "message", "trace")


class Selection:
    """Select dead letters. A call returns a selected one with its changes applied, and None for others.

    Without arguments every dead letter is selected.
    """

    def __init__(
        self,
        positions: Collection[str] = (),
        exceptions: Collection[str] = (),
        changes: Mapping[str, Change] | None = None,
    ) -> None:
        self._positions, self._exceptions, self._changes = frozenset(positions), frozenset(exceptions), changes
        self.selects_all = not positions and not exceptions and changes is None
        self.selected = 0
        self.missing = set(positions or changes or ())
        """The requested records for which no dead letter was found so far."""

    def __call__(self, letter: DeadLetter) -> DeadLetter | None:
        names = {letter.position, letter.source}
        self.missing -= names
        if self._positions and not names & self._positions:
            return None
        if self._exceptions and letter.exception not in self._exceptions:
            return None
        if self._changes is not None and letter.position not in self._changes:
            return None
        self.selected += 1
        change = (self._changes or {}).get(letter.position, {})
        return dataclasses.replace(letter, record=msgspec.structs.replace(letter.record, **change))


def export_row(letter: DeadLetter) -> dict[str, Any]:
    """Return a pending dead letter as a JSON object for an exported file."""
    record = letter.record
    failure = {name: letter.notes[name] for name in _FAILURE_FIELDS if name in letter.notes}
    headers = [[name, bytes_as_json(value)] for name, value in record.headers]
    content = {"timestamp": record.timestamp, "key": bytes_as_json(record.key), "value": bytes_as_json(record.value)}
    row = {"letter": letter.position, "source": letter.source, "replays": letter.replays, **failure, **content}
    return {**row, "headers": headers}


_FIELDS = frozenset({"letter", "source", "replays", *_FAILURE_FIELDS, "timestamp", "key", "value", "headers"})


def read_changes(name: str, file: Path) -> dict[str, Change]:
    """Return the changes in an exported file by the offset of the dead letter. `name` is the file's name in errors.

    Raises UsageError if the file cannot be read.
    """
    found: dict[str, Change] = {}
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            letter, change = _parse_change(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name}, line {number}: {error}") from error
        if letter in found:
            raise UsageError(f"{name}, line {number}: an earlier line has {letter} too")
        found[letter] = change
    return found


def _parse_change(line: str) -> tuple[str, Change]:
    """Return the dead letter's offset and its changes. Raises ValueError."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("letter"), str):
        raise ValueError('expected an object with "letter", as written by `eos dlq export`')
    if unknown := row.keys() - _FIELDS:
        raise ValueError(f"unknown field {min(unknown)!r}: expected {', '.join(sorted(_FIELDS))}")
    change: dict[str, Any] = {}
    for name in row.keys() & {"key", "value"}:
        change[name] = _parse_bytes(name, row[name])
    if "timestamp" in row:
        if type(row["timestamp"]) is not int or not -1 <= row["timestamp"] < 1 << 63:
            raise ValueError("timestamp: expected milliseconds since the epoch, or -1 for none")
        change["timestamp"] = row["timestamp"]
    if "headers" in row:
        if not isinstance(row["headers"], list) or not all(map(_is_header, row["headers"])):
            raise ValueError("headers: expected a list of [NAME, VALUE]")
        change["headers"] = [(name, _parse_bytes(f"header {name}", value)) for name, value in row["headers"]]
    return row["letter"], change


def _is_header(given: object) -> bool:
    return isinstance(given, list) and len(given) == 2 and isinstance(given[0], str) and _is_text(given[0])


def _is_text(given: str) -> bool:
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in given)


def _parse_bytes(name: str, given: object) -> bytes | None:
    try:
        return bytes_from_json(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
