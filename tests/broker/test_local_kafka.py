"""Test LocalKafka: transactions work, data survives restarts, a node may die, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from eos.broker.node import free_ports, is_free
from eos.errors import IllegalState, Unavailable
from tests.support import forked
from tests.support.proxy import HoldingProxy
from tests.support.reading import create_topic, settled_values, wait_until

pytestmark = pytest.mark.takes(130)

DEADLINE_S = 30.0


def commit(servers: str, topic: str, transactional_id: str, *values: str) -> None:
    producer = Producer({"bootstrap.servers": servers, "transactional.id": transactional_id, "log_level": 0})
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    producer.commit_transaction(DEADLINE_S)


# One node


def test_proxied_client_gets_the_proxied_address_only(kafka: LocalKafka) -> None:
    with HoldingProxy.before(kafka):
        admin = AdminClient({"bootstrap.servers": kafka.proxied_servers, "log_level": 0})
        (broker,) = admin.list_topics(timeout=DEADLINE_S).brokers.values()
    assert f"{broker.host}:{broker.port}" == kafka.proxied_servers != kafka.bootstrap_servers
    direct = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
    (broker,) = direct.list_topics(timeout=DEADLINE_S).brokers.values()
    assert f"{broker.host}:{broker.port}" == kafka.bootstrap_servers


@pytest.mark.deep
def test_committed_record_survives_a_stop_and_a_kill(names: Callable[[str], str]) -> None:
    with LocalKafka() as kafka:
        servers = kafka.bootstrap_servers
        create_topic(servers, names("out"))
        commit(servers, names("out"), names("tx"), "before the stop")
        # A single 4.x node that stops before it writes the marker may never write it: see LocalKafka.kill.
        assert settled_values(servers, names("out"))[0] == [b"before the stop"]
        kafka.stop(0)
        assert not kafka.running(0)
        kafka.start(0)
        assert kafka.bootstrap_servers == servers
        commit(servers, names("out"), names("tx"), "before the kill")
        assert settled_values(servers, names("out"))[0] == [b"before the stop", b"before the kill"]
        first = kafka.pid(0)
        kafka.kill(0)
        assert not psutil.pid_exists(first)
        kafka.start(0)
        assert kafka.pid(0) != first
        assert settled_values(servers, names("out"))[0] == [b"before the stop", b"before the kill"]
        with pytest.raises(IllegalState, match="node 0 is running"):
            kafka.start(0)
    assert not kafka.directory.exists()


def test_start_on_a_used_port_names_it_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            pytest.raises(Unavailable, match=f"^port {port} on 127.0.0.1 is in use by another process$"),
            LocalKafka(port=port, data=tmp_path / "data"),
        ):
            pass
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        # The tool that formats the storage refuses this setting, before there is a log.
        ({"num.network.threads": -1}, "could not be formatted.*num.network.threads"),
        # The broker refuses this setting, and logs the reason.
        ({"metric.reporters": "no.such.Reporter"}, "stopped while starting.*no.such.Reporter.*server.log"),
    ],
)
def test_failed_start_reports_its_reason_in_one_sentence(
    config: dict[str, object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eos.broker.node.storage_copy_path", lambda *_: tmp_path / "none")
    with pytest.raises(Unavailable, match=sentence) as raised, LocalKafka(data=tmp_path, config=config):
        pass
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_failed_block_keeps_and_copies_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EOS_KEEP_LOGS", str(tmp_path / "copies"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    kafka = LocalKafka()
    started = "Kafka Server started"
    with pytest.raises(RuntimeError, match="the broker of the test"), kafka:
        # The broker answers clients a moment before it logs its start.
        wait_until("the log reports the start", lambda: started in kafka.log_path(0).read_text(), DEADLINE_S)
        raise RuntimeError("the broker of the test")
    assert not alive(kafka.pid(0))
    assert kafka.log_path(0).exists()
    assert f"the logs of the local Kafka are in {kafka.directory}" in capfd.readouterr().err
    copies = list((tmp_path / "copies").rglob("server.log"))
    assert len(copies) == 1
    assert started in copies[0].read_text()


PARENT = """
import sys
from eos.broker import LocalKafka
with LocalKafka() as kafka:
    print(kafka.pid(0), flush=True)
    sys.stdin.read()
"""


def test_broker_dies_with_its_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.communicate()
    wait_until(f"the end of broker {pid}", lambda: not alive(pid), DEADLINE_S)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# eos broker start | status | stop


class Command:
    """Run `eos broker` as a user does, on one data directory."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def __call__(self, *arguments: str) -> tuple[int, str]:
        run = forked.run(["eos", "broker", *arguments, "--data", str(self.data)])
        return run.returncode, run.stdout + run.stderr

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"│ \d +│ (\d+) ", self("status")[1])]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path / "a directory")
    yield command
    command("stop")


def test_broker_commands_start_show_and_stop_a_broker(broker: Command, names: Callable[[str], str]) -> None:
    port = str(free_ports(1)[0])
    assert broker("status")[0] == 69
    assert broker("stop") == (0, "Kafka is not running\n")
    code, output = broker("start", "--port", port, "--config", "num.partitions=5", "--config", "no.such=1")
    assert (code, "--config no.such: Kafka 4.4.0 has no setting of this name" in output) == (78, True), output
    assert not broker.data.joinpath("node-0").exists()
    settings = ("--config", "num.partitions=5", "--config", "super.users=User:a")
    code, output = broker("start", "--port", port, *settings)
    assert (code, f"Kafka 4.4.0 is running: 127.0.0.1:{port}" in output) == (0, True), output
    assert "num.partitions=5\n" in (broker.data / "node-0" / "server.properties").read_text()
    code, output = broker("start")
    assert (code, "already running" in output) == (0, True), output
    code, output = broker("status")
    assert (code, port in output, "up" in output, str(broker.data) in output) == (0, True, True, True), output
    create_topic(f"127.0.0.1:{port}", names("out"))
    commit(f"127.0.0.1:{port}", names("out"), names("tx"), "kept")
    (pid,) = broker.pids()
    assert broker("stop") == (0, "Kafka is stopped\n")
    assert not alive(pid)
    assert broker("status")[0] == 69
    assert broker("start")[0] == 0
    assert settled_values(f"127.0.0.1:{port}", names("out"))[0] == [b"kept"]


def test_broker_start_restarts_killed_nodes_and_checks_the_data(broker: Command) -> None:
    port = free_ports(1)[0]
    assert broker("start", "--port", str(port))[0] == 0
    code, output = broker("start", "--nodes", "3")
    assert (code, "belongs to 1 node, not 3" in output) == (78, True), output
    code, output = broker("start", "--version", "4.2.1")
    assert (code, "written by Kafka 4.4.0" in output) == (78, True), output
    code, output = broker("start", "--port", str(port + 1))
    assert (code, "is running" in output) == (78, True), output
    (pid,) = broker.pids()
    os.kill(pid, signal.SIGKILL)
    wait_until("the killed broker is reported as down", lambda: broker("status")[0] == 69, DEADLINE_S)
    code, output = broker("start")
    assert code == 0, output
    assert broker.pids() not in ([], [pid])
    assert broker("stop")[0] == 0
    with socket.create_server(("127.0.0.1", port)):
        code, output = broker("start")
    assert (code, output) == (69, f"eos: port {port} on 127.0.0.1 is in use by another process\n")
    assert is_free(port)
