"""compose/*.sh with missing tools: one message names them. The engine and all other programs are stand-ins."""

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
# This engine answers but has no compose plugin.
DOCKER = "case $1 in version) echo 27.0 ;; inspect) echo healthy ;; *) exit 1 ;; esac"


class Machine:
    """A PATH with a few tools and the stand-ins of a test, and the recorded calls of the stand-ins."""

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
        """Run a script and return its exit code and lines. Another user gets it on stdin: the folder may be private."""
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
    # Do not use tmp_path, which only one user can read.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        machine = Machine(Path(directory))
        machine.has("docker", DOCKER)
        yield machine


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root installs packages")
unprivileged = 65_534 if os.geteuid() == 0 else None


@as_root
def test_engine_script_installs_missing_build_and_start_tools(machine: Machine) -> None:
    machine.has("apt-get", "")
    assert machine.run("engine.sh", "start") == (0, ["engine: 27.0 answers; installed docker-compose debootstrap"])
    update, install = machine.calls("apt-get")
    assert update == "update"
    assert install == "install -y --no-install-recommends docker-compose debootstrap", (
        "a second engine is not installed"
    )


def test_engine_script_installs_nothing_if_nothing_is_missing(machine: Machine) -> None:
    for program in ("apt-get", "docker-compose", "debootstrap"):
        machine.has(program, "")
    assert machine.run("engine.sh", "start") == (0, ["engine: 27.0 answers"])
    assert machine.calls("apt-get") == []


def test_compose_v2_and_a_base_image_are_sufficient(machine: Machine) -> None:
    machine.has(
        "docker", 'case "$1 $2" in "version "*) echo 27.0 ;; "compose version" | "image inspect") ;; *) exit 1 ;; esac'
    )
    assert machine.run("engine.sh", "start") == (0, ["engine: 27.0 answers"])


def test_engine_script_without_root_names_missing_packages(machine: Machine) -> None:
    machine.has("apt-get", "exit 100")
    said = "engine: 27.0 answers; docker-compose debootstrap cannot be installed: that takes root"
    assert machine.run("engine.sh", "start", user=unprivileged) == (0, [said])
    assert machine.calls("apt-get") == []


@as_root
def test_unavailable_package_is_reported_with_its_reason(machine: Machine) -> None:
    machine.has("debootstrap", "")
    machine.has("apt-get", "echo 'E: Unable to locate package docker-compose'; exit 100")
    said = "docker-compose cannot be installed: E: Unable to locate package docker-compose"
    assert machine.run("engine.sh", "start") == (0, [f"engine: 27.0 answers; {said}"])


def test_error_for_missing_compose_names_the_install_command(machine: Machine) -> None:
    said = "cluster: no compose is installed: compose/engine.sh start installs it, as root"
    assert machine.run("cluster.sh", "up") == (1, [said])


def test_error_for_a_missing_image_names_the_build_command(machine: Machine) -> None:
    machine.has("docker-compose", "")
    for service in ("worker", "shim"):
        said = f"cluster: the image eos-{service}:latest is not built: make {service}, or make image"
        assert machine.run("cluster.sh", service) == (1, [said])
    assert machine.calls("docker-compose") == []


@pytest.mark.parametrize("service", ["worker", "shim"])
def test_starting_a_worker_or_shim_does_not_recreate_brokers(machine: Machine, service: str) -> None:
    machine.has("docker", "case $1 in image) ;; inspect) echo healthy ;; *) exit 1 ;; esac")
    machine.has("docker-compose", "")
    code, said = machine.run("cluster.sh", service, KAFKA_IMAGE="other")
    assert code == 0, said
    started = [call.partition(" up ")[2] for call in machine.calls("docker-compose") if " up " in call]
    assert started == ["-d --no-recreate kafka-1 kafka-2 kafka-3", f"-d --no-deps {service}"]
