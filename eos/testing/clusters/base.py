"""Defines the interface of every test cluster: the faults, and the queries that find the node for a fault.

Owns the known state of each node (down, paused, cut off), and every query to Kafka. Queries go only to nodes that can
answer, one at a time, because a node that was cut off still returns outdated answers. It must never start a process or
a container, and never repair a fault by itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from eos.broker.queries import (
    GROUP,
    RESPONSE_TIMEOUT_S,
    TRANSACTION,
    Metadata,
    Replicas,
    fetch_metadata,
    find_controller,
    find_coordinator,
)
from eos.errors import EosError, IllegalState, Unavailable

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_MIN_QUERY_S = 0.5  # enough for a connection and an answer, too short for a node to start

T = TypeVar("T")


class NotSupported(EosError):
    """Reports that this backend cannot inject the fault. The test was not run: it neither passed nor failed."""

    exit_code = 69


class Cluster(ABC):
    """Controls a cluster with nodes 0 to `size - 1`, node.id i for node i; use it as a context manager.

    A fault lasts until the call that ends it (`start`, `resume`, `heal`, or `repair` for all of them). To inject a
    fault twice, or to end one that does not exist, raises IllegalState, because it would test nothing. Every method may
    raise Unavailable.
    """

    backend: str
    size: int
    version: str | None
    """Kafka's version, e.g. "4.4.0"; None for an external cluster."""

    def __init__(self) -> None:
        self._down: set[int] = set()
        self._paused: set[int] = set()
        self._cut: set[int] = set()
        self._turn = 0

    @abstractmethod
    def __enter__(self) -> Cluster: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    # The operations of a backend. The caller has checked that node `i` exists, that a fault to be caused does not exist
    # yet, and that a fault to be ended exists.

    @abstractmethod
    def server(self, i: int) -> str:
        """Return `host:port` of one node for clients on this machine; it never changes."""

    @abstractmethod
    def log(self, i: int) -> str:
        """Return everything the node has logged since the cluster started, including earlier runs of the node."""

    @abstractmethod
    def _kill(self, i: int) -> None: ...

    @abstractmethod
    def _stop(self, i: int, timeout_s: float) -> None: ...

    @abstractmethod
    def _launch(self, nodes: list[int]) -> None:
        """Start all of these nodes at once, with their old data and addresses; the method need not wait for them. If
        two of three nodes are down, neither of them has a quorum without the other.
        """

    @abstractmethod
    def _pause(self, i: int) -> None: ...

    @abstractmethod
    def _resume(self, i: int) -> None: ...

    @abstractmethod
    def _partition(self, i: int) -> None: ...

    @abstractmethod
    def _heal(self, i: int) -> None: ...

    def _exit_reason(self, i: int) -> str | None:
        """Return why node `i` ended by itself, or None while it runs."""
        return None

    def _state(self, i: int) -> str:
        """Return the backend's view of the node's process, for the message about a node that does not answer."""
        return ""

    # The faults

    def kill(self, i: int) -> None:
        """Kill the node with SIGKILL; its sockets are closed on return. A paused node is killed too."""
        self._require_up(i)
        self._kill(i)
        self._mark_down(i)

    def stop(self, i: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the node with SIGTERM. The node is down on return.

        Sends SIGKILL after `timeout_s`, because a node without a quorum does not stop on SIGTERM.
        """
        self._require_up(i)
        if i in self._paused:
            self.resume(i)
        self._stop(i, timeout_s)
        self._mark_down(i)

    def start(self, i: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start a node that is down, with its old data and address. Return when it answers and names all reachable
        nodes.

        Its replicas may still be catching up: see `wait_in_sync`. Raises Unavailable with the node's state if it does
        not answer. The node still runs, and `wait_ready` waits for it again; a node that ended is down again.
        """
        self._check(i)
        if i not in self._down:
            raise IllegalState(f"node {i} is running")
        self._start([i], timeout_s)

    def restart(self, i: int) -> None:
        """Stop the node, then start it."""
        self.stop(i)
        self.start(i)

    def pause(self, i: int) -> None:
        """Pause the node: its connections stay open, but the node does not answer. The pause is effective on return."""
        self._require_up(i)
        if i in self._paused:
            raise IllegalState(f"node {i} is paused already")
        self._pause(i)
        self._paused.add(i)

    def resume(self, i: int) -> None:
        """End the node's pause."""
        if i not in self._paused:
            raise IllegalState(f"node {i} is not paused")
        self._resume(i)
        self._paused.discard(i)

    def partition(self, i: int) -> None:
        """Cut the node off from the other nodes and from all clients: every packet is dropped, no connection is reset.

        A node that goes down meanwhile starts without the cut. Raises NotSupported on some backends.
        """
        self._require_up(i)
        if i in self._cut:
            raise IllegalState(f"node {i} is cut off already")
        self._partition(i)
        self._cut.add(i)

    def heal(self, i: int) -> None:
        """End the node's network cut."""
        if i not in self._cut:
            raise IllegalState(f"node {i} is not cut off")
        self._heal(i)
        self._cut.discard(i)

    def repair(self) -> None:
        """End every fault; return when all nodes are up and all replicas are in sync.

        Does nothing to a cluster without a fault.
        """
        if len(self.reachable()) == self.size:
            return
        for i in sorted(self._cut):
            self.heal(i)
        for i in sorted(self._paused):
            self.resume(i)
        down = sorted(self._down)
        if down:
            self._start(down, READY_TIMEOUT_S)
        self.wait_in_sync()

    def running(self, i: int) -> bool:
        """Return whether the node is up. A paused or cut-off node counts as up."""
        self._check(i)
        return i not in self._down

    def reachable(self) -> list[int]:
        """Return the nodes without a fault."""
        return [i for i in range(self.size) if i not in self._down | self._paused | self._cut]

    # The queries

    @property
    def bootstrap_servers(self) -> str:
        """Return the addresses of all nodes in any state, as a client's bootstrap.servers."""
        return ",".join(self.server(i) for i in range(self.size))

    def leader_of(self, topic: str, partition: int = 0) -> int:
        """Return the leader's node as the cluster reports it now; -1 if there is none.

        A node that was just killed stays the leader until the controller notices.
        """
        return self._partition_of(topic, partition).leader

    def in_sync_of(self, topic: str, partition: int = 0) -> set[int]:
        """Return the nodes in the ISR of this partition, as the cluster reports it now."""
        return set(self._partition_of(topic, partition).in_sync)

    def coordinator_of(self, *, group: str | None = None, transactional_id: str | None = None) -> int:
        """Return the node that coordinates this group or this transactional id, once there is one.

        The broker creates the internal topic if it does not exist yet.
        """
        if (group is None) == (transactional_id is None):
            raise IllegalState("coordinator_of takes a group or a transactional_id")
        name, kind = (group, GROUP) if transactional_id is None else (transactional_id, TRANSACTION)
        assert name is not None
        return self._query_node(f"{name} has a coordinator", lambda server: find_coordinator(server, name, kind))

    def controller(self) -> int:
        """Return the active controller, the leader of the metadata quorum; a Metadata response may name any broker."""
        return self._query_node("there is an active controller", find_controller)

    def wait_ready(self, nodes: Iterable[int], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until each of `nodes` itself answers and names every reachable node.

        Raises Unavailable at once if one of them ended.
        """
        for i in nodes:
            self._wait_until_known(i, set(self.reachable()), timeout_s)

    def wait_in_sync(self, *topics: str, timeout_s: float = READY_TIMEOUT_S) -> int:
        """Wait until every node reports all nodes, and a leader and all replicas in sync for every partition.

        It queries every node, because one that was cut off for a while still reports the old state. It checks `topics`
        by name, because some nodes learn of a new topic later. Returns the number of partitions examined, including
        those of Kafka's internal topics. Raises IllegalState while a fault lasts.
        """
        if missing := sorted(set(range(self.size)) - set(self.reachable())):
            raise IllegalState(f"replicas on nodes {missing} cannot become in-sync: start, resume or heal them first")
        problems: list[str] = []
        examined = 0

        def in_sync() -> bool:
            nonlocal examined
            problems.clear()
            for i in range(self.size):
                seen = fetch_metadata(self.server(i))
                if len(seen.nodes) < self.size:
                    problems.append(f"node {i} does not list all nodes")
                examined = collect_late(seen, topics, f"node {i}", problems)
            return not problems

        self._wait_until("all replicas are in sync", in_sync, timeout_s, lambda: ", ".join(problems[:5]))
        return examined

    def save_logs(self, directory: Path) -> list[Path]:
        """Write each node's log to `directory`/node-i.log, and return the files."""
        directory.mkdir(parents=True, exist_ok=True)
        files = [directory / f"node-{i}.log" for i in range(self.size)]
        for i, file in enumerate(files):
            file.write_text(self.log(i))
        return files

    # Internals

    def _check(self, i: int) -> None:
        if not 0 <= i < self.size:
            raise IllegalState(f"there is no node {i}: the cluster has {self.size}, counted from 0")

    def _require_up(self, i: int) -> None:
        if not self.running(i):
            raise IllegalState(f"node {i} is down")

    def _start(self, nodes: list[int], timeout_s: float) -> None:
        self._launch(nodes)
        self._down.difference_update(nodes)
        try:
            self.wait_ready(nodes, timeout_s)
        except Unavailable:
            for i in nodes:
                if self._exit_reason(i) is not None:
                    self._mark_down(i)  # so that the node can be started again
            raise

    def _mark_down(self, i: int) -> None:
        self._down.add(i)
        self._paused.discard(i)
        self._cut.discard(i)

    def _reachable_servers(self) -> list[str]:
        servers = [self.server(i) for i in self.reachable()]
        if not servers:
            raise Unavailable("no node can be reached: all are down, paused or cut off")
        return servers

    def _next_server(self) -> str:
        """Return the next reachable server in turn, so that one that does not answer does not block the others."""
        self._turn += 1
        servers = self._reachable_servers()
        return servers[self._turn % len(servers)]

    def _partition_of(self, topic: str, partition: int) -> Replicas:
        return self._query_node(
            f"{topic}-{partition} is known", lambda server: fetch_metadata(server).partitions.get((topic, partition))
        )

    def _query_node(self, what: str, query: Callable[[str], T | None], timeout_s: float = READY_TIMEOUT_S) -> T:
        def answer() -> tuple[T] | None:
            node = query(self._next_server())
            return None if node is None else (node,)

        return self._wait_until(what, answer, timeout_s)[0]

    def _wait_until(
        self,
        what: str,
        probe: Callable[[], T | None],
        timeout_s: float = READY_TIMEOUT_S,
        details: Callable[[], str] = lambda: "",
    ) -> T:
        """Return the first true result of `probe`; a failing query is repeated until the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            why = ""
            try:
                if answer := probe():
                    return answer
            except OSError as error:
                why = str(error)
            if time.monotonic() > deadline:
                seen = "; ".join(filter(None, (why, details()))) or "no"
                raise Unavailable(f"not within {timeout_s:.0f} s: {what} ({seen})")
            time.sleep(_POLL_S)

    def _wait_until_known(self, i: int, expected: set[int], timeout_s: float) -> None:
        named: set[int] = set()
        deadline = time.monotonic() + timeout_s

        def node_reports_all_expected() -> bool:
            nonlocal named
            why = self._exit_reason(i)
            if why is not None:
                raise Unavailable(f"Kafka node {i} ended while it started: {why}")
            named = set()
            # Cap the query at the deadline. Otherwise a node that starts during a long query would count as on time.
            left = min(max(deadline - time.monotonic(), _MIN_QUERY_S), RESPONSE_TIMEOUT_S)
            named |= fetch_metadata(self.server(i), left).nodes
            return expected <= named

        def describe_answer() -> str:
            answer = f"it names nodes {sorted(named)}" if named else "it names no node"
            return f"{answer}; {self._describe_node(i)}"

        self._wait_until(
            f"node {i} answers and names nodes {sorted(expected)}",
            node_reports_all_expected,
            timeout_s,
            describe_answer,
        )

    def _describe_node(self, i: int) -> str:
        """Return the node's state and its last log lines, which show whether it is slow, stuck or gone."""
        try:
            lines = [line.strip()[:200] for line in self.log(i).splitlines() if line.strip()]
            return f"{self._state(i)}; its log ends with: {' | '.join(lines[-3:]) or 'nothing'}"
        except (EosError, OSError) as error:
            return f"its state and its log are unavailable: {error}"


def collect_late(seen: Metadata, topics: Iterable[str], who: str, problems: list[str]) -> int:
    """Add what `seen` lacks to `problems`: unknown topics, and partitions that are not in sync.

    `who`: the node that reported `seen`. Return the number of partitions in `seen`."""
    known = {topic for topic, _ in seen.partitions}
    problems += [f"{who} does not know {topic}" for topic in topics if topic not in known]
    problems += [f"{topic}-{partition} at {who}" for topic, partition in seen.not_in_sync()]
    return len(seen.partitions)
