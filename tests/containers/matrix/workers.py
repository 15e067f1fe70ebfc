"""Start, watch, restart and disconnect the workers of all stages of one run.

Owns the processes and decides what each exit code means. It must never judge records.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eos.testing.clusters import NotSupported
from tests.containers.matrix.stage_worker import ENVIRONMENT, Orders
from tests.support.pipeline import WorkerProcess
from tests.support.reading import TooSlow

GROUP_IDS = 10_000
"""Group ids per process, from its pid times this number on, because two parallel runs must not share any."""
RESTARTED = (69, 75)
"""Exit codes after which a supervisor restarts a worker: unreachable at its start, temporary."""


class Member:
    """Own one instance of one stage: a name, and its current process."""

    def __init__(self, stage: int, instance: str, number: int) -> None:
        self.stage, self.instance, self.number = stage, instance, number
        self.process: WorkerProcess | None = None
        self.changes: dict[
            str, object
        ] = {}  # in the orders of its process, and of the next one if that process ends by itself
        self.wanted = True
        self.cut_off = False

    @property
    def group_id(self) -> int:
        """Return the group id by which the firewall identifies this worker's packets."""
        return os.getpid() % 100_000 * GROUP_IDS + self.number

    @property
    def name(self) -> str:
        return f"stage-{self.stage}-{self.instance}"


class Workers:
    """Own all workers. `orders(stage, instance)` says what a worker does; `directory` gets logs and step logs."""

    def __init__(self, orders: Callable[[int, str], Orders], directory: Path) -> None:
        self._orders, self._directory = orders, directory
        self.members: list[Member] = []
        self.ends: list[str] = []  # how processes ended that were restarted
        self._starts = 0

    def join(self, stage: int, instance: str, **changes: object) -> Member:
        member = Member(stage, instance, len(self.members))
        self.members.append(member)
        self.start(member, **changes)
        return member

    def start(self, member: Member, **changes: object) -> None:
        self._starts += 1
        member.changes = changes
        orders = self._orders(member.stage, member.instance)
        name = f"{member.name}-{self._starts}"
        orders = dataclasses.replace(orders, step_log=str(self._directory / f"{name}.steps"), **changes)  # type: ignore[arg-type]
        environment = {ENVIRONMENT: json.dumps(dataclasses.asdict(orders))}
        group = member.group_id if os.geteuid() == 0 else None
        command = ["tests.containers.matrix.stage_worker"]
        member.process = WorkerProcess(name, command, environment, self._directory, group=group)
        member.wanted = True

    @property
    def wanted(self) -> list[Member]:
        return [member for member in self.members if member.wanted]

    def tend(self) -> None:
        """Restart processes with an exit code that a supervisor restarts; raise AssertionError for any other."""
        for member in self.members:
            process = member.process
            if process is None or process.running or not member.wanted:
                continue
            code = process.process.returncode
            assert code in RESTARTED, (
                f"{process.name} ended with {code}: {process.final_output or process.log[-2_000:]}"
            )
            self.ends.append(f"{process.name} ended with {code}")
            self.start(member, **member.changes)

    def kill(self, member: Member) -> None:
        self.tend()  # A process that has just ended by itself cannot be killed.
        member.wanted = False
        assert member.process is not None
        member.process.kill()

    def stop(self, *members: Member, timeout_s: float = 60.0) -> None:
        """Send SIGTERM to all workers; each must exit with 0, or with 75 if it could not end its last transaction in
        time."""
        self.tend()
        # A SIGTERM before the worker has started ends an interpreter, not a worker.
        self.wait_running(members)
        for member in members:
            member.wanted = False
            assert member.process is not None
            member.process.terminate()
        for member in members:
            assert member.process is not None
            code = member.process.wait(timeout_s)
            name, final_output = member.process.name, member.process.final_output
            assert code in (0, 75), f"{name} was stopped and ended with {code}: {final_output}"
            if code:
                self.ends.append(f"{name} was stopped and ended with {code}")

    def pause(self, member: Member) -> None:
        self.tend()
        assert member.process is not None
        member.process.pause()

    def resume(self, member: Member) -> None:
        assert member.process is not None
        member.process.resume()

    def cut(self, member: Member) -> None:
        """Drop every packet that the worker sends, so that it cannot acknowledge received ones; no connection is
        reset."""
        if os.geteuid() != 0 or shutil.which("iptables") is None:
            raise NotSupported("cutting a worker off takes root and iptables")
        self._firewall("-I", member)
        member.cut_off = True

    def heal(self, member: Member) -> None:
        self._firewall("-D", member)
        member.cut_off = False

    def _firewall(self, action: str, member: Member) -> None:
        rule = ["iptables", "-w", action, "OUTPUT", "-p", "tcp", "-m", "owner", "--gid-owner", str(member.group_id)]
        subprocess.run([*rule, "-j", "DROP"], check=True, capture_output=True)

    def end(self) -> None:
        """Remove all processes and firewall rules, however the run ended."""
        for member in self.members:
            if member.cut_off:
                self.heal(member)
            if member.process is not None:
                if member.process.running:
                    member.process.process.send_signal(signal.SIGCONT)
                member.process.end()

    def wait_running(self, members: Sequence[Member] = (), timeout_s: float = 90.0) -> None:
        """Wait until each of `members`, or every member that should run, has reported its session."""
        deadline = time.monotonic() + timeout_s
        for member in members or self.members:
            process = member.process
            while process is not None and member.wanted and "session started" not in process.log:
                if time.monotonic() >= deadline:
                    raise TooSlow(f"{process.name} did not start: {process.log[-2_000:]}")
                self.tend()
                time.sleep(0.05)
                process = member.process
