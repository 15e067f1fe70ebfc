"""The journal of identity pairs: what lets clients outlive a restart of the shim between two transactions.

Owns one file of lines: a pair whenever one changed (an init, an end), and the name of each transaction that opened. A
name that was open last is forgotten at the next start, and so its client is fenced, as without a journal. Lines are
written before the client or the broker learns what they say, so they survive the process; there is no fsync: what a
machine loses is older than what its broker knows, and a broker refuses an older identity. It must never hold back
traffic: a file that cannot be written is given up, loudly, and emptied.
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
    """Raises ConfigurationError: the file cannot be used, is another shim's, or is none of ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pairs: dict[str, bytes] = {}
        self._lines = 0
        try:
            # A file of its own is locked: the journal is replaced when it is made shorter.
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"the journal {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.restored = self._read()
            self._file = self._rewritten()
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigurationError(f"the journal {path} is in use by another shim") from error
        except OSError as error:
            os.close(self._lock)
            raise ConfigurationError(f"the journal {path} cannot be used: {error.strerror}") from error
        except ConfigurationError:
            os.close(self._lock)
            raise

    def opened(self, name: str) -> None:
        """The transaction of `name` is about to open upstream."""
        self._pairs.pop(name, None)
        line = _line(name)
        if line is not None:
            self._write(line)

    def pair(self, pair: Pair) -> None:
        line = _line(pair)
        if line is not None:
            self._pairs[pair.name] = line
            self._write(line)

    def close(self) -> None:
        """What is written stays."""
        for number in (self._file, self._lock):
            if number >= 0:
                os.close(number)
        self._file = self._lock = -1

    def _read(self) -> list[Pair]:
        found: dict[str, Pair] = {}
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                said = _LINE.decode(line)
            except msgspec.MsgspecError as error:
                if number == len(lines) and not line.endswith(b"\n"):
                    break  # the machine stopped in the middle of a line
                raise ConfigurationError(
                    f"the journal {self._path} cannot be read at line {number} ({error}): remove it, "
                    "and clients will be fenced once"
                ) from error
            if isinstance(said, str):
                found.pop(said, None)
            else:
                found[said.name] = said
        self._pairs = {name: msgspec.json.encode(pair) + b"\n" for name, pair in found.items()}
        return list(found.values())

    def _rewritten(self) -> int:
        """A file with only the pairs that are known now, in place of the other."""
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
                old, self._file = self._file, self._rewritten()
                os.close(old)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A journal that misses lines must not be read again."""
        events.warning(
            "journal given up: a restart will fence every client", file=self._path, reason=error.strerror or error
        )
        try:
            os.ftruncate(self._file, 0)
        except OSError as second:
            events.warning("journal not emptied: remove it before a restart", file=self._path, reason=second)
        os.close(self._file)
        self._file = -1


def _write_all(number: int, lines: Iterable[bytes]) -> None:
    data = memoryview(b"".join(lines))
    while data:
        data = data[os.write(number, data) :]


def _line(said: Pair | str) -> bytes | None:
    """None where a name is no text, which brokers allow and JSON does not: its client is fenced by a restart."""
    try:
        return msgspec.json.encode(said) + b"\n"
    except UnicodeEncodeError:
        return None
