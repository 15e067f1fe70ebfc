"""Skip deep tests when a suite's time for them is over: `-p tests.suites.limit --deep-until=TIME`, in Unix seconds."""

from __future__ import annotations

import math
import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep-until", type=float, default=math.inf, help="when deep tests are skipped, in Unix seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("deep") and time.time() > item.config.getoption("--deep-until"):
        pytest.skip("the time for deep tests was over")
