"""The pytest plugin in a user's pytest: its additions to the output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import eos

ROOT = Path(eos.__file__).parents[1]
TESTS = """
import warnings

import kafka.admin


def test_user_test():
    warnings.warn("read_text is deprecated", DeprecationWarning)
"""


@pytest.mark.parametrize(("by", "strictly"), [("test_users.py", True), ("conftest.py", False)])
def test_users_tests_show_no_warnings_of_kafka_python(tmp_path: Path, strictly: bool, by: str) -> None:
    (tmp_path / "test_users.py").write_text(TESTS)
    with (tmp_path / by).open("a") as first:
        first.write("\nimport kafka.admin\n")  # a conftest.py is imported before plugins are configured
    if strictly:
        (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONWARNINGS"))}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path,
        env=inherited | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "load_json" not in ran.stdout, ran.stdout
    assert "_legacy" not in ran.stdout
    summary = "1 failed" if strictly else "1 passed, 1 warning"
    assert summary in ran.stdout, ran.stdout + ran.stderr
