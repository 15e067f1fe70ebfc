"""Optimises Spark's Python workers, which run one task after the other, so that the next task starts faster.

Owns nothing of the tasks. It must never change the results of a task.
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
# glibc raises its thresholds up to these values as memory is freed. Here they have these values from the start.
_KEPT_BYTES, _MMAP_BYTES = 64 << 20, 32 << 20
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def begin_task() -> None:
    """Prepare the Python worker for a task; call this before the task does anything."""
    _exclude_modules_from_collection()
    _keep_memory()


def _exclude_modules_from_collection() -> None:
    """Exclude the objects of loaded modules from garbage collection.

    Spark's worker collects all garbage after every task (pyspark/daemon.py). With pandas and pyarrow loaded that visits
    95,000 objects and takes tens of milliseconds, which delays a small batch. Objects of modules live as long as the
    process anyway.
    """
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.freeze()
        _modules_frozen = len(sys.modules)


@cache
def _keep_memory() -> None:
    """Keep up to 64 MB of free memory at the heap's end, unless the user configured glibc's malloc.

    glibc returns freed memory to the kernel, and a task frees megabytes with every batch of rows. A third of its
    processor time went to the kernel, which cleared the same memory again.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "glibc.malloc." in tunables or any(map(os.environ.get, _MALLOC_VARIABLES)):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    # Set both options: if only the trim threshold were set, malloc would no longer raise the mmap threshold from its
    # small initial value.
    if set_option is not None and set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES):
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
