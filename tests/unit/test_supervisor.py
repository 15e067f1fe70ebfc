"""The supervisor with real processes instead of workers: restarts, breaker, exit codes, signals, prefixed lines."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from eos.worker import supervisor as supervising
from eos.worker.supervisor import (
    LONGEST_PAUSE_S,
    GaveUp,
    NextStep,
    PrefixedStream,
    Supervisor,
    final_code,
    next_step,
    pause_s,
)
from tests.support.reading import wait_until

# Each run adds its pid to a file and exits with the next of its codes, of which the last is repeated. Instead of a
# code: "run" waits for SIGTERM, "deaf" ignores the first SIGTERM, "deaf for ever" ignores all of them, and "starting"
# has not installed its handler yet.
PROGRAM = """
import os, signal, sys, time
name, folder, *codes = sys.argv[1:]
lives = os.path.join(folder, name)
with open(lives, "a") as file:
    print(os.getpid(), file=file, flush=True)
life = sum(1 for _ in open(lives))
do = codes[min(life, len(codes)) - 1]
print("life", life)
asked = []
def on_term(number, frame):
    asked.append(number)
    if do == "run" or (do == "deaf" and len(asked) == 2):
        sys.exit(0 if do == "run" else 75)
if do in ("run", "deaf", "deaf for ever", "starting"):
    if do != "starting":
        signal.signal(signal.SIGTERM, on_term)
    open(f"{lives}.up{life}", "a").close()
    while True:
        time.sleep(0.05)
if do.startswith("-"):
    os.kill(os.getpid(), -int(do))
sys.exit(int(do))
"""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "pause_s", lambda count: 0.1)


def supervise(folder: Path, plan: dict[str, Sequence[str]], stop_s: float = 20.0, keep: bool = False) -> Supervisor:
    """Return a supervisor of one process per name, whose runs end as planned."""
    program = folder / "program.py"
    program.write_text(PROGRAM)

    def command(name: str) -> list[str]:
        return [sys.executable, str(program), name, str(folder), *plan[name]]

    return Supervisor(list(plan), command, stop_s=stop_s, keep=keep)


def lives(folder: Path, name: str) -> int:
    return len((folder / name).read_text().split()) if (folder / name).exists() else 0


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def wait_up(folder: Path, *names: str, life: int = 1) -> None:
    """Wait until these processes run and handle signals."""
    for name in names:
        wait_until(f"{name} runs", (folder / f"{name}.up{life}").exists, 30)


def stop_once_up(folder: Path, *names: str, number: signal.Signals = signal.SIGTERM) -> None:
    """Send the supervisor a signal as soon as all these processes handle signals."""

    def ask() -> None:
        wait_up(folder, *names)
        os.kill(os.getpid(), number)

    meanwhile(ask)


# ---- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [64, 65, 66, 69, 70, 77, 78, 79, 1])
def test_permanent_exit_code_stops_all_workers(code: int) -> None:
    assert next_step(code, stopping=False) is NextStep.STOP


@pytest.mark.parametrize("code", [75, -signal.SIGKILL, -signal.SIGSEGV])
def test_worker_restarts_after_temporary_errors_and_kills(code: int) -> None:
    assert next_step(code, stopping=False) is NextStep.RESTART
    assert next_step(code, stopping=True) is NextStep.DONE


@pytest.mark.parametrize(
    ("codes", "code"), [([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 65, 79], 65), ([-9, 0], 75), ([79, 65], 79)]
)
def test_final_exit_code_is_the_first_permanent_one(codes: list[int], code: int) -> None:
    assert final_code(codes) == code


def test_restart_pause_doubles_to_its_maximum() -> None:
    assert [pause_s(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 8, 16]
    assert pause_s(6) == pause_s(60) == LONGEST_PAUSE_S


# ---- processes ---------------------------------------------------------------------------------------------


def test_supervisor_ends_with_0_after_all_workers_succeed(tmp_path: Path) -> None:
    assert supervise(tmp_path, {"a": ["0"], "b": ["0"]}).run() == 0
    assert (lives(tmp_path, "a"), lives(tmp_path, "b")) == (1, 1)


@pytest.mark.parametrize("code", ["75", "-9"])
def test_worker_with_a_temporary_failure_is_restarted(tmp_path: Path, code: str) -> None:
    supervisor = supervise(tmp_path, {"a": [code, code, "0"], "b": ["0"]})
    assert supervisor.run() == 0
    assert (lives(tmp_path, "a"), lives(tmp_path, "b")) == (3, 1)
    assert [status.restarts for status in supervisor.statuses()] == [2, 0]
    assert [i.level for i in supervisor.incidents()] == ["warning", "warning"]


def test_permanent_failure_of_one_worker_ends_the_supervisor(tmp_path: Path) -> None:
    assert supervise(tmp_path, {"a": ["run"], "b": ["75", "65"]}).run() == 65
    assert (lives(tmp_path, "a"), lives(tmp_path, "b")) == (1, 2)


def test_worker_that_keeps_failing_stops_all_with_75(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, {"a": ["run"], "b": ["75"]})
    with pytest.raises(GaveUp, match=r"worker b ended 9 times in a row .* the last time with exit code 75") as gave_up:
        supervisor.run()
    assert gave_up.value.exit_code == 75
    assert (lives(tmp_path, "a"), lives(tmp_path, "b")) == (1, 9)


def ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged ends of workers in order, each with its worker and the consequence."""
    events = [(getattr(one, "event", ""), getattr(one, "fields", {})) for one in caplog.records]
    return [f"{event.split()[1]}: {fields['then']}" for event, fields in events if event.endswith(" ended")]


def test_logged_consequence_of_a_worker_exit_is_correct(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "eos")
    supervise(tmp_path, {"a": ["0"], "b": ["75", "0"]}).run()
    logged = ends(caplog)
    assert sorted(logged[:2]) == ["a: it is done, the others go on", "b: it is started again in 0.1 s"]
    assert logged[2:] == ["b: it is done"]
    caplog.clear()
    supervise(tmp_path, {"c": ["run"], "d": ["65"]}).run()
    assert ends(caplog) == ["d: all are stopped", "c: all are stopping"]
    caplog.clear()
    with pytest.raises(GaveUp):
        supervise(tmp_path, {"e": ["75"]}).run()
    assert ends(caplog)[-2:] == ["e: it is started again in 0.1 s", "e: all are stopped"]


def test_reload_is_logged_as_reason_of_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "eos")
    supervisor = supervise(tmp_path, {"a": ["65", "run"]}, keep=True)

    def drive() -> None:
        wait_until("the first life ended", lambda: bool(ends(caplog)), 30)
        supervisor.reload()
        wait_up(tmp_path, "a", life=2)
        supervisor.reload()
        wait_up(tmp_path, "a", life=3)
        os.kill(os.getpid(), signal.SIGTERM)

    driver = meanwhile(drive)
    supervisor.run()
    driver.join()
    waited, again = "a: waiting for a change of the source", "a: it is started again with the source as it is now"
    assert ends(caplog) == [waited, again, "a: all are stopping"]


def test_counters_of_a_worker_continue_after_a_restart(tmp_path: Path) -> None:
    program = tmp_path / "reporting.py"
    program.write_text(
        """
import os, sys
import msgspec
from eos.health.report import PIPE_VARIABLE
from eos.health.status import Distribution, Status
folder = sys.argv[1]
life = len(os.listdir(folder)) + 1
open(os.path.join(folder, str(life)), "w").close()
commits = Distribution((0.1, 1.0), (life, 0, 1), float(life))
for done in (1, 10 * life):
    status = Status("an-app", "a", os.getpid(), 0.0, 0.0, records_in=done, records_out=2 * done, transactions=life,
        retries=1, aborts={"rebalance": 1, f"life {life}": 1}, poison={"dlq": 2}, commit_seconds=commits)
    os.write(int(os.environ[PIPE_VARIABLE]), msgspec.json.encode(status) + b"\\n")
sys.exit(0 if life == 3 else 75)
"""
    )
    lives = tmp_path / "lives"
    lives.mkdir()
    supervisor = Supervisor(["a"], lambda _: [sys.executable, str(program), str(lives)], stop_s=20.0)
    assert supervisor.run() == 0
    (status,) = supervisor.statuses()
    assert (status.records_in, status.records_out, status.transactions, status.retries) == (60, 120, 6, 3)
    assert status.aborts == {"rebalance": 3, "life 1": 1, "life 2": 1, "life 3": 1}
    assert (status.poison, status.restarts) == ({"dlq": 6}, 2)
    assert (status.commit_seconds.counts, status.commit_seconds.total) == ((6, 0, 3), 6.0)
    assert status.end_to_end_seconds.counts == (0,)


def test_stable_run_resets_the_breaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "SETTLED_S", 0.0)
    assert supervise(tmp_path, {"a": ["75"] * 12 + ["0"]}).run() == 0
    assert lives(tmp_path, "a") == 13


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_forwarded_to_all_and_prevents_restarts(tmp_path: Path, number: signal.Signals) -> None:
    supervisor = supervise(tmp_path, {"a": ["run"], "b": ["run"]})
    stop_once_up(tmp_path, "a", "b", number=number)
    assert supervisor.run() == 0
    assert (lives(tmp_path, "a"), lives(tmp_path, "b")) == (1, 1)


def test_stop_before_the_signal_handler_is_set_counts_as_requested(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, {"a": ["starting"], "b": ["run"]})
    stop_once_up(tmp_path, "a", "b")
    assert supervisor.run() == 0


def test_signal_before_the_run_is_handled(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, {"a": ["run"]})
    with supervisor.hearing_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert supervisor.run() == 0


def test_second_signal_is_forwarded_and_abandoned_work_gives_75(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, {"a": ["deaf"], "b": ["run"]})

    def ask_twice() -> None:
        wait_up(tmp_path, "a", "b")
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until("b ended at the first", lambda: not supervisor.children[1].running, 30)
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(ask_twice)
    assert supervisor.run() == 75


def test_worker_that_ignores_signals_is_killed_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_KILL_MARGIN_S", 0.2)
    supervisor = supervise(tmp_path, {"a": ["deaf for ever"]}, stop_s=0.5)
    stop_once_up(tmp_path, "a")
    assert supervisor.run() == 75


def test_stop_during_a_restart_pause_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "pause_s", lambda count: 1000.0)
    supervisor = supervise(tmp_path, {"a": ["75"]})

    def ask() -> None:
        wait_until("the pause", lambda: supervisor.children[0].start_again_at, 30)
        (status,) = supervisor.statuses()
        assert (status.live, status.ready) == (True, False)
        assert "ended with exit code 75, starts again in" in status.reason
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(ask)
    began = time.monotonic()
    supervisor.run()
    assert time.monotonic() - began < 60
    assert lives(tmp_path, "a") == 1


def test_reload_restarts_running_and_failed_workers(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, {"a": ["run", "run"], "b": ["64", "run"]}, keep=True)

    def reload_and_stop() -> None:
        wait_up(tmp_path, "a")
        wait_until("b failed", lambda: supervisor.children[1].code == 64, 30)
        supervisor.reload()
        wait_up(tmp_path, "a", "b", life=2)
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(reload_and_stop)
    assert supervisor.run() == 0
    assert (lives(tmp_path, "a"), lives(tmp_path, "b")) == (2, 2)


def test_internal_error_of_supervisor_leaves_no_process_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise(tmp_path, {"a": ["run"], "b": ["run"]})

    def fail() -> None:
        if (tmp_path / "a.up1").exists() and (tmp_path / "b.up1").exists():
            raise RuntimeError("a defect in eos")

    monkeypatch.setattr(supervisor, "_kill_overdue", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        supervisor.run()
    for name in ("a", "b"):
        assert not psutil.pid_exists(int((tmp_path / name).read_text()))


# ---- lines -------------------------------------------------------------------------------------------------


def test_line_is_prefixed_and_written_at_once(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as file:
        stream = PrefixedStream(file, "w-0 | ")
        print("one", 2, file=stream)
        print("three\nfour", end="", file=stream)
        assert (tmp_path / "out").read_text() == "w-0 | one 2\nw-0 | three\n"
        stream.finish()
        assert (tmp_path / "out").read_text() == "w-0 | one 2\nw-0 | three\nw-0 | four\n"


def test_write_to_a_closed_pipe_does_not_fail() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as file:
        print("into the void", file=PrefixedStream(file, ""))
