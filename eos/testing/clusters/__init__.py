"""Provides Kafka clusters that tests can break on purpose: containers, local JVMs, or an external cluster.

There is one protocol (`Cluster`), one file per backend, and the same tests for each. A backend that cannot inject a
fault raises `NotSupported`: the test then counts as not run, never as passed. docker and testcontainers are imported
only when a container is requested.
"""

from eos.testing.clusters.base import Cluster, NotSupported
from eos.testing.clusters.choice import Choice, choose

__all__ = ["Choice", "Cluster", "NotSupported", "choose"]
