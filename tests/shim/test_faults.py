"""Inject faults with real Kafka: each does what its name says, and a plan whose fault did not happen fails the run.

The broker's state (the log and its transactions) shows whether a request was applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer

from eos.broker import LocalKafka
from tests.shim.protected_clients import producer_of, send, texts
from tests.shim.shims import RunningShim, eventually, refused, start
from tests.support.reading import create_topic, transaction_of

Names = Callable[[str], str]


@contextmanager
def faulty(kafka: LocalKafka, tmp_path: Path, plan: str, *options: str, ends_with: int = 0) -> Iterator[RunningShim]:
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    shim = start(kafka.bootstrap_servers, "--faults", str(path), "--no-protect", *options)
    try:
        yield shim
        assert shim.stop() == ends_with, shim.events
    finally:
        shim.process.kill()
        shim.process.wait()


def plain_producer(shim: RunningShim) -> Producer:
    """Return a producer without transactions."""
    return Producer({"bootstrap.servers": shim.bootstrap_servers, "linger.ms": 0, "log_level": 0})


def test_late_commit_commits_half_of_next_transaction(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"), partitions=2)
    plan = """
    [[rule]]
    api = "EndTxn"
    action = "reset"
    phase = "late"
    until = { api = "Produce" }
    """
    with faulty(kafka, tmp_path, plan) as shim:
        producer = producer_of(shim.bootstrap_servers, names("id"))
        producer.begin_transaction()
        assert not send(producer, topic, "first")
        producer.commit_transaction(30)
        producer.begin_transaction()
        assert not send(producer, topic, "left")
        producer.produce(topic, "right", partition=1)
        producer.flush(30)
        producer.abort_transaction(30)
        producer.close()
        (late,) = eventually(lambda: shim.named("late copy delivered"))
        assert late["answer"] == "ok", "the coordinator must apply the late copy"
    assert texts(kafka.bootstrap_servers, topic) == ["first", "left"], (
        "all calls succeeded, but a record must be missing"
    )


@pytest.mark.deep_for("blackhole-*")
@pytest.mark.parametrize(
    ("phase", "applied"), [("before_apply", False), ("after_apply", True)], ids=["before the broker", "after it"]
)
@pytest.mark.parametrize("action", ["blackhole", "reset"])
def test_fault_phase_decides_if_broker_ended_transaction(
    kafka: LocalKafka, names: Names, tmp_path: Path, action: str, phase: str, applied: bool
) -> None:
    """Withhold the response in either phase; `times` covers the retries too, so that only the first request counts."""
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    plan = f'[[rule]]\napi = "EndTxn"\naction = "{action}"\nphase = "{phase}"\n'
    plan += '[[rule]]\napi = "EndTxn"\naction = "reset"\ntimes = 1000000\noptional = true\n'
    with faulty(kafka, tmp_path, plan) as shim:
        producer = producer_of(shim.bootstrap_servers, name, **{"socket.timeout.ms": 1_000})
        producer.begin_transaction()
        assert not send(producer, topic, "x")
        with pytest.raises(KafkaException):
            producer.commit_transaction(3)
        state = transaction_of(kafka.bootstrap_servers, name).state
        assert state == ("CompleteCommit" if applied else "Ongoing")
        assert eventually(lambda: shim.named("fault injected"))[0]["rule"].startswith(f"{action} {phase} at EndTxn")


def test_held_request_delays_later_ones_for_its_time(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    plan = '[[rule]]\napi = "Produce"\naction = "delay"\nseconds = 1.5\nnth = 2\n'
    plan += '[[rule]]\napi = "AddPartitionsToTxn"\naction = "delay"\nphase = "after_apply"\nseconds = 1.0\n'
    with faulty(kafka, tmp_path, plan) as shim:
        producer = producer_of(shim.bootstrap_servers, names("id"))
        producer.begin_transaction()
        began = time.monotonic()
        assert not send(producer, topic, "0")
        assert time.monotonic() - began >= 1.0
        began = time.monotonic()
        for number in range(1, 20):
            producer.produce(topic, str(number), partition=0)
            producer.poll(0.01)
        assert producer.flush(30) == 0
        assert time.monotonic() - began >= 1.5
        producer.commit_transaction(30)
        producer.close()
    assert texts(kafka.bootstrap_servers, topic) == [str(number) for number in range(20)]


def test_error_fault_replaces_request_or_response(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    plan = """
    [[rule]]
    api = "Produce"
    action = "error"
    error = "NOT_LEADER_OR_FOLLOWER"
    [[rule]]
    api = "EndTxn"
    action = "error"
    error = 51
    phase = "after_apply"
    """
    with faulty(kafka, tmp_path, plan, "--trace", "--trace-format", "json") as shim:
        producer = producer_of(shim.bootstrap_servers, name)
        producer.begin_transaction()
        assert not send(producer, topic, "x"), "the error must be retriable"
        producer.commit_transaction(30)
        producer.close()
        faults = eventually(lambda: len(found := shim.named("fault injected")) >= 2 and found)
        assert [fault["rule"].split(" ")[0] for fault in faults] == ["error", "error"]
        # The trace is on the clients' side of the faults, so it sees them as the clients do.
        eventually(lambda: any("CONCURRENT_TRANSACTIONS" in line and "EndTxn" in line for line in shim.output))
    assert texts(kafka.bootstrap_servers, topic) == ["x"]


@pytest.mark.parametrize("first", [0, 1])
def test_fault_beside_another_hits_the_other_partition(
    kafka: LocalKafka, names: Names, tmp_path: Path, first: int
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"), partitions=2)
    plan = """
    [[rule]]
    api = "Produce"
    action = "error"
    error = "NOT_LEADER_OR_FOLLOWER"
    [[rule]]
    api = "Produce"
    action = "error"
    error = "INVALID_REQUEST"
    beside = 1
    """
    with faulty(kafka, tmp_path, plan) as shim:
        producer = plain_producer(shim)
        assert not send(producer, topic, "struck and sent again", partition=first)
        assert not send(producer, topic, "the same partition", partition=first)
        assert [error.name() for error in send(producer, topic, "x", partition=1 - first)] == ["INVALID_REQUEST"]
        assert not send(producer, topic, "x", partition=1 - first)
        producer.close()


def test_response_waits_until_another_rule_fired(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"), partitions=2)
    plan = """
    [[rule]]
    api = "Produce"
    action = "error"
    phase = "after_apply"
    error = 10
    partition = "*-1"
    [[rule]]
    api = "Produce"
    action = "error"
    phase = "after_apply"
    error = "INVALID_REQUEST"
    partition = "*-0"
    until = { rule = 1 }
    """
    with faulty(kafka, tmp_path, plan) as shim:
        delivered: list[tuple[int, str]] = []
        producer = plain_producer(shim)

        def report(error: Any, message: Any) -> None:
            delivered.append((message.partition(), error.name()))

        producer.produce(topic, "waits", partition=0, on_delivery=report)
        eventually(lambda: texts(kafka.bootstrap_servers, topic))
        other = plain_producer(shim)
        assert not send(other, topic, "of another client, asked later and answered", partition=0)
        other.close()
        producer.poll(0)
        assert not delivered, "the broker must apply the request without a response"
        producer.produce(topic, "opens", partition=1, on_delivery=report)
        assert producer.flush(30) == 0
        assert sorted(delivered) == [(0, "INVALID_REQUEST"), (1, "MSG_SIZE_TOO_LARGE")]
        producer.close()


@pytest.mark.parametrize("phase", ["before_apply", "after_apply", "late"])
def test_duplicate_produce_is_appended_once(kafka: LocalKafka, names: Names, tmp_path: Path, phase: str) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    plan = f'[[rule]]\napi = "Produce"\naction = "duplicate"\nphase = "{phase}"\n'
    plan += 'until = { api = "EndTxn", when = "arrives" }\n' if phase == "late" else ""
    with faulty(kafka, tmp_path, plan) as shim:
        producer = producer_of(shim.bootstrap_servers, names("id"))
        producer.begin_transaction()
        assert not send(producer, topic, "x")
        producer.commit_transaction(30)
        producer.close()
        name = "late duplicate delivered" if phase == "late" else "duplicate delivered"
        assert eventually(lambda: shim.named(name))[0]["answer"] == "ok"
    assert texts(kafka.bootstrap_servers, topic) == ["x"]


def test_throttled_response_reaches_the_client(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    plan = '[[rule]]\napi = "Produce"\naction = "throttle"\nphase = "after_apply"\nthrottle_ms = 700\n'
    with faulty(kafka, tmp_path, plan) as shim:
        throttle_times_s: list[float] = []
        producer = producer_of(
            shim.bootstrap_servers, names("id"), throttle_cb=lambda event: throttle_times_s.append(event.throttle_time)
        )
        producer.begin_transaction()
        assert not send(producer, topic, "x")
        producer.commit_transaction(30)
        eventually(lambda: producer.poll(0.05) or throttle_times_s)
        assert throttle_times_s[0] == 0.7
        producer.close()


@pytest.mark.parametrize(
    ("rest", "sentence"),
    [
        ("nth = 3", "never fired: 1 requests matched"),
        ('phase = "late"\nuntil = { api = "Produce" }', "its event never occurred"),
    ],
    ids=["it never fired", "its event never occurred"],
)
def test_rule_that_did_not_fire_fails_the_run(
    kafka: LocalKafka, names: Names, tmp_path: Path, rest: str, sentence: str
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    plan = f'[[rule]]\napi = "EndTxn"\naction = "reset"\n{rest}\n'
    with faulty(kafka, tmp_path, plan, ends_with=1) as shim:
        producer = producer_of(shim.bootstrap_servers, names("id"))
        producer.begin_transaction()
        send(producer, topic, "x")
        producer.commit_transaction(30)
        producer.close()
    eventually(lambda: any(sentence in event["line"] for event in shim.named("unreadable")))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("", "needs at least one rule"),
        ("[[rule]]\napi = 'EndTx'\naction = 'reset'", "rule 1 of"),
        ("[[rule]]\napi = 'EndTxn'\naction = 'explode'", "action = explode: must be one of"),
        ("[[rule]]\napi = 'EndTxn'\naction = 'delay'", "needs seconds or until"),
        ("[[rule]]\napi = 'EndTxn'\naction = 'throttle'", "throttle has no phase before_apply: use after_apply"),
        ("[[rule]]\napi = 'EndTxn'\naction = 'error'\nerror = 'NO_SUCH'", "Kafka has no error of this name"),
        ("[[rule]]\napi = 'EndTxn'\naction = 'reset'\nnht = 1", "nht is unknown"),
        ("[[rule]]\napi = 'EndTxn'\naction = 'reset'\nbeside = 1", "not the number of another rule of side broker"),
        ("[[rule]]\napi = 'EndTxn'\naction = 'delay'\nuntil = { rule = 2 }", "not the number of another rule"),
        (
            "[[rule]]\napi = 'EndTxn'\naction = 'delay'\nuntil = { rule = 1, api = 'Produce' }",
            "can be combined only with nth",
        ),
        ("[[rule]]\napi = 'EndTxn'\naction = 'reset'\nnth = 'x'", "nth = 'x': expected int"),
        ("rule = [", "cannot be read"),
    ],
)
def test_invalid_plan_is_one_sentence_and_exit_code_78(tmp_path: Path, plan: str, sentence: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    said = refused(78, sentence, "--upstream", "127.0.0.1:1", "--faults", str(path))
    assert len(said.strip().splitlines()) == 1
