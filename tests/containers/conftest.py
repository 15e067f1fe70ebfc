"""The clusters that these tests break: three nodes on each backend, and what is said where a backend cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eos.testing.clusters import Cluster, choose


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of one cluster in one process, the other tests of one file in one process.

    (`--dist loadgroup` would be that, but xdist 3.8 does not group with pytest 9: it renames the tests in vain.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            return test.partition("[")[2] or file

    return ByCluster(config, log)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes of `request.param`, "backend-version"; every test ends its faults, the next one begins in sync."""
    backend, _, version = request.param.partition("-")
    wanted = request.config.getoption("--eos-kafka")
    if wanted not in (None, backend):
        pytest.skip(f"not run: --eos-kafka={wanted}")
    # Without a wish, so that a machine without an engine says so and goes on; a wish would fail there.
    choice = choose(backend if wanted or backend == "jvm" else None, version)
    if choice.backend != backend:
        pytest.skip(f"not run: {choice.reason}")
    with choice.cluster(3, version) as cluster:
        yield cluster


@pytest.fixture
def whole(cluster: Cluster) -> Iterator[Cluster]:
    """`cluster`, repaired after the test if the test left a fault."""
    yield cluster
    cluster.repair()
