"""Where the committed values of a task are: in memory, or in a folder that a restart goes on with.

Either stands for all of the changelog before `position`, so what is to be read at a start is what lies behind. A folder
is written once a transaction is known to be committed, values and position in one write of LMDB's. LMDB is not told to
sync: what it wrote outlives a killed process, and not a machine that fell. So the folder notes under which boot of the
machine it was written, and is begun anew under another one.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import lmdb

from eos import log
from eos.app.cells import row_length
from eos.app.state import Span
from eos.errors import ConfigurationError, Temporary

Value = bytes | None
"""None: there is none, and the changelog has a tombstone."""

_FORMAT = 2  # docs/formats.md
_MOST_BYTES = 1 << 36  # of one folder: 64 GiB; nothing of it is taken before it is written
_LONGEST_ROW = 100  # LMDB takes 511 with the field


class Values(Protocol):
    position: int
    written_at: float
    """When it was last written, in seconds since the epoch."""

    @property
    def size_bytes(self) -> int:
        """On disk."""

    def __len__(self) -> int: ...

    def get(self, cell: bytes) -> bytes | None: ...

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        """The fields of a row and their values, in order; not beyond the next `apply`."""

    def apply(self, changes: Mapping[bytes, Value], position: int, now: float) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class InMemory:
    position, written_at = 0, 0.0
    size_bytes = 0

    def __init__(self, values: Mapping[bytes, bytes] | None = None) -> None:
        self._values = dict(values or {})
        self._fields: dict[bytes, list[bytes]] | None = None  # of each row, in order, once one was scanned

    def __len__(self) -> int:
        return len(self._values)

    def get(self, cell: bytes) -> bytes | None:
        return self._values.get(cell)

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        if self._fields is None:
            self._fields = {}
            for cell in sorted(self._values):
                end = row_length(cell)
                self._fields.setdefault(cell[:end], []).append(cell[end:])
        fields = self._fields.get(row, [])
        stop = len(fields) if span.stop is None else bisect.bisect_left(fields, span.stop)
        few = fields[bisect.bisect_left(fields, span.start) : stop]
        return ((field, self._values[row + field]) for field in (reversed(few) if span.back else few))

    def _note_fields(self, rows: dict[bytes, list[bytes]], changes: Mapping[bytes, Value]) -> None:
        for cell, value in changes.items():
            if (value is None) is not (cell in self._values):
                continue  # it was there and is, or was not and is not
            end = row_length(cell)
            fields = rows.setdefault(cell[:end], [])
            at = bisect.bisect_left(fields, cell[end:])
            if value is not None:
                fields.insert(at, cell[end:])
            elif len(fields) > 1:
                del fields[at]
            else:
                del rows[cell[:end]]

    def apply(self, changes: Mapping[bytes, Value], position: int, now: float) -> None:
        if self._fields is not None:
            self._note_fields(self._fields, changes)
        for cell, value in changes.items():
            if value is None:
                self._values.pop(cell, None)
            else:
                self._values[cell] = value
        self.position, self.written_at = position, now

    def clear(self) -> None:
        self._values, self._fields, self.position = {}, None, 0

    def close(self) -> None: ...


class InFolder:
    """Raises Temporary where the folder cannot be written: nothing is lost, the changelog has it.

    `changelog_id`: the topic's; values of another topic of that name are thrown away.
    """

    @classmethod
    def of(cls, base: Path, task: str, changelog_id: str, whichever: bool = True) -> InFolder | None:
        """In the task's folder that was written last, which spares reading; None if another process has it. With
        `whichever` in another one then: a process that is stopped and not dead keeps its own."""
        owned = _own(base, task, whichever)
        return None if owned is None else cls(*owned, changelog_id)

    def __init__(self, folder: Path, lock: int, changelog_id: str) -> None:
        self._folder, self._lock = folder, lock
        self._whose = {"v": _FORMAT, "boot": _boot_id(), "changelog": changelog_id}
        self._open()
        noted = self._noted()
        if noted is not None and noted.items() >= self._whose.items():
            self.position, self.written_at = int(noted["position"]), float(noted["at"])
            return
        if noted is not None:
            log.info("state is restored anew", folder=self._folder, why="another boot of this machine, or changelog")
        self.clear()

    def _open(self) -> None:
        path = str(self._folder / "values")
        options: dict[str, Any] = {"map_size": _MOST_BYTES, "max_dbs": 2, "sync": False, "metasync": False}
        options |= {"readahead": False, "max_spare_txns": 1}
        try:
            self._environment = lmdb.open(path, **options)
        except lmdb.Error as error:
            log.warning("state is restored anew", folder=self._folder, why=f"it cannot be read: {error}")
            shutil.rmtree(path, ignore_errors=True)
            self._environment = lmdb.open(path, **options)
        self._values = self._environment.open_db(b"values")
        self._notes = self._environment.open_db(b"notes")
        self._reader = self._environment.begin(self._values)

    def _noted(self) -> dict[str, Any] | None:
        with self._environment.begin(self._notes) as reading:
            noted = reading.get(b"noted")
        try:
            found = json.loads(noted or b"null")
        except ValueError:
            return {}
        return found if isinstance(found, dict) or found is None else {}

    @property
    def size_bytes(self) -> int:
        return (self._folder / "values" / "data.mdb").stat().st_blocks * 512

    def __len__(self) -> int:
        with self._environment.begin(self._values) as reading:
            return int(reading.stat(self._values)["entries"])

    def get(self, cell: bytes) -> bytes | None:
        return self._reader.get(_name(cell))

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        base = _name(row)
        low, high = base + span.start, _behind(base) if span.stop is None else base + span.stop
        cursor = self._reader.cursor()
        if span.back:
            found = cursor.prev() if cursor.set_range(high) else cursor.last()
            while found and (name := cursor.key()) >= low:
                yield name[len(base) :], cursor.value()
                found = cursor.prev()
        else:
            found = cursor.set_range(low)
            while found and (name := cursor.key()) < high:
                yield name[len(base) :], cursor.value()
                found = cursor.next()

    def apply(self, changes: Mapping[bytes, Value], position: int, now: float) -> None:
        noted = json.dumps(self._whose | {"position": position, "at": now}).encode()
        try:
            with self._environment.begin(write=True) as writing:
                for cell, value in changes.items():
                    if value is None:
                        writing.delete(_name(cell), db=self._values)
                    else:
                        writing.put(_name(cell), value, db=self._values)
                writing.put(b"noted", noted, db=self._notes)
        except (lmdb.Error, OSError) as error:
            raise Temporary(
                f"state cannot be written to {self._folder}: {error}",
                remedy="give the disk room (one task has 64 GiB at the most); nothing is lost, the changelog has it",
            ) from error
        self.position, self.written_at = position, now
        self._read_anew()

    def clear(self) -> None:
        with self._environment.begin(write=True) as writing:
            writing.drop(self._values, delete=False)
            writing.drop(self._notes, delete=False)
        self.position, self.written_at = 0, 0.0
        self._read_anew()

    def _read_anew(self) -> None:
        self._reader.abort()
        self._reader = self._environment.begin(self._values)

    def close(self) -> None:
        self._reader.abort()
        self._environment.close()
        os.close(self._lock)


def _name(cell: bytes) -> bytes:
    """LMDB's key of a cell: a row that is long is a hash behind a byte with which no store's name begins."""
    if len(cell) <= _LONGEST_ROW or (end := row_length(cell)) <= _LONGEST_ROW:
        return cell
    return b"\xff" + hashlib.sha256(cell[:end]).digest() + cell[end:]


def _behind(base: bytes) -> bytes:
    """The first name behind all that begin so."""
    kept = base.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])


def check_folder(folder: Path) -> None:
    """Raises ConfigurationError for a folder in which no state can be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"eos.state.dir={folder} cannot be written: {error.strerror}") from error


def _own(base: Path, task: str, whichever: bool) -> tuple[Path, int] | None:
    """A folder of the task, and its lock, which the process's end gives up."""
    numbered = (base / f"{task}.{number}" for number in itertools.count())
    there = list(itertools.takewhile(Path.exists, numbered))
    for folder in [*sorted(there, key=_written_at, reverse=True), base / f"{task}.{len(there)}"]:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if not whichever:
                break
        else:
            return folder, lock
    return None


def _written_at(folder: Path) -> float:
    try:
        return (folder / "values" / "data.mdb").stat().st_mtime
    except OSError:
        return 0.0


def _boot_id() -> str:
    """Of the machine since it was started; where it does not say, none that comes again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
