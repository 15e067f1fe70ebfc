"""Write the results of a suite to a file for the final table: `-p tests.suites.tally --tally=FILE`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_LONGEST = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tally", help="file for the numbers of passed, late and skipped tests")


def _why(report: Any) -> str:
    """Return one line: the exception and the first line of its message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip().split("\n")[0][:_LONGEST]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", []))
    took: dict[str, float] = {}
    for report in (*stats.get("passed", []), *stats.get("failed", []), *stats.get("", [])):
        took[report.nodeid] = round(took.get(report.nodeid, 0) + report.duration, 2)
    tally = {
        "passed": len(stats.get("passed", [])),
        "failed": {report.nodeid: _why(report) for report in (*stats.get("failed", []), *stats.get("error", []))},
        "late": {report.nodeid: _why(report) for report in stats.get("rerun", [])},
        "left_out": reasons,
        "took_s": dict(sorted(took.items(), key=lambda item: -item[1])),
    }
    Path(config.getoption("--tally")).write_text(json.dumps(tally))
