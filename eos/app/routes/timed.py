"""Runs functions that use time: functions of one record with timers or windows, and the functions of due timers.

Owns the order of a record's steps: find its time, let due timers fire first (TimersDue), move the task's time, call the
function, write its changes. The time moves even if the function fails: timers that are due have fired by then.
"""

from __future__ import annotations

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
from eos.app.timers import DueTimer, Timers, TimersDue, due_of, timer_cell, to_ms
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
    that have a function.
    """

    def __init__(
        self, function: Callable[..., Any], stores: Stores, timers_at: int | None, names: Collection[str]
    ) -> None:
        self._function, self._kinds, self._ttls = function, stores.kinds, stores.ttls
        self._timers_at, self._names = timers_at, names
        self.is_stateless = not self._kinds and timers_at is None
        """Whether the function has neither states nor timers."""

    def __call__(
        self,
        task: TaskCells,
        suffix: bytes,
        record: Record,
        given: Any,
        finish: Finish,
        in_timer_function: bool = False,
        cells: Cells | None = None,
    ) -> tuple[Any, list[Any]]:
        """Return the outputs, and the states and timers with unwritten changes.

        `suffix`: the part of the row name derived from the key. `in_timer_function`: see Timers. `cells`: used
        instead of the task's cells.
        """
        if cells is None:
            cells = task
        if self._ttls:
            cells = UnexpiredCells(cells, self._ttls, task.time_ms)
        states: list[Any] = []
        for kind, compiled in self._kinds:  # a comprehension would be a call for each record
            states.append(kind(compiled, cells, suffix))
        if self._timers_at is not None:
            states.insert(self._timers_at, Timers(self._names, task, suffix, record.timestamp, in_timer_function))
        try:
            outputs = finish(record, self._function(given, *states))
            for one in states:
                one._encode()
        finally:
            for one in states:
                one._close()
        return outputs, states

    def call_plainly(self, record: Record, given: Any, finish: Finish) -> Any:
        """Return the outputs of a function without states and timers."""
        return finish(record, self._function(given))

    def write(self, states: Sequence[Any], task: TaskCells) -> None:
        cells: Cells = UnexpiredCells(task, self._ttls, task.time_ms) if self._ttls else task
        for one in states:
            one._write(cells)


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
        self._name, self._call, self._stores, self._timing = name, caller, stores, timing
        self._task_of = stores.task_of
        self._decode, self._make_outputs = decode, made
        # None: the functions of `timing` get the value that the main function gets.
        self._value_of = None if value_of is decode else value_of
        # The hot loop gives outputs the record's timestamp, which is wrong with time=.
        self._hot_loop_finish = (
            made if timing.time is not None else make_hot_loop_finish(made, finish is not None, target)
        )
        self._merge, self._once = merge, timing.once
        self._checks_event_time = timing.time is not None or timing.ahead_ms is not None
        if isinstance(timing.windows, FixedWindows):
            self._starts, self._stays_ms = timing.windows.starts, timing.windows.size_ms + timing.grace_ms
        self._run = {FixedWindows: self._run_in_windows, SessionWindows: self._run_in_sessions}.get(
            type(timing.windows), self._run_by_key
        )
        self.tally = Tally()
        self.feed = make_feed(self._run_one, None, target, as_sends)
        self.each = one_by_one(self.outputs)

    def outputs(self, record: Record) -> Sequence[Send]:
        return cast("Sequence[Send]", self._handle(record, self._make_outputs))

    def _run_one(self, record: Record) -> bytes | UnusualOutputs | None:
        found = self._handle(record, self._hot_loop_finish)
        return UnusualOutputs(found) if type(found) is tuple or type(found) is list else found

    def _handle(self, record: Record, finish: Finish) -> Any:
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

    def _duplicate_outputs(self, record: Record) -> list[Send]:
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

    def _run_by_key(self, task: TaskCells, key: bytes, record: Record, given: Any, finish: Finish) -> Any:
        if self._call.is_stateless:
            return self._call.call_plainly(record, given, finish)
        outputs, states = self._call(task, encode_key(key), record, given, finish)
        self._call.write(states, task)
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
        return [send for outputs, _ in calls for send in outputs]

    def _write_window(self, task: TaskCells, suffix: bytes, states: Sequence[Any], closes_ms: int) -> None:
        self._call.write(states, task)
        for one in states:
            if one._is_stored:
                return  # the window is open already, so its timer is set
        cell = _CLOSINGS + suffix
        if task.get(cell) is None:
            task.set_timer(cell, closes_ms)

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
        outputs, states = self._call(task, suffixes[0], record, given, finish, cells=cells)
        for changed in (*changes, states):
            self._call.write(changed, task)
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

    def _late_outputs(self, record: Record) -> list[Send]:
        self.tally.late += 1
        return _unchanged_output(record, self._timing.late)


def _unchanged_output(record: Record, topic: str | None) -> list[Send]:
    """Return the record as an output to a topic; nothing without a topic."""
    headers = list(readable_headers(record.headers))
    return [] if topic is None else [(topic, record.value, record.key, -1, record.timestamp, headers)]


def find_window(timing: Timing, task: TaskCells, stored_key: bytes) -> Window | None:
    """Return the window that a timer closes; None if the function has no windows."""
    if timing.windows is None:
        return None
    key, start_ms = split_windowed_key(stored_key)
    if isinstance(timing.windows, FixedWindows):
        return Window(start_ms, start_ms + timing.windows.size_ms, key)
    sessions = decode_sessions(task.get(_OPEN_SESSIONS + encode_key(key)))
    session = next(session for session in sessions if session.id_ms == start_ms)
    return Window(session.first_ms, session.last_ms + timing.windows.gap_ms, key)


class TimerFunction:
    """Runs a timer function, or the function that closes windows, for records that the engine makes from due timers."""

    def __init__(
        self,
        caller: Caller,
        stores: Stores,
        give: Callable[[DueTimer, TaskCells], Any],
        finish: Callable[[Any], Any] | None,
        normalise: Normalise,
        target: Target | None,
    ) -> None:
        self._call, self._stores, self._give = caller, stores, give

        made = make_finish(normalise, finish)
        # No warning about a dropped tombstone: a timer has no value.
        self._make_outputs = lambda record, result: () if result is None else made(record, result)
        self._hot_loop_finish = make_hot_loop_finish(self._make_outputs, finish is not None, target)
        self.feed = make_feed(self._run_one, None, target, as_sends)
        self.each = one_by_one(self.outputs)

    def _find(self, record: Record) -> tuple[TaskCells, DueTimer, bytes]:
        due = cast("DueTimer", due_of(record))
        return self._stores.task_of(record), due, encode_key(due.stored_key)

    def outputs(self, record: Record) -> Sequence[Send]:
        return cast("Sequence[Send]", self._fire(record, self._make_outputs))

    def _run_one(self, record: Record) -> bytes | UnusualOutputs | None:
        return cast("bytes | UnusualOutputs | None", self._fire(record, self._hot_loop_finish))

    def _fire(self, record: Record, finish: Finish) -> Any:
        task, due, suffix = self._find(record)
        if task.due_ms(due.cell) != due.due_ms:
            return _NOTHING  # the timer before this one has cleared or moved it
        timers = task.clock_timers if due.clock else task.timers
        if timers.least_set < due.due_ms:
            raise TimersDue(due.due_ms)  # the timer before this one has set a timer that is due earlier than this one
        outputs, states = self._call(task, suffix, record, self._give(due, task), finish, in_timer_function=True)
        self._clear(task, due)
        self._call.write(states, task)
        if due.window is not None:
            self._stores.delete(task, suffix)
        return outputs

    def discard(self, record: Record) -> None:
        """Clear a timer whose function failed, with the state of its window. The error policy then continues without
        the timer."""
        task, due, suffix = self._find(record)
        self._clear(task, due)
        if due.window is not None:
            self._stores.delete(task, suffix)

    def _clear(self, task: TaskCells, due: DueTimer) -> None:
        task.set_timer(due.cell, None)
        if due.window is None:
            return
        cell = _OPEN_SESSIONS + encode_key(due.key)
        if (value := task.get(cell)) is not None:
            _, id_ms = split_windowed_key(due.stored_key)
            task.put(cell, encode_sessions([one for one in decode_sessions(value) if one.id_ms != id_ms]))
