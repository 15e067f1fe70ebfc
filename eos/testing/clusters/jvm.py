"""Runs a cluster of local JVMs (eos.broker.LocalKafka), for machines without a container engine.

Owns only the translation. All nodes and clients share one address here, so a node's packets cannot be distinguished
from the others', and a network cut raises NotSupported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.testing.clusters.base import Cluster, NotSupported


class JvmCluster(Cluster):
    """Runs a cluster of 1 or 3 nodes (LocalKafka has no other sizes).

    `config`: broker properties that override LocalKafka's.
    """

    backend = "jvm"

    def __init__(
        self, nodes: int = 3, version: str = DEFAULT_VERSION, config: Mapping[str, object] | None = None
    ) -> None:
        super().__init__()
        self.size, self.version = nodes, version
        self._kafka = LocalKafka(nodes, version, config=config)

    def __enter__(self) -> JvmCluster:
        self._kafka.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kafka.__exit__(kind, error, trace)

    def server(self, i: int) -> str:
        return self._kafka.bootstrap_servers.split(",")[i]

    def log(self, i: int) -> str:
        return self._kafka.log_path(i).read_text(errors="replace")

    def _kill(self, i: int) -> None:
        self._kafka.kill(i)

    def _stop(self, i: int, timeout_s: float) -> None:
        self._kafka.stop(i, timeout_s)

    def _exit_reason(self, i: int) -> str | None:
        return None if self._kafka.running(i) else self._kafka.failure_reason(i)

    def _state(self, i: int) -> str:
        return f"its JVM is {'running' if self._kafka.running(i) else 'gone'}"

    def _launch(self, nodes: list[int]) -> None:
        # No wait here: the caller of `start` decides how long it may take.
        for i in nodes:
            self._kafka.launch(i)

    def _pause(self, i: int) -> None:
        self._kafka.pause(i)

    def _resume(self, i: int) -> None:
        self._kafka.resume(i)

    def _partition(self, i: int) -> None:
        raise NotSupported("local JVMs share one network address: a network cut needs the container backend")

    def _heal(self, i: int) -> None:
        raise NotSupported("local JVMs cannot be cut off")
