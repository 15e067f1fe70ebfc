"""Functions that use time: functions of one record with timers or windows, and the functions of due timers.

Owns the order of a record's steps: find its time, let due timers fire first (TimersDue), move the task's time, call the
function, write its changes. The time moves even if the function fails: timers that are due have fired by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import msgspec

from eos.app.cells import encode_key
from eos.app.results import Normalise
from eos.app.routes.feeds import make_feed, one_by_one
from eos.app.routes.single import UnusualOutputs, as_sends, send_usual_directly
from eos.app.state import TaskCells
from eos.app.stores import Finish, Stores
from eos.app.timers import Due, Timers, TimersDue, due_of, timer_cell, to_ms
from eos.app.timing import Timing
from eos.app.windows import FixedWindows, windowed_key
from eos.encoding.serde import Decode
from eos.hotloop.python import Target
from eos.records import Record, Send


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
        self._function, self._stores, self._timers_at, self._names = function, stores, timers_at, names

    def __call__(
        self, task: TaskCells, suffix: bytes, record: Record, given: Any, finish: Finish, is_periodic: bool = False
    ) -> tuple[Any, list[Any]]:
        """Return the outputs, and the states and timers with changes that are not written yet.

        `suffix`: the part of a row's name that the key gives. `is_periodic`: see Timers.set.
        """
        states = self._stores.open(self._stores.with_expiry(task, task.time_ms), suffix)
        if self._timers_at is not None:

            def base(clock: bool) -> int:
                return task.clock_ms() if clock and not is_periodic else record.timestamp

            states.insert(self._timers_at, Timers(self._names, task, suffix, base, is_periodic))
        try:
            outputs = finish(record, self._function(given, *states))
            for one in states:
                one._encode()
        finally:
            for one in states:
                one._close()
        return outputs, states

    def write(self, states: Sequence[Any], task: TaskCells) -> None:
        aged = self._stores.with_expiry(task, task.time_ms)
        for one in states:
            one._write(task if type(one) is Timers else aged)


class Timed:
    """A function of one record that has timers or windows."""

    def __init__(
        self,
        name: str,
        caller: Caller,
        stores: Stores,
        timing: Timing,
        decode: Decode | None,
        value_of: Decode | None,
        finish: Callable[[Any], Any] | None,
        normalise: Normalise,
        target: Target | None,
    ) -> None:
        """`value_of` decodes what time= and once= get; `decode` what the function gets."""

        def made(record: Record, result: Any) -> Sequence[Send]:
            return normalise(record, result if finish is None else finish(result))

        self._name, self._call, self._stores, self._timing = name, caller, stores, timing
        self._decode, self._value_of, self._made = decode, value_of, made
        # With time= an output's timestamp is not the record's, which the hot loop would use.
        self._usual = made if timing.time is not None else send_usual_directly(made, finish is not None, target)
        self._run = self._in_windows if isinstance(timing.windows, FixedWindows) else self._by_key
        self.tally = Tally()
        self.feed = make_feed(self._one, None, target, as_sends)
        self.each = one_by_one(self.outputs)

    def outputs(self, record: Record) -> Sequence[Send]:
        return cast("Sequence[Send]", self._handle(record, self._made))

    def _one(self, record: Record) -> bytes | UnusualOutputs | None:
        found = self._handle(record, self._usual)
        return UnusualOutputs(found) if type(found) is tuple or type(found) is list else found

    def _handle(self, record: Record, finish: Finish) -> Any:
        given = record if self._decode is None else self._decode(record.value)
        task, suffix = self._stores.locate(record)
        record = self._at_event_time(record, task)
        now_ms = task.at(record.timestamp)
        if task.timers.next_due <= now_ms:
            raise TimersDue(now_ms)
        task.time_ms = now_ms
        return self._run(task, suffix, record, given, finish)

    def _at_event_time(self, record: Record, task: TaskCells) -> Record:
        """Return the record with its event time. Raise ValueError if it has none, or is too far ahead of the clock."""
        timing, time_ms = self._timing, record.timestamp
        if timing.time is not None:
            found = timing.time(record if self._value_of is None else self._value_of(record.value))
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

    def _by_key(self, task: TaskCells, suffix: bytes, record: Record, given: Any, finish: Finish) -> Any:
        outputs, states = self._call(task, suffix, record, given, finish)
        self._call.write(states, task)
        return outputs

    def _in_windows(self, task: TaskCells, suffix: bytes, record: Record, given: Any, finish: Finish) -> Any:
        """Call the function for each window of the record that is not closed."""
        timing = self._timing
        windows = cast("FixedWindows", timing.windows)
        stays_ms = windows.size_ms + timing.grace_ms
        key = cast("bytes", record.key)
        opened = [
            (encode_key(windowed_key(key, start)), start + stays_ms)
            for start in windows.starts(record.timestamp)
            if start + stays_ms > task.time_ms
        ]
        if not opened:
            return self._late(record)
        finish = finish if len(opened) == 1 else self._made
        calls = [self._call(task, suffix, record, given, finish) for suffix, _ in opened]
        for (suffix, closes_ms), (_, states) in zip(opened, calls, strict=True):
            self._call.write(states, task)
            cell = timer_cell(False, suffix, b"")
            if task.due_ms(cell) is None:
                task.set_timer(cell, closes_ms)
        return calls[0][0] if len(calls) == 1 else [send for outputs, _ in calls for send in outputs]

    def _late(self, record: Record) -> list[Send]:
        self.tally.late += 1
        late = self._timing.late
        return [] if late is None else [(late, record.value, record.key, -1, record.timestamp, list(record.headers))]


class Fired:
    """A function of due timers, or one that closes windows. It gets the records that stand for timers."""

    def __init__(
        self,
        caller: Caller,
        stores: Stores,
        give: Callable[[Due, TaskCells], Any],
        normalise: Normalise,
        finish: Callable[[Any], Any] | None,
    ) -> None:
        self._call, self._stores, self._give = caller, stores, give

        def made(record: Record, result: Any) -> Sequence[Send]:
            # No warning about a dropped tombstone: a timer has no value.
            return () if result is None else normalise(record, result if finish is None else finish(result))

        self._made = made
        self.feed = make_feed(lambda record: UnusualOutputs(self.outputs(record)), None, None, as_sends)
        self.each = one_by_one(self.outputs)

    def _find(self, record: Record) -> tuple[TaskCells, Due, bytes]:
        due = cast("Due", due_of(record))
        key = due.key if due.window is None else windowed_key(due.key, due.window.start_ms)
        return self._stores.task_of(record), due, encode_key(key)

    def outputs(self, record: Record) -> Sequence[Send]:
        task, due, suffix = self._find(record)
        outputs, states = self._call(task, suffix, record, self._give(due, task), self._made, is_periodic=True)
        task.set_timer(due.cell, None)
        self._call.write(states, task)
        if due.window is not None:
            self._stores.delete(task, suffix)
        return cast("Sequence[Send]", outputs)

    def discard(self, record: Record) -> None:
        """Clear a timer whose function failed, with the state of its window: its error policy goes on without it."""
        task, due, suffix = self._find(record)
        task.set_timer(due.cell, None)
        if due.window is not None:
            self._stores.delete(task, suffix)
