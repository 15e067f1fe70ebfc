"""Check that `eos demo --spark` proves its results and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


@pytest.mark.long
@pytest.mark.timeout(1_500)
def test_demo_kills_the_driver_in_a_transaction_and_proves_results(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "eos", "demo", "--spark", "--flights", "60000"],
        capture_output=True,
        text=True,
        timeout=1_400,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3_000:] + run.stderr[-3_000:]
    assert re.search(r"SIGKILL to the driver after \d+ batches, in a transaction .*Ongoing, records in \d", run.stdout)
    assert "WRONG" not in run.stdout
    assert run.stdout.count("│ ok") == 10
    left = [
        p.info["cmdline"]
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []
