"""Find the files that changed since the last landing, with git."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANDED = ".ci/landed"
"""A file with the commit that passed CI last. An old one only makes CI run more tests."""


def since_the_last_landing(root: Path = ROOT) -> tuple[list[str] | None, str]:
    """Return the paths that changed since the last landing, or None if unknown, and a sentence with the reason."""
    landed = (root / LANDED).read_text().strip() if (root / LANDED).exists() else ""
    if not landed:
        return None, f"everything, deep tests too: there is no {LANDED}"
    differs = subprocess.run(
        ["git", "diff", "--name-only", "--no-renames", f"{landed}...HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if differs.returncode != 0:
        return None, f"everything, deep tests too: {differs.stderr.strip().splitlines()[0]}"
    paths = differs.stdout.splitlines()
    return paths, f"{len(paths)} files changed since {landed[:9]}, which landed"
