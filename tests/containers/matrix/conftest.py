"""Provide the clusters on which cells run, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.matrix.__main__ import Clusters


@pytest.fixture(scope="module")
def clusters(pytestconfig: pytest.Config) -> Iterator[Clusters]:
    clusters = Clusters(pytestconfig.getoption("--eos-kafka"))
    yield clusters
    clusters.close()


@pytest.fixture(scope="module")
def single_nodes(pytestconfig: pytest.Config) -> Iterator[Clusters]:
    """Provide single nodes for errors of a worker that do not need three brokers."""
    clusters = Clusters(pytestconfig.getoption("--eos-kafka"), nodes=1)
    yield clusters
    clusters.close()
