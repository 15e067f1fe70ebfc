"""Java classes of Spark's JVM by name, found once.

py4j asks the JVM for each part of a dotted name, at each use: half a dozen round trips that a small batch would notice.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def java_class(jvm: Any, name: str) -> Any:
    """`jvm.a.b.C`; its static methods and constructors can be called. `jvm`: of the SparkContext."""
    return functools.reduce(getattr, name.split("."), jvm)
