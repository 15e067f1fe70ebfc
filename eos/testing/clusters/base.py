"""What every test cluster can be asked and told: the faults, and the questions that tell which node to aim them at.

Owns what is known of each node (down, paused, cut off) and every question to Kafka: those go to nodes that can answer,
one at a time, because a node that was cut off goes on telling the past. It must never start a process or a container,
and never repair a fault unless it is told to.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from eos.broker.questions import (
    ANSWER_TIMEOUT_S,
    GROUP,
    TRANSACTION,
    Metadata,
    Replicas,
    coordinator,
    metadata,
    quorum_leader,
)
from eos.errors import EosError, IllegalState, Unavailable

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_SHORTEST_QUESTION_S = 0.5  # time for a connection and an answer, and none for a node to start

T = TypeVar("T")


class NotSupported(EosError):
    """This backend cannot do that. Whatever needed it was not run: it neither passed nor failed."""

    exit_code = 69


class Cluster(ABC):
    """Nodes 0 to `size - 1`, node.id i for node i; use as a context manager.

    A fault lasts until the call that ends it (`start`, `resume`, `heal`, or `repair` for all of them). Making the same
    fault twice, or ending one that is not there, raises IllegalState: it would test nothing. Every method may raise
    Unavailable.
    """

    backend: str
    size: int
    version: str | None
    """Kafka's version, e.g. "4.4.0"; None when it is somebody else's cluster."""

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

    # What a backend does. `i` has been checked, and the fault is not there yet (or, to end it, is there).

    @abstractmethod
    def server(self, i: int) -> str:
        """`host:port` of one node for clients on this machine; the same for as long as the cluster lives."""

    @abstractmethod
    def log(self, i: int) -> str:
        """Everything the node logged since the cluster began, earlier runs of the node included."""

    @abstractmethod
    def _kill(self, i: int) -> None: ...

    @abstractmethod
    def _stop(self, i: int, timeout_s: float) -> None: ...

    @abstractmethod
    def _launch(self, nodes: list[int]) -> None:
        """Starts nodes that are down, all at once, on their data and addresses; need not wait for them. At once,
        because two of three that are down are no quorum without each other."""

    @abstractmethod
    def _pause(self, i: int) -> None: ...

    @abstractmethod
    def _resume(self, i: int) -> None: ...

    @abstractmethod
    def _partition(self, i: int) -> None: ...

    @abstractmethod
    def _heal(self, i: int) -> None: ...

    def _ended(self, i: int) -> str | None:
        """Why node `i` ended by itself, None while it runs."""
        return None

    def _state(self, i: int) -> str:
        """What the backend says of the node's process, for the message about one that does not answer."""
        return ""

    # The faults

    def kill(self, i: int) -> None:
        """SIGKILL; when this returns its sockets are closed. A paused node is killed too."""
        self._require_up(i)
        self._kill(i)
        self._is_down(i)

    def stop(self, i: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, SIGKILL after `timeout_s`; returns when it is down. A node without a quorum takes all the time."""
        self._require_up(i)
        if i in self._paused:
            self.resume(i)
        self._stop(i, timeout_s)
        self._is_down(i)

    def start(self, i: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Starts a node that is down on its data and its address; returns when it answers and names all nodes that
        can be reached. Its replicas may still be catching up: `wait_in_sync`. Unavailable with what was seen of it when
        it does not: then it runs all the same, and `wait_ready` waits on; one that ended is down again."""
        self._check(i)
        if i not in self._down:
            raise IllegalState(f"node {i} is running")
        self._start([i], timeout_s)

    def restart(self, i: int) -> None:
        """`stop`, then `start`."""
        self.stop(i)
        self.start(i)

    def pause(self, i: int) -> None:
        """It stands still: its connections stay open, and nothing answers on them. Returns when it took effect."""
        self._require_up(i)
        if i in self._paused:
            raise IllegalState(f"node {i} is paused already")
        self._pause(i)
        self._paused.add(i)

    def resume(self, i: int) -> None:
        if i not in self._paused:
            raise IllegalState(f"node {i} is not paused")
        self._resume(i)
        self._paused.discard(i)

    def partition(self, i: int) -> None:
        """Cuts the node off from the other nodes and from all clients: every packet to and from it is dropped, no
        connection is reset. A node that goes down meanwhile starts without the cut. NotSupported on some backends."""
        self._require_up(i)
        if i in self._cut:
            raise IllegalState(f"node {i} is cut off already")
        self._partition(i)
        self._cut.add(i)

    def heal(self, i: int) -> None:
        if i not in self._cut:
            raise IllegalState(f"node {i} is not cut off")
        self._heal(i)
        self._cut.discard(i)

    def repair(self) -> None:
        """Ends every fault; returns when all nodes are up and all replicas are in sync. Does nothing to a cluster
        without a fault."""
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
        """Whether it is up; a paused one and one that is cut off are."""
        self._check(i)
        return i not in self._down

    def reachable(self) -> list[int]:
        """The nodes without a fault."""
        return [i for i in range(self.size) if i not in self._down | self._paused | self._cut]

    # The questions

    @property
    def bootstrap_servers(self) -> str:
        """All nodes, whatever state they are in: what a client is configured with."""
        return ",".join(self.server(i) for i in range(self.size))

    def leader_of(self, topic: str, partition: int = 0) -> int:
        """The leader's node as the cluster says now; -1 when there is none. A node that was just killed stays the
        leader until the controller misses it."""
        return self._partition_of(topic, partition).leader

    def in_sync_of(self, topic: str, partition: int = 0) -> set[int]:
        """The nodes in the ISR of this partition, as the cluster says now."""
        return set(self._partition_of(topic, partition).in_sync)

    def coordinator_of(self, *, group: str | None = None, transactional_id: str | None = None) -> int:
        """The node that coordinates this group or this transactional.id, once there is one.

        The broker makes the internal topic if nobody needed it yet.
        """
        if (group is None) == (transactional_id is None):
            raise IllegalState("coordinator_of takes a group or a transactional_id")
        name, kind = (group, GROUP) if transactional_id is None else (transactional_id, TRANSACTION)
        assert name is not None
        return self._ask_a_node(f"{name} has a coordinator", lambda server: coordinator(server, name, kind))

    def controller(self) -> int:
        """The active controller: the leader of the metadata quorum. (The controller in Metadata is any broker.)"""
        return self._ask_a_node("there is an active controller", quorum_leader)

    def wait_ready(self, nodes: Iterable[int], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until each of `nodes` itself answers and names every reachable node. At once Unavailable when one ended."""
        for i in nodes:
            self._wait_named(i, set(self.reachable()), timeout_s)

    def wait_in_sync(self, *topics: str, timeout_s: float = READY_TIMEOUT_S) -> int:
        """Until every node says that all nodes are there, and that every partition, among them those of `topics`, has
        a leader and all replicas in sync.

        Every node, because one that was cut off for a while still believes what was true before, and `topics`, because
        a topic that was just made is not known everywhere. Returns the number of partitions examined, those of Kafka's
        internal topics too. IllegalState while a fault lasts.
        """
        if missing := sorted(set(range(self.size)) - set(self.reachable())):
            raise IllegalState(f"replicas on nodes {missing} cannot get in sync: start, resume or heal them first")
        late: list[str] = []
        examined = 0

        def in_sync() -> bool:
            nonlocal examined
            late.clear()
            for i in range(self.size):
                seen = metadata(self.server(i))
                if len(seen.nodes) < self.size:
                    late.append(f"node {i} misses nodes")
                examined = examine(seen, topics, f"node {i}", late)
            return not late

        self._until("all replicas are in sync", in_sync, timeout_s, lambda: ", ".join(late[:5]))
        return examined

    def save_logs(self, directory: Path) -> list[Path]:
        """Writes each node's log to `directory`/node-i.log; returns the files."""
        directory.mkdir(parents=True, exist_ok=True)
        files = [directory / f"node-{i}.log" for i in range(self.size)]
        for i, file in enumerate(files):
            file.write_text(self.log(i))
        return files

    # Inside

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
                if self._ended(i) is not None:
                    self._is_down(i)  # it can be started again
            raise

    def _is_down(self, i: int) -> None:
        self._down.add(i)
        self._paused.discard(i)
        self._cut.discard(i)

    def _reachable_servers(self) -> list[str]:
        servers = [self.server(i) for i in self.reachable()]
        if not servers:
            raise Unavailable("no node can be reached: all are down, paused or cut off")
        return servers

    def _next_server(self) -> str:
        """In turn, so that one reachable node that does not answer does not keep the others from it."""
        self._turn += 1
        servers = self._reachable_servers()
        return servers[self._turn % len(servers)]

    def _partition_of(self, topic: str, partition: int) -> Replicas:
        return self._ask_a_node(
            f"{topic}-{partition} is known", lambda server: metadata(server).partitions.get((topic, partition))
        )

    def _ask_a_node(self, what: str, question: Callable[[str], T | None], timeout_s: float = READY_TIMEOUT_S) -> T:
        def answer() -> tuple[T] | None:
            node = question(self._next_server())
            return None if node is None else (node,)

        return self._until(what, answer, timeout_s)[0]

    def _until(
        self,
        what: str,
        probe: Callable[[], T | None],
        timeout_s: float = READY_TIMEOUT_S,
        details: Callable[[], str] = lambda: "",
    ) -> T:
        """The first true answer of `probe`; a question that fails on its way is asked again until the deadline."""
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

    def _wait_named(self, i: int, expected: set[int], timeout_s: float) -> None:
        named: set[int] = set()
        deadline = time.monotonic() + timeout_s

        def names_all() -> bool:
            nonlocal named
            why = self._ended(i)
            if why is not None:
                raise Unavailable(f"Kafka node {i} ended while it started: {why}")
            named = set()
            # Not beyond the deadline: a node that comes back during a long question would be called in time.
            left = min(max(deadline - time.monotonic(), _SHORTEST_QUESTION_S), ANSWER_TIMEOUT_S)
            named |= metadata(self.server(i), left).nodes
            return expected <= named

        def seen() -> str:
            answer = f"it names nodes {sorted(named)}" if named else "it names no node"
            return f"{answer}; {self._sight_of(i)}"

        self._until(f"node {i} answers and names nodes {sorted(expected)}", names_all, timeout_s, seen)

    def _sight_of(self, i: int) -> str:
        """The node's state and its last words: whether it is slow, stuck or gone can be told from them."""
        try:
            lines = [line.strip()[:200] for line in self.log(i).splitlines() if line.strip()]
            return f"{self._state(i)}; its log ends with: {' | '.join(lines[-3:]) or 'nothing'}"
        except (EosError, OSError) as error:
            return f"neither its state nor its log can be had: {error}"


def examine(seen: Metadata, topics: Iterable[str], who: str, late: list[str]) -> int:
    """Adds to `late` what is not in sync as `who` tells it; returns the number of partitions it told of."""
    known = {topic for topic, _ in seen.partitions}
    late += [f"{who} does not know {topic}" for topic in topics if topic not in known]
    late += [f"{topic}-{partition} at {who}" for topic, partition in seen.not_in_sync()]
    return len(seen.partitions)
