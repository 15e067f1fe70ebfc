"""Connects to an external cluster by its address: tests can query it but not break it.

It must never change anything in the cluster, and never report a fault that it did not inject.
"""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn

from eos.broker.queries import fetch_metadata
from eos.errors import ConfigurationError
from eos.testing.clusters.base import READY_TIMEOUT_S, Cluster, NotSupported, collect_late


class ExternalCluster(Cluster):
    """Connects to a cluster at `servers`: HOST:PORT[,HOST:PORT...].

    Its node ids are its own, so nodes are not counted from 0 here. `server`, `log` and every fault raise NotSupported.
    """

    backend = "external"
    version = None

    def __init__(self, servers: str) -> None:
        super().__init__()
        for server in servers.split(","):
            host, _, port = server.strip().rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigurationError(f"{server!r} is not HOST:PORT")
        self._servers = [server.strip() for server in servers.split(",")]
        self.size = 0

    def __enter__(self) -> ExternalCluster:
        nodes = self._query_node(
            f"{self.bootstrap_servers} answers", lambda server: fetch_metadata(server).nodes or None, timeout_s=30
        )
        self.size = len(nodes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(self._servers)

    def wait_in_sync(self, *topics: str, timeout_s: float = READY_TIMEOUT_S) -> int:
        """Wait until all replicas are in sync, as one node reports it."""
        problems: list[str] = []
        examined = 0

        def in_sync() -> bool:
            nonlocal examined
            problems.clear()
            examined = collect_late(fetch_metadata(self._next_server()), topics, "the cluster", problems)
            return not problems

        self._wait_until("all replicas are in sync", in_sync, timeout_s, lambda: ", ".join(problems[:5]))
        return examined

    def repair(self) -> None:
        """Do nothing: there is never a fault to end."""

    def _reachable_servers(self) -> list[str]:
        return self._servers

    def _no_fault(self, *_: object, **__: object) -> NoReturn:
        raise NotSupported(f"a fault needs a cluster of our own, not {self.bootstrap_servers}")

    _require_up = start = resume = heal = _no_fault
    _kill = _stop = _launch = _pause = _resume = _partition = _heal = _no_fault

    def server(self, i: int) -> NoReturn:
        raise NotSupported(
            f"the nodes at {self.bootstrap_servers} cannot be addressed by index: the cluster chooses its own node ids"
        )

    def log(self, i: int) -> NoReturn:
        raise NotSupported(f"a node's log needs a cluster of our own, not {self.bootstrap_servers}")
