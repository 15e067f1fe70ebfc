"""Check that each defect of other software in docs/findings.md still shows itself in the installed versions.

A finding that no longer shows itself is fixed upstream: remove its page and our workaround.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "docs" / "findings").glob("*.py"))
PATIENCE_S = 240


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the living processes that were started with this folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_of_each_finding_shows_its_fault_and_leaves_no_process(script: Path, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = running.communicate(timeout=PATIENCE_S)
        left = processes_of(tmp_path)
        assert left == [], output
    finally:
        for process in processes_of(tmp_path):
            process.kill()
        running.wait()
    assert running.returncode == 0, output
    assert any(line.startswith("SEEN: ") for line in output.splitlines()), output
