"""Computes the checksum of the source of a compiled loop, which is built into it and compared when it is imported.

Used by build.py (by its path, before the package is installed) and by the import. It must import nothing that takes
time, because a worker's start waits for it.
"""

from __future__ import annotations

import zlib
from pathlib import Path


def checksum(folder: Path) -> int | None:
    """Return the checksum of _native.c in the package's folder, or None if a wheel was installed without the file."""
    try:
        return zlib.crc32((folder / "_native.c").read_bytes())
    except OSError:
        return None
