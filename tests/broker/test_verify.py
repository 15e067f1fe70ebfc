"""Run `eos verify` on a real cluster: it passes a run with a kill, and names one lost or duplicate output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
)

from eos.broker import LocalKafka
from eos.encoding import lineage
from eos.testing.history import committed_offsets, end_offsets
from tests.support import forked
from tests.support.reading import configure, create_topic, settled_values, wait_until

pytestmark = pytest.mark.takes(357)

COUNT, PARTITIONS = 12_000, 3
APP = """
from eos import App, Out, Record

app = App({group!r})

@app.process({source!r}, to=[{first!r}, {second!r}])
def split(record: Record):
    outputs = int(record.value) // 7 % 3
    return [record.value, Out(record.value, topic={second!r})][:outputs]
"""


CHAIN = """
from eos import App, dlq

app = App({group!r})

@app.process({source!r}, to={first!r}, on_error=dlq)
def copy(value: str) -> str:
    assert not value.endswith("000")
    return value

@app.process({first!r}, to={second!r}, on_error=dlq)
def again(value: str) -> str:
    assert not value.endswith("001")
    return value
"""


OUTPUTS = sum(number // 7 % 3 for number in range(COUNT))


class Run:
    """Run one App with lineage, and keep its input and outputs."""

    def __init__(self, kafka: LocalKafka, names: Callable[[str], str], directory: Path, app: str = APP) -> None:
        self.servers, self.directory = kafka.bootstrap_servers, directory
        self.admin = AdminClient({"bootstrap.servers": self.servers})
        self.group, self.source = names("group"), names("in")
        self.targets = [names("first"), names("second")]
        for topic in (self.source, *self.targets):
            create_topic(self.servers, topic, PARTITIONS)
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 20})
        for number in range(COUNT):
            producer.produce(self.source, b"%d" % number, partition=number % PARTITIONS)
            producer.poll(0)
        assert producer.flush(30) == 0
        names_in_app = {"group": self.group, "source": self.source, "first": self.targets[0], "second": self.targets[1]}
        (directory / "app.py").write_text(app.format(**names_in_app))

    def worker(self, *more: str) -> subprocess.Popen[bytes]:
        options = ["--bootstrap-servers", self.servers, "--instance", "a", "--until-end"]
        command = ["eos", "run", str(self.directory / "app.py"), *options]
        with (self.directory / "worker.log").open("ab") as log_file:
            return forked.Popen([*command, "-X", "eos.transaction.interval.ms=20", *more], stderr=log_file)

    def committed(self) -> int:
        return sum(committed_offsets(self.servers, self.group, self.source).values())

    def verify(self, *outputs: str) -> tuple[int, str]:
        named = ["--input", self.source, "--group", self.group]
        for topic in outputs or self.targets:
            named += ["--output", topic]
        return self.verified(*named)

    def verified(self, *named: str) -> tuple[int, str]:
        command = ["eos", "verify", "--bootstrap-servers", self.servers, *named]
        done = forked.run(command, env=os.environ | {"COLUMNS": "240"})
        return done.returncode, done.stdout + done.stderr

    def copy(self, topic: str, change: Callable[[list[Message]], list[Message]]) -> str:
        """Copy the first output topic with its headers, and apply `change` to the records."""
        create_topic(self.servers, topic, PARTITIONS)
        total = sum(map(len, settled_values(self.servers, self.targets[0]).values()))
        settings: dict[str, Any] = {"bootstrap.servers": self.servers, "auto.offset.reset": "earliest"}
        consumer = Consumer(settings | {"group.id": f"{topic}-copier", "isolation.level": "read_committed"})
        consumer.subscribe([self.targets[0]])
        messages: list[Message] = []
        wait_until("all outputs", lambda: len(read_on(consumer, messages)) == total, timeout=60)
        consumer.close()
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 20})
        for message in change(messages):
            producer.produce(topic, message.value(), partition=message.partition(), headers=message.headers())
            producer.poll(0)
        assert producer.flush(30) == 0
        return topic

    def remove_half(self, topic: str) -> int:
        """Delete the first half of partition 0 as retention does, and return the new first offset."""
        begin = end_offsets(self.servers, topic).log_end[topic, 0] // 2
        target = TopicPartition(topic, 0, begin)
        self.admin.delete_records([target])[target].result(30)
        return begin

    def compact(self, topic: str) -> None:
        configure(self.servers, topic, "cleanup.policy", "compact")


def read_on(consumer: Consumer, messages: list[Message]) -> list[Message]:
    messages += [message for message in consumer.consume(5_000, 0.2) if message.error() is None]
    return messages


@pytest.fixture
def run(kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path) -> Run:
    return Run(kafka, names, tmp_path)


def source_of(message: Message) -> lineage.Source:
    headers: Any = message.headers()
    return lineage.decode(dict(headers)[lineage.HEADER])


def test_verify_passes_a_killed_run_and_names_each_kind_of_damage(run: Run, names: Callable[[str], str]) -> None:
    killed = run.worker("-X", "eos.lineage=true", "-X", "eos.transaction.max.records=100")
    try:
        wait_until("some committed outputs", lambda: run.committed() > 1_000, timeout=60)
    finally:
        killed.kill()
        killed.wait()
    assert run.committed() < COUNT, "the kill came too late"
    code, printed = run.verify()
    assert code == 0, printed  # The outputs of committed records are complete, and the others are still to come.
    assert run.worker("-X", "eos.lineage=true").wait(120) == 0, (run.directory / "worker.log").read_text()
    code, printed = run.verify()
    assert code == 0, printed
    assert f"{COUNT:,} inputs and {OUTPUTS:,} outputs of group {run.group} examined: holds" in printed

    victim = 2_000

    def without_one(messages: list[Message]) -> list[Message]:
        return messages[:victim] + messages[victim + 1 :]

    code, printed = run.verify(run.copy(names("dropped"), without_one), run.targets[1])
    assert code == 1, printed
    assert "VIOLATED: no_losses" in printed

    doubled: list[lineage.Source] = []

    def with_one_twice(messages: list[Message]) -> list[Message]:
        doubled.append(source_of(messages[victim]))
        return [*messages, messages[victim]]

    code, printed = run.verify(run.copy(names("doubled"), with_one_twice), run.targets[1])
    assert code == 1, printed
    assert f"{run.source}[{doubled[0].partition}]@{doubled[0].offset}" in printed
    assert "no_duplicates" in printed.rpartition("VIOLATED")[2]

    code, printed = run.verify(run.targets[0])  # one of the two topics is not read, so half of the outputs are missing
    assert code == 1, printed
    assert "no_losses" in printed.rpartition("VIOLATED")[2]
    assert f"note: only {run.targets[0]} was searched for outputs: if the App writes to another topic too" in printed


def test_verify_finds_a_loss_after_outputs_deleted_by_retention(run: Run, names: Callable[[str], str]) -> None:
    assert run.worker("-X", "eos.lineage=true").wait(120) == 0, (run.directory / "worker.log").read_text()

    def without_the_newest_of_partition_0(messages: list[Message]) -> list[Message]:
        newest = max(i for i, message in enumerate(messages) if message.partition() == 0)
        return messages[:newest] + messages[newest + 1 :]

    damaged = run.copy(names("damaged"), without_the_newest_of_partition_0)
    begin = run.remove_half(run.targets[0])
    code, printed = run.verify()
    assert code == 0, printed
    assert f"{run.targets[0]}[0] no longer begins at 0 but at {begin}: not decided" in printed

    run.remove_half(damaged)
    code, printed = run.verify(damaged, run.targets[1])
    assert code == 1, printed
    assert "VIOLATED: no_losses" in printed
    run.compact(damaged)
    code, printed = run.verify(damaged, run.targets[1])
    assert code == 0, printed
    assert f"{damaged} is compacted: not decided" in printed


def test_verify_without_lineage_decides_nothing(run: Run) -> None:
    assert run.worker().wait(120) == 0, (run.directory / "worker.log").read_text()
    code, printed = run.verify()
    assert code == 65, printed
    assert "nothing to examine" in printed
    assert "eos.lineage=true" in printed
    code, printed = run.verify("there-is-no-such-topic")
    assert code == 69, printed
    assert "there-is-no-such-topic" in printed


def test_verify_checks_intermediate_and_dead_letter_topics(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path
) -> None:
    run = Run(kafka, names, tmp_path, CHAIN)
    assert run.worker("-X", "eos.lineage=true", "--create-topics").wait(120) == 0, (tmp_path / "worker.log").read_text()
    code, printed = run.verified(str(tmp_path / "app.py"))
    assert code == 0, printed
    assert "note:" not in printed
    handled = (
        2 * COUNT - 11
    )  # 1000, ..., 11000 are dead letters of the first function; the second function reads the others
    assert f"{handled:,} inputs and {handled:,} outputs of group {run.group} examined: holds\n" in printed
