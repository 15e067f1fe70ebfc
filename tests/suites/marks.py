"""Hooks of pytest for the marks of tests: which are deep, which run in one process, which begin first."""

from __future__ import annotations

import fnmatch
import os
import re

import pytest

from tests.suites.table import STATEFUL


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark deep tests, and those that one process runs together because they share a module's fixtures or the broker
    of the older version. Unit tests are too short to be sent one by one."""
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
    """Begin with the tests that take longest, so that no process waits for them at the end."""
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("takes")), default=0))
