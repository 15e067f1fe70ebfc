"""Kill test runs: the watcher of a run removes its cluster, and the next run removes the rest."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from eos.testing.clusters import choose
from eos.testing.clusters.leftovers import CLUSTER_LABEL, OWNER_LABEL, is_dead, owner, remove_leftovers
from tests.support.reading import wait_until


@pytest.fixture
def docker(request: pytest.FixtureRequest) -> Iterator[Any]:
    wanted = request.config.getoption("--eos-kafka")
    choice = choose()
    if wanted not in (None, "container") or choice.backend != "container":
        pytest.skip(f"not run: {choice.reason if wanted is None else f'--eos-kafka={wanted}'}")
    from eos.testing.clusters.container import engine

    client = engine()
    yield client
    client.close()


def dead_owner() -> str:
    """Return the owner name of a process that has just ended."""
    code = "from eos.testing.clusters.leftovers import owner; print(owner())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def another_owner() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a process that lives until its input is closed, and return its owner name."""
    code = "import sys; from eos.testing.clusters.leftovers import owner; print(owner(), flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait(30)


def test_only_an_ended_process_is_dead() -> None:
    assert not is_dead(owner())
    assert is_dead(dead_owner())
    machine, pid, start = owner().rsplit("/", 2)
    # The start time differs, so another process has this pid by now.
    assert is_dead(f"{machine}/{pid}/{int(start) - 1}")
    # A process of another machine cannot be judged from here, and a person's cluster has no such owner.
    assert not is_dead(f"elsewhere/{pid}/{int(start) - 1}")
    assert not is_dead("")
    assert not is_dead("somebody")


def test_only_resources_of_dead_runs_are_removed(docker: Any, names: Any) -> None:
    from eos.testing.clusters.container import BASE_IMAGE

    def make(label: dict[str, str], suffix: str) -> list[Any]:
        name = names(suffix)
        network = docker.networks.create(name, labels=label)
        volume = docker.volumes.create(name, labels=label)
        container = docker.containers.create(
            BASE_IMAGE, ["sleep", "600"], name=name, labels=label, network=name, volumes=[f"{name}:/data"]
        )
        container.start()
        return [container, network, volume]

    made: dict[str, list[Any]] = {}
    with another_owner() as (other, process):
        try:
            # The owner lives until everything exists, because a parallel run may remove resources of dead owners at any
            # moment.
            made["dead"] = make({OWNER_LABEL: other}, "dead")
            made["alive"] = make({OWNER_LABEL: owner()}, "alive")
            made["person"] = make({}, "person")
            # A paused container must be removed too.
            made["dead"][0].pause()
            assert not any(map(is_removed, made["dead"]))
            process.communicate(timeout=30)
            removed = remove_leftovers(docker)
            # The resources are removed by this call, or by that of a parallel run, which may still be at work.
            wait_until("the resources of dead runs are removed", lambda: all(map(is_removed, made["dead"])), 60)
            assert names("alive") not in removed
            assert names("person") not in removed
            for kind in ("alive", "person"):
                assert not any(map(is_removed, made[kind]))
                assert made[kind][0].status == "running"
        finally:
            for things in made.values():
                remove(docker, things)


def is_removed(thing: Any) -> bool:
    from docker.errors import NotFound

    try:
        thing.reload()
    except NotFound:
        return True
    return False


def remove(docker: Any, things: list[Any]) -> None:
    import docker as library

    for thing, options in zip(things, ({"force": True, "v": True}, {}, {}), strict=True):
        with contextlib.suppress(library.errors.NotFound):
            thing.remove(**options)


RUN = """
import sys
from eos.testing.clusters.container import ContainerCluster
with ContainerCluster(nodes=1) as cluster:
    print(cluster.name, flush=True)
    sys.stdin.read()
"""


def test_cluster_is_removed_with_its_killed_run(docker: Any) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    try:
        name = run.stdout.readline().strip()
        filters = {"label": f"{CLUSTER_LABEL}={name}"}
        assert [c.status for c in docker.containers.list(filters=filters)] == ["running"]
        volumes = [m["Name"] for m in docker.containers.list(filters=filters)[0].attrs["Mounts"]]
        assert volumes
    finally:
        run.kill()
        run.communicate()
    # The watcher or another run removes them, possibly while they are listed.
    everything = {"all": True, "filters": filters, "ignore_removed": True}
    wait_until("its containers are removed", lambda: not docker.containers.list(**everything), 120)
    wait_until("its network is removed", lambda: not docker.networks.list(filters=filters), 60)
    wait_until("its volumes are removed", lambda: not {v.name for v in docker.volumes.list()} & set(volumes), 60)
