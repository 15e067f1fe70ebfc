"""Store identity pairs in a journal, so that clients between two transactions survive a restart of the shim.

The journal is a file of lines: a pair after each change (an init, an end), and the transactional.id of each transaction
that opened. An id whose last line is an opened transaction is forgotten at the next start, which fences its client, as
without a journal. Lines are written before the client or the broker sees the change, so they survive a crash of the
process. There is no fsync: if the machine crashes, the journal is older than the broker's state, and the broker rejects
an older identity. The journal must never delay traffic: after a failed write it is disabled with a warning and emptied.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from eos.errors import ConfigurationError
from eos.shim import events
from eos.shim.protect.machine import Pair

# A line is either a pair or the name of a transactional.id whose transaction opened.
_LINE = msgspec.json.Decoder(Pair | str)
_MOST_LINES_PER_PAIR = 4
_FEW_LINES = 100_000


class Journal:
    """Open a journal. Raises ConfigurationError if the file is unusable, used by another shim, or not a journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pairs: dict[str, bytes] = {}
        self._lines = 0
        try:
            # The lock is a separate file, because the journal file is replaced when it is shortened.
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"the journal {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.restored_pairs = self._read()
            self._file = self._rewrite()
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigurationError(f"the journal {path} is in use by another shim") from error
        except OSError as error:
            os.close(self._lock)
            raise ConfigurationError(f"the journal {path} cannot be used: {error.strerror}") from error
        except ConfigurationError:
            os.close(self._lock)
            raise

    def write_opened(self, name: str) -> None:
        """Record that the transaction of `name` is about to open upstream."""
        self._pairs.pop(name, None)
        line = _line(name)
        if line is not None:
            self._write(line)

    def write_pair(self, pair: Pair) -> None:
        line = _line(pair)
        if line is not None:
            self._pairs[pair.name] = line
            self._write(line)

    def close(self) -> None:
        """Close the files and keep their contents."""
        for number in (self._file, self._lock):
            if number >= 0:
                os.close(number)
        self._file = self._lock = -1

    def _read(self) -> list[Pair]:
        found: dict[str, Pair] = {}
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                entry = _LINE.decode(line)
            except msgspec.MsgspecError as error:
                if number == len(lines) and not line.endswith(b"\n"):
                    break  # the machine stopped in the middle of a line
                raise ConfigurationError(
                    f"the journal {self._path} cannot be read at line {number} ({error}): remove it, "
                    "and clients will be fenced once"
                ) from error
            if isinstance(entry, str):
                found.pop(entry, None)
            else:
                found[entry.name] = entry
        self._pairs = {name: msgspec.json.encode(pair) + b"\n" for name, pair in found.items()}
        return list(found.values())

    def _rewrite(self) -> int:
        """Replace the file by one with only the current pairs, and return its descriptor."""
        part = Path(f"{self._path}.part")
        number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(number, self._pairs.values())
            part.replace(self._path)
        except OSError:
            os.close(number)
            raise
        self._lines = len(self._pairs)
        return number

    def _write(self, line: bytes) -> None:
        if self._file < 0:
            return
        try:
            _write_all(self._file, [line])
            self._lines += 1
            if self._lines > _FEW_LINES + _MOST_LINES_PER_PAIR * len(self._pairs):
                old, self._file = self._file, self._rewrite()
                os.close(old)
        except OSError as error:
            self._disable(error)

    def _disable(self, error: OSError) -> None:
        """Disable and empty the journal, because a journal with missing lines must not be read again."""
        events.warning(
            "journal disabled",
            effect="a restart will fence every client",
            file=self._path,
            reason=error.strerror or error,
        )
        try:
            os.ftruncate(self._file, 0)
        except OSError as second:
            events.warning(
                "journal truncation failed", remedy="remove it before a restart", file=self._path, reason=second
            )
        os.close(self._file)
        self._file = -1


def _write_all(number: int, lines: Iterable[bytes]) -> None:
    data = memoryview(b"".join(lines))
    while data:
        data = data[os.write(number, data) :]


def _line(entry: Pair | str) -> bytes | None:
    """Return the line of an entry. Return None for a name that is not text: brokers allow such names, but JSON cannot
    contain them."""
    try:
        return msgspec.json.encode(entry) + b"\n"
    except UnicodeEncodeError:
        return None
