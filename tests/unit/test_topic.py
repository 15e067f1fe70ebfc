"""`eos topic` without a cluster: the display of bytes, and the marks of transactions."""

from __future__ import annotations

import itertools
import json
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from eos import cli
from eos.cli.rendering import bytes_as_json, bytes_as_text, bytes_from_json, header_as_json, headers_as_text
from eos.encoding import lineage
from eos.encoding.dead_letters import make_dead_letter
from eos.errors import Unavailable
from eos.kafka.admin.tail import Mark, MarkedRecord, OffsetRange, _merge_by_timestamp, _PartitionReader, topic_offsets
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Record


def record(offset: int, timestamp: int = -1, partition: int = 0) -> Record:
    return Record("t", partition, offset, timestamp)


def marked(lane: _PartitionReader, stable: int) -> list[tuple[int, str]]:
    return [(seen.record.offset, seen.mark.value) for seen in lane.marked(lambda: stable)]


def test_record_skipped_by_committed_reader_is_aborted() -> None:
    lane = _PartitionReader(4, 9, deque(map(record, (0, 1, 3, 5, 7))), visible={0, 3})
    assert marked(lane, 5) == [(0, "committed"), (1, "aborted"), (3, "committed"), (5, "open"), (7, "open")]
    assert not lane.waiting


def test_undecided_records_wait_and_are_returned_in_order() -> None:
    lane = _PartitionReader(2, 9, deque(map(record, (1, 2, 5))), visible={1})
    assert marked(lane, 4) == [(1, "committed")]
    lane.visible, lane.committed_at = {2}, 4
    assert marked(lane, 4) == [(2, "committed"), (5, "open")]


def test_stable_end_is_not_queried_after_all_records_are_read() -> None:
    def asked() -> int:
        raise AssertionError

    assert len(list(_PartitionReader(2, 2, deque(map(record, (0, 1)))).marked(asked))) == 2


@given(st.lists(st.lists(st.integers(-1, 5), max_size=6), min_size=1, max_size=3))
def test_records_are_merged_by_time_within_offset_order(
    lanes: list[list[int]],
) -> None:
    seen = [[MarkedRecord(record(o, at, p)) for o, at in enumerate(times)] for p, times in enumerate(lanes)]
    merged = list(_merge_by_timestamp(iter(seen)))
    for p, lane in enumerate(seen):
        assert [s for s in merged if s.record.partition == p] == lane
    if all(times == sorted(times) for times in lanes):
        assert [s.record.timestamp for s in merged] == sorted(at for times in lanes for at in times)


class _Cluster:
    """A topic with one partition; the first queries are answered with these errors."""

    def __init__(self, *errors: int) -> None:
        self._errors = list(errors)

    def describe_topics(self, topics: Any, **_: object) -> dict[str, Future[Any]]:
        partition = SimpleNamespace(id=0, leader=SimpleNamespace(id=1), replicas=[1], isr=[1])
        return {"new": answer(SimpleNamespace(partitions=[partition], authorized_operations=None))}

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(brokers={})

    def list_offsets(self, asked: dict[Any, Any], **_: object) -> dict[Any, Future[Any]]:
        error = KafkaException(KafkaError(self._errors.pop(0))) if self._errors else None
        return {place: answer(error or SimpleNamespace(offset=7)) for place in asked}


def answer(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("error", "patient"),
    [
        (KafkaError.NOT_LEADER_FOR_PARTITION, True),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, True),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, False),
    ],
)
def test_new_topic_is_queried_again(error: int, patient: bool) -> None:
    """After `eos topic create`, `eos topic send` may reach a leader that does not know the topic yet."""
    pauses: list[float] = []

    def asked(times: int) -> dict[int, OffsetRange]:
        cluster = _Cluster(*[error] * times)
        world = World(client=lambda _: cluster, now=itertools.count().__next__, sleep=pauses.append)
        return topic_offsets(Settings({"bootstrap.servers": "b"}), "new", 5.0, world)

    if patient:
        assert asked(10) == {0: OffsetRange(7, 7, 7)}, "10 s later, on a broker that is slow"
    with pytest.raises(Unavailable, match=r"the offsets of new\[0\] are unavailable"):
        asked(100 if patient else 1)
    assert bool(pauses) == patient


def test_bytes_are_shown_as_text_and_cannot_move_the_cursor() -> None:
    assert bytes_as_text('žluť {"a": 1}'.encode()) == 'žluť {"a": 1}'
    assert bytes_as_text(b"a\x1b[2Jb\nc\x00") == r"a\x1b[2Jb\nc\x00"
    assert bytes_as_text(b"\xff\xfe") == r"b'\xff\xfe'"


@given(st.none() | st.binary() | st.text().map(str.encode))
def test_bytes_written_as_json_round_trip(data: bytes | None) -> None:
    assert bytes_from_json(json.loads(json.dumps(bytes_as_json(data)))) == data


@pytest.mark.parametrize("given", [5, ["a"], {"base64": 5}, {"base64": "a"}, {"base64": "YQ==", "more": "1"}, {}])
def test_json_without_bytes_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="base64"):
        bytes_from_json(given)


def test_headers_of_eos_are_shown_as_text() -> None:
    mark = ("eos-lineage", lineage.encode(lineage.Source("in", 2, 9, 0, 2, 17)))
    assert headers_as_text([("a", b"1"), mark]) == ["a=1", "(output 1 of 2 of in[2]@9, number 17)"]
    assert header_as_json(*mark) == {"topic": "in", "partition": 2, "offset": 9, "i": 0, "n": 2, "number": 17}
    foreign_header = ("eos-lineage", b"\xff")
    assert headers_as_text([foreign_header, ("b", None)]) == [r"eos-lineage=b'\xff'", "b=(null)"]
    assert header_as_json(*foreign_header) == {"base64": "/w=="}
    failed = Record("in", 2, 9, 5, None, b"v", [("a", b"1")])
    letter = make_dead_letter(failed, ValueError("no\x1b[2J price"), app="shop", function="total")[-1] or []
    said = r"(dead letter of shop/total, from in[2]@9: ValueError: no\x1b[2J price)"
    assert headers_as_text(letter) == ["a=1", said]
    assert headers_as_text([*letter, mark, ("eos-dlq-replays", b"2")]) == [
        "a=1",
        "(output 1 of 2 of in[2]@9, number 17)",
        said.replace("@9:", "@9, replays: 2:"),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("tail", "a b"), "'a b' is not a topic name"),
        (("send", "..", "x"), "'..' is not a topic name"),
        (("create", "ok", "a/b"), "'a/b' is not a topic name"),
        (("send", "t", "x", "--header", "nothing"), "--header nothing: expected NAME=VALUE"),
        (("send", "t", "k:x", "--key", "k", "-K", ":"), "--key and --key-separator cannot be used together"),
        (("tail", "t", "--follow", "--until-end"), "--follow and --until-end cannot be used together"),
        (("tail", "t", "--from-beginning", "-n", "3"), "--from-beginning and --last cannot be used together"),
    ],
)
def test_wrong_command_is_refused_before_a_query(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["topic", *arguments]) == 64
    captured = capsys.readouterr()
    assert captured.err.startswith(f"eos: {sentence}")
    assert captured.out == ""


def test_marks_have_readable_names() -> None:
    assert [mark.value for mark in Mark] == ["committed", "aborted", "open"]
