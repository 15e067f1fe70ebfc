"""Follow the tutorials as a reader does: files, commands, a kill -9, and the printed output."""

from __future__ import annotations

from pathlib import Path

import pytest

from eos.broker import LocalKafka
from tests.support.pages import DOCS, TUTORIALS, differences, follow


@pytest.mark.deep
def test_hello_world_prints_what_the_readme_says(kafka: LocalKafka, tmp_path: Path) -> None:
    (hello,) = follow(DOCS.parent / "README.md", kafka.bootstrap_servers, tmp_path)
    _, printed = hello
    assert printed.count("loud-words[") == 4
    assert differences([hello]) == []


@pytest.mark.deep
def test_tutorial_worker_and_state_survive_kills(kafka: LocalKafka, tmp_path: Path) -> None:
    worker = follow(TUTORIALS / "worker.md", kafka.bootstrap_servers, tmp_path)
    assert len(worker) == 6
    assert differences(worker) == []

    state = follow(TUTORIALS / "state.md", kafka.bootstrap_servers, tmp_path)
    assert len(state) == 3
    assert differences(state) == []
    assert (tmp_path / "balances.log").read_text().count("state restored") == 3
