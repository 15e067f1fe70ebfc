"""Runs client calls that can hang on a helper thread, and abandons a call that does not return before its deadline.

`send_offsets_to_transaction` hung forever in tests that cut connections, in spite of its own timeout. Nothing
can interrupt it, so the thread and its producer are abandoned together: the caller must replace the producer and must
not use the abandoned one again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from eos.kafka.client.client_calls import call_client

_WAIT_SLICE_S = 0.5
IDLE_INTERVAL_S = 1.0


class CallHung(Exception):
    """Reports a call that did not return in time. Its thread still runs, and its effect is unknown."""


class Job:
    """Holds a submitted call, and its result or exception once `done` is set."""

    __slots__ = ("args", "call", "done", "error", "result")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.call, self.args = call, args
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Watchdog:
    """Runs calls one after the other on one daemon thread, and refuses further calls after one has hung.

    Without a call to run, that thread calls `idle` once a second."""

    def __init__(self, name: str, idle: Callable[[], None] | None = None) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.hung = False
        self._on_idle = idle
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.done.is_set():
                continue  # the job was submitted twice
            try:
                job.result = call_client(job.call, *job.args)
            except BaseException as error:  # noqa: BLE001 - it is raised again on the calling thread
                job.error = error
            job.done.set()
            # The error's traceback refers to this frame. If the frame kept the job, the two would form a reference
            # cycle. It would keep the producer alive until the next garbage collection, and a worker rarely collects
            # garbage.
            del job
        self._on_idle = None  # breaks a reference cycle: the callback's owner may refer to this object

    def _next(self) -> Job | None:
        while self._on_idle is not None:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=IDLE_INTERVAL_S)
            self._on_idle()
        return self._jobs.get()

    def start(self, function: Callable[..., Any], *args: Any) -> Job:
        """Queue a call of the function, and return at once."""
        return self.submit(Job(function, args))

    def submit(self, job: Job) -> Job:
        """Queue the job. A caller that was interrupted may submit it again: a job runs only once."""
        self._jobs.put(job)
        return job

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """Return the function's result, or raise its exception. Raise CallHung after `timeout_s` seconds.

        An interruption by a signal passes through."""
        if self.hung:
            raise CallHung("an earlier call on this producer still hangs")
        job = self.start(function, *args)
        deadline = time.monotonic() + timeout_s
        try:
            # Wait in slices. A signal that comes just before a wait does not end the wait, and Python handles the
            # signal only after it.
            while not (finished := job.done.wait(min(_WAIT_SLICE_S, max(0.0, deadline - time.monotonic())))):
                if time.monotonic() >= deadline:
                    # This process and the call may both have been stopped (SIGSTOP, a suspended machine), so give the
                    # call more time.
                    finished = job.done.wait(_WAIT_SLICE_S)
                    break
        except BaseException:
            # A signal ended the wait. The call is still running, so this producer must be abandoned.
            self.hung = True
            raise
        if not finished:
            self.hung = True
            raise CallHung(f"{getattr(function, '__name__', 'call')} did not return within {timeout_s:.1f} s")
        try:
            if job.error is not None:
                raise job.error
            return job.result
        finally:
            del job  # breaks the reference cycle, as in `_work`

    def abandon(self) -> None:
        """Refuse further calls, because one is running that may never return."""
        self.hung = True

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the thread to end after `close`. Return True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread after the queued calls have returned."""
        self._jobs.put(None)
