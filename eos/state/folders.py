"""Keeps the values of a task in its own folder, which a restarted worker continues to use.

A folder is written once a transaction is known to be committed; the engine writes values and position atomically
(eos/state/engines.py). The write survives a killed process but not a machine crash, because nothing is synced while the
worker runs. So the folder records the boot id of the machine. After another boot its state is restored from the
changelog, unless the worker synced the folder when it stopped: a file marks this, and the next owner removes the file
first.
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
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eos import log
from eos.app.cells import row_length, store_prefix
from eos.app.expiry import TIME_BYTES, split_write_time
from eos.app.layers import Span, Value
from eos.errors import ConfigurationError, Temporary
from eos.state.engines import Engine, EngineFailed, Lmdb

_FORMAT = 5  # docs/reference/formats.md
_FOLDER_NOTE = b"noted"
_DAMAGED = "damaged"  # a file next to the engine's folder
_SYNCED = "synced"  # likewise
_MEMORY_BYTES = 64 << 20
_MAX_ROW_BYTES = 100  # LMDB allows keys of 511 bytes, which include the field
_MAX_REST_BYTES = 400  # bytes of a cell's name in a note's name


class InFolder:
    """Keeps the values of one task in a folder.

    Raises Temporary if the folder cannot be written or read; no state is lost, because the changelog has it.
    `changelog_id` is the topic id of the changelog; values of another topic of the same name are discarded.
    """

    @classmethod
    def of(
        cls,
        base: Path,
        task: str,
        changelog_id: str,
        any_folder: bool = True,
        timed: Collection[bytes] = (),
        engine: type[Engine] = Lmdb,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> InFolder | None:
        """Open the task's most recently written folder, which needs the least restoring.

        Returns None if another process owns it. With `any_folder`, open another folder of the task instead, because a
        suspended process may own that one for a long time.
        """
        try:
            acquired = _acquire_folder(base, task, any_folder)
        except OSError as error:
            raise Temporary(f"state cannot be kept in {base}: {error.strerror}") from error
        if acquired is None:
            return None
        try:
            return cls(*acquired, changelog_id, timed, engine, memory_bytes)
        except BaseException:
            os.close(acquired[1])
            raise

    def __init__(
        self,
        folder: Path,
        lock: int,
        changelog_id: str,
        timed: Collection[bytes],
        engine: type[Engine],
        memory_bytes: int,
    ) -> None:
        self._folder, self._lock = folder, lock
        self._timed = {store: _digest(store) for store in timed}
        # By store: the name at or after which all its notes begin. A scan that starts there saves RocksDB from reading
        # all deleted notes.
        self._oldest: dict[bytes, bytes] = {}
        self._identity = {
            "v": _FORMAT,
            "boot": _boot_id(),
            "changelog": changelog_id,
            "ageing": sorted(store.decode() for store in timed),
        }
        for other in folder.iterdir():
            if other.is_dir() and other.name != engine.folder:
                shutil.rmtree(other)  # another engine's folder: nothing updates its values any more
        path, mark = folder / engine.folder, folder / _DAMAGED
        try:
            synced = _remove_marker(folder / _SYNCED)
        except OSError as error:
            raise Temporary(f"state cannot be kept in {folder}: {error.strerror}") from error
        try:
            if mark.exists():
                raise EngineFailed(mark.read_text())
            self._engine = engine(path, memory_bytes)
            note = self._read_note()
        except EngineFailed as error:
            with self._writing():
                self._engine = _replace_engine(path, engine, memory_bytes)
                mark.unlink(missing_ok=True)
            log.warning("state folder discarded", folder=folder, reason=f"it cannot be read: {error}")
            note = None
        required = {name: value for name, value in self._identity.items() if not (synced and name == "boot")}
        if note is not None and note.items() >= required.items():
            self.position, self.as_of = int(note["position"]), float(note["as_of"])
            if note.get("boot") != self._identity["boot"]:
                self.apply({}, self.position, self.as_of)  # from now on the values belong to this boot
            return
        if note is not None:
            reason = "another boot of this machine, another changelog, or a time-to-live that was added or removed"
            log.info("state folder discarded", folder=self._folder, reason=reason)
        self.clear()

    def _read_note(self) -> dict[str, Any] | None:
        try:
            note = self._engine.get_note(_FOLDER_NOTE)
        except Exception as error:
            self._engine.close()
            raise EngineFailed(str(error)) from error
        try:
            found = json.loads(note or b"null")
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
            return self._engine.get(cell if len(cell) <= _MAX_ROW_BYTES else _engine_key(cell))
        except Exception as error:  # RocksDB's errors have no class of their own
            raise self._damaged(error) from error

    def _get_all(self, keys: list[bytes]) -> Mapping[bytes, bytes]:
        """Return the stored values of these engine's keys."""
        try:
            return self._engine.get_all(keys)
        except Exception as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> Temporary:
        """Mark the folder as damaged and return the error; the next start recreates the folder.

        The error is Temporary because no record caused it.
        """
        with contextlib.suppress(OSError):
            (self._folder / _DAMAGED).write_text(str(error))
        return Temporary(
            f"state cannot be read from {self._folder}: {error}",
            remedy="the next start restores it from the changelog; no state is lost",
        )

    def _reading(self, found: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from found
        except Exception as error:
            raise self._damaged(error) from error

    def scan(self, row: bytes, span: Span) -> Iterator[tuple[bytes, bytes]]:
        base = _engine_key(row)
        low, high = span.names(base)
        found = self._reading(self._engine.scan(low, high, span.back))
        return ((name[len(base) :], value) for name, value in found)

    def oldest(self, store: bytes) -> Iterator[tuple[bytes, int]]:
        begin = self._timed[store]
        high = begin + b"\xff" * 25  # sorts after every possible time and digest
        low, self._oldest[begin] = self._oldest.get(begin, begin), high
        for name, cell in self._reading(self._engine.scan_notes(low, high)):
            self._oldest[begin] = min(name, self._oldest[begin])
            yield cell, split_write_time(name[len(begin) :])[0]

    def _time_notes(self, changes: Mapping[bytes, Value]) -> dict[bytes, Value]:
        """Return the changed notes about the times of entries in timed stores; call this before writing the entries.

        A note's name is a digest of the store, the time, and the key and field of the cell, so that entries of one time
        have an order. Its value is the cell.
        """
        notes: dict[bytes, Value] = {}
        for store, begin in self._timed.items():
            prefix = store_prefix(store.decode())
            cells = [cell for cell in changes if cell.startswith(prefix)]
            if not cells:
                continue
            keys = _engine_keys(cells)
            stored = self._get_all(keys)
            oldest, rest_at = self._oldest.get(begin, begin), len(prefix)
            for cell, key in zip(cells, keys, strict=True):
                rest, value, before = cell[rest_at:], changes[cell], stored.get(key)
                if len(rest) > _MAX_REST_BYTES:
                    rest = rest[:_MAX_REST_BYTES] + _digest(cell)
                if before is not None:
                    notes[begin + before[:TIME_BYTES] + rest] = None
                if value is not None:
                    note = begin + value[:TIME_BYTES] + rest
                    notes[note] = cell
                    if note < oldest:
                        oldest = note
            self._oldest[begin] = oldest
        return notes

    def apply(self, changes: Mapping[bytes, Value], position: int, as_of: float) -> None:
        notes = self._time_notes(changes)
        notes[_FOLDER_NOTE] = json.dumps(self._identity | {"position": position, "as_of": as_of}).encode()
        with self._writing():
            self._engine.write(_by_engine_key(changes), notes)
        self.position, self.as_of = position, as_of

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (EngineFailed, OSError) as error:
            raise Temporary(
                f"state cannot be written to {self._folder}: {error}",
                remedy="free disk space (LMDB stores at most 64 GiB per task); no state is lost: the changelog has it",
            ) from error

    def clear(self) -> None:
        with self._writing():
            self._engine.clear()
        self.position, self.as_of = 0, 0.0

    def sync(self) -> None:
        """Write everything to the disk, so that the next owner can use it after a reboot or on another machine.

        State that cannot be synced is restored from the changelog instead.
        """
        try:
            self._engine.sync()
            if not (self._folder / _DAMAGED).exists():
                _create_marker(self._folder / _SYNCED)
        except (EngineFailed, OSError) as error:
            log.debug("state folder not synced", folder=self._folder, error=str(error))

    def close(self) -> None:
        self._engine.close()
        with contextlib.suppress(OSError):
            os.utime(self._lock)  # tells `clean_up` that the folder was in use until now
        os.close(self._lock)


def _create_marker(file: Path) -> None:
    with file.open("wb") as opened:
        os.fsync(opened.fileno())
    _sync_folder(file.parent)


def _remove_marker(file: Path) -> bool:
    """Remove the file and sync the folder, and return whether the file existed."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    _sync_folder(file.parent)
    return True


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _replace_engine(path: Path, engine: type[Engine], memory_bytes: int) -> Engine:
    """Open a new engine in place of one that cannot be read, and delete the old one afterwards.

    If the new engine cannot be opened either, for example because too many files are open, the old values are not the
    cause and are kept. Raises EngineFailed.
    """
    old = path.with_suffix(".old")
    if path.exists():
        path.rename(old)
    try:
        made = engine(path, memory_bytes)
    except EngineFailed:
        shutil.rmtree(path, ignore_errors=True)
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return made


def _engine_key(cell: bytes) -> bytes:
    """Return an engine's key for a cell. A long row name is replaced by its hash, after a byte with which no store's
    name begins.
    """
    if len(cell) <= _MAX_ROW_BYTES or (end := row_length(cell)) <= _MAX_ROW_BYTES:
        return cell
    return b"\xff" + hashlib.sha256(cell[:end]).digest() + cell[end:]


def _engine_keys(cells: list[bytes]) -> list[bytes]:
    return cells if _are_short(cells) else list(map(_engine_key, cells))


def _by_engine_key(changes: Mapping[bytes, Value]) -> Mapping[bytes, Value]:
    return changes if _are_short(changes) else {_engine_key(cell): value for cell, value in changes.items()}


def _are_short(cells: Iterable[bytes]) -> bool:
    """Return whether each cell is its own engine's key."""
    return max(map(len, cells), default=0) <= _MAX_ROW_BYTES


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16).digest()


def folder_of(state_dir: str, app_id: str) -> Path | None:
    """Return the folder of an App below eos.state.dir; None: state is kept in memory. Raise ConfigurationError."""
    try:
        return Path(state_dir).expanduser() / app_id if state_dir else None
    except RuntimeError as error:  # no HOME, and a user that is not in /etc/passwd
        raise ConfigurationError(
            f"eos.state.dir={state_dir} cannot be found: this user has no home folder", remedy="set it, or HOME"
        ) from error


def check_folder(folder: Path) -> None:
    """Create the folder if it is missing. Raise ConfigurationError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"eos.state.dir={folder} cannot be written: {error.strerror}") from error


def _acquire_folder(base: Path, task: str, any_folder: bool) -> tuple[Path, int] | None:
    """Return a folder of the task and its lock, or None if another process has the lock. The end of the process
    releases the lock."""
    existing = [folder for folder in base.glob(f"{glob.escape(task)}.*") if folder.suffix[1:].isdecimal()]
    new = next(name for number in itertools.count() if (name := base / f"{task}.{number}") not in existing)
    for folder in [*sorted(existing, key=_written_at, reverse=True), new]:
        folder.mkdir(parents=True, exist_ok=True)
        if (lock := _try_lock(folder)) is not None:
            return folder, lock
        if not any_folder:
            break
    return None


def _try_lock(folder: Path) -> int | None:
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
    """Delete and return the folders of tasks that no process has used for `unused_s` seconds.

    Their partitions have moved to other workers, and the folders fall further behind their changelogs.
    """
    deleted: list[Path] = []
    for lock in base.glob("*/lock"):
        folder = lock.parent
        try:
            if now - max(lock.stat().st_mtime, _written_at(folder)) < unused_s:
                continue
            if (lock_fd := _try_lock(folder)) is None:
                continue
            shutil.rmtree(folder)
            os.close(lock_fd)
            deleted.append(folder)
        except OSError as error:
            log.debug("state folder not deleted", folder=folder, error=str(error))
    return deleted


def _written_at(folder: Path) -> float:
    try:
        return max((file.stat().st_mtime for file in folder.glob("*/*")), default=0.0)
    except OSError:
        return 0.0  # another process is writing or deleting it


def _boot_id() -> str:
    """Return the machine's boot id, or a random one if the machine does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
