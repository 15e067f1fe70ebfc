"""Check that `eos demo --state` proves its results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reading import TooSlow


@pytest.mark.deep
def test_demo_kills_two_workers_and_every_sum_is_right(tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "eos", "demo", "--state", "--flights", "40000"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=280,
        check=False,
    )
    if "opened no transaction in" in demo.stderr:
        raise TooSlow(demo.stderr)  # On a slow machine the demo uses up its input before the fault.
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "Exactly once, shown in" in demo.stdout
    assert demo.stdout.count(" ok ") == 11
    assert not list(tmp_path.iterdir()), "temporary files were left behind"
