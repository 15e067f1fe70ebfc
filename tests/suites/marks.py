"""Apply the marks of tests with pytest's hooks: which are deep, which run in one process, which run first."""

from __future__ import annotations

import fnmatch
import os
import re

import pytest

from tests.suites.table import STATEFUL


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark deep tests, and group tests that share a module's fixtures or the older broker into one process.

    Unit tests are grouped by file, because they are too short to be distributed one by one.
    """
    parameters = item.name.partition("[")[2].removesuffix("]")
    patterns = [pattern for mark in item.iter_markers("deep_for") for pattern in mark.args]
    repeated = STATEFUL in os.environ and item.nodeid.startswith("tests/broker/")
    if repeated or any(fnmatch.fnmatchcase(parameters, pattern) for pattern in patterns):
        item.add_marker("deep")
    if group := _group_of(item):
        item.add_marker(pytest.mark.xdist_group(group))


def _group_of(item: pytest.Item) -> str:
    file = item.nodeid.partition("::")[0]
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo.name2fixturedefs
    if file.startswith("tests/unit/") or any(found[-1].scope in ("module", "package") for found in fixtures.values()):
        return file
    return "3.9.2" if "kafka392" in fixtures or re.search(r"392|3\.9\.2", item.name) else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no process waits for them at the end."""
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("takes")), default=0))
