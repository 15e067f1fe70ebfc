"""Python workers of Spark, which run one task after the other: what makes the next one cheap.

Owns nothing of the tasks. It must never change what a task computes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from functools import cache

_modules_frozen = 0

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 << 20
_MMAP_BYTES = 32 << 20  # the most that it takes
SET_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def begin_task() -> None:
    """Call it in a task before it does anything."""
    _spare_the_collector()
    _keep_memory()


def _spare_the_collector() -> None:
    """Spark's worker collects all garbage behind every task (pyspark/daemon.py), and with pandas and pyarrow loaded
    looks at 95,000 objects for it: tens of milliseconds, which a small batch waits for. What modules brought stays as
    long as the process anyway, and need not be looked at again."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.freeze()
        _modules_frozen = len(sys.modules)


@cache
def _keep_memory() -> None:
    """glibc gives memory back to the kernel when it is freed, and a task frees megabytes with every batch of rows: half
    of its processor time was the kernel's, clearing the same memory again. So up to 64 MB stay with the process."""
    if sys.platform != "linux" or any(name in os.environ for name in SET_BY_THE_USER):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if set_option is not None:
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES)
