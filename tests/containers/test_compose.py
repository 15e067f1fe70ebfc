"""Run `make up` and `make worker`: the three brokers and the worker of compose/docker-compose.yml work and stop."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

import eos
from eos.broker.node import free_ports
from eos.testing.clusters import choose
from eos.testing.clusters.container import BASE_IMAGE
from eos.testing.clusters.leftovers import OWNER_LABEL, owner
from tests.support.reading import TooSlow, settled_values, wait_until

COMPOSE = Path(__file__).parents[2] / "compose"
APP = """
from eos import App, Record

app = App("doubling")

@app.process("numbers", to="doubled")
def double(record: Record) -> str:
    return str(2 * int(record.value))
"""


def free_ports_in_a_row(count: int) -> list[int]:
    """Return the first of `count` consecutive free ports, as the shim advertises one port per broker."""
    for first in free_ports(50):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return list(range(first, first + count))
    raise AssertionError(f"no {count} free ports in a row")


def composes() -> dict[str, list[str]]:
    """Return the commands of the installed compose versions; each version after v2 counts as one kind."""
    found: dict[str, list[str]] = {}
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        told = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
        if told.returncode == 0:
            found.setdefault("v1" if told.stdout.lstrip("v").startswith("1.") else "v2", command)
    return found


class Project:
    """Run a compose project with its own name, ports and App folder."""

    def __init__(self, folder: Path) -> None:
        self.name = f"eos-test-{uuid.uuid4().hex[:8]}"
        *ports, self.http_port = free_ports(4)
        in_a_row = free_ports_in_a_row(3)
        self.shim = f"127.0.0.1:{in_a_row[0]}"
        self.servers = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EOS_")},
            **{f"EOS_PORT_{i}": str(port) for i, port in enumerate(ports, 1)},
            **{f"EOS_SHIM_PORT_{i}": str(port) for i, port in enumerate(in_a_row, 1)},
            "EOS_SHIM_HTTP_PORT": str(self.http_port),
            "EOS_PROJECT": self.name,
            "EOS_OWNER": owner(),
            "EOS_APP_FOLDER": str(folder),
            "EOS_APP": "doubling:app",
            # Compose waits as long as `__call__` does. By default it reports a busy engine as broken after a minute.
            "COMPOSE_HTTP_TIMEOUT": "200",
        }

    def __call__(self, *arguments: str, **environment: str) -> str:
        run = subprocess.run(
            [str(COMPOSE / "cluster.sh"), *arguments],
            env=self._environment | environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if run.returncode and ("is not healthy" in run.stderr or "Read timed out" in run.stderr):
            raise TooSlow(run.stdout + run.stderr)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def containers(self) -> list[str]:
        listed = subprocess.run(
            ["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={self.name}"],
            capture_output=True,
            text=True,
            check=True,
        )
        return listed.stdout.split()


@pytest.fixture
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    wanted = request.config.getoption("--eos-kafka")
    choice = choose()
    if wanted not in (None, "container") or choice.backend != "container":
        pytest.skip(f"not run: {choice.reason if wanted is None else f'--eos-kafka={wanted}'}")
    if not composes():
        pytest.skip("not run: the engine answers, but no compose is installed (compose/engine.sh start, as root)")
    (tmp_path / "doubling.py").write_text(APP)
    # The worker in the container runs as another user.
    tmp_path.chmod(0o755)
    project = Project(tmp_path)
    try:
        yield project
    finally:
        # pytest shows this output when the test fails.
        print(project("logs", "--no-color", "worker"))
        # No container needs a clean stop.
        project("kill")
        project("down", "-v")
        assert not project.containers()


@pytest.mark.takes(236)
@pytest.mark.timeout(600)
def test_compose_doubles_every_number_once_despite_a_killed_broker(project: Project) -> None:
    started = time.monotonic()
    assert f"KAFKA_BOOTSTRAP_SERVERS={project.servers}" in project("up")
    print(f"three brokers after {time.monotonic() - started:.1f} s")
    create(project, "numbers", "doubled")
    project("worker")
    load(project, range(100))
    wait_until("the first hundred are doubled", lambda: shows(project, doubled(100)), 60)
    project("kill", "-s", "SIGKILL", "kafka-2")
    load(project, range(100, 200))
    wait_until("the second hundred are doubled", lambda: shows(project, doubled(200)), 90)
    project("start", "kafka-2")
    assert "session started" in project("logs", "worker")

    assert f"KAFKA_BOOTSTRAP_SERVERS={project.shim}" in project("shim")
    admin = AdminClient({"bootstrap.servers": project.shim})
    told = {(broker.host, broker.port) for broker in admin.list_topics(timeout=30).brokers.values()}
    host, _, port = project.shim.partition(":")
    assert told == {(host, int(port) + i) for i in range(3)}, "clients of the shim must see the shim's addresses only"
    load(project, range(200, 260), project.shim)
    wait_until("the records sent through the shim are doubled", lambda: shows(project, doubled(260)), 60)
    with urllib.request.urlopen(f"http://127.0.0.1:{project.http_port}/metrics", timeout=30) as answer:
        assert 'eos_shim_transactions_total{end="commit"} 1.0' in answer.read().decode()

    project("stop", "worker")
    assert "stopped" in project("logs", "worker")
    assert sorted_output(project) == doubled(260)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_records_survive_a_restart_and_workers_keep_the_brokers(project: Project) -> None:
    project("up")
    create(project, "numbers", "doubled")
    load(project, range(50))
    project("down")
    assert not project.containers()
    project("up")
    assert sorted_values(project, "numbers") == list(range(50))
    brokers = set(project.containers())
    # This image exists and is no Kafka, so brokers recreated from it would not start.
    project("worker", KAFKA_IMAGE=BASE_IMAGE)
    wait_until("the records from before the worker are doubled", lambda: sorted_output(project) == doubled(50), 60)
    assert len(brokers) == 3
    assert brokers < set(project.containers())


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_compose_file_is_read_by_both_compose_generations(generation: str) -> None:
    if (command := composes().get(generation)) is None:
        pytest.skip(f"not run: no compose {generation} is installed")
    profiles = [*command, "--profile", "worker", "--profile", "shim"]

    def names(what: str) -> set[str]:
        told = subprocess.run(
            [*profiles, "config", what], cwd=COMPOSE, capture_output=True, text=True, timeout=60, check=False
        )
        assert told.returncode == 0, told.stderr
        return set(told.stdout.split())

    brokers = {"kafka-1", "kafka-2", "kafka-3"}
    assert names("--services") == brokers | {"worker", "shim"}
    assert names("--volumes") == brokers


def test_docker_without_compose_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho \"docker: 'compose' is not a docker command.\" >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert composes() == {}


def test_project_resources_have_owner_labels(project: Project) -> None:
    configured = project("config").partition("\nx-")[0]  # compose v2 prints the anchors too.
    # Three brokers, the worker, the shim, the network and three volumes.
    assert configured.count(f"{OWNER_LABEL}: {owner()}") == 9


def create(project: Project, *names: str) -> None:
    """Create topics of two partitions, and wait until every broker knows them with three in-sync replicas."""
    admin = AdminClient({"bootstrap.servers": project.servers})
    for made in admin.create_topics([NewTopic(name, 2) for name in names]).values():
        made.result(30)

    def known_to(server: str) -> bool:
        topics = AdminClient({"bootstrap.servers": server}).list_topics(timeout=10).topics
        found = [topics[name].partitions for name in names if name in topics]
        return [[len(p.isrs) for p in partitions.values()] for partitions in found] == [[3, 3]] * len(names)

    wait_until("every broker knows the topics", lambda: all(map(known_to, project.servers.split(","))), 30)


def load(project: Project, numbers: range, servers: str = "") -> None:
    settings = {"bootstrap.servers": servers or project.servers, "transactional.id": f"{project.name}-load"}
    with eos.transaction(settings) as txn:
        for number in numbers:
            txn.send("numbers", str(number), key=str(number))


def sorted_output(project: Project) -> list[int]:
    return sorted_values(project, "doubled")


def sorted_values(project: Project, topic: str) -> list[int]:
    return sorted(int(v or b"-1") for values in settled_values(project.servers, topic).values() for v in values)


def shows(project: Project, expected: list[int]) -> bool:
    try:
        return sorted_output(project) == expected
    except (KafkaException, TooSlow):
        return False  # Leaders are moving, or a transaction is still open.


def doubled(count: int) -> list[int]:
    return [2 * n for n in range(count)]
