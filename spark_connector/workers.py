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
# Where its own thresholds end that grow with what a program frees; these begin there.
_KEPT_BYTES, _MMAP_BYTES = 64 << 20, 32 << 20
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


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
    """glibc gives memory back to the kernel when it is freed, and a task frees megabytes with every batch of rows: a
    third of its processor time was the kernel's, clearing the same memory again. So what is free at the heap's end
    stays with the process, up to 64 MB, unless the user has a say in it."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "glibc.malloc." in tunables or any(map(os.environ.get, _MALLOC_VARIABLES)):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    # The second alone, where the first is refused, would fix the first where it begins.
    if set_option is not None and set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES):
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
