"""Compare the live trace with the transactions on real Kafka."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import LocalKafka
from tests.shim import java
from tests.shim.shims import RunningShim, eventually, running
from tests.support.chromium import Chromium, needs_chromium

pytestmark = pytest.mark.takes(89)

Names = Callable[[str], str]
STEPS = ["1", "2", "4.1", "4.2", "4.3", "4.4", "5.1"]


@pytest.fixture(scope="module")
def kafka() -> Iterator[LocalKafka]:
    with LocalKafka() as kafka:
        yield kafka


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.html"


@pytest.fixture(scope="module")
def shim(kafka: LocalKafka, page: Path) -> Iterator[RunningShim]:
    options = ("--trace", "--trace-format", "json", "--trace-html", str(page))
    with running(kafka.bootstrap_servers, *options) as shim:
        yield shim
        assert not shim.named("frame not traced"), shim.named("frame not traced")


def traced(shim: RunningShim, transactional_id: str) -> list[dict[str, Any]]:
    steps = [json.loads(line) for line in list(shim.output)]
    return [step for step in steps if step["transactional_id"] == transactional_id]


def make_topics(shim: RunningShim, *names: str) -> None:
    admin = AdminClient({"bootstrap.servers": shim.bootstrap_servers})
    for made in admin.create_topics([NewTopic(name, 2, 1) for name in names]).values():
        made.result(30)


def offsets_of(shim: RunningShim, group: str) -> Consumer:
    return Consumer({"bootstrap.servers": shim.bootstrap_servers, "group.id": group, "auto.offset.reset": "earliest"})


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_trace_shows_every_step_with_its_content(shim: RunningShim, names: Names, outcome: str) -> None:
    target, group, name = names("out"), names("g"), names("id")
    make_topics(shim, target)
    consumer = offsets_of(shim, group)
    consumer.subscribe([target])
    eventually(lambda: consumer.poll(0.1) is None and consumer.assignment())
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    for i in range(60):
        producer.produce(target, f"record {i}".encode(), partition=i % 2)
    producer.flush(30)
    producer.send_offsets_to_transaction([TopicPartition(target, 1, 17)], consumer.consumer_group_metadata(), 30)
    if outcome == "commit":
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)
    eventually(lambda: any(step["name"] == "EndTxn" for step in traced(shim, name)))
    # Leave out markers: the consumer may have fetched some already, and the next test covers them.
    good = [step for step in traced(shim, name) if "errors" not in step and step["name"] != "Marker"]
    order = list(dict.fromkeys(step["step"] for step in good))
    assert order == STEPS
    by_step = {number: [step for step in good if step["step"] == number] for number in STEPS}
    identity = by_step["2"][0]["new_producer_id"], by_step["2"][0]["new_epoch"]
    for number in STEPS[2:]:
        for step in by_step[number]:
            assert (step["producer_id"], step["epoch"]) == identity
            assert step["transaction"] == 1
            assert step["ms"] > 0
    assert sum(step["records"] for step in by_step["4.2"]) == 60
    assert {p for step in by_step["4.2"] for p in step["partitions"]} == {f"{target}-0", f"{target}-1"}
    assert {p for step in by_step["4.1"] for p in step["partitions"]} == {f"{target}-0", f"{target}-1"}
    assert by_step["4.3"][0]["group"] == group
    assert by_step["4.4"][0]["offsets"] == {f"{target}-1": 17}
    assert by_step["5.1"][0]["outcome"] == outcome
    consumer.close()


def test_trace_shows_markers_when_they_are_read(shim: RunningShim, names: Names) -> None:
    target, name = names("out"), names("id")
    make_topics(shim, target)
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(target, b"x", partition=partition)
    producer.commit_transaction(30)
    consumer = offsets_of(shim, names("g"))
    consumer.subscribe([target])

    def markers() -> list[dict[str, Any]]:
        consumer.poll(0.1)
        return [step for step in traced(shim, name) if step["name"] == "Marker"]

    eventually(lambda: len(markers()) == 2)
    assert {tuple(step["offsets"].items()) for step in markers()} == {((f"{target}-0", 1),), ((f"{target}-1", 1),)}
    assert {step["outcome"] for step in markers()} == {"commit"}
    consumer.close()


def test_trace_shows_a_fenced_producer_with_its_error(shim: RunningShim, names: Names) -> None:
    target, name = names("out"), names("id")
    make_topics(shim, target)
    settings = {"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name, "log_level": 0}
    old, new = Producer(settings), Producer(settings)
    old.init_transactions(30)
    old.begin_transaction()
    old.produce(target, b"x")
    old.flush(30)
    new.init_transactions(30)
    with pytest.raises(KafkaException):
        old.commit_transaction(30)
    (refused,) = eventually(lambda: [step for step in traced(shim, name) if step["name"] == "EndTxn"])
    assert refused["errors"] == ["INVALID_PRODUCER_EPOCH"]
    assert refused["transaction"] == 1


def test_trace_shows_kip_890_flow_of_a_java_client(shim: RunningShim, names: Names) -> None:
    source, target, name = names("in"), names("out"), names("id")
    make_topics(shim, source, target)
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers})
    for i in range(60):
        producer.produce(source, f"{i}".encode(), partition=0)
    assert producer.flush(30) == 0
    java.run(
        java.TRANSACTIONAL_COPIER,
        *("--broker-list", shim.bootstrap_servers, "--input-topic", source, "--input-partition", "0"),
        *("--output-topic", target, "--max-messages", "60", "--transaction-size", "30"),
        *("--consumer-group", names("g"), "--transactional-id", name, "--group-mode"),
    )
    ends = eventually(
        lambda: found if len(found := [s for s in traced(shim, name) if s["name"] == "EndTxn"]) >= 2 else None
    )
    assert [(end["epoch"], end["new_epoch"]) for end in ends[:2]] == [(0, 1), (1, 2)]
    steps = traced(shim, name)
    assert {step["step"] for step in steps} - {"5.2"} == {"1", "2", "4.2", "4.4", "5.1"}
    # Produce v13 names topics by id; the trace shows their names all the same.
    assert {p.rpartition("-")[0] for s in steps if s["name"] == "Produce" for p in s["partitions"]} == {target}


def test_trace_page_is_updated_while_the_shim_runs(shim: RunningShim, page: Path, names: Names) -> None:
    name = names("id")
    before = time.time()
    producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name})
    producer.init_transactions(30)
    eventually(lambda: name in page.read_text())
    assert page.stat().st_mtime >= before
    assert "<svg" in page.read_text()


@needs_chromium
def test_trace_page_needs_no_external_resources(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    page, name, target = tmp_path / "trace.html", names("id"), names("out")
    with running(kafka.bootstrap_servers, "--trace-html", str(page)) as shim:
        make_topics(shim, target)
        producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(target, b"x" * 100, partition=0)
        producer.commit_transaction(30)
    with Chromium(tmp_path) as browser:
        for scheme in ("light", "dark"):
            browser.screen(1280, 1100, scheme)
            browser.open(page.as_uri())
            eventually(lambda: name in browser.text())
            assert "committed" in browser.text()
            drawn = browser.ask(
                "[...document.querySelectorAll('svg text')].filter(e => e.getBoundingClientRect().width > 0)"
                ".map(e => e.textContent)"
            )
            for wanted in ("producer", "transaction coordinator", "InitProducerId", "Produce", "EndTxn"):
                assert any(wanted in each for each in drawn), (wanted, drawn)
            browser.picture(tmp_path / f"trace-{scheme}.png")
        outside = [url for url in browser.requested if not url.startswith((page.as_uri(), "data:", "about:"))]
        assert not outside
        assert browser.requested, "the page opened no connection to the shim"
        assert not browser.complaints


def test_text_trace_and_last_page_are_complete(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    page, name, target = tmp_path / "trace.html", names("id"), names("out")
    with running(kafka.bootstrap_servers, "--trace", "--trace-html", str(page)) as shim:
        make_topics(shim, target)
        producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(target, b"x" * 100)
        producer.commit_transaction(30)
        line = eventually(lambda: next((line for line in shim.output if "5.1 EndTxn" in line), None))
    assert f"{name} #1" in line
    assert "  commit  [" in line
    assert "ok" in line
    assert "committed" in page.read_text()
    assert name in page.read_text()
