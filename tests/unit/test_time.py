"""Run functions with timers, windows and deduplication without a broker, and compare them with plain Python."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eos
from eos import App, ListState, MapState, Out, Record, State, Timer, Timers, Window, hopping, sessions, tumbling
from eos.app.layers import Layer
from eos.app.lineage import check_route
from eos.cli import topology
from eos.engine.handling import Handler
from eos.errors import ConfigurationError, IllegalState, PoisonRecord
from eos.state import notes
from eos.state.tasks import Task
from eos.state.timer_index import TimerIndex
from eos.state.values import InMemory
from eos.testing import Ran, advance, run
from eos.worker.watermarks import reached_time_ms

SECOND = 1_000
EVENTS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=30
)
END = advance(10_000 * SECOND)


def records(*events: tuple[int, str, int, int], topic: str = "in") -> list[Record]:
    """Return a record of each event: partition, key, time in seconds, value."""
    offsets: defaultdict[int, Any] = defaultdict(itertools.count)
    return [
        Record(topic, partition, next(offsets[partition]), time_s * SECOND, key.encode(), b"%d" % value)
        for partition, key, time_s, value in events
    ]


def texts(ran: Ran, topic: str = "out") -> list[tuple[str, str, int]]:
    """Return key, value and timestamp in seconds of the outputs to a topic."""
    return [((s.key or b"").decode(), (s.value or b"").decode(), s.timestamp // SECOND) for s in ran.to(topic)]


def windowed(window: Any, grace_s: int = 0, **more: Any) -> App:
    app = App("windows")

    @app.process("in", to="out", window=window, grace=timedelta(seconds=grace_s), late="late", **more)
    def add(value: int, total: State[int], values: ListState[int]) -> None:
        total.set(total.get(0) + value)
        values.append(value)

    @app.on_close(add)
    def close(window: Window, total: State[int], values: ListState[int]) -> str:
        return f"{window.start_ms // SECOND}-{window.end_ms // SECOND} {total.get()} {len(values)}"

    if not hasattr(window, "size_ms"):

        @app.on_merge(add)
        def merge(total: State[int], values: ListState[int], other: State[int], others: ListState[int]) -> None:
            total.set(total.get(0) + other.get(0))
            values.extend(others)

    return app


def windows_by_hand(
    events: list[tuple[int, str, int, int]], size: int, every: int, grace: int
) -> tuple[list[str], int]:
    """Return the final results of windows, sorted, and the number of late records."""
    found, late = [], 0
    now: defaultdict[int, int] = defaultdict(int)
    sums: defaultdict[tuple[int, str, int], list[int]] = defaultdict(list)
    for partition, key, time_s, value in events:
        now[partition] = max(now[partition], time_s)
        starts = [s for s in range(-size, time_s + 1) if s % every == 0 and s <= time_s < s + size]
        opened = [s for s in starts if s + size + grace > now[partition]]
        late += not opened
        for start in opened:
            sums[partition, key, start].append(value)
    for (_, key, start), values in sums.items():
        found.append(f"{key} {start}-{start + size} {sum(values)} {len(values)}")
    return sorted(found), late


@settings(deadline=None, max_examples=60, derandomize=True)
@given(EVENTS, st.sampled_from([(10, 10), (10, 5), (7, 3)]), st.sampled_from([0, 5]))
def test_fixed_windows_equal_a_plain_loop(
    events: list[tuple[int, str, int, int]], shape: tuple[int, int], grace_s: int
) -> None:
    size, every = (timedelta(seconds=s) for s in shape)
    window = tumbling(size) if size == every else hopping(size, every)
    ran = run(windowed(window, grace_s), [*records(*events), END])
    expected, late = windows_by_hand(events, *shape, grace_s)
    assert (sorted(f"{key} {value}" for key, value, _ in texts(ran)), ran.late) == (expected, late)
    assert len(ran.to("late")) == late
    assert ran.states == {"add": {"total": {}, "values": {}}}, "closed windows must leave no state"


def sessions_by_hand(events: list[tuple[int, str, int, int]], gap: int, grace: int) -> tuple[list[str], int]:
    found, late = [], 0
    now: defaultdict[int, int] = defaultdict(int)
    opened: dict[tuple[int, str], list[tuple[list[int], list[int]]]] = defaultdict(list)

    def close(partition: int) -> None:
        for (of, key), some in opened.items():
            for times, values in list(some):
                if of == partition and max(times) + gap + grace <= now[partition]:
                    some.remove((times, values))
                    found.append(f"{key} {min(times)}-{max(times) + gap} {sum(values)} {len(values)}")

    for partition, key, time_s, value in events:
        now[partition] = max(now[partition], time_s)
        close(partition)
        some = opened[partition, key]
        joined = [one for one in some if min(one[0]) - gap < time_s < max(one[0]) + gap]
        if not joined and time_s + gap + grace <= now[partition]:
            late += 1
            continue
        rest = [one for one in some if one not in joined]
        merged = [time_s, *(t for one in joined for t in one[0])], [value, *(v for one in joined for v in one[1])]
        opened[partition, key] = [*rest, merged]
        close(partition)
    for partition in (0, 1):
        now[partition] = 10_000
        close(partition)
    return sorted(found), late


@settings(deadline=None, max_examples=80, derandomize=True)
@given(EVENTS, st.sampled_from([3, 6]), st.sampled_from([0, 4]))
def test_session_windows_equal_a_plain_loop(events: list[tuple[int, str, int, int]], gap_s: int, grace_s: int) -> None:
    ran = run(windowed(sessions(seconds=gap_s), grace_s), [*records(*events), END])
    expected, late = sessions_by_hand(events, gap_s, grace_s)
    assert (sorted(f"{key} {value}" for key, value, _ in texts(ran)), ran.late) == (expected, late)
    assert ran.states == {"add": {"total": {}, "values": {}}}


@pytest.mark.parametrize(("time_s", "result"), [(9, "0-19 2 2"), (10, "0-10 1 1")])
def test_session_boundary_is_exactly_one_gap_after_the_last_record(time_s: int, result: str) -> None:
    """T10: a record one gap later begins another session."""
    ran = run(windowed(sessions(seconds=10), 5), [*records((0, "a", 0, 1), (0, "a", time_s, 1)), END])
    assert texts(ran)[0][1] == result


@pytest.mark.parametrize(("time_s", "closed"), [(14, 0), (15, 1)])
def test_session_closes_one_gap_and_grace_after_its_last_record(time_s: int, closed: int) -> None:
    ran = run(windowed(sessions(seconds=10), 5), records((0, "a", 0, 1), (0, "b", time_s, 1)))
    assert len(ran.to("out")) == closed


@pytest.mark.parametrize("time_ms", [0, 253_402_300_799_999])
def test_windows_at_the_first_and_last_possible_date_are_closed(time_ms: int) -> None:
    """T14: windows aligned to the epoch begin at 0 and reach to the year 9999."""
    ran = run(windowed(tumbling(hours=1)), [Record("in", 0, 0, time_ms, b"a", b"1"), advance(time_ms + 3_600_000)])
    start_s = time_ms // 3_600_000 * 3_600
    assert texts(ran) == [("a", f"{start_s}-{start_s + 3_600} 1 1", start_s + 3_599)]


def test_window_offset_aligns_days_to_a_time_zone() -> None:
    window = tumbling(days=1, offset=timedelta(hours=-2))
    assert window.starts(23 * 3_600_000) == [22 * 3_600_000]
    assert window.starts(21 * 3_600_000) == [-2 * 3_600_000]


def test_closed_window_is_never_opened_again() -> None:
    """T9: its late record is counted, and its result came once."""
    events = records((0, "a", 0, 1), (0, "b", 30, 1), (0, "a", 5, 7))
    ran = run(windowed(tumbling(seconds=10)), [*events, END, END])
    assert texts(ran) == [("a", "0-10 1 1", 9), ("b", "30-40 1 1", 39)]
    assert [(s.key, s.value, s.timestamp) for s in ran.to("late")] == [(b"a", b"7", 5_000)]


def test_keys_with_a_common_prefix_have_separate_windows() -> None:
    """T7: closing the window of `k` leaves those of `k2` and of a key that ends like a window's name."""
    window, other = b"k", b"k" + b"\0" * 8
    app = windowed(tumbling(seconds=10))
    values = [
        Record("in", 0, n, ms, key, b"1") for n, (key, ms) in enumerate([(window, 0), (b"k2", 10_000), (other, 0)])
    ]
    ran = run(app, [*values[:1], *values[2:], values[1], END])
    assert sorted((sent.key, sent.value) for sent in ran.to("out")) == [
        (window, b"0-10 1 1"),
        (other, b"0-10 1 1"),
        (b"k2", b"10-20 1 1"),
    ]


def test_closing_a_window_reads_only_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """T15: the number of reads does not depend on the number of keys."""
    reads: list[bytes] = []
    get = Layer.get
    monkeypatch.setattr(Layer, "get", lambda self, cell: reads.append(cell) or get(self, cell))
    app = App("reads")

    @app.process("in", window=tumbling(seconds=10), grace=timedelta(0))
    def add(value: int, total: State[int]) -> None:
        total.set(total.get(0) + value)

    needed = []
    for keys in (10, 1_000):
        events = [(0, f"k{n}", 15 if n else 5, 1) for n in range(keys)]
        run(app, [*records(*events[:1]), *records(*events[1:])])
        needed.append(sum(b"k0" in cell for cell in reads))
        reads.clear()
    assert needed[0] == needed[1] > 0


def test_window_function_may_send_updates_too() -> None:
    app = App("updates")

    @app.process("in", to="updates", window=tumbling(seconds=10), grace=timedelta(0))
    def count(value: str, seen: State[int]) -> str:
        seen.set(seen.get(0) + 1)
        return f"{seen.get()}"

    @app.on_close(count, to="final")
    def close(window: Window, seen: State[int]) -> str:
        return f"{seen.get()} {window.key.decode()} {window.start:%H:%M:%S} {window.end:%H:%M:%S}"

    ran = run(app, [*records((0, "a", 1, 0), (0, "a", 2, 0)), END])
    assert ran.values("updates") == [b"1", b"2"]
    assert ran.values("final") == [b"2 a 00:00:00 00:00:10"]


def test_windows_without_on_close_delete_their_state() -> None:
    app = App("quiet")

    @app.process("in", window=tumbling(seconds=10), grace=timedelta(0))
    def count(value: str, seen: MapState[str, int]) -> None:
        seen[value] = 1

    assert run(app, [*records((0, "a", 1, 0)), END]).states == {"count": {"seen": {}}}


@pytest.mark.parametrize("on_error", [eos.stop, eos.skip])
def test_closed_window_deletes_the_states_that_on_close_does_not_take(on_error: Any) -> None:
    app = App("partly")

    @app.process("in", window=tumbling(seconds=10), grace=timedelta(0), on_error=on_error)
    def count(value: str, seen: MapState[str, int], total: State[int]) -> None:
        seen[value] = 1
        total.set(total.get(0) + 1)

    @app.on_close(count, to="final")
    def close(window: Window, total: State[int]) -> str:
        if on_error is eos.skip:
            raise ValueError("skipped")
        return str(total.get())

    ran = run(app, [*records((0, "a", 1, 0)), END])
    assert ran.values("final") == ([] if on_error is eos.skip else [b"1"])
    assert ran.states == {"count": {"seen": {}, "total": {}}}


# ---- timers ----------------------------------------------------------------------------------------------------------


def reminders(on_error: Any = eos.stop, **after: float) -> App:
    app = App("timers")

    @app.process("in", to="out", on_error=on_error)
    def note(value: int, values: ListState[int], due: Timers) -> None:
        values.append(value)
        if value == 0:
            due.clear("remind")
        else:
            due.set("remind", after=timedelta(**(after or {"seconds": 10})))

    @app.on_timer(note, "remind")
    def remind(timer: Timer, values: ListState[int]) -> str:
        if 9 in values:
            raise ValueError("nine")
        listed = ",".join(map(str, values))
        values.clear()
        return f"{timer.name} {timer.due_ms // SECOND} at {timer.now_ms // SECOND}: {listed}"

    return app


def test_timers_fire_before_the_record_that_moves_the_time() -> None:
    events = records((0, "b", 0, 1), (0, "a", 0, 2), (0, "a", 10, 3))
    assert texts(run(reminders(), events)) == [
        ("a", "remind 10 at 10: 2", 10),
        ("b", "remind 10 at 10: 1", 10),
    ]


def test_setting_a_timer_again_moves_it_and_clear_deletes_it() -> None:
    events = records((0, "a", 0, 1), (0, "a", 5, 2), (0, "b", 5, 1), (0, "b", 6, 0), (0, "c", 14, 3))
    assert texts(run(reminders(), [*events, advance(15 * SECOND)])) == [("a", "remind 15 at 15: 1,2", 15)]


def test_each_partition_has_its_own_time() -> None:
    events = records((0, "a", 0, 1), (1, "b", 100, 2))
    assert texts(run(reminders(), events)) == []


def test_timer_in_the_past_fires_after_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5: in the same transaction, even if no record follows, and not only when the next transaction begins."""
    monkeypatch.setattr(Handler, "fire_waiting", lambda *_: None)
    ran = run(reminders(), records((0, "a", 100, 1), (0, "b", 20, 2)))
    assert texts(ran) == [("b", "remind 30 at 100: 2", 30)]


def test_timer_in_the_past_sees_the_time_of_its_record_not_of_the_next() -> None:
    """The result must not depend on whether the next record is in the same slice."""
    app = App("past")

    @app.process("in", to="out")
    def start(value: int, due: Timers) -> None:
        if value == 1:
            due.set("late", at=0)

    @app.on_timer(start, "late")
    def late(timer: Timer) -> str:
        return f"at {timer.now_ms // SECOND}"

    assert texts(run(app, records((0, "a", 50, 1), (0, "a", 90, 2)))) == [("a", "at 50", 0)]


def test_periodic_timer_fires_once_after_a_gap() -> None:
    """T13: it keeps its rhythm."""
    app = App("ticks")

    @app.process("in", to="out")
    def start(value: int, due: Timers) -> None:
        due.set("tick", after=timedelta(seconds=10))

    @app.on_timer(start, "tick")
    def tick(timer: Timer, due: Timers) -> str:
        due.set("tick", after=timedelta(seconds=10))
        return f"{(timer.now_ms - timer.due_ms) // (10 * SECOND)} missed"

    ran = run(app, [*records((0, "a", 0, 1)), advance(1_005 * SECOND), advance(1_010 * SECOND)])
    assert texts(ran) == [("a", "99 missed", 10), ("a", "0 missed", 1_010)]


def test_clock_timers_follow_the_clock() -> None:
    app = App("clock")

    @app.process("in", to="out")
    def start(value: int, due: Timers) -> None:
        due.set("later", after=timedelta(hours=1), clock=True)

    @app.on_timer(start, "later")
    def later(key: str, due: Timers) -> str:
        return "fired"

    now = advance(datetime(2026, 1, 1, tzinfo=UTC), clock=True)
    early = advance(datetime(2026, 1, 1, 0, 59, 59, tzinfo=UTC), clock=True)
    late = advance(datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=1))), clock=True)
    event = records((0, "a", 0, 1))
    assert run(app, [now, *event, END, early]).values("out") == []
    assert run(app, [now, *event, late]).values("out") == [b"fired"]


def test_timer_cleared_by_a_timer_due_at_the_same_time_does_not_fire() -> None:
    app = App("pair")

    @app.process("in", to="out")
    def start(value: int, due: Timers) -> None:
        due.set("a", after=timedelta(seconds=1))
        due.set("b", after=timedelta(seconds=1))

    @app.on_timer(start, "a")
    def first(key: str, due: Timers) -> str:
        due.clear("b")
        return "a"

    @app.on_timer(start, "b")
    def second(key: str) -> str:
        return "b"

    assert run(app, [*records((0, "k", 0, 1)), END]).values("out") == [b"a"]


@pytest.mark.parametrize(
    ("steps", "failures"), [([20], 0), ([8, 20], 0), ([20], 1)], ids=["one step", "two steps", "a retry"]
)
def test_timer_set_by_a_timer_function_fires_in_order(steps: list[int], failures: int) -> None:
    """The order depends neither on how far the time moves at once nor on retries."""
    app, left = App("order"), [failures]

    @app.process("in", to="out", on_error=eos.retry(2))
    def start(value: int, due: Timers) -> None:
        due.set("t", after=timedelta(seconds=5))
        due.set("u", after=timedelta(seconds=10))

    @app.on_timer(start, "t")
    def t(timer: Timer, due: Timers) -> str:
        if timer.key == b"y" and left[0]:
            left[0] -= 1
            raise ValueError
        if timer.due_ms == 5 * SECOND:
            due.set("t", at=7 * SECOND)
        return f"t{timer.due_ms // SECOND}"

    @app.on_timer(start, "u")
    def u(timer: Timer) -> str:
        return f"u{timer.due_ms // SECOND}"

    ran = run(app, [*records((0, "x", 0, 0), (0, "y", 0, 0)), *(advance(step * SECOND) for step in steps)])
    fired = [f"{key}:{value}" for key, value, _ in texts(ran)]
    assert fired == ["x:t5", "y:t5", "x:t7", "y:t7", "x:u10", "y:u10"]


@pytest.mark.parametrize("policy", ["skip", "dlq"])
def test_failed_timer_follows_the_policy_of_its_function(policy: str) -> None:
    ran = run(reminders(policy), [*records((0, "a", 0, 9), (0, "b", 1, 1)), END, END])
    assert [key for key, _, _ in texts(ran)] == ["b"]
    assert (ran.skipped, ran.dead_letters) == ((1, 0) if policy == "skip" else (0, 1))
    if policy == "dlq":
        (letter,) = ran.to("in.dlq")
        headers = dict(letter.headers)
        assert (letter.key, headers["eos-timer"], headers["eos-timer-due"]) == (b"a", b"remind", b"10000")


def test_failed_timer_stops_the_run_with_an_error_that_names_it() -> None:
    due = "the timer remind of b'a' that is due at 1970-01-01T00:00:10.000+00:00"
    with pytest.raises(PoisonRecord, match=re.escape(f"remind failed on {due}: ValueError: nine")):
        run(reminders(), [*records((0, "a", 0, 9)), END])


def test_failed_timer_is_retried() -> None:
    app, failures = App("again"), iter([ValueError("away"), ValueError("away"), None])

    @app.process("in", to="out", on_error=eos.retry(2))
    def start(value: int, due: Timers) -> None:
        due.set("x", after=timedelta(seconds=1))

    @app.on_timer(start, "x")
    def fire(key: str) -> str:
        if (failure := next(failures)) is not None:
            raise failure
        return "done"

    ran = run(app, [*records((0, "a", 0, 1)), END])
    assert (ran.values("out"), ran.retries) == ([b"done"], 2)


def test_failed_record_moves_the_time_but_changes_nothing_else() -> None:
    app = App("fails")

    @app.process("in", to="out", on_error=eos.skip)
    def start(value: int, due: Timers) -> None:
        due.set("x", after=timedelta(seconds=10))
        if value == 2:
            raise ValueError

    @app.on_timer(start, "x")
    def fire(key: str) -> str:
        return key

    assert run(app, records((0, "a", 0, 1), (0, "b", 5, 2), (0, "c", 20, 2))).values("out") == [b"a"]


def test_timers_raise_after_their_function_has_returned() -> None:
    kept: list[Timers] = []
    app = App("keeps")

    @app.process("in")
    def start(value: int, due: Timers) -> None:
        kept.append(due)

    @app.on_timer(start, "x")
    def fire(key: bytes) -> None: ...

    run(app, records((0, "a", 0, 1)))
    with pytest.raises(IllegalState, match="timers were used after their function had returned"):
        kept[0].clear("x")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda due: due.set(1, after=timedelta(1)), TypeError, "the name of a timer must be a str, not 1"),
        (lambda due: due.set("x"), TypeError, "the timer x needs one of at= and after="),
        (lambda due: due.set("x", at=datetime(2026, 1, 1)), ValueError, "has no time zone"),
        (lambda due: due.set("x", at="noon"), TypeError, "must be a datetime with a time zone, or milliseconds"),
        (lambda due: due.set("x", after=5), TypeError, "after= of the timer x must be a timedelta, not 5"),
        (lambda due: due.set("x", after=-timedelta(1)), ValueError, "it must be not negative"),
        (lambda due: due.set("x", at=1 << 63), ValueError, "which is too late"),
    ],
)
def test_invalid_timer_call_fails_its_record(call: Any, error: type[Exception], message: str) -> None:
    app = App("wrong")

    @app.process("in")
    def start(value: int, due: Timers) -> None:
        with pytest.raises(error, match=re.escape(message)):
            call(due)

    @app.on_timer(start, "x")
    def fire(key: bytes) -> None: ...

    run(app, records((0, "a", 0, 1)))


def test_timer_without_a_function_is_refused() -> None:
    app = App("typo")

    @app.process("in")
    def start(value: int, due: Timers) -> None:
        due.set("remnid", after=timedelta(1))

    @app.on_timer(start, "remind")
    def fire(key: bytes) -> None: ...

    with pytest.raises(ConfigurationError, match="the timer 'remnid' has no function: there are timer functions for"):
        run(app, records((0, "a", 0, 1)))


# ---- the time of records, deduplication ------------------------------------------------------------------------------


def test_time_function_replaces_the_timestamp() -> None:
    app = App("own-time")

    @app.process("in", to="out", window=tumbling(seconds=10), grace=timedelta(0), time=lambda value: value * SECOND)
    def add(value: int, total: State[int]) -> str:
        total.set(total.get(0) + value)
        return "update"

    @app.on_close(add)
    def close(window: Window, total: State[int]) -> str:
        return f"{total.get()}"

    ran = run(app, records((0, "a", 500, 1), (0, "a", 400, 9), (0, "a", 300, 10)))
    assert texts(ran) == [("a", "update", 1), ("a", "update", 9), ("a", "10", 9), ("a", "update", 10)]


@pytest.mark.parametrize(
    ("time", "timestamp", "message"),
    [
        (None, -1, "the record has no timestamp, and add needs its time: time= can take it from the value"),
        (lambda _: "noon", 0, "the result of time= of add must be a datetime with a time zone, or milliseconds"),
        (lambda _: datetime(2026, 1, 1), 0, "the result of time= of add has no time zone"),
        (lambda _: -5, 0, "time= of add returned -5 ms, a time before 1970"),
        (lambda _: 1 << 52, 0, "further ahead of the clock than ahead= allows"),
    ],
)
def test_record_without_a_usable_time_fails(time: Any, timestamp: int, message: str) -> None:
    """T4: with ahead= a record of the far future fails and does not move the time."""
    app = windowed(tumbling(seconds=10), time=time, ahead=timedelta(days=1))
    with pytest.raises(PoisonRecord, match=re.escape(message)):
        run(app, [Record("in", 0, 0, timestamp, b"a", b"1")])


def unique(**more: Any) -> App:
    app = App("once")

    @app.process("in", to="out", once=lambda value: value, within=timedelta(seconds=10), **more)
    def first(value: int) -> str:
        if value == 9:
            raise ValueError
        return f"{value}"

    return app


def test_duplicates_within_the_time_are_dropped_and_counted() -> None:
    events = records((0, "a", 0, 1), (0, "a", 5, 1), (0, "a", 9, 1), (0, "a", 10, 1), (0, "b", 11, 1), (1, "c", 0, 1))
    ran = run(unique(duplicates="again"), events)
    assert texts(ran) == [("a", "1", 0), ("a", "1", 10), ("c", "1", 0)]
    assert (ran.duplicates, texts(ran, "again")) == (3, [("a", "1", 5), ("a", "1", 9), ("b", "1", 11)])


def test_deduplication_forgets_the_id_of_a_failed_record() -> None:
    ran = run(unique(on_error="skip"), records((0, "a", 0, 9), (0, "a", 1, 9)))
    assert (ran.skipped, ran.duplicates) == (2, 0)


def test_record_without_a_key_cannot_be_deduplicated() -> None:
    with pytest.raises(PoisonRecord, match="this record has no key"):
        run(unique(), [Record("in", 0, 0, 0, None, b"1")])


# ---- definitions -----------------------------------------------------------------------------------------------------


def define(app: App, **more: Any) -> Any:
    @app.process("in", to="out", **more)
    def add(value: int, total: State[int]) -> None: ...

    return add


MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"window": tumbling(MINUTE)}, "add has window= without grace=: say how long a window waits"),
        ({"window": tumbling(MINUTE), "grace": -MINUTE}, "it must be a timedelta that is not negative"),
        ({"window": 60, "grace": MINUTE}, "window= of add is 60: use eos.tumbling(), eos.hopping() or eos.sessions()"),
        ({"grace": MINUTE}, "add has grace= but no window="),
        ({"late": "x"}, "add has late= but no window="),
        ({"once": lambda v: v}, "add has once= without within=: say how long the ids of records are kept"),
        ({"within": MINUTE}, "add has within= but no once="),
        ({"time": "ts"}, "time= of add is 'ts': it must be a function of the value"),
        ({"ahead": 5}, "ahead= of add is 5: it must be a timedelta"),
        ({"idle": timedelta(0)}, "it must be a timedelta of at least a millisecond"),
        ({"window": tumbling(MINUTE), "grace": MINUTE, "ttl": MINUTE}, "add has window= and ttl="),
        ({"window": tumbling(MINUTE), "grace": MINUTE, "late": "a b"}, "late= of add is 'a b', which is not a topic"),
    ],
)
def test_wrong_time_option_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        define(App("refused"), **more)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tumbling(), "tumbling() needs one duration: for example tumbling(hours=1)"),
        (lambda: tumbling(MINUTE, seconds=1), "tumbling() needs one duration"),
        (lambda: tumbling(seconds=-1), "it must be a timedelta of at least a millisecond"),
        (lambda: tumbling(microseconds=1_500), "it must be a whole number of milliseconds"),
        (lambda: tumbling(moons=1), "tumbling() cannot be made of"),
        (lambda: hopping(MINUTE, 2 * MINUTE), "has gaps: every= must be at most the size"),
        (lambda: hopping(1_001 * MINUTE, MINUTE), "puts each record into 1,001 windows, but at most 1,000 are allowed"),
        (lambda: sessions(0), "it must be a timedelta of at least a millisecond"),  # type: ignore[arg-type]
        (lambda: tumbling(MINUTE, offset=5), "offset= of tumbling() is 5: it must be a timedelta"),  # type: ignore[arg-type]
    ],
)
def test_wrong_window_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make()


def test_timer_function_cannot_send_to_an_input_of_its_app() -> None:
    app = App("circle")
    add = define(app, window=tumbling(MINUTE), grace=MINUTE)
    for topic, message in (("in", "in this cycle records could loop forever"), ("circle-add-changelog", "changelog")):
        with pytest.raises(ConfigurationError, match=message):

            @app.on_close(add, to=topic)
            def close(window: Window) -> str:
                return ""

    assert app.destinations == {"out"}, "a refused function leaves the App as it was"
    assert [handler.function.__name__ for handler in app.functions[0].handlers.values()] == ["closed"]


def test_wrong_timer_function_is_refused() -> None:
    app = App("wrong")

    @app.process("in", to="out")
    def start(value: int, seen: State[int], due: Timers) -> None: ...

    with pytest.raises(ConfigurationError, match=r"start sets timers, but no function runs when they are due"):
        app.check()
    for name in (1, "", "x" * 101, "a\0b"):
        with pytest.raises(ConfigurationError, match="the name of a timer must be a str of 1 to 100 bytes"):
            app.on_timer(start, name)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"the state other of fire is not one of start"):

        @app.on_timer(start, "x")
        def fire(key: bytes, other: State[int]) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"parameter of fires is annotated int, but it must be bytes, str or Timer"
    ):

        @app.on_timer(start, "x")
        def fires(key: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"start has no windows to close: give it window="):
        app.on_close(start)
    with pytest.raises(ConfigurationError, match=r"on_timer\(\) needs a function of the App 'wrong'"):
        app.on_timer(print, "x")

    @app.on_timer(start, "x")
    def right(key: bytes, seen: State[int]) -> Out: ...  # type: ignore[empty-body]

    with pytest.raises(ConfigurationError, match=r"start has two functions for the timer 'x', again is the second"):

        @app.on_timer(start, "x")
        def again(key: bytes) -> None: ...


def test_batch_and_async_functions_cannot_use_time() -> None:
    app = App("many")
    with pytest.raises(ConfigurationError, match="it cannot set timers"):

        @app.process_batch("in")
        def batch(values: list[Record], due: Timers) -> None: ...

    with pytest.raises(ConfigurationError, match="is async, so it can have neither timers nor windows"):

        @app.process("in")
        async def later(value: int, due: Timers) -> None: ...

    with pytest.raises(ConfigurationError, match="such a function must read one topic"):

        @app.process(["a", "b"], once=lambda v: v, within=MINUTE)
        def two(value: int) -> None: ...


def test_session_windows_need_a_function_that_merges() -> None:
    app = App("unmerged")
    add = define(app, window=sessions(MINUTE), grace=MINUTE)
    with pytest.raises(ConfigurationError, match="add has session windows, but no function that merges two of them"):
        app.check()
    with pytest.raises(ConfigurationError, match="one cannot merge two windows of add"):

        @app.on_merge(add)
        def one(total: State[int]) -> None: ...


def test_topology_shows_windows_timers_and_topics() -> None:
    text = "\n".join(topology._text(windowed(hopping(2 * MINUTE, MINUTE), 5)))
    assert "    writes  out, late\n" in text
    assert "    windows hopping window of 0:02:00 every 0:01:00, grace 0:00:05, closed by close" in text
    assert "    timers  remind -> remind" in "\n".join(topology._text(reminders()))
    assert "    once    per id within 0:00:10" in "\n".join(topology._text(unique()))


def test_lineage_and_timers_exclude_each_other() -> None:
    (route,) = reminders().functions
    with pytest.raises(ConfigurationError, match="note has timers, windows or once=: use it without them"):
        check_route(route)


def test_window_after_rekeying_waits_for_all_input() -> None:
    app = App("chain")

    @app.process("in", to="by-value")
    def turn(value: int, record: Record) -> Out:
        return Out(value, key=f"v{value}")

    @app.process("by-value", to="out", window=tumbling(seconds=10), grace=timedelta(0))
    def add(value: int, total: State[int]) -> None:
        total.set(total.get(0) + value)

    @app.on_close(add)
    def close(window: Window, total: State[int]) -> str:
        return f"{window.start_ms // SECOND} {total.get()}"

    events = records((0, "a", 5, 1), (0, "a", 95, 1), (1, "b", 6, 1), (1, "b", 35, 2))
    assert texts(run(app, events)) == [("v1", "0 2", 9), ("v2", "30 2", 39)]


@pytest.mark.parametrize(
    ("reached", "committed", "least"),
    [
        ({0: 50, 1: 90}, {0: 3, 1: 3}, 50),  # both have more records
        ({0: 50, 1: 90}, {0: 10, 1: 3}, 90),  # the first was read to its end
        ({0: 50, 1: 90}, {0: 10, 1: 10}, 90),  # both were read to their ends
        ({1: 90}, {1: 3}, 0),  # the first has records, but nothing of it is committed
        ({}, {}, 0),
    ],
)
def test_reached_time_ignores_partitions_read_to_their_end(
    reached: dict[int, int], committed: dict[int, int], least: int
) -> None:
    first, second = ({("in", partition): value for partition, value in of.items()} for of in (reached, committed))
    assert reached_time_ms(first, second, {("in", 0): 10, ("in", 1): 10}) == least


def test_empty_partition_does_not_hold_back_the_time() -> None:
    assert reached_time_ms({("in", 1): 90}, {("in", 1): 3}, {("in", 0): 0, ("in", 1): 10}) == 90


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"grace": timedelta(0)}, {"grace": MINUTE}, "was a State per tumbling window of 0:01:00, grace 0:00:00 when"),
        ({"window": None}, {"grace": MINUTE}, "the state total of add was a State when it was"),
        ({"window": None}, {"window": None, "once": str, "within": MINUTE}, "the state @once of add is new"),
    ],
)
def test_function_with_state_cannot_change_its_use_of_time(
    before: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    """Another grace would make a window final twice, and once= would begin without ids."""
    old, new = App("notes"), App("notes")
    for app, more in ((old, before), (new, now)):
        define(app, **({"window": tumbling(MINUTE)} | more))
    header = notes.current_header("notes", old.functions[0]).encoded()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        notes.next_header("notes", new.functions[0], "changelog[0]", header)


# ---- the index of timers ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20))), max_size=30),
    st.integers(0, 30),
    st.integers(0, 20),
)
def test_timer_index_returns_due_timers_in_order(
    changes: list[tuple[int, int | None]], commit_at: int, until: int
) -> None:
    """Committed timers and those of the open transaction are one order; T6: a timer that moved is found once."""
    task = Task(InMemory(timed=(b"@timers", b"@clock-timers")), has_timers=True)
    expected: dict[bytes, int] = {}
    for number, (name, due_ms) in enumerate(changes):
        if number == commit_at:
            task.committed(0.0)
        cell = b"@timers\0\0\0\0\x01k%d" % name
        task.set_timer(cell, due_ms)
        expected.pop(cell, None)
        if due_ms is not None:
            expected[cell] = due_ms
    due = sorted((due_ms, cell) for cell, due_ms in expected.items() if due_ms <= until)
    assert task.timers.due(until, 2) == due[:2]
    assert task.timers.due(until, 100) == due
    assert isinstance(task.timers, TimerIndex)


def test_timer_index_returns_a_timer_whose_clear_was_rolled_back() -> None:
    task = Task(InMemory(timed=(b"@timers", b"@clock-timers")), has_timers=True)
    cell = b"@timers\0\0\0\0\x01kt"
    task.set_timer(cell, 10)
    task.committed(0.0)
    task.set_timer(cell, None)
    assert task.timers.due(20, 1) == []
    task.roll_back()
    assert task.timers.due(20, 1) == [(10, cell)]
