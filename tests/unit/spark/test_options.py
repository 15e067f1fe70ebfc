"""Settings of Spark's under which one batch could be made of two runs of a task: refused, by name."""

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
def test_what_would_mix_two_runs_of_a_task_is_refused_in_one_sentence(name: str, unsafe: str, safe: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        refuse_unsafe({name: unsafe}.get)
    said = str(refused.value)
    assert said.startswith(f"{name}={unsafe.lower()} ")
    assert said.endswith(f"set it to {safe} for this application")
    assert len(said.splitlines()) == 1
    refuse_unsafe({name: safe}.get)


def test_an_older_spark_does_not_know_all_of_them() -> None:
    refuse_unsafe({}.get)
