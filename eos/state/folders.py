"""The values of a task in a folder of its own, that a restart goes on with.

A folder is written once a transaction is known to be committed, values and position in one write of its engine's
(eos/state/engines.py). That outlives a killed process, and not a machine that fell: nothing is synced while the worker
runs. So the folder notes under which boot of the machine it was written, and is restored from the changelog under
another one, unless it was synced when the worker stopped: a file says so, which the next owner removes first.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eos import log
from eos.app.ageing import TIME_BYTES, apart
from eos.app.cells import row_length, store_of
from eos.app.layers import Span, Value
from eos.errors import ConfigurationError, Temporary
from eos.state.engines import Engine, EngineFailed, Lmdb

_FORMAT = 4  # docs/reference/formats.md
_NOTED = b"noted"
_DAMAGED = "damaged"  # a file beside the engine's folder
_SYNCED = "synced"  # another one
_MEMORY_BYTES = 64 << 20
_LONGEST_ROW = 100  # LMDB takes 511 with the field


class InFolder:
    """Raises Temporary where the folder cannot be written or read: nothing is lost, the changelog has it.

    `changelog_id`: the topic's; values of another topic of that name are thrown away.
    """

    @classmethod
    def of(
        cls,
        base: Path,
        task: str,
        changelog_id: str,
        whichever: bool = True,
        ageing: Collection[bytes] = (),
        engine: type[Engine] = Lmdb,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> InFolder | None:
        """In the task's folder that was written last, which spares reading; None if another process has it. With
        `whichever` in another one then: a process that is stopped and not dead keeps its own."""
        try:
            owned = _own(base, task, whichever)
        except OSError as error:
            raise Temporary(f"state cannot be kept in {base}: {error.strerror}") from error
        if owned is None:
            return None
        try:
            return cls(*owned, changelog_id, ageing, engine, memory_bytes)
        except BaseException:
            os.close(owned[1])
            raise

    def __init__(
        self,
        folder: Path,
        lock: int,
        changelog_id: str,
        ageing: Collection[bytes],
        engine: type[Engine],
        memory_bytes: int,
    ) -> None:
        self._folder, self._lock = folder, lock
        self._ageing = {store: _digest(store) for store in ageing}
        # No store has notes before these names: RocksDB would walk over all that are deleted.
        self._oldest: dict[bytes, bytes] = {}
        self._whose = {
            "v": _FORMAT,
            "boot": _boot_id(),
            "changelog": changelog_id,
            "ageing": sorted(store.decode() for store in ageing),
        }
        for other in folder.iterdir():
            if other.is_dir() and other.name != engine.folder:
                shutil.rmtree(other)  # another engine's, which would only grow old
        path, mark = folder / engine.folder, folder / _DAMAGED
        try:
            synced = _unmark(folder / _SYNCED)
        except OSError as error:
            raise Temporary(f"state cannot be kept in {folder}: {error.strerror}") from error
        try:
            if mark.exists():
                raise EngineFailed(mark.read_text())
            self._engine = engine(path, memory_bytes)
            noted = self._noted()
        except EngineFailed as error:
            with self._writing():
                self._engine = _another(path, engine, memory_bytes)
                mark.unlink(missing_ok=True)
            log.warning("state is restored anew", folder=folder, why=f"it cannot be read: {error}")
            noted = None
        required = {name: value for name, value in self._whose.items() if not (synced and name == "boot")}
        if noted is not None and noted.items() >= required.items():
            self.position, self.as_of = int(noted["position"]), float(noted["as_of"])
            if noted.get("boot") != self._whose["boot"]:
                self.apply({}, self.position, self.as_of)  # what is written from now on is of this boot
            return
        if noted is not None:
            why = "another boot of this machine, another changelog, or a time-to-live that is new or gone"
            log.info("state is restored anew", folder=self._folder, why=why)
        self.clear()

    def _noted(self) -> dict[str, Any] | None:
        try:
            noted = self._engine.noted(_NOTED)
        except Exception as error:
            self._engine.close()
            raise EngineFailed(str(error)) from error
        try:
            found = json.loads(noted or b"null")
        except ValueError:
            return {}
        return found if isinstance(found, dict) or found is None else {}

    @property
    def size_bytes(self) -> int:
        return self._engine.size_bytes

    def __len__(self) -> int:
        return len(self._engine)

    def get(self, cell: bytes) -> bytes | None:
        try:
            return self._engine.get(_name(cell))
        except Exception as error:  # RocksDB has no class for its own
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> Temporary:
        """It is no failure of a record, and the next start begins the folder anew."""
        with contextlib.suppress(OSError):
            (self._folder / _DAMAGED).write_text(str(error))
        return Temporary(
            f"state cannot be read from {self._folder}: {error}",
            remedy="the next start begins the folder anew; nothing is lost: Kafka has it",
        )

    def _reading(self, found: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from found
        except Exception as error:
            raise self._damaged(error) from error

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        base = _name(row)
        low, high = span.names(base)
        found = self._reading(self._engine.scan(low, high, span.back))
        return ((name[len(base) :], value) for name, value in found)

    def oldest(self, store: bytes) -> Iterator[tuple[bytes, int]]:
        begin = self._ageing[store]
        high = begin + b"\xff" * 25  # after any time and digest
        low, self._oldest[begin] = self._oldest.get(begin, begin), high
        for name, cell in self._reading(self._engine.notes(low, high)):
            self._oldest[begin] = min(name, self._oldest[begin])
            yield cell, apart(name[len(begin) :])[0]

    def _written(self, changes: Mapping[bytes, Value]) -> Iterator[tuple[bytes, Value]]:
        """Notes of when what has a time-to-live was written, before it is: a digest of the store, the time, a digest of
        the cell -> the cell."""
        for cell, value in changes.items():
            if (store := self._ageing.get(store_of(cell))) is not None:
                digest = _digest(cell)
                if (before := self.get(cell)) is not None:
                    yield store + before[:TIME_BYTES] + digest, None
                if value is not None:
                    note = store + value[:TIME_BYTES] + digest
                    self._oldest[store] = min(note, self._oldest.get(store, store))
                    yield note, cell

    def apply(self, changes: Mapping[bytes, Value], position: int, as_of: float) -> None:
        notes = dict(self._written(changes)) if self._ageing else {}
        notes[_NOTED] = json.dumps(self._whose | {"position": position, "as_of": as_of}).encode()
        with self._writing():
            self._engine.write(_names(changes), notes)
        self.position, self.as_of = position, as_of

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (EngineFailed, OSError) as error:
            raise Temporary(
                f"state cannot be written to {self._folder}: {error}",
                remedy="give the disk room (LMDB keeps 64 GiB of a task at the most); nothing is lost: Kafka has it",
            ) from error

    def clear(self) -> None:
        with self._writing():
            self._engine.clear()
        self.position, self.as_of = 0, 0.0

    def sync(self) -> None:
        """Write all of it to the disk, so that the next owner finds it whole after a reboot or on another machine. What
        cannot be synced is only restored then."""
        try:
            self._engine.sync()
            if not (self._folder / _DAMAGED).exists():
                _mark(self._folder / _SYNCED)
        except (EngineFailed, OSError) as error:
            log.debug("state folder not synced", folder=self._folder, error=str(error))

    def close(self) -> None:
        self._engine.close()
        with contextlib.suppress(OSError):
            os.utime(self._lock)  # for `clean_up`: it was in use until now
        os.close(self._lock)


def _mark(file: Path) -> None:
    with file.open("wb") as opened:
        os.fsync(opened.fileno())
    _sync_names(file.parent)


def _unmark(file: Path) -> bool:
    """Return whether the file was there. It is gone, on the disk too, before anything else is written."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    _sync_names(file.parent)
    return True


def _sync_names(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _another(path: Path, engine: type[Engine], memory_bytes: int) -> Engine:
    """In place of one that cannot be read, which is deleted once this one is there: where none can be opened (too many
    files are), its values are not to blame. Raises EngineFailed."""
    aside = path.with_suffix(".old")
    if path.exists():
        path.rename(aside)
    try:
        made = engine(path, memory_bytes)
    except EngineFailed:
        shutil.rmtree(path, ignore_errors=True)
        if aside.exists():
            aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return made


def _name(cell: bytes) -> bytes:
    """An engine's key of a cell: a row that is long is a hash behind a byte with which no store's name begins."""
    if len(cell) <= _LONGEST_ROW or (end := row_length(cell)) <= _LONGEST_ROW:
        return cell
    return b"\xff" + hashlib.sha256(cell[:end]).digest() + cell[end:]


def _names(changes: Mapping[bytes, Value]) -> Mapping[bytes, Value]:
    if max(map(len, changes), default=0) <= _LONGEST_ROW:
        return changes
    return {_name(cell): value for cell, value in changes.items()}


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16).digest()


def folder_of(state_dir: str, app_id: str) -> Path | None:
    """Return the folder of an App below eos.state.dir; None: state is kept in memory. Raises ConfigurationError."""
    try:
        return Path(state_dir).expanduser() / app_id if state_dir else None
    except RuntimeError as error:  # no HOME, and a user that /etc/passwd does not know
        raise ConfigurationError(
            f"eos.state.dir={state_dir} cannot be found: this user has no home folder", remedy="set it, or HOME"
        ) from error


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
    there = [folder for folder in base.glob(f"{glob.escape(task)}.*") if folder.suffix[1:].isdecimal()]
    new = next(name for number in itertools.count() if (name := base / f"{task}.{number}") not in there)
    for folder in [*sorted(there, key=_written_at, reverse=True), new]:
        folder.mkdir(parents=True, exist_ok=True)
        if (lock := _locked(folder)) is not None:
            return folder, lock
        if not whichever:
            break
    return None


def _locked(folder: Path) -> int | None:
    """Return the folder's lock; None if another process has it, or has just deleted the folder."""
    path = folder / "lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def clean_up(base: Path, unused_s: float, now: float) -> list[Path]:
    """Delete the folders of tasks that no process has had for this long: their partitions moved away, and what they
    lack grows. Returns those that were deleted."""
    deleted: list[Path] = []
    for lock in base.glob("*/lock"):
        folder = lock.parent
        try:
            if now - max(lock.stat().st_mtime, _written_at(folder)) < unused_s:
                continue
            if (held := _locked(folder)) is None:
                continue
            shutil.rmtree(folder)
            os.close(held)
            deleted.append(folder)
        except OSError as error:
            log.debug("state folder not deleted", folder=folder, error=str(error))
    return deleted


def _written_at(folder: Path) -> float:
    try:
        return max((file.stat().st_mtime for file in folder.glob("*/*")), default=0.0)
    except OSError:
        return 0.0  # another process is at it


def _boot_id() -> str:
    """Of the machine since it was started; where it does not say, none that comes again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
