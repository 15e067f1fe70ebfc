"""Run `eos topic` on a real broker: committed, aborted and open records, and its output for scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from eos import cli
from eos.broker import LocalKafka
from eos.errors import InputGone
from eos.kafka.admin.tail import TopicReader, read_batches_until, read_until
from eos.kafka.client.settings import Settings
from tests.support import forked
from tests.support.reading import create_topic, visible_values, wait_until

Names = Callable[[str], str]
Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def eos(kafka: LocalKafka, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)

    # capsys and not capfd: clients of earlier tests in this process may still log to the descriptor.
    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.invoke(["topic", *arguments])
        return code, *capsys.readouterr()

    return run


def values(output: str) -> list[tuple[str, str]]:
    return [(row["value"], row["state"]) for row in map(json.loads, output.splitlines())]


def begun(kafka: LocalKafka, transactional_id: str) -> Producer:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": transactional_id})
    producer.init_transactions(10)
    producer.begin_transaction()
    return producer


def test_topic_gets_more_partitions_and_is_deleted(eos: Run, kafka: LocalKafka, names: Names) -> None:
    topic, second = names("t"), names("u")
    assert eos("create", topic, second, "--partitions", "2")[0] == 0
    assert eos("partitions", topic, "1") == (64, "", f"eos: {topic} has 2 partitions: Kafka cannot remove any\n")
    assert eos("partitions", topic, "2", "--yes")[:2] == (0, f"{topic}: has 2 partitions\n")
    code, _, output = eos("partitions", topic, "4")
    assert (code, "confirm with --yes" in output, "--with-state" in output) == (64, True, True)
    assert eos("partitions", topic, "4", "--yes")[:2] == (0, f"{topic}: 2 partitions before, 4 now\n")
    assert eos("delete", topic, second)[0] == 64
    assert {row["topic"] for row in json.loads(eos("list", "--json")[1])} >= {topic, second}
    assert eos("delete", topic, second, topic, "--yes")[:2] == (0, f"{topic}: deleted\n{second}: deleted\n")
    assert not {row["topic"] for row in json.loads(eos("list", "--json")[1])} & {topic, second}
    for command in (["delete", topic], ["partitions", topic, "3"]):
        assert eos(*command, "--yes") == (69, "", f"eos: topic {topic} does not exist\n")


def test_topic_is_created_written_in_one_transaction_and_read(
    eos: Run, kafka: LocalKafka, names: Names, capsys: pytest.CaptureFixture[str]
) -> None:
    topic, second = names("t"), names("u")
    assert eos("create", topic, "--partitions", "2")[:2] == (0, f"{topic}: created with 2 partitions\n")
    assert eos("create", topic, second)[1] == f"{topic}: exists\n{second}: created with 8 partitions\n"
    assert eos("tail", topic) == (0, "", f"{topic}: no committed records\n")
    code, output, _ = eos("send", topic, "to", "be", "--key", "k", "--header", "h=v", "--partition", "1")
    assert (code, output) == (0, f"sent in one transaction: {topic}[1]@0, {topic}[1]@1\n")
    assert visible_values(kafka.bootstrap_servers, topic) == {0: [], 1: [b"to", b"be"]}
    lines = eos("tail", topic)[1].splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"{topic}[1]@0", f"{topic}[1]@1"]
    assert [line.split("  ")[2:] for line in lines] == [["k", "to", "h=v"], ["k", "be", "h=v"]]
    listed = {row["topic"]: row for row in json.loads(eos("list", "--json")[1])}
    assert listed[topic] == {"topic": topic, "partitions": 2, "replicas": 1}
    assert not any(name.startswith("__") for name in listed)
    assert eos("send", topic, "x", "--partition", "2")[::2] == (
        64,
        f"eos: --partition 2: {topic} has partitions 0 to 1\n",
    )
    assert eos("send", topic, "a:1", "b:2:3", "-K", ":", "--partition", "0")[0] == 0
    assert [line.split("  ")[2:] for line in eos("tail", topic, "-n", "2")[1].splitlines()] == [
        ["a", "1"],
        ["b", "2:3"],
    ]
    assert eos("send", topic, "a:1", "b", "-K", ":")[::2] == (
        64,
        "eos: value 2, 'b', has no key separator ':'; nothing was sent\n",
    )

    # Each call had its own transactional.id, which the list must not show.
    def of_sends(*arguments: str) -> int:
        cli.invoke(["txn", "list", "--json", *arguments])
        ids = [row["transactional_id"] for row in json.loads(capsys.readouterr().out)]
        return sum(each.startswith("eos-topic-send-") for each in ids)

    # The markers of the last transaction may still be missing.
    wait_until("no send is listed", lambda: of_sends() == 0)
    assert of_sends("--prefix", "eos-topic-send-") >= 2


def test_uncommitted_records_are_shown_and_marked_on_request(eos: Run, kafka: LocalKafka, names: Names) -> None:
    topic = names("t")
    create_topic(kafka.bootstrap_servers, topic, partitions=1)
    eos("send", topic, "a", "b")
    aborting = begun(kafka, names("aborting"))
    aborting.produce(topic, b"never")
    aborting.flush(10)
    aborting.abort_transaction(10)
    eos("send", topic, "c")
    unfinished = begun(kafka, names("open"))
    unfinished.produce(topic, b"maybe")
    unfinished.flush(10)
    eos("send", topic, "behind")
    committed = [("a", "committed"), ("b", "committed"), ("c", "committed")]
    code, output, rest = eos("tail", topic, "--json")
    assert (code, values(output)) == (0, committed)
    assert rest == f"{topic}: 3 more offsets are in an open transaction; --uncommitted shows them\n"
    every = [*committed[:2], ("never", "aborted"), committed[2], ("maybe", "open"), ("behind", "open")]
    for how in (("--from-beginning",), ("-n", "100"), ()):
        assert values(eos("tail", topic, "--json", "--uncommitted", *how)[1]) == every
        assert values(eos("tail", topic, "--json", *how)[1]) == committed
    assert values(eos("tail", topic, "--json", "--uncommitted", "-n", "3")[1]) == every[-3:]
    assert values(eos("tail", topic, "--json", "-n", "1")[1]) == committed[-1:]
    plain = eos("tail", topic, "--uncommitted", "--until-end")[1].splitlines()
    assert [line.endswith(mark) for line, mark in zip(plain[2:5], ("(aborted)", "  c", "(open)"), strict=True)] == [
        True
    ] * 3
    unfinished.commit_transaction(10)
    assert [value for value, _ in values(eos("tail", topic, "--json")[1])] == ["a", "b", "c", "maybe", "behind"]


def test_last_records_are_found_before_many_aborted_ones(eos: Run, kafka: LocalKafka, names: Names) -> None:
    topic = names("t")
    create_topic(kafka.bootstrap_servers, topic, partitions=1)
    eos("send", topic, "first", "second")
    aborting = begun(kafka, names("aborting"))
    for _ in range(100):
        aborting.produce(topic, b"never")
    aborting.flush(10)
    aborting.abort_transaction(10)
    assert [value for value, _ in values(eos("tail", topic, "--json", "-n", "2")[1])] == ["first", "second"]
    assert eos("tail", topic, "-n", "0")[:2] == (0, "")


def test_follow_shows_new_records_until_ctrl_c(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic = names("t")
    create_topic(kafka.bootstrap_servers, topic, partitions=3)
    environment = os.environ | {"KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers}

    def send(data: str) -> None:
        forked.run(["eos", "topic", "send", topic], env=environment, input=data).check_returncode()

    send("before\n")
    with (tmp_path / "out").open("w") as out:
        following = ["eos", "topic", "tail", topic, "--follow", "--json"]
        tailing = forked.Popen[bytes](following, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def shown() -> list[Any]:
        return [row["value"] for row in map(json.loads, (tmp_path / "out").read_text().splitlines())]

    try:
        wait_until("the first record", lambda: shown() == ["before"], 30)
        send("one\ntwo \udcff\n\n")
        wait_until("the new records", lambda: len(shown()) == 4, 30)
        assert sorted(map(str, shown())) == sorted(["before", "one", "{'base64': 'dHdvIP8='}", ""])
        tailing.send_signal(signal.SIGINT)
        assert tailing.wait(30) == 0
    finally:
        tailing.kill()
        tailing.wait()
    assert len(shown()) == 4


def test_closed_output_pipe_is_not_an_error(kafka: LocalKafka, eos: Run, names: Names) -> None:
    topic = names("t")
    create_topic(kafka.bootstrap_servers, topic)
    eos("send", topic, *map(str, range(3_000)))
    ended = subprocess.run(
        f"{sys.executable} -m eos topic tail {topic} --from-beginning | head -n 1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, code = ended.stdout.splitlines()
    assert (first.startswith(f"{topic}[0]@0  "), code, ended.stderr) == (True, "0", "")


def test_missing_topic_is_not_created_by_a_query(eos: Run, names: Names) -> None:
    topic = names("nowhere")
    for arguments in (("tail", topic), ("send", topic, "x")):
        code, output, error = eos(*arguments)
        assert (code, output) == (69, "")
        assert f"topic {topic} does not exist at " in error
        assert error.endswith(f": `eos topic create {topic}` creates it\n")
    assert topic not in eos("list")[1]


def test_query_waits_for_new_topics_but_not_for_deleted_topics(eos: Run, kafka: LocalKafka, names: Names) -> None:
    """Query offsets early and late: after a broker fault, a soak saw OFFSET_OUT_OF_RANGE for existing records."""
    topic = names("t")
    create_topic(kafka.bootstrap_servers, topic, 1)
    settings = Settings({"bootstrap.servers": kafka.bootstrap_servers})
    with TopicReader(settings, topic, {0: 3}, uncommitted=False) as reader:
        early = read_batches_until(reader, {0: 5})
        for _ in range(10):  # one second, in which the broker answers several times that the offset does not exist
            assert next(early) == []
        eos("send", topic, *"abcde")
        assert [seen.record.value for got in early for seen in got] == [b"d", b"e"]
    partition_offset = TopicPartition(topic, 0, 4)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_records([partition_offset])[partition_offset].result(10)
    with (
        TopicReader(settings, topic, {0: 3}, uncommitted=False) as reader,
        pytest.raises(InputGone, match="retention removed records"),
    ):
        list(read_until(reader, {0: 5}))
