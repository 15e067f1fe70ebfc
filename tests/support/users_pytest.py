"""Run pytest as a user of the package does, in the user's own folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_pytest(folder: Path, test: str, *options: str, **environment: str) -> tuple[int, str]:
    """Return the exit code of pytest and all its output."""
    (folder / "test_users_own.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *options]
    environ = os.environ | environment
    run = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
    return run.returncode, run.stdout + run.stderr
