"""Runs N worker processes under one supervisor: `eos run --workers N` and `--reload`.

Owns processes, not work: the exit code of each worker, its restarts and their pauses, and the final exit code. It loads
no App and does not connect to Kafka, so it cannot leak memory or block. `next_step` has all rules. After exit code 75
or a signal from outside, the supervisor restarts a worker after a growing pause, up to MOST_RESTARTS times in a row.
After exit code 0 the worker is done, and the others go on. After any other code all workers stop, and the supervisor
exits with that code.

Workers are named `{instance}-{0..N-1}`. Each reports through a pipe (eos/health/report.py); the end of that pipe shows
a worker that its supervisor has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import IO, Any

import msgspec

from eos import log
from eos.errors import EosError
from eos.health.incidents import Incidents
from eos.health.report import PIPE_VARIABLE
from eos.health.status import Incident, Status, add_counts, judge_report
from eos.signals import Handlers

NAME_VARIABLE = "EOS_SUPERVISED_WORKER"
MOST_RESTARTS = 8  # restarts of one worker, without a run of SETTLED_S in between
SETTLED_S = 60.0
LONGEST_PAUSE_S = 30.0
TEMPORARY = 75
_LOOP_S = 0.1
_KILL_MARGIN_S = 10.0  # a worker exits within eos.shutdown.timeout.ms; one that does not is killed
_READ_BYTES = 1 << 16


class NextStep(Enum):
    RESTART = "start it again"
    DONE = "nothing: it is done, or asked to stop"
    STOP = "stop all"


def next_step(code: int, stopping: bool) -> NextStep:
    """Return what the supervisor does after a worker has ended; a negative code is the signal that killed it."""
    if stopping or code == 0:
        return NextStep.DONE
    return NextStep.RESTART if code == TEMPORARY or code < 0 else NextStep.STOP


def pause_s(restarts_in_a_row: int) -> float:
    """Return the pause before the n-th restart in a row (from 1): 1, 2, 4, ... seconds."""
    return float(min(LONGEST_PAUSE_S, 2.0 ** (restarts_in_a_row - 1)))


def final_code(codes: Sequence[int]) -> int:
    """Return the first code that is neither 0 nor temporary; else 75 if any worker failed, else 0.

    `codes` are in the order of the workers' ends.
    """
    telling = [code for code in codes if code not in (0, TEMPORARY) and code > 0]
    if telling:
        return telling[0]
    return TEMPORARY if any(codes) else 0


class GaveUp(EosError):
    """Reports that a worker was restarted too often; the supervisor may be started again later."""

    exit_code = TEMPORARY


@dataclass
class Child:
    """Represents one supervised worker: its current process, if there is one, and its state."""

    instance: str
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # time.monotonic()
    start_again_at: float | None = None
    restarts: int = 0
    restarts_in_a_row: int = 0
    code: int | None = None
    status: Status | None = None  # the counts include those of all earlier processes
    lives_before: Status | None = None
    last_report_at: float | None = None  # the time of the current process's last report
    pipe: int | None = None
    unread: bytearray = field(default_factory=bytearray)

    @property
    def running(self) -> bool:
        return self.process is not None


class Supervisor:
    """Runs `command(instance)` for each instance until all are done; `run` returns the exit code.

    `stop_s`: how long a worker may take to stop, in seconds. `forward`: pass the workers' output through this process's
    stderr, for a live display; else they write to its stdout and stderr themselves, and the supervisor cannot delay
    them. `keep`: a worker that ends for good does not end the supervisor, which waits for `reload`.
    """

    def __init__(
        self,
        instances: Sequence[str],
        command: Callable[[str], Sequence[str]],
        *,
        stop_s: float,
        forward: bool = False,
        keep: bool = False,
    ) -> None:
        self.children = [Child(instance) for instance in instances]
        self._command = command
        self._stop_s = stop_s
        self._forwards = forward
        self._record_statuses = keep
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._stop_requests = 0
        self._stopping_since: float | None = None
        self._reloading = threading.Event()
        self._codes: list[int] = []
        self._gave_up: GaveUp | None = None
        self._incidents = Incidents()

    # ---- state, for any thread -----------------------------------------------------------------------------------

    def statuses(self) -> list[Status]:
        """Return the statuses of all workers, including those that have ended and wait to be restarted."""
        now = time.monotonic()
        return [self._status_of(child, now) for child in self.children]

    def _status_of(self, child: Child, now: float) -> Status:
        last = child.status
        if last is None:
            last = Status(app="", instance=child.instance, pid=0, started_at=time.time(), at=time.time())
        status = msgspec.structs.replace(last, restarts=child.restarts)
        start_again_at, last_report_at = child.start_again_at, child.last_report_at
        if start_again_at is not None:
            status.live, status.ready = True, False
            status.reason = (
                f"ended with {_code_words(child.code or 0)}, starts again in {max(0.0, start_again_at - now):.0f} s"
            )
        elif child.process is None and child.code is not None:
            status.live, status.ready, status.reason = child.code == 0, False, f"ended with {_code_words(child.code)}"
        elif last_report_at is None:
            status.live, status.ready, status.reason = True, False, "starting"
        else:
            status.live, status.ready, status.reason = judge_report(status, now - last_report_at)
        return status

    def incidents(self) -> list[Incident]:
        return self._incidents.last()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        with self._incidents, self.hearing_signals():
            for child in self.children:
                self._start(child)
            try:
                while self._unfinished():
                    self._turn()
            finally:
                self._kill_all()
                self._drain()
        if self._gave_up is not None and final_code(self._codes) == TEMPORARY:
            raise self._gave_up
        return final_code(self._codes)

    def _unfinished(self) -> bool:
        if any(child.running or child.start_again_at is not None for child in self.children):
            return True
        return self._record_statuses and not self._stop_requests

    def _turn(self) -> None:
        for key, _ in self._selector.select(_LOOP_S):
            key.data()
        while self._signals:
            self._handle_stop_signal(self._signals.pop(0))
        for child in self.children:
            self._look_after(child)
        self._kill_overdue()
        if self._reloading.is_set() and not self._stop_requests:
            self._reload()

    def _look_after(self, child: Child) -> None:
        now = time.monotonic()
        if child.process is not None and (code := child.process.poll()) is not None:
            self._handle_end(child, code)
        elif child.start_again_at is not None and now >= child.start_again_at:
            child.start_again_at = None
            child.restarts += 1
            self._start(child)

    def _handle_end(self, child: Child, code: int) -> None:
        lived_s = time.monotonic() - child.started_at
        self._read_all(child)
        child.process, child.code = None, code
        stopping = self._stopping_since is not None
        step = next_step(code, stopping)
        if step is NextStep.RESTART and not self._reloading.is_set():
            child.restarts_in_a_row = 1 if lived_s >= SETTLED_S else child.restarts_in_a_row + 1
        # Our own SIGTERM kills only a worker that has not set its signal handler yet. Such a worker had begun nothing,
        # so its exit counts as a stop on request.
        asked = stopping and code == -signal.SIGTERM
        log_end = log.info if code == 0 or asked else log.warning
        then = self._describe_next(child, step)
        log_end(f"worker {child.instance} ended", reason=_code_words(code), then=then, lived_s=round(lived_s, 1))
        if self._reloading.is_set() or (self._record_statuses and step is NextStep.STOP):
            return
        if step is NextStep.RESTART:
            self._plan_restart(child)
            return
        self._codes.append(0 if asked else code)
        if step is NextStep.STOP:
            self.stop()

    def _describe_next(self, child: Child, step: NextStep) -> str:
        """Return what the supervisor will do, as text for the log."""
        if self._reloading.is_set():
            return "it is started again with the source as it is now"
        if self._stopping_since is not None:
            return "all are stopping"
        if step is NextStep.DONE:
            others = any(c.running or c.start_again_at is not None for c in self.children)
            return "it is done, the others go on" if others else "it is done"
        if step is NextStep.STOP:
            return "waiting for a change of the source" if self._record_statuses else "all are stopped"
        if child.restarts_in_a_row > MOST_RESTARTS:
            return "all are stopped"
        return f"it is started again in {pause_s(child.restarts_in_a_row):g} s"

    def _plan_restart(self, child: Child) -> None:
        if child.restarts_in_a_row > MOST_RESTARTS:
            self._codes.append(TEMPORARY)
            self._gave_up = GaveUp(
                f"worker {child.instance} ended {child.restarts_in_a_row} times in a row within {SETTLED_S:.0f} s of "
                f"its start, the last time with {_code_words(child.code or 0)}: all are stopped"
            )
            self.stop()
            return
        child.start_again_at = time.monotonic() + pause_s(child.restarts_in_a_row)

    # ---- stopping and starting --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask every worker to stop as SIGTERM does; none is restarted."""
        self._stopping_since = self._stopping_since or time.monotonic()
        for child in self.children:
            child.start_again_at = None
            self._signal(child)

    def reload(self) -> None:
        """Stop and start all workers again. Any thread may call this."""
        self._reloading.set()

    def _reload(self) -> None:
        if self._stopping_since is None:
            self.stop()
        if not any(child.running for child in self.children):
            self._stopping_since = None
            self._reloading.clear()
            for child in self.children:
                child.restarts_in_a_row = 0
                self._start(child)

    def _handle_stop_signal(self, number: int) -> None:
        self._stop_requests += 1
        log.info("stopping", signal=signal.Signals(number).name, asked=self._stop_requests)
        self._reloading.clear()
        self._stopping_since = time.monotonic()
        self.stop()  # the second request makes each worker abort its open transaction

    def _signal(self, child: Child, number: int = signal.SIGTERM) -> None:
        if child.process is not None and child.process.poll() is None:
            child.process.send_signal(number)

    def _kill_overdue(self) -> None:
        since = self._stopping_since
        if since is not None and time.monotonic() - since > self._stop_s + _KILL_MARGIN_S:
            for child in self.children:
                if child.running:
                    log.warning(f"worker {child.instance} did not stop in time: killed")
                    self._signal(child, signal.SIGKILL)
            self._stopping_since = time.monotonic()

    def _kill_all(self) -> None:
        """Kill all workers, so that none outlives the supervisor."""
        for child in self.children:
            if child.process is not None:
                self._signal(child, signal.SIGKILL)
                child.process.wait()

    def _start(self, child: Child) -> None:
        reading, writing = os.pipe()
        environment = {**os.environ, PIPE_VARIABLE: str(writing), NAME_VARIABLE: child.instance}
        stream = subprocess.PIPE if self._forwards else None
        child.process = subprocess.Popen(
            self._command(child.instance),
            env=environment,
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT if stream else None,
            process_group=0,  # a terminal's Ctrl-C reaches only the supervisor, which passes it on once
        )
        os.close(writing)
        child.started_at, child.last_report_at, child.code = time.monotonic(), None, None
        child.lives_before = child.status
        child.unread.clear()
        os.set_blocking(reading, False)
        child.pipe = reading
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._read_report(child))
        if child.process.stdout is not None:
            self._forward(child.process.stdout)
        log.info(f"worker {child.instance} started", pid=child.process.pid)

    # ---- reports of the workers ------------------------------------------------------------------------------------

    def _read_report(self, child: Child) -> bool:
        """Read a part of a report; return False at the end of the pipe, or if it is empty."""
        assert child.pipe is not None
        try:
            part = os.read(child.pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if not part:
            self._selector.unregister(child.pipe)
            os.close(child.pipe)
            child.pipe = None
            return False
        child.unread += part
        *lines, rest = child.unread.split(b"\n")
        child.unread = bytearray(rest)
        if lines:
            now, before = msgspec.json.decode(lines[-1], type=Status), child.lives_before
            child.status = now if before is None else add_counts(before, now)
            child.last_report_at = time.monotonic()
        return True

    def _read_all(self, child: Child) -> None:
        """Read the last report and close the pipe, since a process started by the worker may hold it open."""
        while child.pipe is not None and self._read_report(child):
            continue
        if child.pipe is not None:
            self._selector.unregister(child.pipe)
            os.close(child.pipe)
            child.pipe = None

    def _forward(self, stream: IO[bytes]) -> None:
        os.set_blocking(stream.fileno(), False)
        waiting = bytearray()

        def forward() -> None:
            try:
                part = os.read(stream.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            waiting.extend(part)
            whole = len(waiting) if not part else waiting.rfind(b"\n") + 1
            if whole:
                sys.stderr.write(waiting[:whole].decode(errors="replace"))
                sys.stderr.flush()
                del waiting[:whole]
            if not part:
                self._selector.unregister(stream)
                stream.close()

        self._selector.register(stream, selectors.EVENT_READ, forward)

    def _drain(self) -> None:
        """Forward the last lines of the workers that ended."""
        while self._selector.get_map() and (ready := self._selector.select(0.2)):
            for key, _ in ready:
                key.data()

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT in this block; signals that arrive before `run` are kept."""

        def asked(number: int, _: Any) -> None:
            self._signals.append(number)

        with Handlers(asked):
            yield


def _code_words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class PrefixedStream:
    """Writes whole lines to a text stream, each after `prefix`, so that the lines of several workers do not mix.

    If the reader has closed the stream, lines are dropped without an error: a print() in a function must not fail its
    record.
    """

    def __init__(self, stream: IO[str], prefix: str) -> None:
        self._stream, self._prefix = stream, prefix
        self._line = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            if lines:
                self._put("".join(f"{self._prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        return None

    def finish(self) -> None:
        """Write a last line that has no line end."""
        if self._line:
            self.write("\n")

    def _put(self, text: str) -> None:
        # Bypass the stream's own buffer: it refuses a signal handler that logs during a write.
        line = text.encode(errors="backslashreplace")
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._stream.fileno(), line) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def take_worker_name() -> str | None:
    """Return a supervised worker's instance and remove it from the environment, or None in an unsupervised process."""
    return os.environ.pop(NAME_VARIABLE, None)


def prefix_own_output(worker: str | None) -> None:
    """Prefix every output line of a supervised worker with its name: log lines, the user's prints and final errors."""
    if worker is not None:
        prefix = f"{worker} | "
        for name in ("stdout", "stderr"):
            stream = PrefixedStream(getattr(sys, name), prefix)
            setattr(sys, name, stream)
            atexit.register(stream.finish)
