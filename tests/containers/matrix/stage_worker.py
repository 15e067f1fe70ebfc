"""Run one worker of one stage as a process: `eos run` with the matrix's App, a step log, and removed rules.

It uses the real command line. It adds an App built from its orders, a log of the records that it handled in each
transaction (to explain violations), and `breakages`. A breakage patches one rule out, so that the matrix can show that
it finds the damage. Nothing in the product knows of breakages. The process dies with its parent.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from eos import App, Out, Record, State
from eos.cli import invoke
from eos.cli import run as run_command
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.testing.lineage import WIDTH_BYTES, stamp, unstamp
from eos.worker.worker import Worker
from tests.support.stepping_worker import COUNT

# time (ns since 1970), transaction number, step (-1: a record was handled), source partition, source offset
ENTRY = struct.Struct("<qiiiq")
STEPS = ("begin", "begun", "flush", "flushed", "offsets sent", "committed")
ENVIRONMENT = "EOS_STAGE"


@dataclasses.dataclass
class Orders:
    """Hold the orders of a worker. `first`: the stage that stamps each record with its source; later ones pass the
    stamp on.

    `state`: its function counts by key and adds the count to the stamp. `hold`: the n-th occurrence of a step at which
    it prints `AT` and waits for a line.
    """

    group: str
    instance: str
    source: str
    destinations: list[str]
    settings: dict[str, str]
    step_log: str
    first: bool
    state: bool = False
    work_ms: float = 0.0
    breakage: str | None = None
    holds: list[tuple[str, int]] = dataclasses.field(default_factory=list)


class StepLog:
    """Append fixed-width entries with one write each, so that a SIGKILL leaves complete ones."""

    def __init__(self, path: str, holds: list[tuple[str, int]]) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.transactional_id: Callable[[], str] = str  # of the open transaction
        self._transaction = 0
        self._holds = {(step, nth) for step, nth in holds}
        self._counts: dict[str, int] = {}

    def handled(self, partition: int, offset: int) -> None:
        os.write(self._file, ENTRY.pack(time.time_ns(), self._transaction, -1, partition, offset))

    def step(self, name: str) -> None:
        if name not in STEPS:  # A step of the start.
            return
        if name == "begin":
            self._transaction += 1
        os.write(self._file, ENTRY.pack(time.time_ns(), self._transaction, STEPS.index(name), -1, -1))
        self._counts[name] = nth = self._counts.get(name, 0) + 1
        if (name, nth) in self._holds:
            Path(f"{self._path}.held").write_text(self.transactional_id())
            print(f"AT {name} {nth}", flush=True)
            if not sys.stdin.readline():
                os._exit(1)


def build_app(orders: Orders, step_log: StepLog) -> App:
    app = App(orders.group)

    def outputs(record: Record, content: bytes) -> list[Out]:
        if orders.work_ms:
            time.sleep(orders.work_ms / 1000)
        if orders.first:
            source, partition, offset = 0, record.partition, record.offset
        else:
            assert record.value is not None
            source, partition, offset, _ = unstamp(record.value[:WIDTH_BYTES])
        step_log.handled(partition, offset)
        return [
            Out(stamp(source, partition, offset, number) + content, topic=topic)
            for number, topic in enumerate(orders.destinations)
        ]

    def copy(record: Record) -> list[Out]:
        return outputs(record, b"")

    def count(record: Record, seen: State[int]) -> list[Out]:
        seen.set(seen.get(0) + 1)
        return outputs(record, COUNT.pack(seen.get(0)))

    # The function's name is part of the changelog's name.
    count.__qualname__ = "count"
    app.process(orders.source, to=orders.destinations)(count if orders.state else copy)
    return app


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker lives longer than its run.
    orders = Orders(**json.loads(os.environ[ENVIRONMENT]))
    step_log = StepLog(orders.step_log, [(step, nth) for step, nth in orders.holds])
    if orders.breakage is not None:
        from tests.containers.matrix import breakages  # with modules that no other worker needs

        breakages.ALL[orders.breakage].apply()
    app = build_app(orders, step_log)

    class StageWorker(Worker):
        def __init__(self, app: App, settings: Settings, *, until_end: bool = False) -> None:
            super().__init__(app, settings, until_end=until_end, world=World(step=step_log.step))
            session = self.session
            step_log.transactional_id = lambda: session.producer.transactional_id

    run_command.Worker = StageWorker  # type: ignore[attr-defined, misc]
    run_command.load_app = lambda target: app  # type: ignore[assignment, attr-defined]
    arguments = ["run", "stage:app", "--instance", orders.instance]
    for name, value in orders.settings.items():
        arguments += ["-X", f"{name}={value}"]
    return invoke(arguments)


if __name__ == "__main__":
    sys.exit(main())
