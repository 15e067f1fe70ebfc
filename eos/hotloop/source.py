"""Which source a compiled loop was made of: a checksum, built into it and compared when it is imported.

Owns the checksum, for build.py (which runs it by its path, before the package is installed) and for the import. It must
import nothing that takes time: a worker's start waits for it.
"""

from __future__ import annotations

import zlib
from pathlib import Path


def checksum(folder: Path) -> int | None:
    """Of _native.c in the package's folder; None where a wheel was installed without it, or from no folder at all."""
    try:
        return zlib.crc32((folder / "_native.c").read_bytes())
    except OSError:
        return None
