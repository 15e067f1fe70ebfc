"""Fail records under each policy on real Kafka: dead letters exist exactly once, skipped records leave nothing.

Every worker is a process. The checker judges what a read_committed reader finds: depending on the policy, each input
has its two outputs, its one dead letter, or nothing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewTopic

from eos.broker import LocalKafka
from eos.testing.checker import Inputs, Outputs, check
from eos.testing.history import end_offsets, read_topic
from tests.support import forked
from tests.support.reading import configure, create_topics, settled_ends, wait_until
from tests.support.stepping_worker import is_poison

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipeline, Pipelines
pytest_plugins = ["tests.support.pipeline"]

EVERY = 10
SESSION = {"session.timeout.ms": "3000"}
CONSUMER = {"group.protocol": "consumer"}
POISON, UNAVAILABLE, TEMPORARY, CONFIGURATION = 65, 69, 75, 78
Position = tuple[str, int, int]


def create_dlq_topics(pipeline: Pipeline, max_bytes: int | None = None) -> list[str]:
    """Create the dead-letter topics. `max_bytes`: the largest batch that they accept."""
    topics = [f"{source}.dlq" for source in pipeline.sources]
    create_topics(pipeline.servers, [NewTopic(topic, 3, 1) for topic in topics])
    for topic in topics if max_bytes else []:
        limit_bytes(pipeline, topic, max_bytes or 0)
    return topics


def limit_bytes(pipeline: Pipeline, topic: str, limit: int) -> None:
    configure(pipeline.servers, topic, "max.message.bytes", str(limit))


def dead_letters(pipeline: Pipeline, topics: list[str]) -> Outputs:
    """Return the dead letters as outputs of the checker; their headers name their source."""
    columns: dict[str, dict[tuple[int, int, int], bytes]] = {}
    for name in ("topic", "partition", "offset"):
        log = read_topic(pipeline.servers, topics, header=f"eos-dlq-{name}")
        where = zip(log.topic.tolist(), log.partition.tolist(), log.offset.tolist(), strict=True)
        columns[name] = {position: value or b"" for position, value in zip(where, log.headers or [], strict=True)}
    positions = sorted(columns["topic"])
    table = np.array(positions, np.int64).reshape(-1, 3)
    return Outputs(
        topics=tuple(topics),
        topic=table[:, 0].astype(np.int32),
        partition=table[:, 1].astype(np.int32),
        offset=table[:, 2],
        source_topic=np.array([pipeline.sources.index(columns["topic"][p].decode()) for p in positions], np.int32),
        source_partition=np.array([int(columns["partition"][p]) for p in positions], np.int32),
        source_offset=np.array([int(columns["offset"][p]) for p in positions], np.int64),
        copy=np.zeros(len(positions), np.int32),
    )


def combined(first: Outputs, second: Outputs) -> Outputs:
    names = ("partition", "offset", "source_topic", "source_partition", "source_offset", "copy")
    columns: dict[str, Any] = {n: np.concatenate([getattr(first, n), getattr(second, n)]) for n in names}
    topic = np.concatenate([first.topic, second.topic + len(first.topics)])
    return Outputs(topics=(*first.topics, *second.topics), topic=topic, **columns)


def judge(
    pipeline: Pipeline, dlq_topics: list[str], fails: Callable[[Position], bool], dead: bool, complete: bool = True
) -> int:
    """Check every rule, and return how many loaded inputs failed. `fails`: inputs without outputs, which have one
    dead letter if `dead`."""
    topics = [*pipeline.destinations, *dlq_topics]
    settled_ends(pipeline.servers, topics, 20)
    outputs = read_topic(pipeline.servers, pipeline.destinations).outputs()
    if dlq_topics:
        outputs = combined(outputs, dead_letters(pipeline, dlq_topics))
    loaded = [(pipeline.sources[t], p, offset) for t, p, offset in pipeline._loaded]
    failing = np.array([fails(position) for position in loaded])
    report = check(
        inputs(pipeline),
        outputs,
        fan_out=np.where(failing, 1 if dead else 0, len(pipeline.destinations)),
        committed=pipeline.committed(),
        complete=complete,
        ends=end_offsets(pipeline.servers, [*pipeline.sources, *topics]),
    )
    report.raise_if_violated()
    examined = {v.rule for v in report.verdicts}
    assert {
        "no_duplicates",
        "no_losses",
        "no_unexpected_outputs",
        "order",
        "atomic",
        "offsets_match_outputs",
    } <= examined
    return int(failing.sum())


def inputs(pipeline: Pipeline) -> Inputs:
    """Return the loaded inputs without the transactions that handled them, which only stepping workers report."""
    given = pipeline.inputs()
    return given if pipeline._attempts else dataclasses.replace(given, transaction=None)


def one_of_many(position: Position) -> bool:
    return is_poison(position[2], EVERY)


# Workers that are killed between dead letters.


def kill_between_dead_letters(pipeline: Pipeline, settings: dict[str, str]) -> None:
    dlq_topics = create_dlq_topics(pipeline)
    settings = settings | {
        "transaction.timeout.ms": "30000"
    }  # a successor ends the open transaction before the broker does
    orders: dict[str, Any] = {"settings": settings, "on_error": "dlq", "poison_every": EVERY}
    for step, nth in (("flush", 3), ("offsets sent", 2)):
        worker = pipeline.worker(holds=[(step, nth)], **orders)
        worker.wait_at(step, nth)
        wait_until(
            "a dead letter in the open transaction",
            lambda: not {topic for topic, _ in pipeline.open_partitions()}.isdisjoint(dlq_topics),
        )
        worker.kill()
    pipeline.finish(**orders)
    dead = judge(pipeline, dlq_topics, one_of_many, dead=True)
    assert dead > 100
    assert "dead_letters=" in pipeline.workers[-1].log


def test_dead_letters_of_killed_workers_exist_exactly_once(kafka: LocalKafka, pipelines: Pipelines) -> None:
    kill_between_dead_letters(pipelines.on(kafka, 2_000), SESSION)


@pytest.mark.deep
def test_dead_letters_in_the_consumer_protocol_exist_exactly_once(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 2_000)
    pipeline.set_group_session_timeout(2_000)
    kill_between_dead_letters(pipeline, CONSUMER)


@pytest.mark.deep
def test_dead_letters_before_kip_890_exist_exactly_once(kafka392: LocalKafka, pipelines: Pipelines) -> None:
    kill_between_dead_letters(pipelines.on(kafka392, 2_000), SESSION)


# Records that the client or the broker refuses.


@pytest.mark.deep_for("client-skip", "client-retry", "broker-*")
@pytest.mark.parametrize(
    ("refused_by", "policy", "settings"),
    [
        ("the-client", "skip", {}),
        ("the-client", "dlq", {}),
        ("the-client", "retry", {}),
        ("the-broker", "skip", {}),
        ("the-broker", "retry", CONSUMER),
    ],
    ids=["client-skip", "client-dlq", "client-retry", "broker-skip", "broker-retry-then-dlq-consumer"],
)
def test_policy_handles_an_output_that_is_too_large(
    refused_by: str, policy: str, settings: dict[str, str], kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(kafka, 900)
    dlq_topics = create_dlq_topics(pipeline) if policy != "skip" else []
    if refused_by == "the-broker":
        limit_bytes(pipeline, pipeline.destinations[1], 100_000)
    position = pipeline.record((pipeline.sources[0], 1), 70)
    size = 2_000_000 if refused_by == "the-client" else 200_000
    pipeline.finish(on_error=policy, large_at=(*position, size), large_last=True, settings=settings)
    assert judge(pipeline, dlq_topics, lambda at: at == position, dead=policy != "skip") == 1
    log = pipeline.workers[-1].log
    assert "MSG_SIZE_TOO_LARGE" in log
    assert ("retries=2" in log) is (policy == "retry")


def test_record_that_fails_an_asynchronous_send_is_found(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    dlq_topics = create_dlq_topics(pipeline)
    limit_bytes(pipeline, pipeline.destinations[1], 100_000)
    position = pipeline.record((pipeline.sources[0], 1), 3)
    # The function is slow, so the transaction is long. The record is refused early in it, and then the client accepts
    # no more records.
    settings = {"eos.transaction.interval.ms": "1000"}
    pipeline.finish(on_error="dlq", large_at=(*position, 200_000), work_ms=3, settings=settings)
    assert judge(pipeline, dlq_topics, lambda at: at == position, dead=True) == 1
    assert "MSG_SIZE_TOO_LARGE" in pipeline.workers[-1].log


def test_refused_dead_letter_stops_the_worker_with_65(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    dlq_topics = create_dlq_topics(pipeline, max_bytes=100)
    topic, partition, offset = position = pipeline.record((pipeline.sources[0], 1), 50)
    worker = pipeline.worker(on_error="dlq", raise_at=position)
    worker.assert_ended(POISON, f"{topic}[{partition}]@{offset}", "DeadLetterRefused", "MSG_SIZE_TOO_LARGE")
    judge(pipeline, dlq_topics, lambda at: at == position, dead=True, complete=False)
    assert pipeline.committed()[topic, partition] <= offset
    for name in dlq_topics:
        limit_bytes(pipeline, name, 1_000_000)
    pipeline.finish(on_error="dlq", raise_at=position)
    assert judge(pipeline, dlq_topics, lambda at: at == position, dead=True) == 1


# Retries.


def test_retry_waits_without_an_open_transaction(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    dlq_topics = create_dlq_topics(pipeline)
    position = pipeline.record((pipeline.sources[0], 1), 50)
    worker = pipeline.worker(on_error="retry-slowly", raise_at=position)
    worker.wait_log("record failed, retry scheduled")
    pipeline.wait_not_open()
    members = pipeline.members()
    time.sleep(4)  # longer than the transaction timeout, because this waits for the broker's clock
    assert pipeline.members() == members
    assert len(members) == 1
    worker.terminate()
    assert worker.wait() == 0
    assert worker.log.count("record failed, retry scheduled") == 1
    assert "aborts=0" in worker.log
    judge(pipeline, dlq_topics, lambda at: at == position, dead=True, complete=False)
    assert pipeline.committed()[position[0], position[1]] <= position[2]
    pipeline.finish()
    judge(pipeline, dlq_topics, lambda at: False, dead=True)


# Functions that are too slow.


def test_record_slower_than_the_timeout_gets_its_own_transaction(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 300)
    topic, partition, offset = pipeline.record((pipeline.sources[0], 1), 20)
    pipeline.finish(slow_at=(topic, partition, offset, 3.5), settings={"transaction.timeout.ms": "1500", **SESSION})
    worker = pipeline.workers[-1]
    assert f"for {topic}[{partition}]@{offset}, longer than transaction.timeout.ms=1500" in worker.log
    # The record may exceed the timeout together with others first, and then alone.
    assert worker.log.count("transaction exceeded its timeout") in (1, 2)
    pipeline.verify()


@pytest.mark.long
def test_function_slower_than_the_poll_interval_exits_with_78(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 300)
    position = pipeline.record((pipeline.sources[0], 1), 20)
    settings = {"session.timeout.ms": "6000", "max.poll.interval.ms": "6000", "transaction.timeout.ms": "30000"}
    worker = pipeline.worker(slow_at=(*position, 8.0), settings=settings)
    worker.assert_ended(CONFIGURATION, "max.poll.interval.ms=6000", f"{position[0]}[{position[1]}]@{position[2]}")
    assert pipeline.committed()[position[0], position[1]] == position[2], "the records before it must be committed"
    pipeline.finish()
    pipeline.verify()


# Whole programs, as users write them.


TYPED = """
import eos
import msgspec

app = eos.App({app!r})

class Order(msgspec.Struct):
    number: int

@app.process({sources!r}, to={destinations!r}, on_error=eos.dlq)
def double(order: Order) -> Order:
    return Order(order.number * 2)
"""


def test_input_that_cannot_be_decoded_becomes_a_dead_letter(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 60)  # each value is b"input", which is not JSON
    dlq_topics = create_dlq_topics(pipeline)
    pipeline.program(TYPED, "--until-end").assert_ended(0)
    assert judge_dead(pipeline, dlq_topics) == 60
    settings = {
        "bootstrap.servers": pipeline.servers,
        "group.id": f"{pipeline.app}-look",
        "auto.offset.reset": "earliest",
    }
    consumer = Consumer(settings | {"isolation.level": "read_committed"})
    consumer.subscribe(dlq_topics)
    message = wait_until("a dead letter", lambda: consumer.poll(0.5), 30)
    consumer.close()
    headers: Any = dict(message.headers())
    assert message.value() == b"input"
    assert message.key().startswith(b"key ")
    assert message.topic() == headers["eos-dlq-topic"].decode() + ".dlq"
    assert headers["eos-dlq-exception"] == b"eos.serde.DecodeError"
    assert b"expected Order as JSON" in headers["eos-dlq-message"]
    original = TopicPartition(
        headers["eos-dlq-topic"].decode(), int(headers["eos-dlq-partition"]), int(headers["eos-dlq-offset"])
    )
    assert (original.topic, original.partition, original.offset) in {
        (pipeline.sources[t], p, offset) for t, p, offset in pipeline._loaded
    }
    assert int(headers["eos-dlq-timestamp"]) > 1_600_000_000_000


def judge_dead(pipeline: Pipeline, dlq_topics: list[str]) -> int:
    """Check that each input has exactly one dead letter."""
    found = dead_letters(pipeline, dlq_topics)
    report = check(inputs(pipeline), found, fan_out=1, committed=pipeline.committed(), complete=True)
    report.raise_if_violated()
    return len(found)


STAMPING = """
import asyncio
import eos
from eos.testing.lineage import stamp

app = eos.App({app!r})
sources, destinations = {sources!r}, {destinations!r}

def outs(record):
    if record.offset % 10 == 5:
        raise ValueError("this record is one of many")
    where = sources.index(record.topic), record.partition, record.offset
    return [eos.Out(stamp(*where, i), record.key, topic=topic, timestamp=0) for i, topic in enumerate(destinations)]
"""
BATCH = (
    STAMPING
    + """
@app.process_batch(sources, to=destinations, on_error=eos.dlq)
def copy(records: list[eos.Record]):
    return [out for record in records for out in outs(record)]
"""
)
ASYNC = (
    STAMPING
    + """
running = most = 0

@app.process(sources, to=destinations, on_error=eos.dlq)
async def copy(record: eos.Record):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.02 if record.offset % 3 else 0.001)
    running -= 1
    return outs(record)

@app.on_start
async def opened():
    print("opened", flush=True)

@app.on_stop
async def closed():
    print("at once:", most, flush=True)
"""
)


@pytest.mark.parametrize("program", [BATCH, ASYNC], ids=["batch", "async"])
def test_batch_and_async_failures_keep_other_records_in_order(
    program: str, kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(kafka, 900)
    dlq_topics = create_dlq_topics(pipeline)
    worker = pipeline.program(program, "--until-end")
    worker.assert_ended(0)
    assert judge(pipeline, dlq_topics, one_of_many, dead=True) > 50
    if program is ASYNC:
        worker.wait_line("opened")
        worker.wait_line("at once: 100")


CANNOT_START = (
    STAMPING
    + """
@app.process(sources, to=destinations)
def copy(record: eos.Record):
    return outs(record)

@app.on_start
def connect():
    raise OSError("the database is away")
"""
)


def test_start_hook_error_exits_with_75_and_shows_user_frames(kafka: LocalKafka, pipelines: Pipelines) -> None:
    worker = pipelines.on(kafka).program(CANNOT_START, "--until-end")
    worker.assert_ended(75, "on_start: connect raised OSError: the database is away")
    assert "program.py" in worker.log
    assert "in connect" in worker.log
    assert "eos/worker/worker.py" not in worker.log


REFUSED = (
    STAMPING.replace("raise ValueError", "pass #")
    + """
large, nowhere = 7, 8  # of ten

def outs_refused(record):
    made = outs(record)
    if record.partition == 1 and record.offset % 100 == large:
        return [made[0], eos.Out(bytes(2_000_000), topic=destinations[1])]
    if record.partition == 1 and record.offset % 100 == nowhere:
        return [made[0], eos.Out(b"", topic=destinations[1], partition=99)]
    return made

if {batch}:
    @app.process_batch(sources, to=destinations, on_error=eos.dlq)
    def copy_all(records: list[eos.Record]):
        return [eos.Out(out.value, r.key, out.topic, (), out.partition, 0) for r in records for out in outs_refused(r)]
else:
    app.process(sources, to=destinations, on_error=eos.dlq)(outs_refused)
"""
)


@pytest.mark.parametrize("batch", [False, pytest.param(True, marks=pytest.mark.long)], ids=["single", "batch"])
def test_refused_outputs_are_found_in_a_large_transaction(batch: bool, kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 900)
    dlq_topics = create_dlq_topics(pipeline)
    pipeline.program(REFUSED.replace("{batch}", str(batch)), "--until-end").assert_ended(0)

    def refused(position: Position) -> bool:
        return position[1] == 1 and position[2] % 100 in (7, 8)

    assert judge(pipeline, dlq_topics, refused, dead=True) >= 4
    log = pipeline.workers[-1].log
    assert "MSG_SIZE_TOO_LARGE" in log
    assert "_UNKNOWN_PARTITION" in log


def test_missing_dead_letter_topic_exits_with_69_at_the_start(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 10)
    missing = ", ".join(f"{source}.dlq" for source in pipeline.sources)
    pipeline.program(TYPED, "--until-end").assert_ended(UNAVAILABLE, f"topics {missing} do not exist at ")
    assert pipeline.committed() == {}


STUCK = """
import asyncio
import eos

app = eos.App({app!r})

@app.process({sources!r}, to={destinations!r})
async def stuck(record: eos.Record):
    print("STUCK", flush=True)
    await asyncio.sleep(3600)

@app.on_stop
async def closed():
    print("closed", flush=True)
"""


def test_second_signal_abandons_unfinished_async_functions(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 60)
    worker = pipeline.program(STUCK, "--until-end", "-X", "transaction.timeout.ms=60000")
    worker.wait_line("STUCK")
    worker.terminate()
    worker.wait_log("stopping")
    worker.terminate()
    worker.assert_ended(TEMPORARY, "the stop took too long")
    pipeline.wait_not_open(timeout_s=5)
    assert pipeline.committed() == {}


LINEAGE = """
import eos

app = eos.App({app!r})
first, second = {sources!r}

def copy(record: eos.Record):
    if record.offset % 10 == 5:
        raise ValueError("this record is one of many")
    return record.value

app.process(first, to={destinations!r}[0], on_error=eos.dlq)(copy)
app.process(second, to={destinations!r}[0], on_error=eos.skip)(copy)
"""


def test_verify_counts_skipped_records_and_dead_letters(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 900)
    dlq_topics = create_dlq_topics(pipeline)
    worker = pipeline.program(LINEAGE, "--until-end", "-X", "eos.lineage=true")
    worker.assert_ended(0)
    failing = {
        number: sum(t == number and one_of_many(("", p, o)) for t, p, o in pipeline._loaded) for number in (0, 1)
    }
    assert f"skipped={failing[1]} dead_letters={failing[0]} " in worker.log
    outputs = pipeline.loaded - failing[1]

    def verify(*topics: str) -> tuple[int, str]:
        named = [option for topic in topics for option in ("--output", topic)]
        inputs = [option for topic in pipeline.sources for option in ("--input", topic)]
        where = ["--bootstrap-servers", pipeline.servers, "--group", pipeline.app]
        done = forked.run(["eos", "verify", *where, *inputs, *named], env=os.environ | {"COLUMNS": "240"})
        return done.returncode, done.stdout + done.stderr

    code, printed = verify(pipeline.destinations[0], dlq_topics[0])
    assert code == 0, printed
    assert f"{pipeline.loaded:,} inputs and {outputs:,} outputs of group {pipeline.app} examined: holds" in printed
    code, printed = verify(pipeline.destinations[0])
    assert code == 1, printed  # Without their topic, the dead letters are missing outputs.
    assert "no_losses" in printed.rpartition("VIOLATED")[2]
