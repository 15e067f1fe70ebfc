"""Kafka clusters that can be broken on purpose: containers, local JVMs, or somebody else's cluster by its address.

One protocol (`Cluster`), one file per backend, the same tests on each. A backend that cannot do a fault raises
`NotSupported`: the test is then reported as not run, never as passed. Neither docker nor testcontainers is imported
before a container is asked for.
"""

from eos.testing.clusters.base import Cluster, NotSupported
from eos.testing.clusters.choice import Choice, choose

__all__ = ["Choice", "Cluster", "NotSupported", "choose"]
