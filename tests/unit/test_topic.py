"""`eos topic` without a cluster: what becomes of a record's bytes on the screen, and of its transaction in the mark."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos import cli
from eos.cli.topic import text_of
from eos.kafka.tail import Mark, Seen, _Lane, _merged
from eos.records import Record


def record(offset: int, timestamp: int = -1, partition: int = 0) -> Record:
    return Record("t", partition, offset, timestamp)


def marked(lane: _Lane, stable: int) -> list[tuple[int, str]]:
    return [(seen.record.offset, seen.mark.value) for seen in lane.marked(lambda: stable)]


def test_a_record_that_the_committed_reader_passed_by_is_aborted_and_one_behind_the_stable_end_open() -> None:
    lane = _Lane(4, 9, deque(map(record, (0, 1, 3, 5, 7))), visible={0, 3})
    assert marked(lane, 5) == [(0, "committed"), (1, "aborted"), (3, "committed"), (5, "open"), (7, "open")]
    assert not lane.waiting


def test_what_the_committed_reader_may_still_get_waits_and_is_told_in_order() -> None:
    lane = _Lane(2, 9, deque(map(record, (1, 2, 5))), visible={1})
    assert marked(lane, 4) == [(1, "committed")]
    lane.visible, lane.committed_at = {2}, 4
    assert marked(lane, 4) == [(2, "committed"), (5, "open")]


def test_where_all_is_passed_nobody_is_asked_for_the_stable_end() -> None:
    def asked() -> int:
        raise AssertionError

    assert len(list(_Lane(2, 2, deque(map(record, (0, 1)))).marked(asked))) == 2


@given(st.lists(st.lists(st.integers(-1, 5), max_size=6), min_size=1, max_size=3))
def test_records_of_several_partitions_are_merged_by_time_and_never_against_an_offset_order(
    lanes: list[list[int]],
) -> None:
    seen = [[Seen(record(o, at, p)) for o, at in enumerate(times)] for p, times in enumerate(lanes)]
    merged = list(_merged(iter(seen)))
    for p, lane in enumerate(seen):
        assert [s for s in merged if s.record.partition == p] == lane
    if all(times == sorted(times) for times in lanes):
        assert [s.record.timestamp for s in merged] == sorted(at for times in lanes for at in times)


def test_bytes_are_shown_as_text_where_they_are_and_cannot_move_the_cursor() -> None:
    assert text_of('žluť {"a": 1}'.encode()) == 'žluť {"a": 1}'
    assert text_of(b"a\x1b[2Jb\nc\x00") == r"a\x1b[2Jb\nc\x00"
    assert text_of(b"\xff\xfe") == r"b'\xff\xfe'"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("tail", "a b"), "'a b' is not the name of a topic"),
        (("send", "..", "x"), "'..' is not the name of a topic"),
        (("create", "ok", "a/b"), "'a/b' is not the name of a topic"),
        (("send", "t", "x", "--header", "nothing"), "--header nothing: expected NAME=VALUE"),
        (("tail", "t", "--follow", "--until-end"), "--follow and --until-end exclude each other"),
        (("tail", "t", "--from-beginning", "-n", "3"), "--from-beginning and --last exclude each other"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_before_the_cluster_is_asked(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["topic", *arguments]) == 64
    told = capsys.readouterr()
    assert told.err.startswith(f"eos: {sentence}")
    assert told.out == ""


def test_marks_have_names_that_people_know() -> None:
    assert [mark.value for mark in Mark] == ["committed", "aborted", "open"]
