"""Provide clusters of three nodes that tests break, on each backend, or the reason why a backend is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eos.testing.clusters import Cluster, choose


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of one cluster in one process, and the other tests of each file in one process.

    `--dist loadgroup` should do this, but xdist 3.8 does not group with pytest 9, because it renames the tests too
    late.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            return test.partition("[")[2] or file

    return ByCluster(config, log)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Start three nodes of `request.param`, "backend-version". Every test ends its faults, so the next one starts in
    sync."""
    backend, _, version = request.param.partition("-")
    wanted = request.config.getoption("--eos-kafka")
    if wanted not in (None, backend):
        pytest.skip(f"not run: --eos-kafka={wanted}")
    # Name no backend if possible: a machine without an engine then skips the test, instead of failing it.
    choice = choose(backend if wanted or backend == "jvm" else None, version)
    if choice.backend != backend:
        pytest.skip(f"not run: {choice.reason}")
    with choice.cluster(3, version) as cluster:
        yield cluster


@pytest.fixture
def whole(cluster: Cluster) -> Iterator[Cluster]:
    """Return `cluster`, and repair it after the test if the test left a fault."""
    yield cluster
    cluster.repair()
