"""What happens to a run, drawn from its seed: which node or worker, when, and for how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from eos.errors import Unavailable
from eos.testing.clusters import Cluster
from tests.containers.matrix.crew import Crew, Member

TRANSACTION_TIMEOUT_S, SESSION_TIMEOUT_S = 10.0, 6.0  # the product's default; the least a broker allows
OUTLASTS_S = (11.0, 14.0)  # past both
SHORT_S = (0.5, 4.0)
STILL_LEADER_S = (1.0, 4.0)  # shorter than a broker's session (6 s): the controller does not notice
SLOW_S, BACK_S = 60.0, 600.0
"""After how long it is told that a broker is slow to come back, and how long that may last: what a run judges is the
workers, and they go on meanwhile."""


@dataclass(frozen=True)
class Fault:
    """One fault as it was made, for the story of the run. `hits`: whose transactions it could hit; None: anybody's."""

    at_s: float
    at_ns: int
    what: str
    hits: str | None = None

    def __str__(self) -> str:
        return f"{self.at_s:.0f} s: {self.what}"


class Faults:
    """Makes one cell's faults on a cluster and a crew."""

    def __init__(self, cluster: Cluster, crew: Crew, chance: random.Random, tend: Callable[[float], None]) -> None:
        self._cluster, self._crew, self._chance, self._tend = cluster, crew, chance, tend
        self.began = time.monotonic()
        self.made: list[Fault] = []
        self.slow: list[str] = []  # brokers that took their time to come back, with what was seen of them

    def hit_worker(self, fault: str) -> None:
        member = self._chance.choice(self._crew.wanted)
        crew = self._crew
        if fault == "kill":
            crew.kill(member)
            self.note(f"SIGKILL {member.name}", member)
            self._tend(self._chance.choice([0.0, TRANSACTION_TIMEOUT_S + 1]))  # before or past its transaction's end
            crew.start(member)
        elif fault == "stop":
            crew.wait_running()
            self.note(f"SIGTERM {member.name}", member)
            crew.stop(member)
            self._tend(self._chance.uniform(*SHORT_S))
            crew.start(member)
        else:
            self._hold(member, fault)

    def _hold(self, member: Member, fault: str) -> None:
        begin, end = (self._crew.pause, self._crew.resume) if fault == "pause" else (self._crew.cut, self._crew.heal)
        seconds = self._chance.uniform(*OUTLASTS_S)
        begin(member)
        self.note(f"{fault} {member.name} for {seconds:.1f} s", member)
        self._tend(seconds)
        end(member)

    def hit_node(self, fault: str, node: int, why: str, seconds: float | None = None) -> None:
        """The node is well again when this returns, though its replicas may lag behind.

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
        """Until it answers, however often it has to be asked or started within `BACK_S`; after that Unavailable."""
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
        """Called as soon as the fault is there."""
        hits = member.process.name if member is not None and member.process is not None else None
        self.made.append(Fault(round(time.monotonic() - self.began, 1), time.time_ns(), what, hits))
