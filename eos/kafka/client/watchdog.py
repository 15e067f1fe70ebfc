"""Deadlines on client calls that can hang: a call runs on a helper thread and is abandoned when it does not return.

`send_offsets_to_transaction` was seen to hang for ever under connection cuts, its own timeout notwithstanding. Nothing
can interrupt it, so the thread and its producer are given up together: the caller must replace the producer and must
not use the abandoned one again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from eos.kafka.client.raising import raising

_LOOK_S = 0.5
IDLE_S = 1.0


class CallHung(Exception):
    """The call did not return in time; its thread still runs and whatever it may yet do is unknown."""


class Job:
    """A call on its way; its result or exception once `done` is set."""

    __slots__ = ("args", "call", "done", "error", "result")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.call, self.args = call, args
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Watchdog:
    """Runs calls one after the other on one daemon thread; after a hang it refuses further calls. While there is none,
    that thread calls `idle` once a second."""

    def __init__(self, name: str, idle: Callable[[], None] | None = None) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.hung = False
        self._idle = idle
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.done.is_set():
                continue  # it came twice
            try:
                job.result = raising(job.call, *job.args)
            except BaseException as error:  # noqa: BLE001 - it is raised again on the calling thread
                job.error = error
            job.done.set()
            # This frame is in the error's traceback. Were the job left in it, the two would hold each other, and with
            # them the producer whose method was called, until a garbage collection: which a worker keeps from running.
            del job
        self._idle = None  # whose it is may hold us

    def _next(self) -> Job | None:
        while self._idle is not None:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=IDLE_S)
            self._idle()
        return self._jobs.get()

    def start(self, function: Callable[..., Any], *args: Any) -> Job:
        """Has the function called behind the jobs before it; does not wait."""
        return self.submit(Job(function, args))

    def submit(self, job: Job) -> Job:
        """As `start`. Who was interrupted may do it again: a job runs once."""
        self._jobs.put(job)
        return job

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """The function's result or exception; CallHung after `timeout_s`. An interrupt (a signal) passes through."""
        if self.hung:
            raise CallHung("an earlier call on this producer still hangs")
        job = self.start(function, *args)
        deadline = time.monotonic() + timeout_s
        try:
            # In pieces: a signal that comes a moment before a wait begins does not end it, and is handled behind it.
            while not (finished := job.done.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))):
                if time.monotonic() >= deadline:
                    # This process may have stood still (SIGSTOP, a suspended machine): the call had no time either.
                    finished = job.done.wait(_LOOK_S)
                    break
        except BaseException:
            # A signal ended the wait: the call is still running, so this producer is done for.
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
            del job  # as in `_work`

    def abandon(self) -> None:
        """Refuse further calls: one is running that may never return."""
        self.hung = True

    def ended(self, timeout_s: float) -> bool:
        """After `close`: whether no call is running any more, asked for up to `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, once the calls before have returned."""
        self._jobs.put(None)
