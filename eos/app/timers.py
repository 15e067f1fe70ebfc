"""Defines the timers of a function: what it sets by its record's key and a name, and what its timer functions get.

A timer is an entry of the task's state (eos/app/cells.py): its field is the timer's name, its value the due time. It is
kept and restored like all other state. eos/state/timer_index.py finds due timers, eos/engine/handling.py fires them: it
hands each one to its function as a record (`record_of`), so that results, error policies and dead letters are the same
as for records.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple, Protocol, overload

from eos.app.cells import CLOCK_TIMERS, EVENT_TIMERS, decode_key, split_suffix, store_prefix
from eos.app.windows import EPOCH, Window, from_ms
from eos.errors import ConfigurationError, IllegalState
from eos.records import Header, Record

NEVER: Final = 1 << 63
"""A time in milliseconds that is never reached."""
_MS: Final = timedelta(milliseconds=1)
_DUE: Final = struct.Struct(">Q")
_MAX_NAME_BYTES: Final = 100
_END_OF_DATES: Final = 253_402_300_800_000  # the year 10,000 in milliseconds
_PREFIXES: Final = {False: store_prefix(EVENT_TIMERS), True: store_prefix(CLOCK_TIMERS)}


def to_ms(time: object, what: str) -> int:
    """Return a time in milliseconds since the epoch. Raise TypeError or ValueError with `what`, a noun phrase."""
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise ValueError(f"{what} has no time zone: {time!r}. Add one, for example tzinfo=timezone.utc")
        return (time - EPOCH) // _MS
    if type(time) is not int:
        raise TypeError(f"{what} must be a datetime with a time zone, or milliseconds since the epoch, not {time!r}")
    return time


class Timer(NamedTuple):
    """Describes a timer that fires.

    `due_ms` and `now_ms` are milliseconds since the epoch. `now_ms` is the present time of the task, or of the clock
    for a timer that was set with clock=True. After a gap in the input it can be much later than `due_ms`.
    """

    key: bytes
    name: str
    due_ms: int
    now_ms: int

    @property
    def due(self) -> datetime:
        """Return the due time as a datetime in UTC."""
        return from_ms(self.due_ms)


class TimersDue(Exception):
    """Interrupts a function's records: timers are due before the next record, which moves the time to `now_ms`."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        self.now_ms = now_ms


class TaskClock(Protocol):
    """Defines the part of a task that timers use."""

    time_ms: int

    def clock_ms(self) -> int:
        """Return the wall clock's time in milliseconds since the epoch."""

    def due_ms(self, cell: bytes) -> int | None:
        """Return when this timer is due; None if it is not set."""

    def set_timer(self, cell: bytes, due_ms: int | None) -> None:
        """Set the timer of this cell, or clear it (None) if it is set."""


class TimerQueue(Protocol):
    """Holds the timers of a task in order (eos/state/timer_index.py)."""

    next_due: int
    least_set: int

    def due(self, until_ms: int, most: int) -> list[tuple[int, bytes]]: ...


def timer_cell(clock: bool, suffix: bytes, name: bytes) -> bytes:
    """Return the cell of a timer; `suffix` is the part of a row's name that comes from the key."""
    return _PREFIXES[clock] + suffix + name


def encode_due(due_ms: int) -> bytes:
    return _DUE.pack(due_ms)


def decode_due(value: bytes) -> int:
    due_ms: int = _DUE.unpack_from(value)[0]
    return due_ms


class Timers:
    """Sets and clears the timers of the record's key, each by its name.

    `@app.on_timer(function, name)` decorates the function that runs when the timer is due. A key has one timer of each
    name: setting it again moves it. As with state, a change counts only if the function returns. Do not keep the
    object: it raises IllegalState once its function has returned.
    """

    __slots__ = ("_base_ms", "_changes", "_in_timer_function", "_is_open", "_names", "_suffix", "_task")

    def __init__(
        self, names: Collection[str], task: TaskClock, suffix: bytes, base_ms: int, in_timer_function: bool
    ) -> None:
        """Create the timers of one key.

        `base_ms`: the time from which `after=` counts. `in_timer_function`: whether the timers are passed to a timer
        function. Then `base_ms` is the due time of the timer that fired.
        """
        self._names, self._suffix, self._base_ms, self._in_timer_function = names, suffix, base_ms, in_timer_function
        self._task, self._is_open = task, True
        self._changes: dict[str, tuple[bool, int] | None] = {}

    def set(
        self, name: str, *, at: datetime | int | None = None, after: timedelta | None = None, clock: bool = False
    ) -> None:
        """Set the timer of this name, `at` a time or `after` a duration.

        The time is event time: the timer fires when the records of its partition reach it. With `clock` it is the wall
        clock's time. `at`: a datetime with a time zone, or milliseconds since the epoch. `after` counts from the
        record's time, or from now with `clock`. In a timer function it counts from the timer's due time, in whole steps
        up to a time that is still to come: after a gap, a periodic timer fires once and keeps its rhythm.

        A time that has passed fires the timer in the same transaction. Raises TypeError, ValueError, and
        ConfigurationError for a name without a timer function.
        """
        task = self._open()
        self._check_name(name)
        if (at is None) == (after is None):
            raise TypeError(f"the timer {name} needs one of at= and after=")
        due_ms = self._due_after(task, name, after, clock) if at is None else to_ms(at, f"at= of the timer {name}")
        if due_ms >= NEVER:
            raise ValueError(f"the timer {name} is due {due_ms} ms after the epoch, which is too late")
        self._changes[name] = clock, max(due_ms, 0)

    def _due_after(self, task: TaskClock, name: str, after: object, clock: bool) -> int:
        if not isinstance(after, timedelta):
            raise TypeError(f"after= of the timer {name} must be a timedelta, not {after!r}")
        step = after // _MS
        if step < 0 or (step == 0 and self._in_timer_function):
            least = (
                "at least a millisecond, or the timer would fire forever" if self._in_timer_function else "not negative"
            )
            raise ValueError(f"after= of the timer {name} is {after}: it must be {least}")
        if self._in_timer_function:
            passed = (task.clock_ms() if clock else task.time_ms) - self._base_ms
            return self._base_ms + step * max(1, passed // step + 1)
        return (task.clock_ms() if clock else self._base_ms) + step

    def clear(self, name: str) -> None:
        """Clear the timer of this name, if it is set."""
        self._open()
        self._check_name(name)
        self._changes[name] = None

    def _check_name(self, name: object) -> None:
        if type(name) is not str:
            raise TypeError(f"the name of a timer must be a str, not {name!r}")
        if name not in self._names:
            known = f"there are timer functions for {', '.join(sorted(self._names))}" if self._names else "it has none"
            raise ConfigurationError(
                f"the timer {name!r} has no function: {known}",
                remedy=f'decorate one with @app.on_timer(function, "{name}")',
            )

    def _open(self) -> TaskClock:
        if not self._is_open:
            raise IllegalState(
                "timers were used after their function had returned",
                remedy="use them only while the function handles the record, and do not keep them",
            )
        return self._task

    # ---- the interface of a state (eos/app/state.py) ----------------------------------------------------------------

    _is_stored: Final = False

    def _encode(self) -> None: ...

    def _close(self) -> None:
        self._is_open = False

    def _write(self, _: object) -> None:
        for name, change in self._changes.items():
            for clock in (False, True):
                cell = timer_cell(clock, self._suffix, name.encode())
                self._task.set_timer(cell, change[1] if change is not None and change[0] is clock else None)


def check_timer_name(name: object) -> str:
    """Return the name of a timer. Raise ConfigurationError."""
    if type(name) is not str or not 0 < len(name.encode(errors="replace")) <= _MAX_NAME_BYTES or "\0" in name:
        raise ConfigurationError(
            f"the name of a timer must be a str of 1 to {_MAX_NAME_BYTES} bytes, without a zero byte, not {name!r}"
        )
    return name


# ---- timers that fire ------------------------------------------------------------------------------------------------


class DueTimer(NamedTuple):
    """Names a timer that is due. `suffix`: the part of the rows' names that comes from the key under which the state is
    kept. If the function has windows, this is the window's key."""

    cell: bytes
    due_ms: int
    suffix: bytes
    key: bytes
    name: str
    clock: bool
    window: Window | None
    session_id_ms: int | None
    """The id of the session that `window` is; None for other windows and timers."""


FindWindow = Callable[[bytes], tuple[Window, int | None]]
"""Returns the window that a timer closes, given the stored key, and the session's id if it is a session window."""


class _TimerHeaders(Sequence[Header]):
    """Gives the headers of a record that stands for a timer, for its dead letter. They are made when they are read."""

    __slots__ = ("due",)

    def __init__(self, due: DueTimer) -> None:
        self.due = due

    def _headers(self) -> list[Header]:
        due_at: Header = ("eos-timer-due", b"%d" % self.due.due_ms)
        if (window := self.due.window) is None:
            return [("eos-timer", self.due.name.encode()), due_at]
        return [due_at, ("eos-window-start", b"%d" % window.start_ms), ("eos-window-end", b"%d" % window.end_ms)]

    def __len__(self) -> int:
        return len(self._headers())

    @overload
    def __getitem__(self, at: int) -> Header: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Header]: ...

    def __getitem__(self, at: int | slice) -> Header | Sequence[Header]:
        return self._headers()[at]


_FIRST_ID: Final = -2


def record_of(topic: str, partition: int, cell: bytes, due_ms: int, find_window: FindWindow | None) -> Record:
    """Return the record that stands for a due timer: its function, error policy and dead letter get it.

    Its key is the timer's, its timestamp the due time, and its offset a negative number that identifies the timer.
    `find_window`: None if the timer's function has no windows.
    """
    clock = cell.startswith(_PREFIXES[True])
    suffix, name = split_suffix(cell, _PREFIXES[clock])
    key, window, session_id_ms = decode_key(suffix), None, None
    if find_window is not None:
        window, session_id_ms = find_window(key)
        key = window.key
    due = DueTimer(cell, due_ms, suffix, key, name.decode(), clock, window, session_id_ms)
    timer_id = int.from_bytes(hashlib.blake2b(cell + encode_due(due_ms), digest_size=7).digest())
    timestamp = due_ms if window is None else window.end_ms - 1
    return Record(topic, partition, _FIRST_ID - timer_id, timestamp, key, None, _TimerHeaders(due))


def due_of(record: Record) -> DueTimer | None:
    """Return the timer that this record represents, or None if the record was read from a topic."""
    return record.headers.due if record.offset <= _FIRST_ID and isinstance(record.headers, _TimerHeaders) else None


def timer_of(record: Record) -> DueTimer:
    """Return the timer that the record of a timer function represents."""
    due: DueTimer = record.headers.due  # type: ignore[attr-defined]
    return due


def describe(due: DueTimer) -> str:
    """Return the name of a timer for messages."""
    at = due.due_ms if due.due_ms >= _END_OF_DATES else from_ms(due.due_ms).isoformat(timespec="milliseconds")
    if due.window is not None:
        return f"the window of {due.key!r} that closes at {at}"
    return f"the timer {due.name} of {due.key!r} that is due at {at}"
