"""Run `eos run` in a process that stops at chosen steps of chosen transactions until its parent lets it continue.

It uses the real command line (settings, signals, exit codes, messages) and adds only what a test must see or decide:
the interface `World.step`, an App built from the parent's orders, and a file of attempts. It must never change what a
worker does.

Protocol: the environment variable `EOS_STEPPING` holds one JSON object (`Orders`). The worker prints `AT <step> <n>`
when it holds at the n-th occurrence of a step (`AT record <n>`: at the record of `hold_at`), and continues after one
line on stdin. It prints `IDLE` when there is nothing to do for the first time since a step. It dies with its parent.
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

# time (monotonic ns), transaction number, index of the source topic, partition, offset
ATTEMPT = struct.Struct("<qqiiq")


@dataclasses.dataclass
class Orders:
    """Hold the parent's orders: an App `app` from `sources` to each of `destinations`, and its settings."""

    app: str
    instance: str
    sources: list[str]
    destinations: list[str]
    settings: dict[str, str]
    attempts: str
    first_transaction: int = 0  # gives the transactions of all workers of a test distinct numbers
    until_end: bool = False
    holds: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    work_ms: float = 0.0  # duration of the function per record
    slow_at: tuple[str, int, int, float] | None = None  # extra seconds of work on this record
    # When this record runs for the first time, the function waits for a line.
    hold_at: tuple[str, int, int] | None = None
    raise_at: tuple[str, int, int] | None = None
    large_at: tuple[str, int, int, int] | None = None  # bytes of this record's outputs
    on_error: str = "stop"  # a name in POLICIES
    poison_every: int = 0  # the function raises at offsets divisible by this number
    large_last: bool = False  # only the last of the large outputs is large
    reads: list[str] = dataclasses.field(default_factory=list)  # patterns that replace the sources of the function
    stateful: bool = False  # one function per source, which counts by key and adds the count to the stamp
    keep_producer: bool = False  # keeps the producer even where the product replaces it: see tests/support/sessions.py
    later: list[str] = dataclasses.field(
        default_factory=list
    )  # topics that may be created later and match the patterns, after `sources`


COUNT = struct.Struct("<q")


def counter_of(source: int) -> str:
    """Return the name of the function that counts the records of this source."""
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
    """Count the steps, report the current one, and wait where the orders say so."""

    def __init__(self, holds: list[tuple[str, int]]) -> None:
        self._holds = {(step, nth) for step, nth in holds}
        self.counts: dict[str, int] = {}
        self._idle_reported = False

    def __call__(self, step: str) -> None:
        self._idle_reported = False
        self.counts[step] = nth = self.counts.get(step, 0) + 1
        if (step, nth) in self._holds:
            print(f"AT {step} {nth}", flush=True)
            if not sys.stdin.readline():
                os._exit(1)

    def idle(self) -> None:
        if not self._idle_reported:
            self._idle_reported = True
            print("IDLE", flush=True)


def build_app(orders: Orders, steps: Steps) -> App:
    app = App(orders.app)
    attempts = os.open(orders.attempts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    index = {topic: number for number, topic in enumerate([*orders.sources, *orders.later])}

    def outputs(record: Record, content: bytes) -> list[Out]:
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
        # Note the attempt only now, because a record whose function raised was not part of this transaction.
        os.write(attempts, ATTEMPT.pack(time.monotonic_ns(), transaction, source, record.partition, record.offset))
        payload = bytes(orders.large_at[3]) if orders.large_at and at == tuple(orders.large_at[:3]) else b""
        last = len(orders.destinations) - 1
        return [
            Out(
                stamp(source, record.partition, record.offset, number)
                + content
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
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker lives longer than its test.
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
