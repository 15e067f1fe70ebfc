"""Defines windows: spans of event time for which a function keeps state of its own per key.

A window's state is stored under a key of its own, the record's key followed by the window's start, and a timer closes
it (eos/app/timers.py). This module must never do I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from eos.errors import ConfigurationError

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_START: Final = struct.Struct(">q")
_MAX_WINDOWS: Final = 1_000  # of one record


def from_ms(time_ms: int) -> datetime:
    """Return a time in milliseconds since the epoch as a datetime in UTC."""
    return EPOCH + time_ms * _MS


class Window(NamedTuple):
    """Describes a window of one key, from its start (included) to its end (excluded).

    Both are in milliseconds since the epoch.
    """

    start_ms: int
    end_ms: int
    key: bytes

    @property
    def start(self) -> datetime:
        """Return the start as a datetime in UTC."""
        return from_ms(self.start_ms)

    @property
    def end(self) -> datetime:
        """Return the end as a datetime in UTC."""
        return from_ms(self.end_ms)


def windowed_key(key: bytes, start_ms: int) -> bytes:
    """Return the key under which the state of a window is stored."""
    return key + _START.pack(start_ms)


def split_windowed_key(stored: bytes) -> tuple[bytes, int]:
    """Return the record's key and the start of the window."""
    return stored[: -_START.size], _START.unpack(stored[-_START.size :])[0]


@dataclass(frozen=True)
class FixedWindows:
    """Defines windows of one size at regular intervals: tumbling windows do not overlap, hopping windows do."""

    size_ms: int
    every_ms: int
    offset_ms: int = 0

    def starts(self, time_ms: int) -> list[int]:
        """Return the starts of the windows that contain this time, the earliest first."""
        last = time_ms - (time_ms - self.offset_ms) % self.every_ms
        if self.size_ms == self.every_ms:
            return [last]
        return list(range(last, time_ms - self.size_ms, -self.every_ms))[::-1]

    def __str__(self) -> str:
        offset = f", offset {self.offset_ms * _MS}" if self.offset_ms else ""
        if self.size_ms == self.every_ms:
            return f"tumbling window of {self.size_ms * _MS}{offset}"
        return f"hopping window of {self.size_ms * _MS} every {self.every_ms * _MS}{offset}"


class Session(NamedTuple):
    """Holds an open session window of a key: the times of its first and its last record.

    `id_ms`: the time of the record that opened it, under which its state is stored; this time stays the same when an
    earlier record moves `first_ms`.
    """

    id_ms: int
    first_ms: int
    last_ms: int


_SESSION = struct.Struct(">qqq")


def encode_sessions(sessions: list[Session]) -> bytes | None:
    return b"".join(_SESSION.pack(*session) for session in sessions) or None


def decode_sessions(value: bytes | None) -> list[Session]:
    return [Session(*found) for found in _SESSION.iter_unpack(value or b"")]


@dataclass(frozen=True)
class SessionWindows:
    """Defines windows of records that follow each other within a gap; each ends one gap after its last record."""

    gap_ms: int

    def joins(self, session: Session, time_ms: int) -> bool:
        """Return whether a record of this time belongs to the session."""
        return session.first_ms - self.gap_ms < time_ms < session.last_ms + self.gap_ms

    def __str__(self) -> str:
        return f"session window with a gap of {self.gap_ms * _MS}"


Windows = FixedWindows | SessionWindows


def tumbling(size: timedelta | None = None, *, offset: timedelta = timedelta(0), **parts: float) -> FixedWindows:
    """Return windows that follow each other without gaps: `tumbling(hours=1)`, or `tumbling(timedelta(hours=1))`.

    They are aligned to 1970-01-01 00:00 UTC, moved by `offset`: days of a zone one hour ahead of UTC are
    `tumbling(days=1, offset=timedelta(hours=-1))`. An offset is fixed and does not follow daylight saving time. `parts`
    are those of timedelta. Raises ConfigurationError.
    """
    size_ms = _to_ms("tumbling()", "size", _duration("tumbling()", size, parts))
    return FixedWindows(size_ms, size_ms, _offset_ms("tumbling()", offset, size_ms))


def hopping(size: timedelta, every: timedelta, *, offset: timedelta = timedelta(0)) -> FixedWindows:
    """Return overlapping windows of one size. A new window begins every `every`.

    A record belongs to size / every windows, at most 1,000, and its function is called for each of them. `offset`: as
    for `tumbling`. Raises ConfigurationError.
    """
    size_ms, every_ms = _to_ms("hopping()", "size", size), _to_ms("hopping()", "every", every)
    if every_ms > size_ms:
        raise ConfigurationError(f"hopping() of {size} every {every} has gaps: every= must be at most the size")
    if -(-size_ms // every_ms) > _MAX_WINDOWS:
        raise ConfigurationError(
            f"hopping() of {size} every {every} puts each record into {-(-size_ms // every_ms):,} windows, but at most "
            f"{_MAX_WINDOWS:,} are allowed",
            remedy="choose larger steps, or sum up tumbling windows in a second function",
        )
    return FixedWindows(size_ms, every_ms, _offset_ms("hopping()", offset, every_ms))


def sessions(gap: timedelta | None = None, **parts: float) -> SessionWindows:
    """Return windows that end when a key has had no record for a gap: `sessions(minutes=30)`.

    A record that comes exactly one gap after the last one begins another window. A record between two windows that is
    less than a gap away from both merges them. Raises ConfigurationError.
    """
    return SessionWindows(_to_ms("sessions()", "gap", _duration("sessions()", gap, parts)))


def _duration(of: str, given: timedelta | None, parts: dict[str, float]) -> object:
    if (given is None) == (not parts):
        raise ConfigurationError(f"{of} needs one duration: for example {of[:-1]}hours=1)")
    try:
        return given if given is not None else timedelta(**parts)
    except (TypeError, OverflowError) as error:
        raise ConfigurationError(f"{of} cannot be made of {parts}: {error}") from error


def _to_ms(of: str, what: str, duration: object) -> int:
    if not isinstance(duration, timedelta) or duration < _MS:
        raise ConfigurationError(f"{what} of {of} is {duration!r}: it must be a timedelta of at least a millisecond")
    if duration % _MS:
        raise ConfigurationError(f"{what} of {of} is {duration!r}: it must be a whole number of milliseconds")
    return duration // _MS


def _offset_ms(of: str, offset: object, every_ms: int) -> int:
    if not isinstance(offset, timedelta):
        raise ConfigurationError(f"offset= of {of} is {offset!r}: it must be a timedelta")
    return offset // _MS % every_ms
