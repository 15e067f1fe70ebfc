"""Python workers of Spark, which run one task after the other: what makes the next one cheap.

Owns nothing of the tasks. It must never change what a task computes.
"""

from __future__ import annotations

import gc
import sys

_modules_frozen = 0


def spare_the_collector() -> None:
    """Call it at the begin of a task. Spark's worker collects all garbage behind every task (pyspark/daemon.py), and
    with pandas and pyarrow loaded looks at 95,000 objects for it: tens of milliseconds, which a small batch waits for.
    What modules brought stays as long as the process anyway, and need not be looked at again."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.freeze()
        _modules_frozen = len(sys.modules)
