"""Run one or three real Kafka nodes for the duration of a `with` block.

The module owns the cluster's directory, its ports and its processes, and ends all of them however the block ends. It
must never undo an action of a test: a killed node stays down until `start`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from eos.broker import node as broker_node
from eos.broker.jars import DEFAULT_VERSION, kafka_jars, parse_version
from eos.broker.java import find_java
from eos.broker.node import Node, format_all, free_ports, stop_all, wait_until_ready
from eos.broker.properties import HOST, NodePorts
from eos.broker.queries import fetch_metadata
from eos.errors import ConfigurationError, IllegalState, Unavailable


class LocalKafka:
    """Run real Apache Kafka (KRaft, combined roles) on 127.0.0.1, as a context manager.

    `nodes` is 1 or 3. `data` is a directory to keep; None uses a temporary one, which is removed unless the block fails
    or `keep` is set. `port` is the first node's client port and the others follow; None uses free ones. `config` are
    broker properties that override the defaults here. For `proxied_port` see `proxied_servers`. Node i has node.id i,
    counted from 0. The JVMs end with this process even if it is SIGKILLed. With EOS_KEEP_LOGS=DIR the nodes' logs are
    copied there at the end. Raises Unavailable without Java or jars, if a port is in use or if a node does not start.
    """

    def __init__(
        self,
        nodes: int = 1,
        version: str = DEFAULT_VERSION,
        data: str | os.PathLike[str] | None = None,
        port: int | None = None,
        config: Mapping[str, object] | None = None,
        proxied_port: int | None = None,
    ) -> None:
        if nodes not in (1, 3):
            raise ConfigurationError(f"a local Kafka has 1 or 3 nodes, not {nodes}")
        if proxied_port is not None and nodes != 1:
            raise ConfigurationError("proxied_port needs a single node, because one proxy serves one broker")
        parse_version(version)
        self.version, self.config = version, dict(config or {})
        self.keep = False
        self._count, self._port, self._proxied_port = nodes, port, proxied_port
        self._data = None if data is None else Path(data).absolute()
        self._directory: Path | None = None
        self._nodes: list[Node] = []

    def __enter__(self) -> LocalKafka:
        java, jars = find_java(), kafka_jars(self.version)
        ports = choose_ports(self._count, self._port, self._proxied_port)
        broker_node.require_free(port for node in ports for port in node.all())
        self._directory = self._data or Path(tempfile.mkdtemp(prefix="eos-kafka-"))
        self._nodes = [Node(i, self._directory / f"node-{i}", self.version, java, jars) for i in range(self._count)]
        try:
            for node in self._nodes:
                node.configure(ports, self.config)
            format_all(self._nodes, persistent_cluster_id(self._directory))
            for node in self._nodes:
                node.launch(heap_for(self._count), die_with_parent=True)
            wait_until_ready(self._nodes, set(range(self._count)))
        except BaseException:
            # Keep the directory, because the error names a log file in it.
            self._end(keep=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An interrupt or an exit is not a failure of the block, so its logs are not kept.
        failed = kind is not None and issubclass(kind, Exception)
        self._end(keep=failed or self.keep)
        if (failed or self.keep) and self._data is None:
            print(f"eos: the logs of the local Kafka are in {self.directory}", file=sys.stderr)

    def _end(self, keep: bool) -> None:
        if self._data is not None:
            stop_all(self._nodes)
        for node in self._nodes:
            node.kill()
        copies = os.environ.get("EOS_KEEP_LOGS")
        if copies:
            self._copy_logs(Path(copies))
        if self._data is None and not keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _copy_logs(self, to: Path) -> None:
        for node in self._nodes:
            target = to / self.directory.name / node.directory.name
            target.mkdir(parents=True, exist_ok=True)
            for source in (node.log_path, node.stdout_path, node.properties_path):
                if source.exists():
                    shutil.copy(source, target)

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise IllegalState("the local Kafka was not started")
        return self._directory

    @property
    def bootstrap_servers(self) -> str:
        """Return `127.0.0.1:port` of each node, for clients that connect to the brokers directly."""
        return ",".join(f"{HOST}:{self._node(i).ports.client}" for i in range(self._count))

    @property
    def proxied_servers(self) -> str:
        """Return `127.0.0.1:proxied_port`, where a test's own proxy listens. Its clients get no other address.

        The proxy forwards each connection to `proxied_upstream`.
        """
        if self._proxied_port is None:
            raise IllegalState("the local Kafka has no proxied_port")
        return f"{HOST}:{self._proxied_port}"

    @property
    def proxied_upstream(self) -> tuple[str, int]:
        """Return (host, port) of the listener that the test's proxy forwards to."""
        port = self._node(0).ports.proxied
        if port is None:
            raise IllegalState("the local Kafka has no proxied_port")
        return HOST, port

    def pid(self, i: int) -> int:
        process = self._node(i).process
        assert process is not None
        return process.pid

    def log_path(self, i: int) -> Path:
        return self._node(i).log_path

    def running(self, i: int) -> bool:
        """Return whether the JVM exists, even if it is paused."""
        return self._node(i).is_running()

    def kill(self, i: int) -> None:
        """Send SIGKILL and wait until the JVM has ended, its sockets are closed and its ports are free.

        On a single node of 4.x, a commit acknowledged a few milliseconds before may hang forever after `start`: the
        restarted coordinator treats a partition without a leader as deleted, skips its marker and marks the transaction
        as complete (KAFKA-20734; 3 of 5 kills right after a commit on 4.3.1, 0 of 5 on 3.9.2). Wait until the commit is
        visible before the kill, or use three nodes.
        """
        self._node(i).kill()

    def stop(self, i: int, timeout_s: float = broker_node.STOP_TIMEOUT_S) -> None:
        """Send SIGTERM and wait; send SIGKILL after `timeout_s`."""
        stop_all([self._node(i)], timeout_s)

    def start(self, i: int, timeout_s: float = broker_node.START_TIMEOUT_S) -> None:
        """Start a stopped or killed node on its data and ports. Return when it answers and sees all running nodes.

        Its replicas may still be catching up: see `wait_in_sync`. Raises IllegalState if the node is running,
        Unavailable if it does not start.
        """
        self.launch(i)
        alive = {other.index for other in self._nodes if other.is_reachable}
        wait_until_ready([self._node(i)], alive, timeout_s)

    def launch(self, i: int) -> None:
        """Start a node as `start` does, without waiting. `running` and `failure_reason` report its state later."""
        node = self._node(i)
        if node.is_running():
            raise IllegalState(f"Kafka node {i} is running")
        node.launch(heap_for(self._count), die_with_parent=True)

    def failure_reason(self, i: int) -> str:
        """Return the first error the node logged since its last launch, or else the last line its JVM printed."""
        return self._node(i).failure_reason()

    def pause(self, i: int) -> None:
        """Send SIGSTOP: connections stay open and get no responses."""
        self._node(i).pause()

    def resume(self, i: int) -> None:
        """Send SIGCONT."""
        self._node(i).resume()

    def wait_in_sync(self, timeout_s: float = broker_node.START_TIMEOUT_S) -> int:
        """Wait until each running node reports a leader and all replicas in sync for every partition.

        Return the number of partitions. Raises Unavailable after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                nodes = [self._node(i) for i in range(self._count)]
                seen = [fetch_metadata(f"{HOST}:{node.ports.client}") for node in nodes if node.is_reachable]
                late = [f"{topic}-{partition}" for one in seen for topic, partition in one.not_in_sync()]
                if seen and not late:
                    return len(seen[0].partitions)
            except OSError as error:
                late = [str(error)]
            if time.monotonic() > deadline:
                raise Unavailable(f"after {timeout_s:.0f} s not in sync: {', '.join(late[:5])}")
            time.sleep(0.1)

    def _node(self, i: int) -> Node:
        if not self._nodes:
            raise IllegalState("the local Kafka was not started")
        return self._nodes[i]


def heap_for(nodes: int) -> str:
    return "1g" if nodes == 1 else "512m"


def choose_ports(nodes: int, first_client_port: int | None, proxied_port: int | None = None) -> list[NodePorts]:
    """Return client ports from `first_client_port` on, or free ones for None, and free ports for the rest."""
    count = 3 * nodes
    wanted = [] if first_client_port is None else [first_client_port + i for i in range(nodes)]
    free = free_ports(count, taken=[*wanted, *([] if proxied_port is None else [proxied_port])])
    clients = wanted or free[:nodes]
    return [
        NodePorts(clients[i], free[nodes + i], free[2 * nodes + i] if proxied_port is not None else None, proxied_port)
        for i in range(nodes)
    ]


def persistent_cluster_id(directory: Path) -> str:
    """Return the cluster id of the data in `directory`, and create it at the first use."""
    file = directory / "cluster.id"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(broker_node.random_id())
        part.replace(file)
    return file.read_text().strip()
