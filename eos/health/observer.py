"""Makes the status of a worker in this process: the one source of the live line, the metrics and the page.

The worker's thread calls `tick` (after a transaction, and when idle); any thread may call `status`. It must never make
the worker wait: it reads plain numbers, and twice a second it samples the values that only the worker's thread can
read.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

import eos
from eos import log
from eos.errors import PoisonRecord
from eos.health.incidents import Incidents
from eos.health.status import (
    Distribution,
    FunctionState,
    FunctionTime,
    PartitionLag,
    Sample,
    Status,
    judge,
    stuck_after_s,
)
from eos.observe import Histogram

if TYPE_CHECKING:
    from eos.worker.worker import Worker

_SAMPLE_INTERVAL_S = 0.5
_PACKAGE = str(Path(eos.__file__).parent)
_STANDARD_LIBRARY = str(Path(os.__file__).parent)


class Observer:
    """Observes one worker from construction on. Use it as a context manager around the worker's run, on its thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._session = worker.session
        self._thread = threading.get_ident()
        self._started_at = time.time()
        self._limit_s = stuck_after_s(worker.settings)
        self._sample: Sample | None = None
        self._next_sample = 0.0
        self._poisoned = 0
        self._stuck_logged = False
        self._incidents = Incidents()
        worker.on_tick = self.tick

    def tick(self) -> None:
        """Take a sample; the worker's thread calls this between transactions."""
        now = time.monotonic()
        if now < self._next_sample:
            return
        self._next_sample = now + _SAMPLE_INTERVAL_S
        snapshot = self._session.snapshot()
        lags = [PartitionLag(*partition, records) for partition, records in sorted(snapshot.lags.items())]
        states = tuple(FunctionState(*state) for state in self._worker.states())
        times = tuple(FunctionTime(*found) for found in self._worker.times())
        self._sample = Sample(snapshot.is_member, snapshot.unlocated, lags, snapshot.restoring, states, times)

    def status(self) -> Status:
        """Return the current status; any thread may call this."""
        counters, sample = self._session.counters, self._sample
        pulse, now = self._session.pulse.now, time.monotonic()
        stuck_at = self._current_line() if now - pulse[3] > self._limit_s else ""
        verdict = judge(pulse, now, self._limit_s, sample, stuck_at)
        self._log_if_stuck(verdict.live, verdict.reason)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Status(
            app=self._worker.app.id,
            instance=self._worker.settings.instance,
            pid=os.getpid(),
            started_at=self._started_at,
            at=time.time(),
            live=verdict.live,
            ready=verdict.ready,
            reason=verdict.reason,
            stuck_after_s=self._limit_s,
            records_in=counters.records_in,
            records_out=counters.records_out,
            transactions=counters.transactions,
            retries=counters.retries,
            repeated=counters.repeated,
            late=counters.late,
            duplicates=counters.duplicates,
            aborts=dict(counters.aborts_by_cause),
            rebuilds=dict(counters.rebuilds_by_cause),
            replacements=dict(counters.replacements),
            rebalances=dict(counters.rebalances),
            poison={"stop": self._poisoned, "dlq": counters.dead_letters, "skip": counters.skipped},
            commit_seconds=_to_distribution(counters.commit_seconds),
            end_to_end_seconds=_to_distribution(counters.end_to_end_seconds),
            lags=sample.lags if sample else [],
            states=list(sample.states) if sample else [],
            times=list(sample.times) if sample else [],
            memory_bytes=_memory_bytes(),
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            incidents=self._incidents.last(),
        )

    def _log_if_stuck(self, live: bool, reason: str) -> None:
        if not live and not self._stuck_logged and reason.startswith("stuck"):
            log.warning("worker stuck", reason=reason)
        self._stuck_logged = not live

    def _current_line(self) -> str:
        """Return the line of code that the worker's thread is at: the user's own, if one is on the stack."""
        frame: FrameType | None = sys._current_frames().get(self._thread)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        theirs = [f for f in stack if not f.filename.startswith((_PACKAGE, _STANDARD_LIBRARY, "<"))]
        at = theirs[-1] if theirs and "site-packages" not in theirs[-1].filename else stack[-1]
        return f"{at.name} ({Path(at.filename).name}:{at.lineno})"

    def __enter__(self) -> Self:
        self._incidents.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PoisonRecord):
            self._poisoned += 1
        if error is not None:
            self._incidents.note(time.time(), "error", f"{type(error).__name__}: {error}")
        self._session.pulse.beat("stopped")
        self._incidents.__exit__()


def _to_distribution(histogram: Histogram) -> Distribution:
    return Distribution(histogram.bounds, tuple(histogram.counts), histogram.total)


def _memory_bytes() -> int:
    """Return the resident memory in bytes, or 0 without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
