"""Groups of Spark: records are processed in order after a shuffle, and state is kept by key."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from eos import App, ListState, MapState, Out, Record, State, skip
from eos.records import Send
from spark_connector import keyed
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

    def __init__(self) -> None:
        self.held: tuple[Any, ...] | None = None

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
    (packed,) = keyed.pack(iter([pa.RecordBatch.from_pylist(rows, SOURCE)]))
    records = packed.column("record").to_pylist()
    assert len(set(packed.column("place").to_pylist())) == 1
    random.Random(len(rows)).shuffle(records)
    frames = (pd.DataFrame({"record": records[at : at + 2]}) for at in range(0, len(records), 2))
    function = cloudpickle.loads(cloudpickle.dumps(app))
    sends: Sequence[bytes] = [sends for made in function((b"",), frames, cast("Any", state)) for sends in made["sends"]]
    batch = pa.RecordBatch.from_pydict({"sends": pa.array(sends, pa.binary())})
    return [value for out in keyed.unpack(iter([batch])) for value in out.column("value").to_pylist()]


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
