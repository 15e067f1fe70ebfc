"""Run `eos reset`: replays, skipped records, other names, adopted groups and recreated topics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPartition
from kafka.structs import OffsetAndMetadata

from eos.broker import LocalKafka
from eos.testing.verify import verify
from tests.support.life import POISON, Life
from tests.support.raw import raw_producer
from tests.support.reading import create_topic, wait_until

Names = Callable[[str], str]
PROGRAMS = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def life(kafka: LocalKafka, tmp_path: Path, names: Names) -> Life:
    return Life(kafka, tmp_path, names("app"))


def test_reset_skips_a_poison_record_and_replays_the_input(life: Life) -> None:
    life.load([b"a", POISON, b"b"])
    life.load([b"c"], partition=1)
    stopped = life.run()
    assert stopped.returncode == 65, stopped.stderr
    poison = f"{life.input}[0]@1"
    assert f"eos reset theapp.py:app --skip '{poison}' --wait 30 --bootstrap-servers {life.servers}`" in stopped.stderr
    # A record stops a worker but does not remove it from the group, so a restart gets its partitions.
    shown = life.reset("--skip", poison, "--dry-run", "--wait", "30")
    assert shown.returncode == 0, shown.stderr
    assert "skips up to 1" in shown.stdout
    assert life.reset("--skip", poison).returncode == 64, "the prompt has no terminal to ask on"
    skipped = life.reset("--skip", f"{life.input}[0]@2", "--yes")
    assert (skipped.returncode, f"{poison} comes before {life.input}[0]@2" in skipped.stderr) == (78, True), (
        skipped.stderr
    )
    assert life.committed()[0] == 1
    moved = life.reset("--skip", poison, "--yes")
    assert moved.returncode == 0, moved.stderr
    again = life.reset("--skip", poison, "--yes")
    assert (again.returncode, "there is nothing to skip" in again.stderr) == (78, True), again.stderr
    assert life.run().returncode == 0
    assert life.settled() == [b"a", b"b", b"c"]
    assert life.committed() == [3, 1]
    assert life.reset("--from", "latest", "--yes").returncode == 0
    assert life.committed() == [3, 1]
    assert life.reset("--from", "2000-01-01T00:00:00", "--yes").returncode == 0
    assert life.committed() == [0, 0]
    assert life.reset("--from", f"{life.input}[0]@2", "--yes").returncode == 0
    assert life.run().returncode == 0
    assert life.settled() == [b"a", b"b", b"b", b"c", b"c"], "only the record before the target must stay skipped"


def test_reset_skips_only_records_that_a_reader_sees(life: Life) -> None:
    with raw_producer(life.servers, f"{life.app}-other") as producer:
        producer.begin()
        producer.send(life.input, "given up")
        producer.abort()
    refused = life.reset("--skip", f"{life.input}[0]@0", "--yes")
    assert (refused.returncode, f"there is no record at {life.input}[0]@0" in refused.stderr) == (78, True), (
        refused.stderr
    )
    assert life.committed()[0] < 0


def test_reset_is_refused_while_a_member_lives(life: Life) -> None:
    life.load([b"a"])
    with life.running("--instance", "the-living") as worker:
        wait_until("its output", lambda: life.outputs() == [b"a"], 60)
        before = life.committed()
        refused = life.reset("--from", "earliest", "--yes")
        assert refused.returncode == 69
        assert f"group {life.app} has 1 member ({life.app}-the-living on 127.0.0.1): stop them first" in refused.stderr
        assert life.committed() == before
        life.stop(worker)
    assert life.reset("--from", "earliest", "--yes").returncode == 0
    assert life.committed() == [0, 0]


def test_reset_is_refused_while_offsets_are_pending(life: Life) -> None:
    life.load([b"a"])
    with raw_producer(life.servers, f"{life.app}-dead") as producer:
        producer.begin()
        producer.send_offset(life.app, life.input, 1)
        refused = life.reset("--from", "earliest", "--yes")
        assert refused.returncode == 69, refused.stderr
        assert "an open transaction contains offsets" in refused.stderr
        producer.commit()
    assert life.committed()[0] == 1


def test_invalid_reset_target_is_refused_and_moves_no_offset(life: Life) -> None:
    life.load([b"a"])
    assert life.run().returncode == 0
    for where, code in ((f"{life.input}:0:7", 78), (f"{life.input}:9:0", 64), ("other:0:0", 64), ("soon", 64)):
        refused = life.reset("--from", where, "--yes")
        assert refused.returncode == code, refused.stderr
        assert "Traceback" not in refused.stderr
    assert life.committed() == [1, -1]


def test_worker_continues_the_group_of_an_at_least_once_consumer(life: Life) -> None:
    life.load([b"handled before", b"a"])
    consumer = Consumer(
        {"bootstrap.servers": life.servers, "group.id": life.app, "auto.offset.reset": "earliest"}
        | {"enable.auto.commit": False}
    )
    consumer.subscribe([life.input])
    message = wait_until("its first record", lambda: consumer.poll(0.2), 30)
    assert message.value() == b"handled before"
    consumer.commit(message, asynchronous=False)
    refused = life.run()  # the consumer must leave the group first
    assert refused.returncode == 78, refused.stderr
    said = f"eos: group {life.app} has members that are not workers of this App (client.id rdkafka): stop those"
    assert said in refused.stderr
    consumer.close()
    assert life.run().returncode == 0
    assert life.settled() == [b"a"]


def test_reset_keeps_offset_metadata(life: Life) -> None:
    """Check offset metadata with and without `--group`; metadata of other programs is kept byte for byte."""
    life.load([b"a", POISON, b"b"])
    lineage = ("-X", "eos.lineage=true")
    assert life.run(*lineage).returncode == 65
    other = KafkaConsumer(bootstrap_servers=life.servers, group_id=life.app, enable_auto_commit=False)
    before = other.committed(KafkaPartition(life.input, 0), metadata=True)
    assert json.loads(before.metadata.rstrip("\0"))["lineage"] == [0, 1, 1]
    assert life.reset("--skip", f"{life.input}[0]@1", "--yes", "--wait", "30").returncode == 0
    after = other.committed(KafkaPartition(life.input, 0), metadata=True)
    assert after.offset == 2
    notes = json.loads(before.metadata.rstrip("\0"))
    assert json.loads(after.metadata.rstrip("\0")) == notes | {"lineage": [0, 2, 1]}
    assert life.run(*lineage).returncode == 0
    found = verify(life.servers, [life.input], [life.output], life.app)
    assert (found.report.ok, found.inputs, found.outputs) == (True, 3, 2), str(found.report)
    for text in ("AQAAAZ", "x" * 40):
        other.commit({KafkaPartition(life.input, 0): OffsetAndMetadata(3, text, -1)})
        group = ("--group", life.app, "--topic", life.input)
        assert life.eos("reset", *group, "--from", f"{life.input}[0]@1", "--yes").returncode == 0
        assert life.eos("reset", *group, "--accept-changelog", "--yes").returncode == 0
        after = other.committed(KafkaPartition(life.input, 0), metadata=True)
        assert (after.offset, after.metadata.rstrip("\0")) == (1, text)
    other.close()


@pytest.mark.deep_for("more1")
@pytest.mark.parametrize("more", [(), ("-X", "partition.assignment.strategy=range")])
def test_app_with_changed_sources_reads_only_the_new_sources(life: Life, more: tuple[str, ...]) -> None:
    """Change the sources: a static member that returns gets its old partitions without a rebalance."""
    first, second = life.input, create_topic(life.servers, f"{life.input}-2")
    file = life.path / "theapp.py"
    before = file.read_text()
    life.load([b"a"])
    with life.running("--instance", "one", *more):
        wait_until("its output", lambda: life.outputs() == [b"a"], 60)
    for value, sources in ((b"b", [first, second]), (b"c", [second])):
        file.write_text(before.replace(repr(first), repr(sources)))
        life.load([value], topic=second)
        life.load([b"not read" if first not in sources else value], topic=first)
        wanted = [*life.outputs(), *[value] * len(sources)]
        with life.running("--instance", "one", *more):
            wait_until("the outputs of both", lambda wanted=wanted: life.outputs() == wanted, 60)  # type: ignore[misc]


def test_topic_recreated_between_runs_is_read_from_its_beginning(life: Life) -> None:
    """Recreate a topic; Kafka deletes a group's offsets together with the topic."""
    life.load([b"a", b"b", b"c"])
    assert life.run().returncode == 0
    life.recreate_input([b"d"])
    assert life.run().returncode == 0
    assert life.settled() == [b"a", b"b", b"c", b"d"]


@pytest.mark.deep_for("fewer*")
@pytest.mark.parametrize("records", [1, 8], ids=["fewer records than before", "more records than before"])
def test_topic_recreated_during_a_run_stops_the_worker_with_66(records: int, life: Life) -> None:
    """Recreate a topic during a run; with more records than before, the client would silently continue in its
    middle."""
    life.load([b"a", b"b", b"c"])
    with life.running("--instance", "one") as worker:
        wait_until("its outputs", lambda: len(life.outputs()) == 3, 60)
        life.recreate_input([b"new"] * records)
        assert worker.wait(60) == 66, life.log
        assert "eos: the input is gone: " in life.log
    assert life.reset("--from", "earliest", "--yes", "--wait", "30").returncode == 0
    assert life.run().returncode == 0
    assert life.settled().count(b"new") >= records


@pytest.mark.deep
def test_rolling_restart_loses_and_duplicates_nothing(life: Life) -> None:
    """Stop and restart one worker after the other, as in an upgrade, while records arrive."""
    names = ("a", "b")
    log = life.path / "workers.log"
    stderr = log.open("ab")
    workers = {name: life.start("--instance", name, stderr=stderr) for name in names}
    expected: list[bytes] = []

    def more() -> None:
        values = [f"{len(expected) + i:03d}".encode() for i in range(20)]
        for partition in range(2):
            life.load(values[partition::2], partition)
        expected.extend(values)

    def wait_until_at_work(starts: int) -> None:
        """Wait until all workers work: one could write all outputs alone, and an early SIGTERM would end its
        interpreter."""
        wait_until("all workers are at work", lambda: log.read_text().count("session started") == starts, 60)

    try:
        more()
        for restarts, name in enumerate(names):
            wait_until("all outputs", lambda: life.outputs() == expected, 60)
            wait_until_at_work(len(names) + restarts)
            workers[name].terminate()
            more()
            assert workers[name].wait(60) == 0
            workers[name] = life.start("--instance", name, stderr=stderr)
            more()
        wait_until("all outputs", lambda: life.outputs() == expected, 60)
        wait_until_at_work(2 * len(names))
    finally:
        for worker in workers.values():
            worker.terminate()
        codes = [worker.wait(60) for worker in workers.values()]
        stderr.close()
    assert codes == [0, 0], log.read_text()
    assert life.settled() == expected


PROGRAM = """
import sys
import eos
from theapp import app

settings = {"eos.instance": "one", "bootstrap.servers": sys.argv[1]}
eos.run(app, settings, until_end=True)
print("handled", flush=True)
eos.run(app, settings)
print("stopped", flush=True)
sys.stdin.readline()
try:
    eos.run(app, settings, until_end=True)
except eos.PoisonRecord as error:
    print(error.exit_code, error.offset, flush=True)
"""


def test_program_runs_an_app_like_the_command_line(life: Life) -> None:
    (life.path / "program.py").write_text(PROGRAM)
    life.load([b"a"])
    command = [sys.executable, "program.py", life.servers]
    with subprocess.Popen(
        command, cwd=life.path, env=PROGRAMS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        try:
            assert program.stdout.readline() == "handled\n"
            life.load([b"b"])
            wait_until("the second output", lambda: life.outputs() == [b"a", b"b"], 60)
            program.send_signal(signal.SIGINT)
            assert program.stdout.readline() == "stopped\n"
            life.load([POISON])
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "65 2\n"
            assert program.wait(60) == 0
        finally:
            program.kill()
    assert life.committed() == [2, -1]
