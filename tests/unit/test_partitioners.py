"""The partitioner of an input topic: its recognition, the findings, and the worker's one warning."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos import App, Out, Record, State
from eos.kafka.admin.facts import Topic
from eos.kafka.admin.preflight import Level
from eos.kafka.client.settings import Settings
from eos.worker.partitioners import HASHES, InputPartitioners, Place, fnv1a, judge, recognise

JAVA, CRC32, FNV = "murmur2_random", "consistent_random", "fnv1a_random"
KEYS = [b"customer-%d" % number for number in range(100)]
OTHERS = [b"other-%d" % number for number in range(4)]


def place(partitioner: str, keys: Iterable[bytes], partitions: int) -> set[Place]:
    return {(key, HASHES[partitioner](key) % partitions) for key in keys}


def records(places: Iterable[Place], topic: str = "in") -> list[Record]:
    return [Record(topic, partition, number, key=key) for number, (key, partition) in enumerate(sorted(places))]


def joined(partitions: int = 8) -> tuple[App, dict[str, Topic]]:
    """Return an App that writes `in` again by another key, and counts in `between`."""
    app = App("app")

    @app.process("in", to="between")
    def again(value: bytes) -> Out:
        return Out(value, key=value)

    @app.process("between", to="out")
    def count(value: bytes, seen: State[int]) -> None: ...

    @app.process("direct", to="out")
    def count_directly(value: bytes, seen: State[int]) -> None: ...

    return app, {name: Topic(True, partitions) for name in ("in", "between", "direct", "out")}


# Hashes of Kafka's own test (org.apache.kafka.common.utils.UtilsTest.testMurmur2), and of the authors of FNV.
@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_hashes_as_java_does(key: bytes, hashed: int) -> None:
    assert HASHES[JAVA](key) == hashed & 0x7FFFFFFF


def test_fnv1a_is_absolute() -> None:
    assert fnv1a(b"foobar") == 2**32 - 0xBF9CF968


@given(st.sampled_from(sorted(HASHES)), st.integers(3, 200), st.sets(st.binary(min_size=1), min_size=20, max_size=60))
def test_keys_are_recognised_as_one_partitioner(name: str, partitions: int, keys: set[bytes]) -> None:
    assert recognise(place(name, keys, partitions), partitions) == (name,)


@given(st.sampled_from([(JAVA, CRC32), (CRC32, FNV), (JAVA, FNV)]), st.integers(3, 200))
def test_two_producers_of_a_topic_are_recognised(names: tuple[str, str], partitions: int) -> None:
    places = place(names[0], KEYS[:50], partitions) | place(names[1], KEYS[40:], partitions)
    assert set(recognise(places, partitions) or ()) == set(names)


@pytest.mark.parametrize("partitions", [3, 8, 100])
def test_other_rules_are_recognised_as_none(partitions: int) -> None:
    assert recognise({(key, len(key) % partitions) for key in KEYS}, partitions) == ()
    assert recognise(place(JAVA, KEYS, partitions) | place(CRC32, OTHERS, partitions), partitions) == ()
    assert recognise({(key, p % (partitions - 1)) for key, p in place(CRC32, KEYS, partitions)}, partitions) == ()


def test_keys_that_two_partitioners_explain_decide_nothing() -> None:
    both = [
        key for key in (b"%d" % number for number in range(2_000)) if HASHES[JAVA](key) % 8 == HASHES[CRC32](key) % 8
    ]
    assert len(both) > 100
    assert recognise(place(JAVA, both, 8), 8) is None


@pytest.mark.parametrize(("keys", "partitions"), [(100, 1), (14, 4), (4, 100), (0, 8), (29, 2)])
def test_too_few_keys_or_partitions_decide_nothing(keys: int, partitions: int) -> None:
    assert recognise(place(CRC32, KEYS[:keys], partitions), partitions) is None


@pytest.mark.parametrize(
    ("topic", "found", "settings", "level", "words"),
    [
        ("in", (CRC32,), {}, Level.WARNING, "-X partitioner=consistent_random keeps the partitions (with empty state"),
        ("in", (CRC32,), {"partitioner": "consistent"}, Level.OK, "CRC32"),
        ("in", (CRC32,), {"partitioner": "murmur2_random"}, Level.OK, "CRC32"),
        ("in", (CRC32,), {"partitioner": "random"}, Level.OK, "CRC32"),
        ("in", (JAVA,), {}, Level.OK, "murmur2"),
        ("in", (), {}, Level.OK, "unknown"),
        ("in", (JAVA, CRC32), {}, Level.WARNING, "two partitions"),
        ("direct", (JAVA, CRC32), {}, Level.FAILED, "count_directly has two states of the key"),
        ("direct", (CRC32,), {}, Level.WARNING, "out will be written with murmur2"),
        ("between", (JAVA,), {}, Level.OK, "murmur2"),
        ("between", (JAVA,), {"partitioner": CRC32}, Level.WARNING, "count has no state of them"),
        ("between", (JAVA, CRC32), {}, Level.WARNING, "count has two states"),
    ],
)
def test_finding_says_what_follows(
    topic: str, found: tuple[str, ...], settings: dict[str, str], level: Level, words: str
) -> None:
    app, topics = joined()
    finding = judge(app, Settings(settings), topics, topic, found)
    assert finding.level is level
    assert words in str(finding)


@pytest.mark.parametrize(("partitions", "level"), [(1, Level.OK), (9, Level.OK), (12, Level.WARNING)])
def test_output_whose_keys_spread_anyway_causes_no_warning(partitions: int, level: Level) -> None:
    app, topics = joined()
    topics["between"] = Topic(True, partitions)
    assert judge(app, Settings(), topics, "in", (CRC32,)).level is level


@pytest.fixture
def look() -> Callable[..., InputPartitioners]:
    def make(partitions: int = 8, **settings: str) -> InputPartitioners:
        app, topics = joined(partitions)
        return InputPartitioners(app, Settings(settings), topics)

    return make


def test_worker_warns_once_from_the_first_keys(
    look: Callable[..., InputPartitioners], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = look()
    keys = records(place(CRC32, KEYS, 8))
    for start in range(0, 100, 10):
        assert not inputs.note(keys[start : start + 10])
    (line,) = caplog.messages
    assert line.startswith("input has another partitioner topic=in keys=20 why=in was written with CRC32")
    assert not inputs.note(records(place(JAVA, KEYS, 8), "between"))
    assert inputs.note(records(place(JAVA, KEYS, 8), "direct")), "all topics are known"
    assert len(caplog.messages) == 1


def test_worker_stops_looking_after_a_thousand_records(
    look: Callable[..., InputPartitioners], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = look()
    for _ in range(10):
        for topic in ("in", "between", "direct"):
            done = inputs.note([Record(topic, 0, 0) for _ in range(2_000)])
    assert done
    assert caplog.messages == []


def test_worker_warns_of_few_keys_after_many_records(
    look: Callable[..., InputPartitioners], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = look()
    for _ in range(100):
        inputs.note(records(place(CRC32, KEYS[:12], 8)))
    assert len(caplog.messages) == 1


def test_topic_with_one_partition_is_not_examined(look: Callable[..., InputPartitioners]) -> None:
    assert look(partitions=1).note(records(place(CRC32, KEYS, 1)))
