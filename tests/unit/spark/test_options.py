"""Spark settings that could mix two runs of a task in one batch are refused by name."""

from __future__ import annotations

import pytest

from eos.errors import ConfigurationError
from spark_connector.options import refuse_unsafe

CHECKSUM = "spark.sql.shuffle.orderIndependentChecksum"


@pytest.mark.parametrize(
    ("name", "unsafe", "safe"),
    [
        ("spark.speculation", "true", "false"),
        ("spark.shuffle.push.enabled", "TRUE", "false"),
        (f"{CHECKSUM}.enabled", "false", "true"),
        (f"{CHECKSUM}.enableFullRetryOnMismatch", "False", "true"),
    ],
)
def test_setting_that_could_mix_task_runs_is_refused(name: str, unsafe: str, safe: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        refuse_unsafe({name: unsafe}.get)
    said = str(refused.value)
    assert said.startswith(f"{name}={unsafe.lower()} ")
    assert said.endswith(f"set it to {safe} for this application")
    assert len(said.splitlines()) == 1
    refuse_unsafe({name: safe}.get)


def test_unset_spark_settings_are_accepted() -> None:
    refuse_unsafe({}.get)
