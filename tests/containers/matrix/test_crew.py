"""How workers of the matrix may end: what is started again, what is counted, and what fails the cell."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.containers.matrix import crew
from tests.containers.matrix.__main__ import PASSED, Result, markdown, table
from tests.containers.matrix.stage_worker import Orders
from tests.support.pipeline import WorkerProcess

# As glibc's `assert` and as librdkafka's own say it.
ASSERTIONS = (
    "python: rdkafka_queue.h:1086: rd_kafka_enq_once_del_source_return: Assertion `eonce->refcnt > 0' failed.",
    "*** rdkafka_queue.c:12:rd_kafka_q_destroy0: assert: rkq->rkq_refcnt > 0 ***",
)
WORKER = """
    import os, resource, signal, sys
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print({said!r}, file=sys.stderr, flush=True)
    {end}
"""


def orders(stage: int, instance: str) -> Orders:
    return Orders("g", instance, "in", ["out"], {}, "", first=True)


def ended(directory: Path, monkeypatch: pytest.MonkeyPatch, said: str, end: str) -> crew.Crew:
    """A crew whose only worker has said this and ended so."""
    made = started(directory, monkeypatch, said, end)
    process = made.members[0].process
    assert process is not None
    process.wait()
    return made


def started(directory: Path, monkeypatch: pytest.MonkeyPatch, said: str, end: str) -> crew.Crew:
    (directory / "short_lived.py").write_text(textwrap.dedent(WORKER.format(said=said, end=end)))

    def start(
        name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path, group: int | None
    ) -> WorkerProcess:
        return WorkerProcess(name, ["short_lived"], {**environment, "PYTHONPATH": str(directory)}, directory)

    monkeypatch.setattr(crew, "WorkerProcess", start)
    made = crew.Crew(orders, directory)
    made.join(0, "a")
    return made


@pytest.mark.parametrize("said", ASSERTIONS)
def test_a_worker_that_an_assertion_of_librdkafka_ended_is_started_again_and_counted(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ended(tmp_path, monkeypatch, said, "os.abort()")
    made.tend()
    try:
        assert made.ends == ["stage-0-a-1 ended with -6"]
        assert made.client_aborts == [f"stage-0-a-1: {said}"]
        process = made.members[0].process
        assert process is not None
        assert process.name == "stage-0-a-2"
    finally:
        made.end()


def test_one_that_ends_so_while_it_is_stopped_is_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = f"""
    def abort(*_):
        print({ASSERTIONS[0]!r}, file=sys.stderr, flush=True)
        os.abort()
    signal.signal(signal.SIGTERM, abort)
    print("session started", file=sys.stderr, flush=True)
    while True:
        signal.pause()
    """
    made = started(tmp_path, monkeypatch, "", end)
    try:
        made.stop(*made.members)
        assert made.ends == ["stage-0-a-1 was stopped and ended with -6"]
        assert made.client_aborts == [f"stage-0-a-1: {ASSERTIONS[0]}"]
    finally:
        made.end()


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ("Fatal Python error: Aborted", "os.abort()"),
        ("python: decode.c:7: f: Assertion `n > 0' failed.", "os.abort()"),
        ("%5|1795|REQTMOUT|rdkafka#producer-1| assertions are fine", "os.abort()"),
        (ASSERTIONS[0], "os.kill(os.getpid(), signal.SIGSEGV)"),
        (ASSERTIONS[0], "os._exit(70)"),
        (ASSERTIONS[0], "os._exit(0)"),
    ],
)
def test_any_other_end_fails_the_cell(said: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ended(tmp_path, monkeypatch, said, end)
    with pytest.raises(AssertionError, match="stage-0-a-1 ended with "):
        made.tend()
    made.end()
    assert (made.ends, made.client_aborts) == ([], [])


def test_a_cell_that_passed_beside_client_aborts_says_how_many() -> None:
    quiet = Result("c", "faults", PASSED, 7, "jvm", "2026-11-22")
    told = Result("d", "faults", PASSED, 7, "jvm", "2026-11-22", client_aborts=["stage-0-a-1: x", "stage-0-b-4: y"])
    *_, first, second = markdown([quiet, told])
    assert "client aborts" not in first
    assert second.endswith("| client aborts: 2 |")
    assert list(table([quiet, told]).columns[-1].cells) == ["", "client aborts: 2"]
