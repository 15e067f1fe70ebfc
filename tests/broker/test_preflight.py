"""Run the preflight and `eos doctor` on suitable and unsuitable brokers: exit codes and messages within seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from tests.support import forked
from tests.support.brokers import local_kafka
from tests.support.hanging import NO_VERIFICATION, produce_late
from tests.support.life import write_app
from tests.support.raw import raw_producer
from tests.support.reading import configure, create_topic, settled_values, took_under, transaction_of, wait_until

pytestmark = pytest.mark.takes(104)

Names = Callable[[str], str]
OWN_LOOP = """
from eos import TransactSession

settings = {{"bootstrap.servers": "{servers}", "group.id": "own", "transactional.id": "own-one"}}
with TransactSession(settings, ["{topic}"]):
    pass
"""


@pytest.fixture(scope="module")
def kafka(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Start one node with a low transaction timeout limit and Kafka's default replication of its internal topics."""
    unfit = {
        "transaction.max.timeout.ms": 20_000,
        "transaction.state.log.replication.factor": 3,
        "transaction.state.log.min.isr": 2,
    }
    yield from local_kafka(request, config=NO_VERIFICATION | unfit, proxied_port=free_ports(1)[0])


class Directory:
    """Write an App from `app-in` to `app-out` into a user's directory."""

    def __init__(self, path: Path, app: str) -> None:
        self.path, self.app, self.input, self.output = path, app, f"{app}-in", f"{app}-out"
        write_app(path, app, self.input, self.output)

    def eos(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `eos` with these arguments; the last one is the cluster."""
        *first, servers = arguments
        return forked.run(["eos", *first, "--bootstrap-servers", servers], cwd=self.path)

    def doctor(self, servers: str, *more: str) -> list[dict[str, object]]:
        ended = self.eos("doctor", "theapp.py:app", "--instance", "one", "--json", *more, servers)
        rows: list[dict[str, object]] = json.loads(ended.stdout)
        failed = [row["exit_code"] for row in rows if row["level"] == "failed"]
        assert ended.returncode == (failed[0] if failed else 0), ended.stderr
        return rows


@pytest.fixture
def here(tmp_path: Path, names: Names) -> Directory:
    return Directory(tmp_path, names("app"))


def fill(servers: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(topic, b"x")
    assert producer.flush(30) == 0


def failed(rows: list[dict[str, object]]) -> list[str]:
    return [str(row["found"]) for row in rows if row["level"] == "failed"]


# The order matters, because the first transaction of the cluster creates its transaction log.


def test_transaction_log_that_needs_more_brokers_exits_with_78(kafka: LocalKafka, here: Directory) -> None:
    servers = kafka.bootstrap_servers
    for topic in (here.input, here.output):
        create_topic(servers, topic)
    began = time.monotonic()
    ended = here.eos("run", "theapp.py:app", "--until-end", servers)
    assert ended.returncode == 78, ended.stderr
    took_under(15, began, "a refusal at once, and not hung as init_transactions does")
    assert (
        "__transaction_state cannot be created: transaction.state.log.replication.factor=3 with 1 broker"
        in ended.stderr
    )
    assert "no transaction can begin" in failed(here.doctor(servers))[0]


def test_missing_topic_exits_with_69_and_can_be_created(kafka: LocalKafka, here: Directory) -> None:
    servers = kafka.bootstrap_servers
    create_topic(servers, here.input, 3)
    fill(servers, here.input)
    missing = here.eos("run", "theapp.py:app", "--until-end", servers)
    assert missing.returncode == 69
    sentence = (
        f"eos: topic {here.output} does not exist at {servers}: `eos topic create {here.output}` creates it, as does"
    )
    assert missing.stderr.splitlines()[-1].startswith(sentence)
    repaired = AdminClient({"bootstrap.servers": servers})
    # Change what the preflight reported about this cluster, as an operator would.
    kafka.stop(0)
    properties = kafka.directory / "node-0" / "server.properties"
    text = properties.read_text().replace("log.replication.factor=3", "log.replication.factor=1")
    properties.write_text(text.replace("transaction.state.log.min.isr=2", "transaction.state.log.min.isr=1"))
    kafka.start(0)
    ended = here.eos("run", "theapp.py:app", "--until-end", "--create-topics", servers)
    assert ended.returncode == 0, ended.stderr
    assert f"topic created topic={here.output}" in ended.stderr
    assert len(repaired.list_topics(here.output, timeout=10).topics[here.output].partitions) == 3
    assert [v for values in settled_values(servers, here.output).values() for v in values] == [b"x"]


def test_transaction_timeout_above_the_maximum_exits_with_78(kafka: LocalKafka, here: Directory) -> None:
    servers = kafka.bootstrap_servers
    for topic in (here.input, here.output):
        create_topic(servers, topic)
    ended = here.eos("run", "theapp.py:app", "--until-end", "-X", "transaction.timeout.ms=20001", servers)
    assert ended.returncode == 78, ended.stderr
    assert "transaction.max.timeout.ms=20000: set transaction.timeout.ms to at most 20000" in ended.stderr
    ended = here.eos("run", "theapp.py:app", "--until-end", "-X", "session.timeout.ms=100", servers)
    assert ended.returncode == 78, ended.stderr
    assert "session.timeout.ms=100 is not between the brokers' 500 and" in ended.stderr


def test_doctor_shows_open_and_hanging_transactions(kafka: LocalKafka, here: Directory) -> None:
    servers = kafka.bootstrap_servers
    for topic in (here.input, here.output):
        create_topic(servers, topic)
    assert failed(here.doctor(servers)) == []
    with raw_producer(servers, f"{here.app}-p", transaction_timeout_ms=20_000) as producer:
        producer.begin()
        producer.send(here.input, "a")
        opened = [row for row in here.doctor(servers) if row["check"] == "transactions"]
        assert [row["level"] for row in opened] == ["ok"]
        assert f"{here.input}[0]: transaction of {here.app}-p is open" in str(opened[0]["found"])
        producer.commit()
        wait_until("the markers", lambda: transaction_of(servers, f"{here.app}-p").state == "CompleteCommit")
    at = transaction_of(servers, f"{here.app}-p")
    produce_late(servers, here.input, 0, f"{here.app}-p", (at.producer_id, at.producer_epoch), sequence=1)
    rows = [row for row in here.doctor(servers) if row["level"] == "failed"]
    assert [(row["check"], row["exit_code"]) for row in rows] == [("transactions", 69)]
    assert f"{here.input}[0]: transaction of {here.app}-p is hanging" in str(rows[0]["found"])
    assert rows[0]["change"] == f"eos txn abort --topic {here.input} --partition 0"


def test_missing_cluster_exits_with_69_within_seconds(here: Directory) -> None:
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    began = time.monotonic()
    ended = here.eos("doctor", "theapp.py:app", "--json", nowhere)
    assert ended.returncode == 69, ended.stderr
    took_under(20, began, "doctor of a cluster that is not there")
    (row,) = json.loads(ended.stdout)
    assert (row["check"], row["level"], row["exit_code"]) == ("brokers", "failed", 69)
    assert str(row["found"]).startswith(f"{nowhere} cannot be reached: ")
    assert str(row["change"]).startswith("check bootstrap.servers")


@pytest.mark.deep
def test_topics_that_can_lose_records_warn_and_fail_with_strict(cluster: LocalKafka, here: Directory) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, here.input)
    fill(servers, here.input)
    safe = here.eos("run", "theapp.py:app", "--until-end", "--create-topics", "-X", "eos.strict=true", servers)
    assert safe.returncode == 0, safe.stderr
    assert "can lose" not in safe.stderr
    configure(servers, here.output, "unclean.leader.election.enable", "true")
    sentence = f"topic {here.output} can lose acknowledged records: unclean.leader.election.enable=true"

    def known() -> bool:
        return any(sentence in str(row["found"]) for row in here.doctor(servers))

    wait_until("the new configuration", known, 30)
    warned = here.eos("run", "theapp.py:app", "--until-end", servers)
    assert warned.returncode == 0, warned.stderr
    assert sentence in warned.stderr
    refused = here.eos("run", "theapp.py:app", "--until-end", "-X", "eos.strict=true", servers)
    assert refused.returncode == 78, refused.stderr
    assert sentence in refused.stderr


@pytest.mark.deep
def test_older_broker_passes_the_preflight(kafka392: LocalKafka, here: Directory) -> None:
    servers = kafka392.bootstrap_servers
    for topic in (here.input, here.output):
        create_topic(servers, topic)
    fill(servers, here.input)
    ended = here.eos("run", "theapp.py:app", "--until-end", servers)
    assert ended.returncode == 0, ended.stderr
    assert failed(here.doctor(servers)) == []


def test_error_lists_brokers_with_unreachable_addresses(here: Directory, kafka: LocalKafka) -> None:
    """Advertise an address of another network, as in a container: only the first connection succeeds."""
    create_topic(kafka.bootstrap_servers, here.input, 1)
    create_topic(kafka.bootstrap_servers, here.output, 1)
    bootstrap = "{}:{}".format(*kafka.proxied_upstream)
    sentence = f"{bootstrap} answers, but its brokers cannot be reached at the addresses that they advertise: "
    for command in (
        ("run", "theapp.py:app", "--instance", "one"),
        ("reset", "theapp.py:app", "--from", "earliest", "--yes"),
        ("topic", "tail", here.input),
    ):
        ended = here.eos(*command, bootstrap)
        assert ended.returncode == 69, ended.stderr
        assert f"eos: {sentence}{kafka.proxied_servers} (" in ended.stderr.splitlines()[-1]
        assert ": set advertised.listeners on the brokers" in ended.stderr.splitlines()[-1]
    own_loop = [sys.executable, "-c", OWN_LOOP.format(servers=bootstrap, topic=here.input)]
    ended = subprocess.run(own_loop, capture_output=True, text=True, timeout=60, check=False)
    assert sentence + kafka.proxied_servers in ended.stderr
