"""Input older than the retention of its outputs: one warning, and topics between functions that keep all records."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import pytest

from eos import App, Record
from eos.kafka.admin import facts, preflight
from eos.kafka.admin.facts import Facts, Topic
from eos.kafka.admin.preflight import Requirements
from eos.kafka.client.settings import Settings
from eos.worker.retention import Retention

WEEK_MS = 604_800_000
NOW_S = 1_700_000_000.0
WEEK = {"retention.ms": str(WEEK_MS), "cleanup.policy": "delete", "message.timestamp.type": "CreateTime"}


def record(age_ms: int, topic: str = "in") -> Record:
    return Record(topic, 3, 7, round(NOW_S * 1000) - age_ms, value=b"v")


def retention(**topics: Mapping[str, str] | None) -> Retention:
    app = App("app")
    app.process("in", to=["out", "more"], on_error="dlq")(lambda record: None)
    app.process("other", to="more")(lambda record: None)
    kept = {"out": None, "more": None, "in.dlq": WEEK, **topics}
    return Retention(app, {name: Topic(True, config=config) for name, config in kept.items()})


def test_input_older_than_destination_retention_is_named_with_setting(caplog: pytest.LogCaptureFixture) -> None:
    look = retention(out=WEEK, more={**WEEK, "retention.ms": "3600000"})
    assert not look.is_exceeded(record(3_600_000), NOW_S)
    assert caplog.messages == []
    assert look.is_exceeded(record(3_600_001), NOW_S)
    (line,) = caplog.messages
    assert line.startswith("input is older than the retention of a destination topic=in partition=3 offset=7")
    assert "destination=more retention=1:00:00" in line
    assert "retention.ms=-1 of more" in line


@pytest.mark.parametrize(
    "kept",
    [
        {**WEEK, "retention.ms": "-1"},
        {**WEEK, "cleanup.policy": "compact"},
        {**WEEK, "message.timestamp.type": "LogAppendTime"},
        None,
    ],
)
def test_topic_without_time_retention_causes_no_warning(kept: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert not retention(out=kept).is_exceeded(record(100 * WEEK_MS), NOW_S)
    assert caplog.messages == []


def test_records_of_other_functions_or_without_time_cause_no_warning() -> None:
    look = retention(out=WEEK)
    assert not look.is_exceeded(record(100 * WEEK_MS, "other"), NOW_S)
    assert not look.is_exceeded(Record("in", 0, 0, -1, value=b"v"), NOW_S)
    assert look.is_exceeded(record(100 * WEEK_MS), NOW_S)


def test_topics_between_functions_are_created_to_keep_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Mapping[str, str]] = {}

    def create(new: list[Any], **_: object) -> dict[str, Any]:
        made.update({topic.topic: topic.config for topic in new})
        return {topic.topic: types.SimpleNamespace(result=lambda: None) for topic in new}

    client = types.SimpleNamespace(create_topics=create)
    monkeypatch.setattr(facts, "connect", lambda *_: client)
    monkeypatch.setattr(facts, "describe_topic", lambda *_: Topic(True))
    monkeypatch.setattr(preflight, "check_clients", lambda *_: None)
    monkeypatch.setattr(preflight, "judge", lambda *_: [])

    def ask(*_: object) -> Facts:
        there = {name: Topic(exists=name in made or name == "in", partitions=2) for name in ("in", "between", "out")}
        return Facts("b:9092", 1, 2, frozenset(), {}, there)

    monkeypatch.setattr(preflight, "query_facts", ask)
    need = Requirements(inputs=("in", "between"), outputs=("between", "out"))
    preflight.require_fit_cluster(Settings({"eos.create.topics": True}), need)
    assert made == {"between": {"retention.ms": "-1", "retention.bytes": "-1"}, "out": {}}
