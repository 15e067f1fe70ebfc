"""Test where a worker starts and how it ends: start offsets, --until-end, signals, messages and exit codes.

Every test runs the real command line in its own process and judges by the contents of Kafka.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from eos import TransactSession
from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.session import loop
from eos.session.outcomes import Listener
from tests.support.life import Life
from tests.support.reading import configure, create_topic, took_under, wait_until

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipelines
pytest_plugins = ["tests.support.pipeline"]

LATEST = {"auto.offset.reset": "latest"}
USAGE, POISON, INPUT_GONE, UNAVAILABLE, TEMPORARY, CONFIGURATION = 64, 65, 66, 69, 75, 78

APP = """
from eos import App, Out, Record

app = App({app!r})


@app.process({sources!r}, to={destinations!r})
def copy(record: Record) -> Out:
    return Out(record.value)
"""

CHAIN = """
from eos import App

app = App({app!r})


@app.process({source!r}, to={between!r})
def first(value: bytes) -> bytes:
    return value


@app.process({between!r}, to={to!r})
def second(value: bytes) -> bytes:
    return value
"""


@pytest.fixture
def life(kafka: LocalKafka, tmp_path: Path, names: Callable[[str], str]) -> Life:
    return Life(kafka, tmp_path, names("app"))


# Where it starts.


def test_latest_starts_at_the_end_and_commits_this_offset(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    pipeline.skip_loaded()
    worker = pipeline.worker(settings=LATEST)
    wait_until("all start offsets are committed", lambda: len(pipeline.committed()) == 6)
    worker.kill()
    # Without the committed start offset, the restarted worker would start after these records.
    pipeline.load(300)
    pipeline.finish(settings=LATEST)
    pipeline.verify()


def test_added_partition_is_read_from_its_beginning_with_latest(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    pipeline.skip_loaded()
    worker = pipeline.worker(settings=LATEST | {"topic.metadata.refresh.interval.ms": "1000"})
    wait_until("all start offsets are committed", lambda: len(pipeline.committed()) == 6)
    added = pipeline.add_partition(pipeline.sources[0])
    pipeline.load_transaction(90, places=[added])
    pipeline.load(300)
    pipeline.wait_handled(pipeline.loaded)
    worker.terminate()
    assert worker.wait() == 0
    pipeline.verify()


def test_auto_offset_reset_latest_skips_nothing_between_functions(kafka: LocalKafka, life: Life) -> None:
    """Write with one function before the partition of the other one has an offset; `latest` must not skip it."""
    between = create_topic(kafka.bootstrap_servers, f"{life.app}-between")
    (life.path / "theapp.py").write_text(CHAIN.format(app=life.app, source=life.input, between=between, to=life.output))
    life.load([b"before the group", b"also"])
    life.load([b"1", b"2", b"3"], topic=between)
    # Otherwise the intermediate topic would look like another App's.
    moved = "--topic", life.input, "--from", "latest", "--yes"
    wait_until("the first group has a coordinator", lambda: life.reset(*moved).returncode == 0, 30)
    assert life.run("-X", "auto.offset.reset=latest").returncode == 0
    life.load([b"4"])
    assert life.run("-X", "auto.offset.reset=latest").returncode == 0
    assert life.settled() == [b"1", b"2", b"3", b"4"]


def test_deleted_committed_offset_stops_the_worker_with_66(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    pipeline.finish()
    pipeline.verify()
    place = (pipeline.sources[1], 2)
    committed = pipeline.committed()
    pipeline.load(300)
    low = pipeline.record(place, -5)[2]
    pipeline.delete_before(place, low)
    worker = pipeline.worker(until_end=True)
    worker.assert_ended(INPUT_GONE, f"{place[0]}[2]", f"offset {committed[place]}", f"holds {low} to ")
    after = pipeline.committed()
    assert after[place] == committed[place], "it was not reset"


@pytest.mark.parametrize("idle", [False, True])
def test_offset_of_an_idle_partition_is_committed_again(
    idle: bool, kafka: LocalKafka, pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit the offset of an idle partition again, because it can expire under group.protocol=consumer.

    Brokers then count offsets.retention.minutes from each offset's own commit, and the next start of an empty group
    would repeat the records of that partition.
    """
    pipeline = pipelines.on(kafka, 600)
    pipeline.finish()
    before = pipeline.committed()
    deadline = time.monotonic() + 60

    class Stops(Listener):
        def on_idle(self) -> None:
            idling.stop_requested = idling.counters.transactions > 0 or time.monotonic() > deadline

    if idle:
        monkeypatch.setattr(loop, "IDLE_REFRESH_S", 0.5)
        with TransactSession(
            {
                "bootstrap.servers": pipeline.servers,
                "group.id": pipeline.app,
                "transactional.id": f"{pipeline.app}-two",
            },
            pipeline.sources,
            listener=Stops(),
        ) as idling:
            assert list(idling) == []
            assert (idling.counters.transactions, idling.counters.records_in) == (1, 0)
    else:
        pipeline.load_transaction(9, places=[(pipeline.sources[0], 0)])
        pipeline.finish("two")
    asked = [TopicPartition(*place) for place in before]
    wanted = [ConsumerGroupTopicPartitions(pipeline.app, asked)]
    committed = pipeline.admin.list_consumer_group_offsets(wanted)[pipeline.app].result(10).topic_partitions
    assert {json.loads(tp.metadata)["instance"] for tp in committed} == {f"{pipeline.app}-two"}
    assert all(tp.offset >= before[tp.topic, tp.partition] for tp in committed)
    pipeline.verify()


# How it ends: --until-end.


def test_until_end_finishes_with_empty_and_aborted_partitions(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka)
    first, second = pipeline.sources
    full = [(first, 0), (first, 1), (second, 0), (second, 1)]
    pipeline.load_transaction(400, places=full)
    pipeline.load_transaction(30, commit=False, places=[*full, (first, 2)])  # second[2] stays empty
    workers = [pipeline.worker(instance, until_end=True) for instance in ("one", "two")]
    assert [worker.wait() for worker in workers] == [0, 0]
    pipeline.verify()


def test_until_end_of_empty_topics_ends_immediately(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka)
    assert pipeline.worker(until_end=True).wait(30) == 0
    assert pipeline.delivered == 0


def test_until_end_leaves_later_records_to_the_next_run(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    worker = pipeline.worker(until_end=True, holds=[("flush", 1)])
    worker.wait_at("flush", 1)
    pipeline.load(300)
    worker.release()
    assert worker.wait() == 0
    pipeline.verify(complete=False)
    pipeline.finish()
    pipeline.verify()


# How it ends: signals.


def test_sigterm_ends_the_batch_commits_and_exits_with_0(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 2_000)
    # Enough time for every transaction: none may be aborted.
    worker = pipeline.worker(work_ms=2, settings={"transaction.timeout.ms": "30000"})
    pipeline.wait_handled(100)
    asked = time.monotonic()
    worker.terminate()
    assert worker.wait() == 0
    took_under(5, asked, "from the signal to the end")
    assert "aborts=0" in worker.log
    commits = [line for line in worker.log.splitlines() if " committed taken=" in line]
    assert commits
    for line in commits:
        assert re.search(r" transactional_id=\S+ producer_id=\d+ epoch=\d+ state=\w+$", line), line
    assert pipeline.delivered < 2 * pipeline.loaded, "the worker must be stopped during its run"
    assert pipeline.members() == [], "a final stop must remove a static member from the group"
    pipeline.verify(complete=False)
    pipeline.finish()
    pipeline.verify()


@pytest.mark.deep_for("the-shutdown-timeout")
@pytest.mark.parametrize("how", ["a-second-sigterm", "the-shutdown-timeout"])
def test_slow_stop_aborts_and_exits_with_75(how: str, kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 300)
    pipeline.finish()  # one transaction is committed, however many records the slow worker's first one has
    pipeline.load(300)
    slow = (*pipeline.record((pipeline.sources[0], 0), 80), 120.0)
    settings = {"eos.shutdown.timeout.ms": "500"} if how == "the-shutdown-timeout" else {}
    worker = pipeline.worker(slow_at=slow, settings=settings | {"transaction.timeout.ms": "30000"})
    worker.wait_line("SLOW")
    worker.terminate()
    worker.wait_log("stopping")
    if how == "a-second-sigterm":
        worker.terminate()
    worker.assert_ended(TEMPORARY, "the stop took too long")
    pipeline.wait_not_open(timeout_s=5)  # The worker aborted the transaction itself, long before its timeout.
    pipeline.verify(complete=False)
    pipeline.finish()
    pipeline.verify()


# How it ends: a record that cannot be handled.


def test_function_error_stops_the_worker_with_65_at_its_record(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 900)
    topic, partition, offset = poison = pipeline.record((pipeline.sources[0], 1), 70)
    worker = pipeline.worker(raise_at=poison)
    worker.assert_ended(POISON, f"{topic}[{partition}]@{offset}", "ValueError: this record is poison")
    assert 'raise ValueError("this record is poison")' in worker.log, "the user's own frames are missing"
    before = pipeline.record((topic, partition), 69)[2]
    assert before < pipeline.committed()[topic, partition] <= offset
    pipeline.verify(complete=False)
    again = pipeline.worker(raise_at=poison)
    again.assert_ended(POISON, f"{topic}[{partition}]@{offset}")
    assert before < pipeline.committed()[topic, partition] <= offset
    pipeline.finish()
    pipeline.verify()


@pytest.mark.deep_for("the-broker")
@pytest.mark.parametrize("refused_by", ["the-client", "the-broker"])
def test_output_too_large_stops_the_worker_with_65(refused_by: str, kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 900)
    if refused_by == "the-broker":
        # Large enough for a batch of ordinary outputs, as topic limits are.
        configure(pipeline.servers, pipeline.destinations[1], "max.message.bytes", "100000")
    size = 2_000_000 if refused_by == "the-client" else 200_000
    topic, partition, offset = place = pipeline.record((pipeline.sources[0], 1), 70)
    worker = pipeline.worker(large_at=(*place, size))
    setting = (
        "message.max.bytes=1000000 of the producer" if refused_by == "the-client" else "max.message.bytes of topic"
    )
    worker.assert_ended(POISON, f"{topic}[{partition}]@{offset}", "a record of ", setting, "MSG_SIZE_TOO_LARGE")
    pipeline.verify(complete=False)
    before = pipeline.record((topic, partition), 69)[2]
    assert before < pipeline.committed()[topic, partition] <= offset
    pipeline.finish()
    pipeline.verify()


# How it ends: missing topics and clusters.


def test_missing_topic_exits_with_69_and_is_named_in_the_error(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka)
    missing = f"{pipeline.app}-missing"
    worker = pipeline.program(APP, sources=[pipeline.sources[0], missing])
    worker.assert_ended(UNAVAILABLE, f"topic {missing} does not exist")
    assert missing not in pipeline.admin.list_topics(timeout=10).topics


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        (("-X", "eos.startup.timeout.ms=4000"), 12),
        pytest.param((), 30, marks=pytest.mark.long),
    ],
    ids=["four-seconds", "by-default"],
)
def test_unreachable_cluster_exits_with_69_in_time(
    arguments: tuple[str, ...], limit_s: float, kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(kafka)
    unreachable = f"127.0.0.1:{free_ports(1)[0]}"
    began = time.monotonic()
    worker = pipeline.program(APP, "--bootstrap-servers", unreachable, *arguments)
    worker.assert_ended(UNAVAILABLE, unreachable, "cannot be reached")
    took_under(limit_s, began, "the worker of a cluster that is not there")
