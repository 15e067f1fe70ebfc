"""A plugin that writes down how a suite went, for the table at the end: `-p tests.suites.tally --tally=FILE`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tally", help="where to write how many passed, which were late, what was left out")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", []))
    tally = {
        "passed": len(stats.get("passed", [])),
        "failed": len(stats.get("failed", [])) + len(stats.get("error", [])),
        "late": [report.nodeid for report in stats.get("rerun", [])],
        "left_out": reasons,
    }
    Path(config.getoption("--tally")).write_text(json.dumps(tally))
