"""Apply the marks of tests with pytest's hooks: which are deep, which run first, and which run in one process."""

from __future__ import annotations

import fnmatch
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.suites.table import STATEFUL

ROOT = Path(__file__).parents[2]

# A module-scoped fixture of the file, or one of a conftest.py.
_SHARED = re.compile(r'scope="module"|\b(cluster|whole|clusters|single_nodes): ')
# Tests on the older broker, by their names: one process starts it, and the others rarely need their own.
_OLDER = re.compile(r"392|3\.9\.2|_3_9_|before_kip_890|before_4_0")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as deep the parameters that `deep_for` names, and tests that the suite of state repeats."""
    parameters = item.name.partition("[")[2].removesuffix("]")
    patterns = [pattern for mark in item.iter_markers("deep_for") for pattern in mark.args]
    is_repeated = STATEFUL in os.environ and item.nodeid.startswith("tests/broker/")
    if is_repeated or any(fnmatch.fnmatchcase(parameters, pattern) for pattern in patterns):
        item.add_marker("deep")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run deep tests last, for which there may be no time, and the longest first, so that no process waits for them at
    the end."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> tuple[bool, bool, int]:
    seconds = max((mark.args[0] for mark in item.iter_markers("takes")), default=0)
    return item.get_closest_marker("deep") is not None, unit_of(item.nodeid) != "older", -seconds


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send each unit to the first free process. xdist's own groups change the node id, which pytest 9.2 forbids."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # keep our order instead of one by number of tests
    return ByUnit(config, log)


def unit_of(nodeid: str) -> str:
    """Return the unit of tests that one process runs together.

    It is a single test, a file whose tests share module fixtures, or all tests on the older broker. Unit tests are
    grouped by file, because they are too short to be distributed one by one.
    """
    file = nodeid.partition("::")[0]
    if _stays_together(file):
        return file
    return "older" if _OLDER.search(nodeid) else nodeid


@cache
def _stays_together(file: str) -> bool:
    path = ROOT / file
    return file.startswith("tests/unit/") or (path.exists() and bool(_SHARED.search(path.read_text())))
