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


@functools.cache
def loaded_class(jvm: Any, name: str) -> Any:
    """The java.lang.Class, None where it is not on the class path of the session's jars."""
    from py4j.protocol import Py4JJavaError

    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        return jvm.java.lang.Class.forName(name, False, loader)
    except Py4JJavaError:
        return None
