"""An App's functions over Arrow batches, without Spark: input rows, output rows, and failures sent to the driver."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from eos import App, Out, Record, dlq, retry, skip
from eos.errors import ConfigurationError, PoisonRecord, Temporary
from spark_connector import failures
from spark_connector.apply import Apply
from spark_connector.failures import ExecutorFailure

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Order(msgspec.Struct):
    number: int


def rows(*records: Record) -> pa.RecordBatch:
    """Return the records as rows of Spark's Kafka source."""
    columns = {
        "key": pa.array([r.key for r in records], pa.binary()),
        "value": pa.array([r.value for r in records], pa.binary()),
        "topic": pa.array([r.topic for r in records], pa.string()),
        "partition": pa.array([r.partition for r in records], pa.int32()),
        "offset": pa.array([r.offset for r in records], pa.int64()),
        "timestamp": pa.array([r.timestamp * 1000 for r in records], pa.timestamp("us", "UTC")),
        "timestampType": pa.array([0 for _ in records], pa.int32()),
        "headers": pa.array(
            [[{"key": k, "value": v} for k, v in r.headers] if r.headers else None for r in records], HEADERS
        ),
    }
    return pa.RecordBatch.from_pydict(columns)


def run(app: App, *records: Record, batch_most: int = 5_000) -> list[dict[str, Any]]:
    """Return the output rows of an executor, to which the App is pickled as Spark would do it."""
    apply: Apply = cloudpickle.loads(cloudpickle.dumps(Apply(app, batch_most)))
    return [row for batch in apply(iter([rows(*records)])) for row in batch.to_pylist()]


def numbered(topic: str, count: int, **fields: Any) -> list[Record]:
    return [Record(topic, 0, 10 + n, value=b'{"number": %d}' % n, **fields) for n in range(count)]


def test_outputs_keep_the_order_of_records_and_within_each_record() -> None:
    app = App("order")

    @app.process("in", to="out")
    def twice(order: Order) -> Iterator[str]:
        yield f"{order.number} first"
        yield f"{order.number} second"

    found = [row["value"] for row in run(app, *numbered("in", 300), batch_most=7)]
    assert found == [f"{n} {which}".encode() for n in range(300) for which in ("first", "second")]


def test_function_receives_the_record_a_worker_would_read() -> None:
    app = App("reads")
    seen: list[Record] = []

    @app.process("in", to="out")
    def look(record: Record) -> str:
        seen.append(record)
        return repr(record)

    records = [
        Record("in", 2, 5, 1_700_000_000_123, b"k", b"v", [("h", b"\x00"), ("none", None)]),
        Record("in", 2, 6, -1, None, None),
    ]
    # Run in this process, so that `seen` is filled here.
    list(Apply(app, 100)(iter([rows(*records)])))
    assert seen == records


def test_output_becomes_a_row_with_all_columns_of_the_sink() -> None:
    app = App("writes")

    @app.process("in", to=["out", "other"])
    def full(record: Record) -> list[Out | bytes]:
        out = Out(None, key={"b": 1, "a": 2}, topic="other", headers=[("h", None)], partition=3, timestamp=77)
        return [b"kept", out, Out("now", timestamp=0)]

    kept, full_row, now = run(app, Record("in", 0, 1, 1_700_000_000_123, b"k", b"v"))
    assert kept == {
        "topic": "out",
        "partition": None,
        "key": b"k",
        "value": b"kept",
        "headers": None,
        "timestamp_ms": 1_700_000_000_123,
    }
    assert full_row == {
        "topic": "other",
        "partition": 3,
        "key": b'{"a":2,"b":1}',
        "value": None,
        "headers": [{"key": "h", "value": None}],
        "timestamp_ms": 77,
    }
    assert now["timestamp_ms"] is None


def test_each_topic_runs_its_function_in_limited_batches() -> None:
    app = App("topics")

    @app.process_batch("many", to="out")
    def many(records: list[Record]) -> list[Out]:
        return [records[0].out(str(len(records)))]

    @app.process("one", to="out")
    def one(order: Order) -> str:
        return "one"

    found = run(app, *numbered("many", 7), *numbered("one", 1), *numbered("many", 2), batch_most=3)
    assert [row["value"] for row in found] == [b"3", b"3", b"1", b"one", b"1", b"1"]


def failure_of(app: App, *records: Record) -> tuple[Exception, str]:
    """Return the error and traceback that the driver decodes from Spark's text."""
    with pytest.raises(ExecutorFailure) as raised:
        run(app, *records)
    text = f"Job aborted: ...\n  File x, line 3\nspark_connector.failures.ExecutorFailure: {raised.value}\n{{more}}"
    carried = failures.from_text(text)
    assert carried is not None
    return carried


def test_poison_record_reaches_the_driver_with_position_and_traceback() -> None:
    app = App("poison")

    @app.process("in", to="out")
    def picky(order: Order) -> str:
        if order.number == 3:
            raise ValueError("not\nthis } one")
        return "fine"

    error, trace = failure_of(app, *numbered("in", 5))
    assert isinstance(error, PoisonRecord)
    assert (error.topic, error.partition, error.offset, error.exit_code) == ("in", 0, 13, 65)
    assert str(error).endswith("picky failed on in[0]@13: ValueError: not\nthis } one")
    assert "in picky" in trace
    assert "eos/app/routes/" not in trace


@pytest.mark.parametrize("asynchronous", [False, True])
def test_exit_in_a_function_is_a_poison_record(asynchronous: bool) -> None:
    app = App("leaves")

    async def leaves_later(order: Order) -> str:
        sys.exit(0)

    def leaves(order: Order) -> str:
        sys.exit(0)

    app.process("in", to="out")(leaves_later if asynchronous else leaves)
    error, trace = failure_of(app, *numbered("in", 2))
    assert isinstance(error, PoisonRecord)
    assert str(error).endswith("failed on in[0]@10: SystemExit: 0")
    assert "sys.exit(0)" in trace


def test_decode_error_and_failed_batch_name_their_records() -> None:
    app = App("poison2")

    @app.process("in", to="out")
    def one(order: Order) -> str:
        return "fine"

    @app.process_batch("many", to="out")
    def many(records: list[Record]) -> list[Out]:
        raise KeyError("k")

    error, trace = failure_of(app, Record("in", 1, 8, value=b"{"))
    assert "one failed on in[1]@8: DecodeError: expected Order as JSON" in str(error)
    assert trace == "", "no frame is of user code"
    error, _ = failure_of(app, *numbered("many", 4))
    assert "many failed on one of 4 records (many[0]@10..13): KeyError: 'k'" in str(error)


def test_undeclared_output_topic_is_a_configuration_error() -> None:
    app = App("wrong")

    @app.process("in", to="out")
    def elsewhere(order: Order) -> Out:
        return Out("x", topic="nowhere")

    error, _ = failure_of(app, *numbered("in", 1))
    assert isinstance(error, ConfigurationError)
    assert "is not in its to=" in str(error)


def test_text_without_a_failure_line_is_not_an_executor_failure() -> None:
    assert failures.from_text("java.lang.OutOfMemoryError: eos-failure of something") is None


def test_policies_apply_to_each_record_as_in_a_worker() -> None:
    app = App("policies")

    def picky(record: Record) -> bytes | None:
        if record.offset in (11, 13):
            raise ValueError(f"not {record.offset}")
        return record.value

    app.process("skipped", to="out", on_error=skip)(picky)
    app.process("dead", to="out", on_error=dlq)(picky)
    app.process("tried", to="out", on_error=retry(2, then="dlq", backoff_ms=1))(picky)
    skipped, dead, tried = (run(app, *numbered(topic, 5), batch_most=2) for topic in ("skipped", "dead", "tried"))
    assert [row["value"] for row in skipped] == [b'{"number": %d}' % n for n in (0, 2, 4)]
    for found, topic in ((dead, "dead"), (tried, "tried")):
        assert [row["topic"] for row in found] == ["out", f"{topic}.dlq", "out", f"{topic}.dlq", "out"]
        why = {header["key"]: header["value"] for header in found[1]["headers"]}
        assert (why["eos-dlq-offset"], why["eos-dlq-message"]) == (b"11", b"not 11")
        assert found[1]["value"] == b'{"number": 1}'


def test_retried_record_has_one_output() -> None:
    app = App("again")
    tries: list[int] = []

    @app.process("in", to="out", on_error=retry(3, backoff_ms=1))
    def fails_twice(record: Record) -> bytes | None:
        tries.append(record.offset)
        if tries.count(record.offset) < 3 and record.offset == 12:
            raise OSError("not now")
        return record.value

    batches = Apply(app, 100)(iter([rows(*numbered("in", 5))]))
    assert [row["value"] for batch in batches for row in batch.to_pylist()] == [b'{"number": %d}' % n for n in range(5)]
    assert tries == [10, 11, 12, 12, 12, 13, 14]


def test_hooks_run_around_a_task_and_async_outputs_keep_order() -> None:
    app = App("hooks")
    events: list[str] = []
    app.on_start(lambda: events.append("start"))
    app.on_stop(lambda: events.append("stop"))
    # Each record waits for the next one, so none would end if they ran one at a time.
    done = [asyncio.Event() for _ in range(6)]
    done[5].set()

    @app.process("in", to="out")
    async def slow(order: Order) -> str:
        await asyncio.wait_for(done[order.number + 1].wait(), 60)
        events.append(f"done {order.number}")
        done[order.number].set()
        return str(order.number)

    batches = Apply(app, 100)(iter([rows(*numbered("in", 5))]))
    assert [row["value"] for batch in batches for row in batch.to_pylist()] == [b"%d" % n for n in range(5)]
    assert events == ["start", "done 4", "done 3", "done 2", "done 1", "done 0", "stop"], "the records run concurrently"


def test_failed_start_hook_raises_temporary_before_any_record() -> None:
    app = App("hook")

    @app.on_start
    def connect() -> None:
        raise OSError("no such model")

    @app.process("in", to="out")
    def never(order: Order) -> str:
        raise AssertionError("a record was processed")

    error, trace = failure_of(app, *numbered("in", 1))
    assert type(error) is Temporary
    assert "connect raised OSError: no such model" in str(error)
    assert "in connect" in trace
