"""Draw the faults of a run from its seed: which node or worker, when, and for how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from eos.errors import Unavailable
from eos.testing.clusters import Cluster
from tests.containers.matrix.workers import Member, Workers

TRANSACTION_TIMEOUT_S, SESSION_TIMEOUT_S = 10.0, 6.0  # the product's default; the minimum of a broker
OUTLASTS_S = (11.0, 14.0)  # longer than both
SHORT_S = (0.5, 4.0)
STILL_LEADER_S = (1.0, 4.0)  # shorter than a broker's session (6 s), so the controller does not notice
SLOW_S, BACK_S = 60.0, 600.0
"""After how long a slow broker start is reported, and how long it may last. A run judges the workers, which continue
meanwhile."""


@dataclass(frozen=True)
class Fault:
    """Describe one fault for the story of the run. `hits`: the workers whose transactions it could hit (None: all)."""

    at_s: float
    at_ns: int
    what: str
    hits: str | None = None

    def __str__(self) -> str:
        return f"{self.at_s:.0f} s: {self.what}"


class Faults:
    """Cause the faults of one cell on its cluster and workers."""

    def __init__(
        self, cluster: Cluster, workers: Workers, chance: random.Random, tend: Callable[[float], None]
    ) -> None:
        self._cluster, self._workers, self._chance, self._tend = cluster, workers, chance, tend
        self.began = time.monotonic()
        self.made: list[Fault] = []
        self.slow: list[str] = []  # brokers that were slow to start, with their observed state

    def hit_worker(self, fault: str) -> None:
        member = self._chance.choice(self._workers.wanted)
        workers = self._workers
        if fault == "kill":
            workers.kill(member)
            self.note(f"SIGKILL {member.name}", member)
            self._tend(
                self._chance.choice([0.0, TRANSACTION_TIMEOUT_S + 1])
            )  # before or after the end of its transaction
            workers.start(member)
        elif fault == "stop":
            workers.wait_running()
            self.note(f"SIGTERM {member.name}", member)
            workers.stop(member)
            self._tend(self._chance.uniform(*SHORT_S))
            workers.start(member)
        else:
            self._hold(member, fault)

    def _hold(self, member: Member, fault: str) -> None:
        begin, end = (
            (self._workers.pause, self._workers.resume) if fault == "pause" else (self._workers.cut, self._workers.heal)
        )
        seconds = self._chance.uniform(*OUTLASTS_S)
        begin(member)
        self.note(f"{fault} {member.name} for {seconds:.1f} s", member)
        self._tend(seconds)
        end(member)

    def hit_node(self, fault: str, node: int, why: str, seconds: float | None = None) -> None:
        """Hit a node, and return when it is healthy again, though its replicas may lag behind.

        `seconds`: how long a pause or a cut lasts; by default longer than sessions and transactions.
        """
        cluster = self._cluster
        if fault in ("kill", "stop"):
            (cluster.kill if fault == "kill" else cluster.stop)(node)
            self.note(f"{fault} node {node}, {why}")
            self._tend(self._chance.uniform(*SHORT_S))
            self.start_again(node)
        else:
            begin, end = (cluster.pause, cluster.resume) if fault == "pause" else (cluster.partition, cluster.heal)
            seconds = self._chance.uniform(*OUTLASTS_S) if seconds is None else seconds
            begin(node)
            self.note(f"{fault} node {node}, {why}, for {seconds:.1f} s")
            self._tend(seconds)
            end(node)

    def start_again(self, node: int) -> None:
        """Start the node and query it until it answers; raise Unavailable after `BACK_S`."""
        cluster, began = self._cluster, time.monotonic()
        while True:
            try:
                if cluster.running(node):
                    cluster.wait_ready([node], SLOW_S)
                else:
                    cluster.start(node, SLOW_S)
                return
            except Unavailable as late:
                self.slow.append(f"{time.monotonic() - self.began:.0f} s: node {node}: {late}")
                if time.monotonic() - began > BACK_S:
                    raise
                self._tend(1.0)

    def note(self, what: str, member: Member | None = None) -> None:
        """Record the fault as soon as it is there."""
        hits = member.process.name if member is not None and member.process is not None else None
        self.made.append(Fault(round(time.monotonic() - self.began, 1), time.time_ns(), what, hits))
