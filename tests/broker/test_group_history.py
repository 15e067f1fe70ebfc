"""Distinguish a group whose offsets expired from a group that never ran, by its history of committed offsets.

Brokers let offsets expire on their own clock. The tests delete the group instead, which has the same effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eos.broker import LocalKafka
from eos.testing.checker import check
from eos.testing.history import read_topic
from tests.support.reading import wait_until

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipeline, Pipelines
pytest_plugins = ["tests.support.pipeline"]

INPUT_GONE = 66


def delete_group(pipeline: Pipeline) -> None:
    pipeline.admin.delete_consumer_groups([pipeline.app])[pipeline.app].result(10)
    wait_until("a group without committed offsets", lambda: not pipeline.committed())


@pytest.mark.deep_for("earliest*")
@pytest.mark.parametrize(
    ("reset", "danger"), [("earliest", "handle all records again"), ("latest", "skip the records")]
)
def test_group_without_committed_offsets_is_refused_until_reset(
    reset: str, danger: str, kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(kafka, 600)
    pipeline.finish()
    before = pipeline.committed()
    delete_group(pipeline)
    pipeline.load(300)
    refused = pipeline.worker(until_end=True, settings={"auto.offset.reset": reset})
    assert refused.wait() == INPUT_GONE, refused.final_output
    for part in (pipeline.app, "before (noted on", "offsets.retention.minutes", danger, "eos reset"):
        assert part in refused.final_output
    assert not pipeline.committed()
    start_options = [
        argument for (topic, number), at in before.items() for argument in ("--from", f"{topic}:{number}:{at}")
    ]
    topics = [argument for topic in pipeline.sources for argument in ("--topic", topic)]
    reset_command = pipeline.eos(
        *("reset", "--group", pipeline.app, *topics, *start_options, "--yes", "--wait", "30"),
        *("--bootstrap-servers", pipeline.servers),
    )
    assert reset_command.wait() == 0, reset_command.log
    pipeline.finish(settings={"auto.offset.reset": reset})
    # Not `pipeline.verify`, which watches the offsets that the test deleted.
    pipeline.settle()
    outputs = read_topic(pipeline.servers, pipeline.destinations).outputs()
    fan_out = len(pipeline.destinations)
    check(pipeline.inputs(), outputs, fan_out=fan_out, committed=pipeline.committed()).raise_if_violated()
    assert len(outputs) == fan_out * 900


@pytest.mark.deep
def test_group_without_a_history_topic_starts_again(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 60)
    settings = {"eos.places.topic": ""}
    pipeline.finish(settings=settings)
    delete_group(pipeline)
    pipeline.finish(settings=settings)
    assert len(pipeline.committed()) == 6
    wait_until("every output twice", lambda: pipeline.delivered >= 2 * 60 * len(pipeline.destinations))
