"""`eos run` in a process of its own that stops at chosen steps of chosen transactions until its parent lets it go on.

It goes through the real command line (settings, signals, exit codes, messages) and adds only what a test must see or
decide: the seam `World.step`, an App made from the parent's orders, and a file of attempts. It must
never change what a worker does.

Protocol: one JSON object in the environment variable `EOS_STEPPING` (`Orders`); on stdout a line `AT <step> <n>` when
the n-th occurrence of a step is held (`AT record <n>`: on the record of `hold_at`), after which one line on stdin lets
it go on; `IDLE` when there was nothing to do for the first time since a step. It dies with its parent.
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

import eos
from eos import App, Out, Record, State
from eos.cli import invoke
from eos.cli import run as run_command
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.testing.lineage import stamp
from eos.worker.worker import Worker
from tests.support.sessions import keep_producers

# When (monotonic ns), number of the transaction, source topic's index, partition, offset.
ATTEMPT = struct.Struct("<qqiiq")


@dataclasses.dataclass
class Orders:
    """What the parent wants: an App `app` from `sources` to every one of `destinations`, and its settings."""

    app: str
    instance: str
    sources: list[str]
    destinations: list[str]
    settings: dict[str, str]
    attempts: str
    first_transaction: int = 0  # numbers the transactions of all workers of a test apart
    until_end: bool = False
    holds: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    work_ms: float = 0.0  # how long the function works on one record
    slow_at: tuple[str, int, int, float] | None = None  # on this record it works so many seconds
    hold_at: tuple[str, int, int] | None = None  # on this record the function waits for a line, the first time
    raise_at: tuple[str, int, int] | None = None
    large_at: tuple[str, int, int, int] | None = None  # this record's outputs have so many bytes
    on_error: str = "stop"  # a name in POLICIES
    poison_every: int = 0  # the function raises on every so many offsets
    large_last: bool = False  # only the last of the large outputs is large
    reads: list[str] = dataclasses.field(default_factory=list)  # patterns that the function has in its sources' place
    stateful: bool = False  # a function of its own for each source, which counts by key and says so behind the stamp
    keep_producer: bool = False  # where the product replaces it: see tests/support/sessions.py
    later: list[str] = dataclasses.field(default_factory=list)  # topics that may come and match them, behind `sources`


COUNT = struct.Struct("<q")


def counter_of(source: int) -> str:
    """The name of the function that counts the records of this source."""
    return f"count-{source}"


POLICIES = {
    "stop": eos.stop,
    "skip": eos.skip,
    "dlq": eos.dlq,
    "retry": eos.retry(2, then=eos.dlq, backoff_ms=20),
    "retry-slowly": eos.retry(5, then=eos.dlq, backoff_ms=60_000, backoff_max_ms=60_000),
}


def is_poison(offset: int, every: int) -> bool:
    return every > 0 and offset % every == every // 2


class Steps:
    """Counts the steps, says where it stands, and waits where it was told to."""

    def __init__(self, holds: list[tuple[str, int]]) -> None:
        self._holds = {(step, nth) for step, nth in holds}
        self.counts: dict[str, int] = {}
        self._idle_told = False

    def __call__(self, step: str) -> None:
        self._idle_told = False
        self.counts[step] = nth = self.counts.get(step, 0) + 1
        if (step, nth) in self._holds:
            print(f"AT {step} {nth}", flush=True)
            if not sys.stdin.readline():
                os._exit(1)

    def idle(self) -> None:
        if not self._idle_told:
            self._idle_told = True
            print("IDLE", flush=True)


def build_app(orders: Orders, steps: Steps) -> App:
    app = App(orders.app)
    attempts = os.open(orders.attempts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    index = {topic: number for number, topic in enumerate([*orders.sources, *orders.later])}

    def outputs(record: Record, told: bytes) -> list[Out]:
        source = index[record.topic]
        transaction = orders.first_transaction + steps.counts.get("begun", 0)
        at = (record.topic, record.partition, record.offset)
        if orders.work_ms:
            time.sleep(orders.work_ms / 1000)
        if orders.slow_at and at == tuple(orders.slow_at[:3]):
            print("SLOW", flush=True)
            time.sleep(orders.slow_at[3])
        if orders.hold_at and at == tuple(orders.hold_at):
            steps("record")
        if orders.raise_at and at == tuple(orders.raise_at):
            raise ValueError("this record is poison")
        if is_poison(record.offset, orders.poison_every):
            raise ValueError("this record is one of many")
        # Only now: a record whose function raised was not part of this transaction.
        os.write(attempts, ATTEMPT.pack(time.monotonic_ns(), transaction, source, record.partition, record.offset))
        payload = bytes(orders.large_at[3]) if orders.large_at and at == tuple(orders.large_at[:3]) else b""
        last = len(orders.destinations) - 1
        return [
            Out(
                stamp(source, record.partition, record.offset, number)
                + told
                + (payload if number == last or not orders.large_last else b""),
                topic=topic,
            )
            for number, topic in enumerate(orders.destinations)
        ]

    def copy(record: Record) -> list[Out]:
        return outputs(record, b"")

    def counting(name: str) -> Callable[[Record, State[int]], list[Out]]:
        def count(record: Record, seen: State[int]) -> list[Out]:
            seen.set(seen.get(0) + 1)
            return outputs(record, COUNT.pack(seen.get(0)))

        count.__qualname__ = name
        return count

    policy = POLICIES[orders.on_error]
    if orders.stateful:
        for number, topic in enumerate(orders.sources):
            app.process(topic, to=orders.destinations, on_error=policy)(counting(counter_of(number)))
    else:
        app.process(orders.reads or orders.sources, to=orders.destinations, on_error=policy)(copy)
    return app


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its test
    orders = Orders(**json.loads(os.environ["EOS_STEPPING"]))
    steps = Steps([(step, nth) for step, nth in [*orders.holds, ("record", 1)]])
    app = build_app(orders, steps)
    if orders.keep_producer:
        keep_producers()

    class SteppingWorker(Worker):
        def __init__(self, app: App, settings: Settings, *, until_end: bool = False) -> None:
            super().__init__(app, settings, until_end=until_end, world=World(step=steps))

        def on_idle(self) -> None:
            super().on_idle()
            steps.idle()

    run_command.Worker = SteppingWorker  # type: ignore[attr-defined, misc]
    run_command.load_app = lambda target: app  # type: ignore[assignment, attr-defined]
    arguments = ["run", "stepping:app", "--instance", orders.instance, "--log-level", "debug"]
    arguments += ["--until-end"] if orders.until_end else []
    for name, value in orders.settings.items():
        arguments += ["-X", f"{name}={value}"]
    return invoke(arguments)


if __name__ == "__main__":
    sys.exit(main())
