"""Sends a supervised worker's status to its supervisor: a JSON line twice a second, through a pipe.

The pipe also shows whether the supervisor still runs. If the supervisor has ended, the worker stops as after SIGTERM,
so a killed supervisor leaves no orphan. This module owns the worker's end; eos/worker/supervisor.py owns the other.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from eos import log
from eos.health.status import Status

PIPE_VARIABLE = "EOS_SUPERVISOR_PIPE"
INTERVAL_S = 0.5
_STOP_MARGIN_S = 5.0
_TEMPORARY = 75


def supervisor_pipe() -> int | None:
    """Return the file descriptor of the supervisor's pipe, or None without a supervisor.

    Child processes of the worker do not inherit it.
    """
    text = os.environ.pop(PIPE_VARIABLE, None)
    if text is None:
        return None
    os.set_inheritable(int(text), False)
    return int(text)


class Reporter:
    """Reports on a daemon thread inside the context, and once at its end. `stop_s`: the seconds a stop may take."""

    def __init__(self, pipe: int, status: Callable[[], Status], stop_s: float) -> None:
        self._pipe, self._status, self._stop_s = pipe, status, stop_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eos-report", daemon=True)

    def _run(self) -> None:
        while self._report():
            if self._stopping.wait(INTERVAL_S):
                return
        self._end_this_process()

    def _report(self) -> bool:
        """Send one report; return False if the supervisor has closed the pipe.

        A slow supervisor delays only this thread.
        """
        line = msgspec.json.encode(self._status()) + b"\n"
        try:
            while line:
                line = line[os.write(self._pipe, line) :]
        except BrokenPipeError:
            return False
        return True

    def _end_this_process(self) -> None:
        # This last resort needs no interpreter: a client call that holds the GIL forever (observed: a rebalance
        # callback inside the consumer's close) blocks signal handlers and this thread.
        faulthandler.dump_traceback_later(self._stop_s + 2 * _STOP_MARGIN_S, exit=True, file=sys.__stderr__ or 2)
        log.warning("supervisor ended, stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        # The worker stops by itself in time, unless a call blocks its signal handlers.
        time.sleep(self._stop_s + _STOP_MARGIN_S)
        os._exit(_TEMPORARY)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(INTERVAL_S)
        if not self._thread.is_alive():
            self._report()
