"""Groups of Spark: records are processed in order after a shuffle, and state is kept by key."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from eos import App, ListState, MapState, Out, Record, State, Timer, Timers, Window, retry, skip, tumbling
from eos.records import Send
from eos.testing import run as run_offline
from spark_connector import apply, keyed
from spark_connector.apply import write
from spark_connector.failures import ExecutorFailure

SOURCE = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


class State_:
    """Stands for Spark's GroupState: one tuple or none."""

    def __init__(self, began_ms: int = 0) -> None:
        self.held: tuple[Any, ...] | None = None
        self.began_ms = began_ms

    def getCurrentProcessingTimeMs(self) -> int:
        return self.began_ms

    @property
    def exists(self) -> bool:
        return self.held is not None

    @property
    def get(self) -> tuple[Any, ...]:
        assert self.held is not None
        return self.held

    def update(self, held: tuple[Any, ...]) -> None:
        self.held = held

    def remove(self) -> None:
        self.held = None


def app_of(policy: Any = skip) -> App:
    app = App("shop")

    @app.process("in", to="out", on_error=policy)
    def visit(record: Record, seen: State[int], pages: MapState[str, int], last: ListState[str]) -> Out | None:
        page = (record.value or b"").decode()
        if page == "forget":
            seen.delete()
            pages.clear()
            last.clear()
            return None
        seen.set(seen.get(0) + 1)
        pages[page] = record.offset
        last.append(page)
        if page == "bad":
            raise ValueError(page)
        return Out(f"{seen.get()} {dict(pages)} {list(last)}", headers={"h": "x", "n": None})

    return app


def rows_of(*values: str, first: int = 0, key: bytes | None = b"k") -> list[dict[str, Any]]:
    return [
        {"key": key, "value": v.encode(), "topic": "in", "partition": 1, "offset": n, "timestamp": 7_000_000 + n}
        for n, v in enumerate(values, first)
    ]


def run(app: keyed.Keyed, state: State_, rows: list[dict[str, Any]]) -> list[bytes]:
    """Run a copy of the function, as each task does, over shuffled rows in several frames."""
    return [value for frame in run_frames(app, state, rows) for value in frame]


def run_frames(app: keyed.Keyed, state: State_, rows: list[dict[str, Any]]) -> list[list[bytes]]:
    """Do the same as `run`, and return the outputs of each frame."""
    function = cloudpickle.loads(cloudpickle.dumps(app))
    (packed,) = keyed.pack(iter([pa.RecordBatch.from_pylist(rows, SOURCE)]), app.timed_topics)
    records, places = packed.column("record").to_pylist(), set(packed.column("place").to_pylist())
    assert len(places) == 1
    random.Random(len(rows)).shuffle(records)
    frames = (pd.DataFrame({"record": records[at : at + 2]}) for at in range(0, len(records), 2))
    made = [list(sends["sends"]) for sends in function(tuple(places), frames, cast("Any", state))]
    batches = [pa.RecordBatch.from_pydict({"sends": pa.array(sends, pa.binary())}) for sends in made]
    return [out.column("value").to_pylist() for batch in batches for out in keyed.unpack(iter([batch]))]


def test_state_continues_with_a_key_until_all_is_deleted() -> None:
    app, state = keyed.Keyed(app_of(), 100), State_()
    assert run(app, state, rows_of("x", "y", "bad")) == [b"1 {'x': 0} ['x']", b"2 {'x': 0, 'y': 1} ['x', 'y']"]
    held = state.held
    assert run(app, state, rows_of("bad", first=3)) == []
    assert state.held == held
    assert run(app, state, rows_of("x", first=4)) == [b"3 {'x': 4, 'y': 1} ['x', 'y', 'x']"]
    assert run(app, state, rows_of("forget", first=5)) == []
    assert not state.exists
    assert run(app, state, rows_of("z", first=6)) == [b"1 {'z': 6} ['z']"]


def test_record_without_key_fails_and_error_names_its_position() -> None:
    state = State_()
    assert run(keyed.Keyed(app_of(), 100), state, rows_of("x", key=None)) == []
    with pytest.raises(ExecutorFailure, match=r"visit failed on in\[1\]@9: ValueError: bad"):
        run(keyed.Keyed(app_of("stop"), 100), state, rows_of("x", "bad", first=8))
    assert not state.exists, "a failed batch stores no state"


def test_outputs_round_trip_through_spark_columns() -> None:
    sends: list[Send] = [("out", b"v", None, 3, 7, [("h", b"\xff"), ("n", None)]), ("out", None, b"k", -1, 0, None)]
    packed = pa.RecordBatch.from_pydict({"sends": pa.array([keyed._encode(sends)], pa.binary())})
    (out,) = keyed.unpack(iter([packed]))
    assert out.to_pylist() == write(sends).to_pylist()


MINUTE_MS = 60_000
MINUTE = timedelta(minutes=1)


def timed_app(policy: Any = skip) -> App:
    """Return an App whose function uses timers, deduplication and state that expires."""
    app = App("shop")

    @app.process("in", to="out", once=lambda value: value, within=3 * MINUTE, ttl={"seen": MINUTE}, on_error=policy)
    def visit(value: str, seen: State[int], last: ListState[str], due: Timers) -> str:
        seen.set(seen.get(0) + 1)
        last.append(value)
        due.set("quiet", after=MINUTE / 2)
        if value.endswith("7"):
            raise ValueError(value)
        return f"{seen.get()} {list(last)}"

    @app.on_timer(visit, "quiet")
    def quiet(timer: Timer, last: ListState[str]) -> str:
        listed = list(last)
        last.clear()
        return f"{timer.key!r} {timer.due_ms} {listed}"

    return app


def window_app() -> App:
    app = App("shop")

    @app.process("in", to="out", window=tumbling(minutes=1), grace=MINUTE / 6, late="late")
    def add(value: str, total: State[int]) -> None:
        total.set(total.get(0) + 1)

    @app.on_close(add)
    def close(window: Window, total: State[int]) -> str:
        return f"{window.key!r} {window.start_ms} {total.get()}"

    return app


def timed_rows(count: int) -> list[dict[str, Any]]:
    draw = random.Random(count)
    return [
        {
            "key": b"%d" % draw.randrange(5),
            "value": b"%d" % draw.randrange(count // 2),
            "topic": "in",
            "partition": 1,
            "offset": 2 * number,  # aborted records and markers are gaps
            "timestamp": (number * 5_000 + draw.choice((0, 0, 2 * MINUTE_MS))) * 1_000,
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("make", [timed_app, window_app])
@pytest.mark.parametrize("seed", range(8))
def test_function_with_time_equals_a_run_without_spark(make: Callable[[], App], seed: int) -> None:
    """Split the records into random micro-batches; each is repeated, and only its last run counts."""
    rows, draw = timed_rows(200), random.Random(seed)
    records = [Record("in", 1, row["offset"], row["timestamp"] // 1_000, row["key"], row["value"]) for row in rows]
    # All records are of one partition, so that the outputs have one order.
    expected = [sent.value for sent in run_offline(make(), records).sent]
    app, state, found, at = keyed.Keyed(make(), 7), State_(began_ms=10**13), list[bytes | None](), 0
    while at < len(rows):
        end = at + draw.choice((1, 3, 40))
        repeated = copy.copy(state)
        outputs = run(app, state, rows[at:end])
        assert (run(app, repeated, rows[at:end]), repeated.held) == (outputs, state.held)
        found, at = found + outputs, end
    assert len(expected) > 50
    assert found == expected


def test_future_record_moves_the_time_only_to_the_start_of_its_batch() -> None:
    """Spark keeps that start with the batch, so a repetition has the same outputs and state."""

    def at(minute: int, offset: int) -> dict[str, Any]:
        (row,) = rows_of(f"of {minute}", first=offset)
        return {**row, "timestamp": minute * MINUTE_MS * 1_000}

    app, state = keyed.Keyed(window_app(), 7), State_(began_ms=2 * MINUTE_MS)
    assert run(app, state, [at(0, 0), at(60, 1)]) == [b"b'k' 0 1"]
    assert run(app, state, [at(30, 2)]) == [], "minute 30 is not late, because the time is minute 2"
    state.began_ms = 90 * MINUTE_MS
    assert run(app, state, [at(61, 3)]) == [b"b'k' 1800000 1"]


def test_retried_timer_after_the_last_record_fires_in_its_batch() -> None:
    app, failed = App("shop"), list[str]()

    @app.process("in", to="out", on_error=retry(1, backoff_ms=1))
    def visit(value: str, due: Timers) -> None:
        due.set("passed", at=1)

    @app.on_timer(visit, "passed")
    def passed(key: str) -> str:
        if not failed:
            failed.append(key)
            raise ValueError("only once")
        return key

    state = State_(began_ms=10**13)
    assert run(keyed.Keyed(app, 100), state, rows_of("x")) == [b"k"]


def test_timer_of_the_clock_is_refused_when_it_is_set() -> None:
    app = App("shop")

    @app.process("in", to="out")
    def visit(value: str, due: Timers) -> None:
        due.set("late", at=1, clock=value == "clock")

    @app.on_timer(visit, "late")
    def late(key: str) -> str:
        return key

    state = State_(began_ms=10**13)
    assert run(keyed.Keyed(app, 100), state, rows_of("event")) == [b"k"]
    held = state.held
    with pytest.raises(ExecutorFailure, match=r"ConfigurationError.*the timer 'late' of b'k' was set with clock=True"):
        run(keyed.Keyed(app, 100), state, rows_of("event", "clock", first=1))
    assert state.held == held


def test_many_due_timers_are_yielded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_MOST_OUTPUTS", 600)
    rows = [{**row, "key": b"%d" % n, "timestamp": n * 1_000} for n, row in enumerate(rows_of(*["x"] * 2_000))]
    last = [{**row, "timestamp": 2 * MINUTE_MS * 1_000} for row in rows_of("x", first=2_000)]
    app, state = keyed.Keyed(window_app(), 5_000), State_(began_ms=10**13)
    frames = run_frames(app, state, rows + last)
    assert [len(frame) for frame in frames] == [1_000, 1_000]
    assert len({value for frame in frames for value in frame}) == 2_000
