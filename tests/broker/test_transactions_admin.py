"""Run `eos txn` on a real broker: open and hanging transactions, which of them may be ended, and their readers.

The broker accepts late requests of a producer without verification. So the tests can create at will a state that a kill
rarely leaves: coordinator CompleteCommit and an open partition.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import IsolationLevel

from eos.broker import LocalKafka
from eos.errors import ConfigurationError, Temporary
from eos.kafka.admin.transactions import Verdict, abort_hanging, find_open, log_partition_of
from eos.kafka.client.cluster import OFFSETS_LOG, ClusterAdmin
from eos.kafka.client.settings import Settings
from tests.support import forked
from tests.support.brokers import local_kafka
from tests.support.hanging import NO_VERIFICATION, commit_offset_late, produce_late
from tests.support.life import until_killed, write_app
from tests.support.raw import RawProducer, raw_producer
from tests.support.reading import (
    create_topic,
    ends_of,
    partitions_of,
    settled_values,
    stable_offset,
    transaction_of,
    visible_values,
    wait_until,
)

pytestmark = pytest.mark.takes(96)

Names = Callable[[str], str]


@pytest.fixture(scope="module")
def kafka(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    yield from local_kafka(request, config=NO_VERIFICATION)


def eos(kafka: LocalKafka, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return forked.run(["eos", *arguments, "--bootstrap-servers", kafka.bootstrap_servers], input=stdin)


def settings(kafka: LocalKafka) -> Settings:
    return Settings({"bootstrap.servers": kafka.bootstrap_servers})


def test_committed_offsets_are_shown_during_an_open_transaction(kafka: LocalKafka, names: Names) -> None:
    """Read committed offsets during an open transaction; a starting worker (`latest`, patterns) need not wait for
    it."""
    group, topics = names("group"), [create_topic(kafka.bootstrap_servers, names(which)) for which in ("old", "new")]
    with raw_producer(kafka.bootstrap_servers, names("tx")) as producer, ClusterAdmin(settings(kafka)) as admin:
        producer.begin()
        producer.send_offset(group, topics[0], 3)
        producer.commit()
        wait_until("its committed offset", lambda: admin.committed_topics(group) == {topics[0]})
        producer.begin()
        producer.send_offset(group, topics[0], 4)
        producer.send_offset(group, topics[1], 4)
        assert admin.committed_topics(group) == {topics[0]}


def is_settled(kafka: LocalKafka, transactional_id: str) -> bool:
    return transaction_of(kafka.bootstrap_servers, transactional_id).state.startswith("Complete")


def commit_one(kafka: LocalKafka, producer: RawProducer, topic: str, value: str) -> None:
    """Commit a transaction and wait for its markers, so that all that follows is later."""
    producer.commit_one(topic, value)
    wait_until("the markers", lambda: is_settled(kafka, producer.transactional_id))


def hang(kafka: LocalKafka, topic: str, transactional_id: str) -> tuple[int, int]:
    """Open a transaction on `topic` [0] whose coordinator reports CompleteCommit."""
    servers = kafka.bootstrap_servers
    create_topic(servers, topic)
    with raw_producer(servers, transactional_id) as producer:
        commit_one(kafka, producer, topic, "committed")
    found = transaction_of(servers, transactional_id)
    produce_late(servers, topic, 0, transactional_id, (found.producer_id, found.producer_epoch), sequence=1)
    return found.producer_id, found.producer_epoch


def stable_and_high(kafka: LocalKafka, topic: str) -> tuple[int, int]:
    partitions = partitions_of(kafka.bootstrap_servers, topic)
    (stable,) = ends_of(kafka.bootstrap_servers, partitions, IsolationLevel.READ_COMMITTED)
    (high,) = ends_of(kafka.bootstrap_servers, partitions, IsolationLevel.READ_UNCOMMITTED)
    return stable, high


def test_hanging_transaction_is_found_and_aborted(kafka: LocalKafka, names: Names) -> None:
    topic, name = names("t"), names("id")
    producer_id, epoch = hang(kafka, topic, name)
    stable, high = stable_and_high(kafka, topic)
    assert (stable, high) == (2, 3)

    found = eos(kafka, "txn", "find-hanging", "--topic", topic, "--json")
    assert found.returncode == 1, found.stderr
    (row,) = json.loads(found.stdout)
    assert row["topic"] == topic
    assert (row["partition"], row["producer_id"], row["epoch"], row["start_offset"]) == (0, producer_id, epoch, 2)
    assert (row["verdict"], row["state"], row["transactional_id"]) == ("hanging", "CompleteCommit", name)
    assert row["held_back"] == 1

    table = eos(kafka, "txn", "find-hanging", "--topic", topic)
    assert "reports CompleteCommit and will write no marker" in table.stdout
    command = next(line for line in table.stderr.splitlines() if line.startswith("to abort it: eos "))
    healed = eos(kafka, *command.removeprefix("to abort it: eos ").split(), "--yes")
    assert healed.returncode == 0, healed.stderr
    wait_until("readers can continue", lambda: len(set(stable_and_high(kafka, topic))) == 1)
    assert visible_values(kafka.bootstrap_servers, topic) == {0: [b"committed"]}
    again = eos(kafka, "txn", "find-hanging", "--topic", topic)
    assert (again.returncode, again.stdout) == (0, "no hanging transactions\n")


def test_hanging_pending_offset_is_found_and_ended(kafka: LocalKafka, names: Names) -> None:
    topic, name, group = names("t"), names("id"), names("group")
    servers = kafka.bootstrap_servers
    create_topic(servers, topic)
    with raw_producer(servers, name) as producer:
        producer.begin()
        producer.send(topic, "x")
        producer.send_offset(group, topic, 5)
        producer.commit()
        wait_until("the markers", lambda: is_settled(kafka, name))
    at = transaction_of(servers, name)
    commit_offset_late(servers, group, topic, 7, name, (at.producer_id, at.producer_epoch))

    with ClusterAdmin(settings(kafka)) as admin:
        ours = [t for t in find_open(admin, [OFFSETS_LOG]) if t.transactional_id == name]
        assert [t.verdict for t in ours] == [Verdict.HANGING]
        topic_, partition = ours[0].partition
        assert topic_ == OFFSETS_LOG
    healed = eos(kafka, "txn", "abort", "--topic", OFFSETS_LOG, "--partition", str(partition), "--yes")
    assert healed.returncode == 0, healed.stderr
    assert stable_offset(servers, group, topic) == 5


def test_open_transaction_of_a_live_producer_is_not_ended(kafka: LocalKafka, names: Names) -> None:
    topic, name = names("t"), names("id")
    create_topic(kafka.bootstrap_servers, topic)
    with raw_producer(kafka.bootstrap_servers, name) as producer:
        producer.begin()
        producer.send(topic, "kept")
        none = eos(kafka, "txn", "find-hanging", "--topic", topic)
        assert (none.returncode, none.stdout) == (0, "no hanging transactions\n")
        shown = json.loads(eos(kafka, "txn", "find-hanging", "--all", "--topic", topic, "--json").stdout)
        assert [(row["verdict"], row["transactional_id"]) for row in shown] == [("open", name)]
        refused = eos(kafka, "txn", "abort", "--topic", topic, "--partition", "0", "--yes")
        assert refused.returncode == 69
        assert f"its producer has not ended it yet (transactional.id {name})" in refused.stderr
        with ClusterAdmin(settings(kafka)) as admin:
            (ours,) = find_open(admin, [topic])
            with pytest.raises(ConfigurationError):
                abort_hanging(admin, ours)
        producer.commit()
    wait_until("the commit", lambda: visible_values(kafka.bootstrap_servers, topic) == {0: [b"kept"]})


def test_second_abort_of_a_hanging_transaction_writes_no_marker(kafka: LocalKafka, names: Names) -> None:
    topic, name = names("t"), names("id")
    hang(kafka, topic, name)
    with ClusterAdmin(settings(kafka)) as admin:
        (hanging,) = find_open(admin, [topic])
        abort_hanging(admin, hanging)
        end = stable_and_high(kafka, topic)
        with pytest.raises(Temporary):
            abort_hanging(admin, hanging)
    assert stable_and_high(kafka, topic) == end


def test_coordinator_ends_a_transaction_and_fences_its_owner(kafka: LocalKafka, names: Names) -> None:
    topic, name = names("t"), names("id")
    create_topic(kafka.bootstrap_servers, topic)
    # The producer is fenced by then, so its close would only raise an error.
    producer = RawProducer(kafka.bootstrap_servers, name)
    producer.begin()
    producer.send(topic, "given up")
    listed = json.loads(eos(kafka, "txn", "list", "--state", "ongoing", "--prefix", name, "--json").stdout)
    assert [(row["transactional_id"], row["partitions"]) for row in listed] == [(name, [[topic, 0]])]
    described = eos(kafka, "txn", "describe", name)
    assert "Ongoing" in described.stdout
    assert f"{topic}[0]" in described.stdout
    unasked = eos(kafka, "txn", "abort", "--transactional-id", name, stdin="")
    assert unasked.returncode == 64
    assert "confirm with --yes" in unasked.stderr
    assert transaction_of(kafka.bootstrap_servers, name).state == "Ongoing"
    ended = eos(kafka, "txn", "abort", "--transactional-id", name, "--yes", "--json")
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(ended.stdout)
    assert (row["transactional_id"], row["before"]["state"]) == (name, "Ongoing")
    assert row["after"]["epoch"] > row["before"]["epoch"]
    again = eos(kafka, "txn", "abort", "--transactional-id", name, "--yes")
    assert f"{name}: was {row['after']['state']}" in again.stdout, again.stderr
    assert visible_values(kafka.bootstrap_servers, topic) == {0: []}
    after = transaction_of(kafka.bootstrap_servers, name)
    assert after.state in ("Empty", "CompleteAbort")
    with pytest.raises(Exception, match="FENCED"):
        producer.commit()
    timeout: Any = json.loads(eos(kafka, "txn", "describe", name, "--json").stdout)["timeout_ms"]
    assert timeout == 30_000, "the successor's init must set another timeout"


def test_unknown_transactional_id_is_not_created(kafka: LocalKafka, names: Names) -> None:
    name = names("nobody")
    for command in (("describe", name), ("abort", "--yes", "--transactional-id", name)):
        refused = eos(kafka, "txn", *command)
        assert refused.returncode == 69
        assert f"{name}: no coordinator knows this transactional.id" in refused.stderr
    with ClusterAdmin(settings(kafka)) as admin:
        assert admin.describe(name) is None


def test_error_names_the_missing_topic(kafka: LocalKafka, names: Names) -> None:
    refused = eos(kafka, "txn", "find-hanging", "--topic", names("missing"))
    assert refused.returncode == 69
    assert names("missing") in refused.stderr
    assert "Traceback" not in refused.stderr


def test_worker_waiting_for_a_hanging_offset_names_the_command(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic, name, app = names("t"), names("id"), names("app")
    servers = kafka.bootstrap_servers
    for created in (topic, names("out")):
        create_topic(servers, created)
    with raw_producer(servers, name) as producer:
        commit_one(kafka, producer, topic, "waits")
    at = transaction_of(servers, name)
    commit_offset_late(servers, app, topic, 0, name, (at.producer_id, at.producer_epoch))
    write_app(tmp_path, app, topic, names("out"))
    log = tmp_path / "worker.log"
    command = ["eos", "run", "theapp.py:app", "--until-end", "--bootstrap-servers", servers]
    with log.open("wb") as stderr, until_killed(forked.Popen(command, cwd=tmp_path, stderr=stderr)) as worker:
        wait_until("the cause", lambda: "because=" in log.read_text() or worker.poll() is not None, 60)
        logged = log.read_text()
        assert worker.poll() is None, logged
        assert f"because=a transaction of {name} hangs on {OFFSETS_LOG}[{log_partition_of(app, 8)}]" in logged
        assert f"command=`eos txn find-hanging --topic {OFFSETS_LOG}`" in logged
        assert visible_values(servers, names("out")) == {0: []}
        with ClusterAdmin(settings(kafka)) as admin:
            for hanging in find_open(admin, [OFFSETS_LOG]):
                abort_hanging(admin, hanging)
        assert worker.wait(60) == 0, log.read_text()
    assert settled_values(servers, names("out")) == {0: [b"waits"]}
