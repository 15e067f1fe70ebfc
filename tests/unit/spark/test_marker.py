"""The decision about a batch: every combination of marker and checkpoint, with its error message."""

from __future__ import annotations

import pytest

from spark_connector.marker import Decision, Marker, WrongProgress, decide, sink_key

MINE, OTHER = "query-1", "query-2"
SAME, DIFFERENT = "digest-1", "digest-2"


def at(batch: int, query: str = MINE, adopted: int | None = None) -> Marker:
    return Marker(query, batch, 10, SAME, adopted)


WRITE, ADOPT, ALREADY = Decision.WRITE, Decision.ADOPT, Decision.ALREADY
# The marker, the query's batch, the digest of its offsets, adopt_at -> the decision, or words of the error.
CASES = [
    (None, 0, SAME, None, WRITE),
    (None, 1, SAME, None, "no marker of this sink"),
    (None, 7, SAME, 7, ADOPT),
    (None, 7, SAME, 6, "no marker of this sink"),
    (None, 0, SAME, 0, WRITE),
    (at(6), 7, SAME, None, WRITE),
    (at(6), 7, DIFFERENT, None, WRITE),
    (at(7), 7, SAME, None, ALREADY),
    (at(7), 7, DIFFERENT, None, "other source offsets"),
    (at(7), 7, DIFFERENT, 7, ADOPT),
    (at(7), 7, SAME, 7, ALREADY),
    (at(7, adopted=7), 7, SAME, 7, ALREADY),
    (at(9), 7, SAME, None, "behind Kafka, whose last batch is 9"),
    (at(5), 7, SAME, None, "ahead of Kafka, whose last batch is 5"),
    (at(9), 7, SAME, 7, ADOPT),
    # adopt_at stays in the program, so it must not adopt a second time after a checkpoint is restored later.
    (at(9, adopted=7), 7, SAME, 7, "adopt_at=7 was used already"),
    (at(7, adopted=7), 7, DIFFERENT, 7, "adopt_at=7 was used already"),
    (at(7, OTHER), 8, SAME, None, "belongs to query query-2, which wrote batch 7 last"),
    (at(7, OTHER), 7, SAME, None, "belongs to query query-2"),
    (at(7, OTHER), 0, SAME, None, "belongs to query query-2"),
    (at(7, OTHER), 0, SAME, 0, ADOPT),
    (at(7, OTHER, adopted=8), 8, SAME, 8, ADOPT),
]


@pytest.mark.parametrize(("marker", "batch", "offsets", "adopt_at", "expected"), CASES)
def test_batch_is_written_once_or_refused(
    marker: Marker | None, batch: int, offsets: str, adopt_at: int | None, expected: Decision | str
) -> None:
    if isinstance(expected, Decision):
        assert decide(marker, MINE, batch, offsets, adopt_at) is expected
    else:
        with pytest.raises(WrongProgress, match=expected):
            decide(marker, MINE, batch, offsets, adopt_at)


def test_marker_round_trips() -> None:
    whole = Marker(MINE, 3, 10, SAME, None, ("a", "b"), "run-1")
    for marker in (at(3), at(3, adopted=2), Marker("", "2013-01-01", 5, ""), whole):
        assert Marker.decode(marker.encode()) == marker


def test_marker_of_version_1_has_no_topics() -> None:
    before = b'{"version": 1, "query": "query-1", "batch": 7, "rows": 10, "offsets": "digest-1", "adopted": null}'
    assert Marker.decode(before) == at(7)
    assert decide(Marker.decode(before), MINE, 7, SAME, None, ["anywhere"]) is ALREADY


def test_marker_of_another_topic_is_refused() -> None:
    """Two sinks share an id in a micro-batch: after a restart the second one's rows would count as written."""
    found = Marker(MINE, 7, 10, SAME, None, ("a",))
    assert decide(found, MINE, 7, SAME, None, ["a"]) is ALREADY
    assert decide(found, MINE, 7, SAME, None, ["a", "b"]) is ALREADY
    assert decide(found, MINE, 8, SAME, None, ["b"]) is WRITE
    with pytest.raises(WrongProgress, match="batch 7 of this sink went to a, and not to b: two sinks"):
        decide(found, MINE, 7, SAME, None, ["b"])
    assert decide(found, MINE, 7, SAME, 7, ["b"]) is ADOPT


def test_marker_ignores_unknown_fields_and_refuses_newer_versions() -> None:
    text = at(7).encode().decode()
    assert Marker.decode(text.replace("{", '{"news": 1, ', 1).encode()) == at(7)
    with pytest.raises(ValueError, match="marker version 3 is not supported: this eos reads versions up to 2"):
        Marker.decode(text.replace('"version": 2', '"version": 3').encode())


@pytest.mark.parametrize("value", [b"", b"{}", b"[1]", b'{"version": 3}', b'{"version": 2, "run": "r"}', b"\xff"])
def test_invalid_marker_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError):
        Marker.decode(value)


def test_keys_of_streams_and_writes_are_distinct() -> None:
    keys = [sink_key("a"), sink_key("a", "b"), sink_key("a", ""), sink_key('a", "batch": "b'), sink_key("a/b")]
    assert len(set(keys)) == len(keys)
