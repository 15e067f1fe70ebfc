"""Runs functions that use time: functions of one record with timers or windows, and the functions of due timers.

Owns the order of a record's steps: find its time, let due timers fire first (TimersDue), move the task's time, call the
function, write its changes. The time moves even if the function fails: timers that are due have fired by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, cast

import msgspec

from eos.app.cells import OPEN_SESSIONS, SEEN_IDS, encode_key, store_prefix
from eos.app.expiry import UnexpiredCells, add_write_time, unexpired
from eos.app.layers import Layer
from eos.app.results import Normalise
from eos.app.routes.feeds import make_feed, one_by_one
from eos.app.routes.single import UnusualOutputs, as_sends, make_finish, make_hot_loop_finish
from eos.app.state import Cells, TaskCells
from eos.app.stores import Finish, Stores
from eos.app.timers import DueTimer, FindWindow, Timers, TimersDue, timer_cell, timer_of, to_ms
from eos.app.timing import Timing
from eos.app.windows import (
    FixedWindows,
    Session,
    SessionWindows,
    Window,
    decode_sessions,
    encode_sessions,
    split_windowed_key,
    windowed_key,
)
from eos.encoding.serde import Decode, encode
from eos.hotloop.python import Target
from eos.records import Record, Send, readable_headers

_SEEN_IDS: Final = store_prefix(SEEN_IDS)
_OPEN_SESSIONS: Final = store_prefix(OPEN_SESSIONS)
_NOTHING: Final = UnusualOutputs()
_CLOSINGS: Final = timer_cell(False, b"", b"")  # the prefix of the timers that close windows


class Tally:
    """Counts late records and duplicates until the engine takes the counts."""

    late = duplicates = 0

    def take(self) -> tuple[int, int]:
        """Return the counts and begin again at 0."""
        taken = self.late, self.duplicates
        self.late = self.duplicates = 0
        return taken


class Caller:
    """Calls a function with the states and timers of one key.

    `timers_at`: the position of the parameter annotated Timers among the states; None without one. `names`: the timers
    that have a function. `in_timer_function`: see Timers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        stores: Stores,
        timers_at: int | None,
        names: Collection[str],
        in_timer_function: bool,
    ) -> None:
        self._ttls, self._names, self._in_timer_function = stores.ttls, names, in_timer_function
        self.function = function
        self.is_stateless = not stores.kinds and timers_at is None
        """Whether the function has neither states nor timers."""
        self._has_timers = timers_at is not None
        self._call = stores.caller(function if timers_at is None else _taking_timers(function, timers_at))
        self.call: Callable[[TaskCells, bytes, Record, Any, Finish], tuple[Any, Sequence[Any]]] = (
            self._call_at_time if self._ttls or self._has_timers else self._call
        )
        """Returns the outputs, and the states and timers with unwritten changes. The arguments are those of
        `Stores.caller`, with the task as its cells."""

    def _call_at_time(
        self, task: TaskCells, suffix: bytes, record: Record, given: Any, finish: Finish
    ) -> tuple[Any, Sequence[Any]]:
        return self.call_on(task, task, suffix, record, given, finish)

    def call_on(
        self, cells: Cells, task: TaskCells, suffix: bytes, record: Record, given: Any, finish: Finish
    ) -> tuple[Any, Sequence[Any]]:
        """Do what `call` does, with `cells` in place of the task's."""
        if self._ttls:
            cells = UnexpiredCells(cells, self._ttls, task.time_ms)
        if not self._has_timers:
            return self._call(cells, suffix, record, given, finish)
        timers = Timers(self._names, task, suffix, record.timestamp, self._in_timer_function)
        try:
            outputs, states = self._call(cells, suffix, record, (given, timers), finish)
        finally:
            timers._close()
        return outputs, (*states, timers)

    def write(self, states: Sequence[Any], task: TaskCells) -> None:
        cells: Cells = UnexpiredCells(task, self._ttls, task.time_ms) if self._ttls else task
        for one in states:
            one._write(cells)


def _taking_timers(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Return the function with its timers, which are parameter `at` after the first, in a pair with the first."""

    def call(pair: tuple[Any, Timers], *states: Any) -> Any:
        given, timers = pair
        return function(given, *states[:at], timers, *states[at:])

    return call


class TimedFunction:
    """Runs a function of one record that has timers or windows."""

    def __init__(
        self,
        name: str,
        caller: Caller,
        stores: Stores,
        timing: Timing,
        merge: Callable[..., object] | None,
        decode: Decode | None,
        value_of: Decode | None,
        finish: Callable[[Any], Any] | None,
        normalise: Normalise,
        target: Target | None,
    ) -> None:
        """Compile the function. `decode` decodes its value, and `value_of` decodes the value for time= and once=."""

        made = make_finish(normalise, finish)
        self._name, self._stores, self._timing = name, stores, timing
        self._caller, self._call, self._function = caller, caller.call, caller.function
        self._task_of = stores.task_of
        self._decode, self._make_outputs = decode, made
        # None: the functions of `timing` get the value that the main function gets.
        self._value_of = None if value_of is decode else value_of
        # The hot loop gives outputs the record's timestamp, which is wrong with time=.
        usual = make_hot_loop_finish(made, finish is not None, None if timing.time is not None else target)
        self._merge, self._once = merge, timing.once
        self._checks_event_time = timing.time is not None or timing.ahead_ms is not None
        if isinstance(timing.windows, FixedWindows):
            self._starts, self._stays_ms = timing.windows.starts, timing.windows.size_ms + timing.grace_ms
        self._run = {FixedWindows: self._run_in_windows, SessionWindows: self._run_in_sessions}.get(
            type(timing.windows), self._run_plainly if caller.is_stateless else self._run_by_key
        )
        self.tally = Tally()
        self.outputs: Callable[[Record], Sequence[Send]] = functools.partial(self._handle, made)
        self.feed = make_feed(functools.partial(self._handle, usual), None, target, as_sends)
        self.each = one_by_one(self.outputs)

    def _handle(self, finish: Finish, record: Record) -> Any:
        """Return what `finish` makes of the function's result, or UnusualOutputs."""
        given = record if self._decode is None else self._decode(record.value)
        task, key = self._task_of(record), record.key
        if key is None:
            raise self._stores.key_missing()
        if self._checks_event_time or record.timestamp < 0:
            record = self._with_event_time(record, given, task)
        now_ms = task.at(record.timestamp)
        if task.timers.next_due <= now_ms:
            raise TimersDue(now_ms)
        task.time_ms = now_ms
        if self._once is None:
            return self._run(task, key, record, given, finish)
        found = self._once(self._value_of(record.value) if self._value_of else given)
        cell = _SEEN_IDS + encode_key(found if type(found) is bytes else self._encode_id(found))
        seen = task.get(cell)
        if seen is not None and unexpired(seen, self._timing.within_ms, now_ms) is not None:
            return self._duplicate_outputs(record)
        outputs = self._run(task, key, record, given, finish)
        task.put(cell, add_write_time(now_ms, b""))
        return outputs

    def _encode_id(self, found: object) -> bytes:
        encoded = encode(found)
        if encoded is None:
            raise ValueError(f"once= of {self._name} returned None, which is no id of a record")
        return encoded

    def _duplicate_outputs(self, record: Record) -> UnusualOutputs:
        self.tally.duplicates += 1
        return _unchanged_output(record, self._timing.duplicates)

    def _with_event_time(self, record: Record, given: Any, task: TaskCells) -> Record:
        """Return the record with its event time. Raise ValueError if it has none, or is too far ahead of the clock."""
        timing, time_ms = self._timing, record.timestamp
        if timing.time is not None:
            found = timing.time(self._value_of(record.value) if self._value_of else given)
            time_ms = to_ms(found, f"the result of time= of {self._name}")
            record = msgspec.structs.replace(record, timestamp=time_ms)
        if time_ms < 0:
            raise ValueError(
                f"the record has no timestamp, and {self._name} needs its time: time= can take it from the value"
                if timing.time is None
                else f"time= of {self._name} returned {time_ms} ms, a time before 1970"
            )
        if timing.ahead_ms is not None and time_ms > (limit := task.clock_ms() + timing.ahead_ms):
            raise ValueError(f"the record's time is {time_ms - limit} ms further ahead of the clock than ahead= allows")
        return record

    def _run_plainly(self, task: TaskCells, key: bytes, record: Record, given: Any, finish: Finish) -> Any:
        """Call a function without states and timers."""
        return finish(record, self._function(given))

    def _run_by_key(self, task: TaskCells, key: bytes, record: Record, given: Any, finish: Finish) -> Any:
        outputs, states = self._call(task, encode_key(key), record, given, finish)
        self._caller.write(states, task)
        return outputs

    def _run_in_windows(self, task: TaskCells, key: bytes, record: Record, given: Any, finish: Finish) -> Any:
        """Call the function for each window of the record that is not closed."""
        stays_ms = self._stays_ms
        starts = self._starts(record.timestamp)
        if starts[0] + stays_ms <= task.time_ms:
            starts = [start for start in starts if start + stays_ms > task.time_ms]
            if not starts:
                return self._late_outputs(record)
        if len(starts) == 1:
            suffix = encode_key(windowed_key(key, starts[0]))
            outputs, states = self._call(task, suffix, record, given, finish)
            self._write_window(task, suffix, states, starts[0] + stays_ms)
            return outputs
        suffixes = [encode_key(windowed_key(key, start)) for start in starts]
        calls = [self._call(task, suffix, record, given, self._make_outputs) for suffix in suffixes]
        for start, suffix, (_, states) in zip(starts, suffixes, calls, strict=True):
            self._write_window(task, suffix, states, start + stays_ms)
        return UnusualOutputs(send for outputs, _ in calls for send in outputs)

    def _write_window(self, task: TaskCells, suffix: bytes, states: Sequence[Any], closes_ms: int) -> None:
        self._caller.write(states, task)
        for one in states:
            if one._is_stored:
                return  # the window is open already, so its timer is set
        cell = _CLOSINGS + suffix
        if task.get(cell) is None:
            task.add_timer(cell, closes_ms)

    def _run_in_sessions(self, task: TaskCells, key: bytes, record: Record, given: Any, finish: Finish) -> Any:
        """Merge the sessions that the record joins, then call the function for the resulting window."""
        timing, time_ms = self._timing, record.timestamp
        windows = cast("SessionWindows", timing.windows)
        stays_ms = windows.gap_ms + timing.grace_ms
        cell = _OPEN_SESSIONS + encode_key(key)
        sessions = decode_sessions(task.get(cell))
        joined = [session for session in sessions if windows.joins(session, time_ms)]
        if not joined and time_ms + stays_ms <= task.time_ms:
            return self._late_outputs(record)
        session, *merged = joined or [Session(time_ms, time_ms, time_ms)]
        suffixes = [encode_key(windowed_key(key, one.id_ms)) for one in (session, *merged)]
        cells = Layer(task) if merged else task
        changes = [self._merge_states(cells, suffixes[0], other) for other in suffixes[1:]]
        outputs, states = self._caller.call_on(cells, task, suffixes[0], record, given, finish)
        for changed in (*changes, states):
            self._caller.write(changed, task)
        for other in suffixes[1:]:
            self._stores.delete(task, other)
            task.set_timer(timer_cell(False, other, b""), None)
        first_ms = min(time_ms, *(one.first_ms for one in (session, *merged)))
        last_ms = max(time_ms, *(one.last_ms for one in (session, *merged)))
        others = [one for one in sessions if one not in joined]
        task.put(cell, encode_sessions([*others, Session(session.id_ms, first_ms, last_ms)]))
        task.set_timer(timer_cell(False, suffixes[0], b""), last_ms + stays_ms)
        return outputs

    def _merge_states(self, cells: Cells, suffix: bytes, other: bytes) -> list[Any]:
        """Call the user's function with the states of two session windows. Return the changed states of the first."""
        assert self._merge is not None
        into, merged = self._stores.open(cells, suffix), self._stores.open(cells, other)
        try:
            self._merge(*into, *merged)
            for one in into:
                one._encode()
        finally:
            for one in (*into, *merged):
                one._close()
        for one in into:
            one._write(cells)
        return into

    def _late_outputs(self, record: Record) -> UnusualOutputs:
        self.tally.late += 1
        return _unchanged_output(record, self._timing.late)


def _unchanged_output(record: Record, topic: str | None) -> UnusualOutputs:
    """Return the record as an output to a topic; nothing without a topic."""
    if topic is None:
        return _NOTHING
    headers = list(readable_headers(record.headers))
    return UnusualOutputs([(topic, record.value, record.key, -1, record.timestamp, headers)])


def window_finder(timing: Timing, task: TaskCells) -> FindWindow | None:
    """Return the function that finds the windows of a task; None if its function has no windows."""

    def find_fixed(windows: FixedWindows, stored_key: bytes) -> tuple[Window, None]:
        key, start_ms = split_windowed_key(stored_key)
        return Window(start_ms, start_ms + windows.size_ms, key), None

    def find_session(windows: SessionWindows, stored_key: bytes) -> tuple[Window, int]:
        key, id_ms = split_windowed_key(stored_key)
        sessions = decode_sessions(task.get(_OPEN_SESSIONS + encode_key(key)))
        session = next(session for session in sessions if session.id_ms == id_ms)
        return Window(session.first_ms, session.last_ms + windows.gap_ms, key), id_ms

    if isinstance(timing.windows, FixedWindows):
        return functools.partial(find_fixed, timing.windows)
    return None if timing.windows is None else functools.partial(find_session, timing.windows)


class TimerFunction:
    """Runs a timer function, or the function that closes windows, for records that the engine makes from due timers."""

    def __init__(
        self,
        caller: Caller,
        stores: Stores,
        window_stores: Stores,
        give: Callable[[DueTimer, TaskCells], Any],
        finish: Callable[[Any], Any] | None,
        normalise: Normalise,
        target: Target | None,
    ) -> None:
        """Compile the function. `window_stores`: the stores whose entries are deleted with the window."""
        self._caller, self._call, self._window_stores, self._give = caller, caller.call, window_stores, give
        self._task_of = stores.task_of

        made = make_finish(normalise, finish)

        def make_outputs(record: Record, result: Any) -> Sequence[Send]:
            # No warning about a dropped tombstone: a timer has no value.
            return () if result is None else made(record, result)

        usual = make_hot_loop_finish(make_outputs, finish is not None, target)
        self.outputs: Callable[[Record], Sequence[Send]] = functools.partial(self._fire, make_outputs)
        self.feed = make_feed(functools.partial(self._fire, usual), None, target, as_sends)
        self.each = one_by_one(self.outputs)

    def _fire(self, finish: Finish, record: Record) -> Any:
        task, due = self._task_of(record), timer_of(record)
        if task.due_ms(due.cell) != due.due_ms:
            return _NOTHING  # the timer before this one has cleared or moved it
        timers = task.clock_timers if due.clock else task.timers
        if timers.least_set < due.due_ms:
            raise TimersDue(due.due_ms)  # the timer before this one has set a timer that is due earlier than this one
        outputs, states = self._call(task, due.suffix, record, self._give(due, task), finish)
        task.clear_timer(due.cell)
        if due.window is None:
            self._caller.write(states, task)
        else:
            self._delete_window(task, due)
        return outputs

    def discard(self, record: Record) -> None:
        """Clear a timer whose function failed, with the state of its window. The error policy then continues without
        the timer."""
        task, due = self._task_of(record), timer_of(record)
        task.set_timer(due.cell, None)
        if due.window is not None:
            self._delete_window(task, due)

    def _delete_window(self, task: TaskCells, due: DueTimer) -> None:
        self._window_stores.delete(task, due.suffix)
        if due.session_id_ms is not None:
            cell = _OPEN_SESSIONS + encode_key(due.key)
            if (value := task.get(cell)) is not None:
                others = [one for one in decode_sessions(value) if one.id_ms != due.session_id_ms]
                task.put(cell, encode_sessions(others))
