"""Runs the demo in order: Kafka, flights, two workers and their faults, the contrast, the proof.

Owns the order and the supervision of the workers. It must never judge (proof.py does), and never leave a process
behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.broker.jars import kafka_jars
from eos.demo import contrast, data, proof, topics
from eos.demo.faults import Hit, NotProven, Witness, kill_in_a_transaction, pause_in_a_transaction
from eos.demo.process import Child
from eos.demo.proof import Row
from eos.demo.show import Show
from eos.kafka.client.cluster import TransactionalIdState

TRANSACTION_TIMEOUT_MS = 5_000
# A run has about this many transactions, however many flights there are. Small ones make it likely that one is open
# when a fault is injected.
_TRANSACTIONS = 1_000
_KILL_AT, _PAUSE_AT = 0.03, 0.10  # fractions of the flights to handle
# This fraction of the flights is loaded before the workers start. The rest is loaded after the faults, and small parts
# of it earlier if the workers reach the end: a fault must find unhandled input, however many attempts it needs.
_INITIAL_PART, _ADDED_PART = 0.5, 0.01
_WORK_TIMEOUT_S = 150.0
_TEMPORARY_FAILURE = 75


@dataclass(frozen=True)
class Faults:
    """Holds the faults that hit the workers; `timed_out`: the paused worker's transaction after its timeout."""

    kill: Hit
    pause: Hit
    timed_out: TransactionalIdState


def run_demo(show: Show, bootstrap_servers: str | None, flights: int) -> list[Row]:
    """Run the whole demo and return the table's rows. Raise EosError: Unavailable, NotProven, ..."""
    show.title(f"eos demo: {flights:,} real flights, two workers, a SIGKILL and a SIGSTOP; what does Kafka hold then?")
    with (
        directory_for_logs() as directory,
        kafka_for(show, bootstrap_servers) as servers,
        topics.created_topics(servers, delete=bootstrap_servers is not None),
    ):
        source = topics.Flights(servers, flights)
        with show.bar("loading", flights) as progress:
            source.load(int(_INITIAL_PART * flights), progress)
        show.step(
            f"{source.loaded:,} flights of 2013 are in topic {topics.FLIGHTS}, {topics.PARTITIONS} partitions; "
            "the others follow while the workers run"
        )
        show.step(f"two workers: eos run {_displayed_target()} --instance a (or b)")
        show.code(example())
        faults = _run_workers(show, servers, directory, source, flights)
        show.step("for contrast: a plain at-least-once loop handles a quarter of the flights")
        loop = _run_contrast(show, servers, directory)
        show.step("the proof: read_committed output against a computation straight from the CSV file")
        rows = _prove(show, servers, flights, faults, loop)
        show.table(rows)
        _print_verdict(show, rows, faults, loop)
    return rows


@contextlib.contextmanager
def directory_for_logs() -> Iterator[Path]:
    """Provide a folder for the workers' logs, which is kept and named after an error."""
    directory = Path(tempfile.mkdtemp(prefix="eos-demo-"))
    try:
        yield directory
    except Exception:
        if any(directory.iterdir()):
            print(f"eos: the logs of the workers are in {directory}", file=sys.stderr)
            raise
        directory.rmdir()
        raise
    except BaseException:  # an interrupted run does not need its logs
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory)


@contextlib.contextmanager
def kafka_for(show: Show, bootstrap_servers: str | None) -> Iterator[str]:
    """Yield the given servers, or start a local Kafka and yield its servers."""
    if bootstrap_servers is not None:
        show.step(f"Kafka at {bootstrap_servers}")
        yield bootstrap_servers
        return
    with contextlib.ExitStack() as stack:
        kafka_jars(DEFAULT_VERSION, show.console)
        with show.busy(f"starting Kafka {DEFAULT_VERSION}"):
            kafka = stack.enter_context(LocalKafka())
        show.step(f"Kafka {DEFAULT_VERSION} runs on this machine: {kafka.bootstrap_servers}")
        yield kafka.bootstrap_servers


def example(name: str = "flights") -> Path:
    """Return an App's file: next to this module in a wheel, in examples/ of a checkout."""
    packaged = Path(__file__).with_name(f"{name}.py")
    return packaged if packaged.exists() else Path(__file__).parents[2] / "examples" / f"{name}.py"


def target(name: str = "flights") -> str:
    """Return the argument of `eos run` for an App."""
    return f"eos.demo.{name}:app" if example(name).parent == Path(__file__).parent else f"{example(name)}:app"


def _displayed_target() -> str:
    """Return the argument as a user would type it here; the workers themselves run in another directory."""
    return target().removeprefix(f"{Path.cwd()}{os.sep}")


def _worker(servers: str, instance: str, directory: Path, flights: int) -> Child:
    settings = {
        "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
        "eos.transaction.max.records": max(10, flights // _TRANSACTIONS),
    }
    arguments = ["eos", "run", target(), "--instance", instance, "--bootstrap-servers", servers]
    for name, value in settings.items():
        arguments += ["-X", f"{name}={value}"]
    return Child(instance, arguments, directory)


def _run_workers(show: Show, servers: str, directory: Path, source: topics.Flights, flights: int) -> Faults:
    """Run both workers until the group has handled all flights, with a fault for each on the way."""

    def handled(count: int) -> None:
        progress(count)
        if count >= source.loaded:
            source.load(int(_ADDED_PART * flights))

    with (
        _worker(servers, "a", directory, flights) as a,
        _worker(servers, "b", directory, flights) as b,
        show.bar("handling", flights) as progress,
        contextlib.closing(topics.Follower(servers)) as follower,
    ):
        workers = Workers([a, b], follower, handled)
        with contextlib.closing(Witness(servers, workers.tick)) as witness:
            workers.start()
            workers.wait_for(int(_KILL_AT * flights))
            kill = _kill(show, a, witness)
            workers.wait_for(int(_PAUSE_AT * flights))
            pause, timed_out = _pause(show, b, witness)
            source.load(flights)
            workers.wait_for(source.loaded)
            workers.stop()
        took = time.monotonic() - workers.began
        show.event(f"both workers are done: {flights:,} flights in {took:.1f} s")
        return Faults(kill, pause, timed_out)


class Workers:
    """Supervises workers: reports progress, and restarts a worker that exits with 75 (a temporary failure)."""

    def __init__(self, workers: list[Child], follower: topics.Follower, progress: Callable[[int], None]) -> None:
        self._workers, self._follower, self._progress = workers, follower, progress
        self._finished_codes = {0}  # exit codes of workers that have finished
        self.began = time.monotonic()

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def tick(self) -> bool:
        """Return whether all workers have finished; call this often.

        Raises NotProven for a worker that failed or takes too long.
        """
        self._progress(self._follower.committed())
        codes = {worker: worker.exit_code() for worker in self._workers}
        for worker, code in codes.items():
            if code in self._finished_codes:
                continue
            if code == _TEMPORARY_FAILURE:
                worker.start()
            elif code not in (None, -9):  # -9: the demo's own kill; kill_in_a_transaction or _kill restarts the worker
                raise NotProven(f"worker {worker.name} ended with exit code {code}: {worker.log_path}")
        if time.monotonic() - self.began > _WORK_TIMEOUT_S:
            raise NotProven(f"after {_WORK_TIMEOUT_S:.0f} s only {self._follower.committed():,} flights are handled")
        return self._finished_codes.issuperset(codes.values())

    def wait_for(self, records: int) -> None:
        while self._follower.committed() < records:
            self.tick()
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop each worker with SIGTERM and wait until it exits by itself; all flights are handled by then."""
        self._finished_codes.add(_TEMPORARY_FAILURE)
        for worker in self._workers:
            worker.stop()
        self.wait_for_exit()

    def wait_for_exit(self) -> None:
        while not self.tick():
            time.sleep(0.05)


def _kill(show: Show, worker: Child, witness: Witness) -> Hit:
    hit = kill_in_a_transaction(worker, witness)
    show.event(f"SIGKILL to worker {worker.name} in a transaction ({hit})", "red")
    worker.start()
    show.event(f"worker {worker.name} is started again: first it aborts the transaction that it left open")
    return hit


def _pause(show: Show, worker: Child, witness: Witness) -> tuple[Hit, TransactionalIdState]:
    hit = pause_in_a_transaction(worker, witness)
    began = time.monotonic()
    show.event(f"SIGSTOP to worker {worker.name} in a transaction ({hit})", "red")
    timed_out = witness.wait_until_ended(hit)
    paused_s = time.monotonic() - began
    show.event(f"{paused_s:.1f} s later the broker aborts the transaction of worker {worker.name}", "yellow")
    worker.resume()
    show.event(f"SIGCONT: worker {worker.name} continues, unaware of the abort")
    witness.wait_for_log(worker, "rebuilt from the committed offsets")
    show.event(f"the commit of worker {worker.name} is refused, and it continues from the committed offsets")
    return hit, timed_out


def _run_contrast(show: Show, servers: str, directory: Path) -> contrast.Contrast:
    total = contrast.flights(servers)
    with show.bar("at least once", total) as progress:
        loop = contrast.run(servers, directory, total, progress)
    times = "once" if loop.kills == 1 else f"{loop.kills} times"
    show.event(f"killed {times} and started again: {loop.flights:,} flights became {loop.records:,} records")
    return loop


def _prove(show: Show, servers: str, flights: int, faults: Faults, loop: contrast.Contrast) -> list[Row]:
    with show.busy("reading everything back"):
        expected, found = data.expectation(flights), proof.read(servers)
        kills = int(faults.kill.found.state == "Ongoing" and faults.kill.partitions > 0)
        pauses = int(faults.pause.found.state == "Ongoing" and faults.timed_out.state == "CompleteAbort")
        return [*proof.exactly_once_rows(expected, found), *proof.fault_rows(found, kills, pauses, loop)]


def _print_verdict(show: Show, rows: list[Row], faults: Faults, loop: contrast.Contrast) -> None:
    wrong = [row.check for row in rows if not row.passed]
    if wrong:
        raise NotProven(f"exactly-once was violated or could not be verified: {'; '.join(wrong)}")
    show.console.print(
        f"[bold green]Exactly once[/], shown in {show.total_s:.0f} s. Attempts until each fault hit an open "
        f"transaction: {_times(faults.kill.attempts, 'SIGKILL')}, {_times(faults.pause.attempts, 'SIGSTOP')} "
        f"(at-least-once loop: {_times(loop.kills, 'SIGKILL')}).",
        soft_wrap=True,
    )


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
