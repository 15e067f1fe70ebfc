"""Describes how a function uses time: its timers and windows, and where its event time comes from. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from eos.app.state import Store
from eos.app.windows import FixedWindows, SessionWindows, Windows
from eos.errors import ConfigurationError
from eos.records import is_topic_name

_MS: Final = timedelta(milliseconds=1)


@dataclass(frozen=True)
class Timing:
    """Holds what the decorator of a function says about time; durations are in milliseconds."""

    windows: Windows | None = None
    grace_ms: int = 0
    time: Callable[[Any], Any] | None = None
    """Returns the event time of what the function gets; None: the record's timestamp."""
    idle_ms: int | None = None
    """After this long without a record the time of a partition follows the clock."""
    ahead_ms: int | None = None
    """A record further ahead of the clock fails."""
    late: str | None = None
    """The topic of records whose windows are all closed; None: they are only counted."""
    once: Callable[[Any], Any] | None = None
    within_ms: int = 0
    duplicates: str | None = None


NO_TIMING: Final = Timing()


def uses_time(stores: tuple[Store, ...], timing: Timing) -> bool:
    """Return whether a function needs the time of its task: it has timers, windows or deduplication."""
    return timing != NO_TIMING or any(not store.is_kept for store in stores)


def make_timing(
    function: str,
    *,
    window: Windows | None,
    grace: timedelta | None,
    time: Callable[[Any], Any] | None,
    ahead: timedelta | None,
    late: str | None,
) -> Timing:
    """Return the timing of a function, as its decorator gives it. Raise ConfigurationError."""
    if window is None:
        if given := [name for name, value in (("grace=", grace), ("late=", late)) if value is not None]:
            raise ConfigurationError(f"{function} has {given[0]} but no window=")
    elif not isinstance(window, FixedWindows | SessionWindows):
        raise ConfigurationError(
            f"window= of {function} is {window!r}: use eos.tumbling(), eos.hopping() or eos.sessions()"
        )
    elif grace is None:
        raise ConfigurationError(
            f"{function} has window= without grace=: say how long a window waits for late records after its end",
            remedy="for example grace=timedelta(minutes=10), or timedelta(0) to close each window at its end",
        )
    if time is not None and not callable(time):
        raise ConfigurationError(f"time= of {function} is {time!r}: it must be a function of the value")
    if late is not None and not is_topic_name(late):
        raise ConfigurationError(f"late= of {function} is {late!r}, which is not a topic name")
    return Timing(
        window,
        _duration_ms(function, "grace", grace, least=0) or 0,
        time,
        ahead_ms=_duration_ms(function, "ahead", ahead, least=0),
        late=late,
    )


def _duration_ms(function: str, name: str, duration: timedelta | None, least: int) -> int | None:
    if duration is None:
        return None
    if not isinstance(duration, timedelta) or duration < least * _MS:
        kind = "that is not negative" if least == 0 else "of at least a millisecond"
        raise ConfigurationError(f"{name}= of {function} is {duration!r}: it must be a timedelta {kind}")
    return duration // _MS
