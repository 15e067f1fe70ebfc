"""Run the local Kafka of `eos broker`, whose nodes outlive the command that started them.

The module owns the state file in the data directory (version, ports, pids) and the check that a pid in it still belongs
to a node. It must never signal a process without this check, and never use the data with an older version or another
number of nodes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from eos.broker.jars import DEFAULT_VERSION, kafka_jars, parse_version, user_folder
from eos.broker.java import find_java
from eos.broker.local import choose_ports, heap_for, persistent_cluster_id
from eos.broker.node import (
    STOP_TIMEOUT_S,
    Node,
    format_all,
    is_free,
    require_free,
    unknown_settings,
    wait_until_ready,
)
from eos.broker.properties import DERIVED_SETTINGS, HOST, NodePorts
from eos.errors import ConfigurationError, Unavailable

DEFAULT_PORT = 9092
_STATE_FILE = "broker.json"
_PORT_RELEASE_S = 3.0


class NodeState(msgspec.Struct):
    client_port: int
    controller_port: int
    pid: int | None = None


class State(msgspec.Struct):
    """Hold the stored state of a data directory. A stored `pid` may be outdated; `DetachedKafka.is_up` checks it."""

    version: str
    nodes: list[NodeState]
    config: dict[str, str] = {}  # broker settings of --config


@dataclass(frozen=True)
class NodeStatus:
    index: int
    pid: int | None
    port: int
    is_up: bool
    log_path: Path


def default_directory() -> Path:
    return user_folder("XDG_DATA_HOME", ".local/share") / "eos" / "broker"


class DetachedKafka:
    """Manage the local Kafka whose data is in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()
        self._state_path = self.directory / _STATE_FILE

    def state(self) -> State | None:
        try:
            return msgspec.json.decode(self._state_path.read_bytes(), type=State)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"{self._state_path} cannot be read: {error}") from error

    def bootstrap_servers(self) -> str:
        state = self.state()
        return ",".join(f"{HOST}:{node.client_port}" for node in state.nodes) if state else ""

    def status(self) -> list[NodeStatus]:
        state = self.state()
        return [
            NodeStatus(i, node.pid, node.client_port, self.is_up(i, node.pid), self._node_directory(i) / "server.log")
            for i, node in enumerate(state.nodes if state else [])
        ]

    def is_up(self, index: int, pid: int | None) -> bool:
        """Return whether `pid` is the JVM of node `index`: its command line ends with the node's properties file."""
        if pid is None:
            return False
        return f"kafka.Kafka {self._node_directory(index) / 'server.properties'}" in command_line(pid)

    def start(
        self,
        nodes: int | None = None,
        version: str | None = None,
        port: int | None = None,
        config: Mapping[str, str] | None = None,
        console: Console | None = None,
    ) -> list[int]:
        """Start the nodes that are down and return their numbers. The list is empty if all were running.

        An argument that is None keeps the value that the data has; new data begins with 1 node of version 4.4.0 at port
        9092. `config` are further broker settings. Raises ConfigurationError for another number of nodes, an older
        version, or different settings of a running cluster; Unavailable if the cluster cannot be started.
        """
        if nodes not in (None, 1, 3):
            raise ConfigurationError(f"a local Kafka has 1 or 3 nodes, not {nodes}")
        if taken := DERIVED_SETTINGS & (config or {}).keys():
            raise ConfigurationError(f"{min(taken)} cannot be set: --nodes, --port and --data determine it")
        with self._locked():
            before = self.state()
            up = {node.index for node in self.status() if node.is_up}
            if before is not None:
                _wait_for_ports(node for i, node in enumerate(before.nodes) if i not in up)
            state = self._next_state(before, bool(up), nodes, version, port, config or {})
            down = [i for i in range(len(state.nodes)) if i not in up]
            if down:
                new = (config or {}).keys() - (before.config if before else {}).keys()
                self._start_nodes(state, down, new, console or Console(stderr=True))
            return down

    def _next_state(
        self,
        before: State | None,
        running: bool,
        nodes: int | None,
        version: str | None,
        port: int | None,
        config: Mapping[str, str],
    ) -> State:
        if before is None:
            version = version or DEFAULT_VERSION
            parse_version(version)
            return State(version, _layout(nodes or 1, DEFAULT_PORT if port is None else port), dict(config))
        count, first_port = len(before.nodes), before.nodes[0].client_port
        if nodes not in (None, count):
            raise ConfigurationError(
                f"the data in {self.directory} belongs to {count} node{'s' if count > 1 else ''}, not {nodes}: "
                "choose another --data directory"
            )
        if version is not None and parse_version(version) < parse_version(before.version):
            raise ConfigurationError(
                f"the data in {self.directory} was written by Kafka {before.version}, which {version} cannot read: "
                "choose another --data directory"
            )
        if running:
            other = version not in (None, before.version) or port not in (None, first_port)
            if other or not config.items() <= before.config.items():
                raise ConfigurationError(
                    f"Kafka {before.version} is running at port {first_port} on the data in {self.directory}"
                    f"{''.join(f', with {name}={value}' for name, value in before.config.items())}: "
                    "stop it first with `eos broker stop`"
                )
            return before
        layout = _layout(count, first_port if port is None else port, before.nodes)
        return State(version or before.version, layout, {**before.config, **config})

    def _start_nodes(self, state: State, down: list[int], new: Set[str], console: Console) -> None:
        """Start the nodes that are down. `new` are the names of settings that the data does not have yet."""
        require_free(state.nodes[i].client_port for i in down)
        java, jars = find_java(), kafka_jars(state.version, console)
        if new and (unknown := unknown_settings(java, jars, new)):
            raise ConfigurationError(f"--config {unknown[0]}: Kafka {state.version} has no setting of this name")
        ports = [NodePorts(node.client_port, node.controller_port) for node in state.nodes]
        nodes = [Node(i, self._node_directory(i), state.version, java, jars) for i in down]
        try:
            with console.status(f"starting Kafka {state.version} …"):
                for node in nodes:
                    node.configure(ports, state.config)
                format_all(nodes, persistent_cluster_id(self.directory))
                # From now on the data belongs to this version and this number of nodes.
                for node in nodes:
                    node.launch(heap_for(len(ports)), die_with_parent=False)
                    assert node.process is not None
                    state.nodes[node.index].pid = node.process.pid
                    self._write(state)
                wait_until_ready(nodes, set(range(len(ports))))
        except BaseException:
            # An interrupted start must not leave half a cluster running.
            for node in nodes:
                node.kill()
            raise

    def stop(self, console: Console | None = None) -> list[int]:
        """Send SIGTERM to all nodes at once, and SIGKILL after 30 s. Return the nodes that were running."""
        if self.state() is None:
            return []
        with self._locked():
            running = {node.index: node.pid for node in self.status() if node.is_up and node.pid is not None}
            if not running:
                return []
            with (console or Console(stderr=True)).status("stopping Kafka …"):
                self._signal(running, signal.SIGCONT)
                self._signal(running, signal.SIGTERM)
                if not self._wait_down(running, STOP_TIMEOUT_S):
                    self._signal(running, signal.SIGKILL)
                    if not self._wait_down(running, STOP_TIMEOUT_S):
                        raise Unavailable(f"Kafka in {self.directory} did not end after SIGKILL")
            state = self.state()
            assert state is not None
            _wait_for_ports(state.nodes[i] for i in running)
            for node in state.nodes:
                node.pid = None
            self._write(state)
            return sorted(running)

    def _signal(self, running: dict[int, int], number: signal.Signals) -> None:
        for index, pid in running.items():
            if self.is_up(index, pid):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue  # the process ended after the check

    def _wait_down(self, running: dict[int, int], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while any(self.is_up(index, pid) for index, pid in running.items()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _node_directory(self, index: int) -> Path:
        return self.directory / f"node-{index}"

    def _write(self, state: State) -> None:
        part = self._state_path.with_suffix(".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        part.replace(self._state_path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let only one command at a time use the data, so that the second sees the changes of the first."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = (self.directory / "lock").open("w")
        except OSError as error:
            raise ConfigurationError(f"{self.directory} cannot be written: {error.strerror}") from error
        with handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _layout(count: int, first_port: int, before: list[NodeState] | None = None) -> list[NodeState]:
    """Return the ports of a cluster that is down. Controller ports stay the same unless they are in use."""
    fresh = choose_ports(count, first_port)
    return [
        NodeState(
            ports.client,
            before[i].controller_port if before and is_free(before[i].controller_port) else ports.controller,
        )
        for i, ports in enumerate(fresh)
    ]


def _wait_for_ports(down: Iterable[NodeState]) -> None:
    """Wait until killed JVMs have released their ports. A JVM loses its command line before its ports."""
    deadline = time.monotonic() + _PORT_RELEASE_S
    for node in down:
        while node.pid is not None and not is_free(node.client_port) and time.monotonic() < deadline:
            time.sleep(0.02)


def command_line(pid: int) -> str:
    """Return the command line of a process, or "" if it does not exist or is a zombie."""
    if sys.platform == "linux":
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            raw = b""
    else:
        raw = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False).stdout
    return raw.decode(errors="surrogateescape")
