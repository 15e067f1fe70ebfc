"""Build the Dockerfile of `eos init`: the image is a healthy worker that does not run as root and stops cleanly.

The build uses no registry. Its base is this machine's Debian with pip and the wheels that the Dockerfile installs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from eos import cli
from eos.testing.clusters import choose
from eos.testing.clusters.container import BASE_IMAGE, ContainerCluster
from eos.testing.clusters.leftovers import OWNER_LABEL, owner
from tests.support.reading import settled_values, wait_until

ROOT = Path(__file__).parents[2]
BASE = f"""FROM {BASE_IMAGE}
COPY wheels /wheels
COPY pip /usr/lib/python3/dist-packages/pip
RUN ln -s python3 /usr/bin/python && printf '#!/bin/sh\\nexec python -m pip "$@"\\n' > /usr/bin/pip
RUN chmod +x /usr/bin/pip
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_BREAK_SYSTEM_PACKAGES=1
"""


def docker(*arguments: str, timeout: float = 240, **more: object) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False, **more)
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stdout[-3_000:]}{done.stderr[-3_000:]}"
    return done.stdout.strip()


@pytest.fixture
def images() -> Iterator[list[str]]:
    made = [f"eos-test-{what}:{uuid.uuid4().hex[:8]}" for what in ("python", "app")]
    yield made
    subprocess.run(["docker", "image", "rm", "-f", *made], capture_output=True, check=False)


def build(image: str, folder: Path, *options: str) -> None:
    docker(
        *("build", "--force-rm", "-q", "-t", image, "--label", f"{OWNER_LABEL}={owner()}", *options, str(folder)),
        env=os.environ | {"DOCKER_BUILDKIT": "0"},
    )


def make_base(image: str, folder: Path) -> Path:
    """Build the base image, and return the wheel of eos, which it lacks; other wheels are for the image's Python."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    pure = os.environ | {"EOS_PURE_PYTHON": "1"}
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder / "wheels", ROOT], env=pure, check=True)
    (wheel,) = (folder / "wheels").iterdir()
    for_it = ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11"]
    subprocess.run([*pip, "download", "-d", folder / "wheels", *for_it, f"{wheel}[metrics]"], check=True)
    ours = wheel.rename(folder.parent / wheel.name)
    found = importlib.util.find_spec("pip")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, folder / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "Dockerfile").write_text(BASE)
    build(image, folder)
    return ours


def written(servers: str) -> list[bytes | None]:
    return [value for values in settled_values(servers, "shop-out").values() for value in values]


@pytest.mark.deep
def test_image_of_a_new_app_is_a_healthy_worker_without_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: list[str]
) -> None:
    choice = choose(None, "4.4.0")
    if choice.backend != "container":
        pytest.skip(f"not run: {choice.reason}")
    python, image = images
    (tmp_path / "base").mkdir()
    wheel = make_base(python, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(["init", "shop"]) == 0
    shutil.copy(wheel, "shop")
    build(image, tmp_path / "shop", "--build-arg", f"PYTHON={python}")

    with choice.cluster(1, "4.4.0") as cluster:
        assert isinstance(cluster, ContainerCluster)
        servers = ["--bootstrap-servers", cluster.bootstrap_servers]
        assert cli.invoke(["topic", "create", "shop-in", "shop-out", *servers]) == 0
        assert cli.invoke(["topic", "send", "shop-in", "to be", *servers]) == 0
        worker = docker(
            *("run", "-d", "--network", cluster.name, "--label", f"{OWNER_LABEL}={owner()}"),
            *("-e", "KAFKA_BOOTSTRAP_SERVERS=kafka-0:9092", "-e", "EOS_INSTANCE=shop-0", image),
        )
        try:
            wait_until("the output of the worker", lambda: written(cluster.bootstrap_servers) == [b"TO BE"], 150)
            wait_until(
                "the worker is healthy",
                lambda: docker("inspect", "-f", "{{.State.Health.Status}}", worker) == "healthy",
                150,
            )
            assert docker("exec", worker, "id", "-u") == "1000"
            docker("stop", "-t", "45", worker)
            assert docker("inspect", "-f", "{{.State.ExitCode}}", worker) == "0"
            logged = subprocess.run(["docker", "logs", worker], capture_output=True, text=True, check=True)
            assert "records_in=1 records_out=1" in logged.stdout + logged.stderr
        finally:
            print(subprocess.run(["docker", "logs", worker], capture_output=True, text=True, check=False))
            docker("rm", "-f", worker)
