"""compose/*.sh where something is missing: one sentence says what. The engine and everything else are stand-ins."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPOSE = Path(__file__).parents[2] / "compose"
TOOLS = ("bash", "cat", "dirname", "grep", "mktemp", "rm", "tail")
# An engine that answers, without a compose of its own.
DOCKER = "case $1 in version) echo 27.0 ;; inspect) echo healthy ;; *) exit 1 ;; esac"


class Machine:
    """What can be found on PATH: a few tools, and what a test says. `calls` are those of the stand-ins."""

    def __init__(self, directory: Path) -> None:
        self._bin, self._calls = directory / "bin", directory / "calls"
        self._bin.mkdir()
        self._calls.touch()
        self._calls.chmod(0o666)
        for tool in TOOLS:
            (self._bin / tool).symlink_to(str(shutil.which(tool)))

    def has(self, program: str, script: str) -> None:
        file = self._bin / program
        file.write_text(f'#!{shutil.which("bash")}\necho "{program} $*" >>{self._calls}\n{script}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    def run(self, script: str, *arguments: str, user: int | None = None, **environment: str) -> tuple[int, list[str]]:
        """Exit code and lines of a script, which another user is given as its input: the folder may be ours only."""
        path = COMPOSE / script
        command = ["bash", "-s"] if user is not None else ["bash", str(path)]
        ended = subprocess.run(
            [*command, *arguments],
            executable=shutil.which("bash"),
            input=path.read_text() if user is not None else "",
            env={"PATH": str(self._bin)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
            user=user,
        )
        return ended.returncode, ended.stdout.splitlines()

    def calls(self, of: str) -> list[str]:
        called = [line.partition(" ") for line in self._calls.read_text().splitlines()]
        return [arguments for program, _, arguments in called if program == of]


@pytest.fixture
def machine() -> Iterator[Machine]:
    # Not tmp_path, which is for one user only.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        machine = Machine(Path(directory))
        machine.has("docker", DOCKER)
        yield machine


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root installs packages")
nobody = 65_534 if os.geteuid() == 0 else None


@as_root
def test_engine_script_installs_missing_build_and_start_tools(machine: Machine) -> None:
    machine.has("apt-get", "")
    assert machine.run("engine.sh", "start") == (0, ["engine: 27.0 answers; installed docker-compose debootstrap"])
    update, install = machine.calls("apt-get")
    assert update == "update"
    assert install == "install -y --no-install-recommends docker-compose debootstrap", "no second engine"


def test_where_nothing_is_missing_nothing_is_installed(machine: Machine) -> None:
    for program in ("apt-get", "docker-compose", "debootstrap"):
        machine.has(program, "")
    assert machine.run("engine.sh", "start") == (0, ["engine: 27.0 answers"])
    assert machine.calls("apt-get") == []


def test_with_compose_v2_and_a_base_image_nothing_is_missing(machine: Machine) -> None:
    machine.has(
        "docker", 'case "$1 $2" in "version "*) echo 27.0 ;; "compose version" | "image inspect") ;; *) exit 1 ;; esac'
    )
    assert machine.run("engine.sh", "start") == (0, ["engine: 27.0 answers"])


def test_who_may_not_install_is_told_what_is_missing(machine: Machine) -> None:
    machine.has("apt-get", "exit 100")
    said = "engine: 27.0 answers; docker-compose debootstrap cannot be installed: that takes root"
    assert machine.run("engine.sh", "start", user=nobody) == (0, [said])
    assert machine.calls("apt-get") == []


@as_root
def test_a_package_that_cannot_be_had_is_told_with_the_reason(machine: Machine) -> None:
    machine.has("debootstrap", "")
    machine.has("apt-get", "echo 'E: Unable to locate package docker-compose'; exit 100")
    said = "docker-compose cannot be installed: E: Unable to locate package docker-compose"
    assert machine.run("engine.sh", "start") == (0, [f"engine: 27.0 answers; {said}"])


def test_without_a_compose_the_cluster_says_what_installs_one(machine: Machine) -> None:
    said = "cluster: no compose is installed: compose/engine.sh start installs it, as root"
    assert machine.run("cluster.sh", "up") == (1, [said])


def test_a_worker_whose_image_was_never_built_is_told_how_to_build_it(machine: Machine) -> None:
    machine.has("docker-compose", "")
    for service in ("worker", "shim"):
        said = f"cluster: the image eos-{service}:latest is not built: make {service}, or make image"
        assert machine.run("cluster.sh", service) == (1, [said])
    assert machine.calls("docker-compose") == []


@pytest.mark.parametrize("service", ["worker", "shim"])
def test_beside_a_worker_or_shim_the_brokers_stay_as_they_are(machine: Machine, service: str) -> None:
    machine.has("docker", "case $1 in image) ;; inspect) echo healthy ;; *) exit 1 ;; esac")
    machine.has("docker-compose", "")
    code, said = machine.run("cluster.sh", service, KAFKA_IMAGE="other")
    assert code == 0, said
    started = [call.partition(" up ")[2] for call in machine.calls("docker-compose") if " up " in call]
    assert started == ["-d --no-recreate kafka-1 kafka-2 kafka-3", f"-d --no-deps {service}"]
