"""The writing task without a broker: the results that it reports to the driver when it fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from kafka import errors as kafka_errors

from eos.kafka.admin.ownership import Identity
from spark_connector import task, wire
from spark_connector.answers import Answer, Stopped
from spark_connector.attempt import _check
from spark_connector.claims import Claims, ClaimServer
from spark_connector.packing import pack_rows, unpack
from spark_connector.placing import TARGET

IDENTITY = Identity(5, 1)


@pytest.fixture
def server() -> Iterator[ClaimServer]:
    server = ClaimServer("127.0.0.1", "127.0.0.1")
    server.claims.begin(IDENTITY)
    yield server
    server.close()


def run(server: ClaimServer, targets: list[int], connection: dict[str, Any] | None = None) -> task.Result:
    """Return the result that a task of share 0 of two reports."""
    connection = {"bootstrap.servers": "127.0.0.1:1"} | (connection or {})
    where = tuple(("t", partition, 1_000_000) for partition in range(4))
    job = task.Job("id", IDENTITY, where, 2, connection, server.claims_client, "none", 1.0)
    values = pa.array([b"v"] * len(targets), pa.binary())
    rows = pa.record_batch({TARGET: pa.array(targets, pa.int32()), "key": values, "value": values})
    (result,) = task.writer(job)(iter([pack_rows(rows, 2, 0)]))
    return task.Result.decode(result.to_pylist()[0]["result"])


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (RuntimeError("unexpected"), Answer.RESTART),
        (FileNotFoundError(2, "No such file or directory", "/ca.pem"), Answer.RESTART),
        (kafka_errors.SaslAuthenticationFailedError("wrong password"), Answer.UNAUTHORISED),
        (kafka_errors.TopicAuthorizationFailedError("t"), Answer.UNAUTHORISED),
    ],
)
def test_unexpected_error_is_reported_and_not_retried_by_spark(
    error: Exception,
    answer: Answer,
    server: ClaimServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: Any) -> Any:
        raise error

    monkeypatch.setattr(wire, "shared", fail)
    result = run(server, [0, 2, 0])
    assert result.answer == answer.name
    assert str(error) in str(result.sentence)
    assert type(error).__name__ in str(result.sentence)
    granted, poison = server.claims.end()
    assert (granted, poison) == ({0}, None)
    # The executor logs the traceback, except for errors that the message explains completely.
    assert ("Traceback" in capsys.readouterr().err) == (answer is Answer.RESTART)
    with pytest.raises(Stopped, match=re.escape(str(error))) as stopped:
        _check([result], granted)
    assert stopped.value.answer is answer


def test_error_names_the_setting_that_is_invalid_on_the_executor(server: ClaimServer) -> None:
    result = run(server, [0], {"security.protocol": "SSL", "ssl.ca.location": "/nowhere/ca.pem"})
    assert result.answer is not None
    assert "ssl.ca.location" in str(result.sentence)


def test_failure_before_the_claim_is_raised_for_a_spark_retry(
    server: ClaimServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> Any:
        raise ValueError("not a packed value")

    monkeypatch.setattr(task, "unpack", fail)
    with pytest.raises(ValueError, match="not a packed value"):
        run(server, [0])
    assert server.claims.end() == (frozenset(), None)


def test_rows_of_another_share_are_refused(server: ClaimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "unpack", lambda packed: list(unpack(packed))[::-1])
    result = run(server, [0, 1])
    assert result.answer == Answer.REFUSED.name
    assert "got rows of target" in str(result.sentence)


class Written:
    """Stands for a PartitionWriter: keeps the start of each row's value, and has nothing in flight."""

    unacknowledged = unacknowledged_bytes = retries = bytes = waited_s = 0

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.writes = 0

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        self.values += [value.as_py()[:8] for value in rows.column("value")]
        self.writes += 1

    @property
    def next_sequence(self) -> int:
        return len(self.values)

    def finish(self) -> None:
        pass


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[int, Written]:
    """Return the writers by target."""
    written: dict[int, Written] = {}
    monkeypatch.setattr(task._Share, "_open", lambda _, target: written.setdefault(target, Written()))
    return written


def job_of(targets: int) -> task.Job:
    """Return a job with a single share."""
    claims = Claims()
    claims.begin(IDENTITY)
    where = tuple(("t", partition, 1_000_000) for partition in range(targets))
    return task.Job("id", IDENTITY, where, 1, {}, claims, "none", 1.0)  # type: ignore[arg-type]


def no_wire() -> Any:
    raise AssertionError("nothing is in flight")


@pytest.mark.parametrize("mixed", [True, False])
def test_rows_of_rare_partitions_do_not_keep_their_batch_in_memory(
    mixed: bool, written: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed: one row in a hundred is for another partition, and waits as a copy with the others of its value.
    Otherwise each value is for one partition, which gets few rows."""
    count, values, targets = 1_000, 30, 200
    monkeypatch.setattr(task, "_KEPT_BYTES", 2_000_000)
    monkeypatch.setattr(task, "_WAITING_BYTES", 500_000 if mixed else 4_000_000)
    share = task._Share(job_of(targets), 0, no_wire)
    before, most, expected = pa.total_allocated_bytes(), 0, dict[int, list[bytes]]()
    for number in range(values):
        at = [(i % targets if i % 100 == 99 else 0) if mixed else number for i in range(number, number + count)]
        rows = [b"%08d" % (number * count + i) + bytes(1_000) for i in range(count)]
        for target, value in zip(at, rows, strict=True):
            expected.setdefault(target, []).append(value[:8])
        share.write(pa.record_batch({TARGET: pa.array(at, pa.int32()), "value": pa.array(rows, pa.binary())}))
        most = max(most, pa.total_allocated_bytes() - before)
    share.finish()
    assert {target: one.values for target, one in written.items()} == expected
    # The bound, the value that exceeds it, and the next one; all rows together are 30 MB.
    assert most < 6_000_000


def test_rows_of_small_batches_are_written_together(written: dict[int, Written]) -> None:
    """10 small batches for 3 partitions become one request per partition."""
    packed = []
    for number in range(10):
        values = pa.array([b"%08d" % i for i in range(number * 30, number * 30 + 30)], pa.binary())
        rows = {TARGET: pa.array([i % 3 for i in range(30)], pa.int32()), "key": values, "value": values}
        packed.append(pack_rows(pa.record_batch(rows), 1, number))
    result = task.write_rows(job_of(3), iter(packed), no_wire)
    assert result is not None
    assert (result.answer, result.rows, result.sequences) == (None, 300, 300)
    assert [written[target].writes for target in range(3)] == [1, 1, 1]
    for target in range(3):
        assert written[target].values == [b"%08d" % i for i in range(target, 300, 3)]
