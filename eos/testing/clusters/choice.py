"""Chooses a backend and gives the reason: the requested one, else containers if they can run, else local JVMs.

It must never start anything: the choice costs one query to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eos.broker.jars import DEFAULT_VERSION
from eos.errors import Unavailable
from eos.testing.clusters.base import Cluster

Backend = Literal["container", "jvm", "external"]


@dataclass(frozen=True)
class Choice:
    """Describes a chosen backend. `reason`: one line for people. `servers`: the address of an external cluster."""

    backend: Backend
    reason: str
    servers: str = ""

    def cluster(
        self, nodes: int = 3, version: str = DEFAULT_VERSION, config: Mapping[str, object] | None = None
    ) -> Cluster:
        """Return a cluster that is not started yet: use it as a context manager."""
        if self.backend == "container":
            from eos.testing.clusters.container import ContainerCluster

            return ContainerCluster(nodes, version, config)
        if self.backend == "jvm":
            from eos.testing.clusters.jvm import JvmCluster

            return JvmCluster(nodes, version, config)
        from eos.testing.clusters.external import ExternalCluster

        return ExternalCluster(self.servers)


def choose(wanted: str | None = None, version: str = DEFAULT_VERSION) -> Choice:
    """Choose a backend: "container", "jvm", HOST:PORT[,HOST:PORT...], or None for the best on this machine."""
    if wanted == "jvm":
        return Choice("jvm", "brokers are local JVMs, as requested")
    if wanted not in (None, "container"):
        return Choice("external", f"brokers are those at {wanted}", servers=str(wanted))
    why_not = _explain_no_containers(version)
    if wanted is None and why_not is not None:
        return Choice("jvm", f"brokers are local JVMs: {why_not}")
    # A backend requested by name is not replaced: it reports a missing part when it is started.
    from eos.testing.clusters.container import image_for

    return Choice("container", f"brokers are containers of {image_for(version)}")


def _explain_no_containers(version: str) -> str | None:
    from eos.testing.clusters.container import engine, image_for, require_image

    try:
        client = engine()
    except Unavailable as error:
        return str(error)
    try:
        require_image(client, image_for(version))
    except Unavailable as error:
        return str(error)
    finally:
        client.close()
    return None
