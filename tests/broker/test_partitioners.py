"""Input of different partitioners on a real broker: the worker's warning, `eos doctor`, the setting, state, joins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import NewTopic

from eos.broker import LocalKafka
from eos.worker.partitioners import HASHES
from tests.support import forked
from tests.support.reading import create_topics, settled_ends, settled_records

KEYS = [b"customer-%d" % number for number in range(200)]
PARTITIONS = 7
JAVA, CRC32 = "murmur2_random", "consistent_random"
APP = """
import eos
app = eos.App({app!r})
@app.process({source!r}, to={to!r})
def copy(value: bytes) -> bytes:
    return value
"""

JOIN = """
import eos
from eos import State
app = eos.App({app!r})
@app.process([{java!r}, {crc32!r}], to={between!r})
def again(value: bytes) -> bytes:
    return value
@app.process({between!r}, to={to!r})
def count(value: bytes, seen: State[int]) -> str:
    seen.set(seen.get(0) + 1)
    return str(seen.get())
@app.process({both!r}, to={both_to!r})
def count_directly(value: bytes, seen: State[int]) -> str:
    seen.set(seen.get(0) + 1)
    return str(seen.get())
"""


def produce(servers: str, topic: str, partitioner: str | None) -> dict[bytes, int]:
    """Write a record of each key. Return the partition that librdkafka chose for it."""
    found: dict[bytes, int] = {}

    def note(error: KafkaError | None, message: Message) -> None:
        assert error is None
        found[message.key() or b""] = message.partition() or 0

    producer = Producer({"bootstrap.servers": servers} | ({} if partitioner is None else {"partitioner": partitioner}))
    for key in KEYS:
        producer.produce(topic, b"v", key, on_delivery=note)
    assert producer.flush(15) == 0
    return found


@pytest.mark.parametrize("partitioner", [*HASHES, None])
def test_hashes_are_those_of_librdkafka(
    kafka: LocalKafka, names: Callable[[str], str], partitioner: str | None
) -> None:
    create_topics(kafka.bootstrap_servers, [NewTopic(names("in"), PARTITIONS, 1)])
    found = produce(kafka.bootstrap_servers, names("in"), partitioner)
    assert found == {key: HASHES[partitioner or CRC32](key) % PARTITIONS for key in KEYS}


def test_input_of_librdkafka_is_named_until_the_setting_keeps_it(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path
) -> None:
    servers, source, to = kafka.bootstrap_servers, names("in"), names("out")
    create_topics(servers, [NewTopic(name, PARTITIONS, 1) for name in (source, to)])
    chosen = produce(servers, source, None)

    def eos(command: str, *more: str) -> tuple[str, str]:
        ran = forked.run(["eos", command, "theapp.py:app", *more, "--bootstrap-servers", servers], cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout, ran.stderr

    def found(*more: str) -> list[str]:
        rows = [row for row in json.loads(eos("doctor", "--json", *more)[0]) if row["check"] == "partitioner"]
        return [f"{row['level']}: {row['found']}; {row['change']}" for row in rows]

    (tmp_path / "theapp.py").write_text(APP.format(app=names("app-1"), source=source, to=to))
    setting = ("-X", "partitioner=consistent_random")
    (warning,) = found()
    assert warning.startswith(f"warning: {source} was written with CRC32")
    assert "-X partitioner=consistent_random keeps the partitions" in warning
    assert found(*setting) == [f"ok: {source} was written with CRC32 (the default of librdkafka); "]

    for more, lines, hashed in (((), 1, JAVA), (setting, 0, CRC32)):
        (tmp_path / "theapp.py").write_text(APP.format(app=names(f"app-{lines}"), source=source, to=to))
        before = settled_ends(servers, [to])
        log = eos("run", "--until-end", *more)[1]
        assert log.count("input has another partitioner") == lines
        assert log.count(f"{source} was written with CRC32") == lines
        placed = {
            message.key(): partition
            for partition, messages in settled_records(servers, to).items()
            for message in messages
            if (message.offset() or 0) >= before[to, partition]
        }
        assert placed == {key: HASHES[hashed](key) % PARTITIONS for key in KEYS}
    assert placed == chosen


def test_join_is_correct_and_topic_with_two_partitioners_is_named(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path
) -> None:
    servers, topics = kafka.bootstrap_servers, ("java", "crc32", "both", "between", "to", "both_to")
    create_topics(servers, [NewTopic(names(name), PARTITIONS, 1) for name in topics])
    for topic, partitioner in (("java", JAVA), ("crc32", CRC32), ("both", JAVA), ("both", CRC32)):
        produce(servers, names(topic), partitioner)
    filled = {name: names(name) for name in (*topics, "app")}
    (tmp_path / "theapp.py").write_text(JOIN.format(**filled))
    command = ["theapp.py:app", "--bootstrap-servers", servers]

    doctor = forked.run(["eos", "doctor", *command, "--json"], cwd=tmp_path)
    assert doctor.returncode == 78
    failed = [row["found"] for row in json.loads(doctor.stdout) if row["level"] == "failed"]
    assert [found.partition(" was")[0] for found in failed] == [names("both")]
    assert "count_directly has two states of the key" in failed[0]

    ran = forked.run(["eos", "run", *command, "--until-end"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    warned = [line for line in ran.stderr.splitlines() if "input has another partitioner" in line]
    assert sorted(re.findall("topic=([^ ]+)", " ".join(warned))) == sorted([names("both"), names("crc32")])

    def counted_twice(topic: str) -> set[bytes | str | None]:
        partitions = settled_records(servers, names(topic)).values()
        return {message.key() for messages in partitions for message in messages if message.value() == b"2"}

    assert counted_twice("to") == set(KEYS)
    # A key has one state only where both partitioners chose the same partition.
    same = {key for key in KEYS if HASHES[JAVA](key) % PARTITIONS == HASHES[CRC32](key) % PARTITIONS}
    assert 0 < len(same) < len(KEYS)
    assert counted_twice("both_to") == same
