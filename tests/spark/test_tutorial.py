"""Follow the Spark tutorial after the worker's."""

from __future__ import annotations

from pathlib import Path

import pytest

from eos.broker import LocalKafka
from tests.support.pages import TUTORIALS, differences, follow


@pytest.mark.deep
def test_query_killed_as_in_the_tutorial_duplicates_nothing(kafka: LocalKafka, tmp_path: Path) -> None:
    assert differences(follow(TUTORIALS / "worker.md", kafka.bootstrap_servers, tmp_path)) == []

    spark = follow(TUTORIALS / "spark.md", kafka.bootstrap_servers, tmp_path, timeout=250)
    assert len(spark) == 3
    assert differences(spark) == []
