"""The broker logs named in the report of a failed test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eos.broker import LocalKafka
from tests.conftest import pytest_runtest_makereport


class Three(LocalKafka):
    """A started cluster of three nodes."""

    bootstrap_servers = "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"  # type: ignore[assignment]

    def log_path(self, i: int) -> Path:
        return Path(f"/logs/node-{i}/server.log")


def sections(when: str, failed: bool) -> list[tuple[str, str]]:
    report = SimpleNamespace(failed=failed, when=when, sections=[])
    item: Any = SimpleNamespace(funcargs={"names": str, "cluster": Three(nodes=3)})
    hook: Any = pytest_runtest_makereport(item)
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(report)
    assert ended.value.value is report
    return report.sections


@pytest.mark.parametrize("when", ["setup", "call"])
def test_failed_test_names_the_log_of_each_broker(when: str) -> None:
    paths = "/logs/node-0/server.log\n/logs/node-1/server.log\n/logs/node-2/server.log"
    assert sections(when, failed=True) == [("logs of cluster", paths)]


def test_passed_test_names_no_log() -> None:
    assert sections("call", failed=False) == []
