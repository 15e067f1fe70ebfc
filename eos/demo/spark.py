"""Runs `eos demo --spark`: a worker and a stateful Spark query over flights, with the driver killed mid-batch.

Owns the order of this demo and its proof. The expectation is computed directly from the CSV file. Nothing here shares
code with examples/departures.py and examples/delays_by_hour.py, which it judges. It must never leave a process behind.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from confluent_kafka.admin import NewTopic

from eos.demo import data, topics
from eos.demo.faults import MAX_ATTEMPTS, Hit, NotProven, Witness
from eos.demo.process import Child
from eos.demo.proof import Row, at_least_one
from eos.demo.show import Show
from eos.demo.story import directory_for_logs, kafka_for
from eos.errors import Unavailable
from eos.testing.history import Log, end_offsets, read_topic

DEPARTURES, HOURS, MARKERS = "departures", "delays-by-hour", "__eos_sinks"
TRANSACTIONAL_ID = "delays-by-hour"
_TOPICS = (
    NewTopic(topics.FLIGHTS, topics.PARTITIONS),
    NewTopic(DEPARTURES, topics.PARTITIONS),
    NewTopic(HOURS, topics.PARTITIONS, config={"cleanup.policy": "compact"}),
)
_WORK_TIMEOUT_S = 400.0
# Approximate number of batches, for any number of flights: a kill must come between the first and the last.
_BATCHES = 6
_JVM_EXIT_TIMEOUT_S = 60.0
_EXAMPLES = Path(__file__).parents[2] / "examples"

Totals = tuple[int, int, int]  # flights, minutes, late flights


@dataclass(frozen=True)
class Killed:
    """Describes the kill that hit: the transaction that it left open, and the number of batches committed before."""

    hit: Hit
    batches: int


def run_demo(show: Show, bootstrap_servers: str | None, flights: int) -> list[Row]:
    """Run the whole demo and return the table's rows. Raise EosError: Unavailable, NotProven, ..."""
    if not _EXAMPLES.is_dir():
        raise Unavailable("this demo runs the programs in examples/: run it from a checkout (make demo-spark)")
    show.title(
        f"eos demo --spark: {flights:,} real flights, a worker, a stateful Spark query, and a SIGKILL in mid-batch"
    )
    with (
        directory_for_logs() as directory,
        kafka_for(show, bootstrap_servers) as servers,
        topics.created_topics(servers, delete=bootstrap_servers is not None, wanted=_TOPICS, groups=("departures",)),
    ):
        with show.bar("loading", flights) as progress:
            loaded = topics.load(servers, flights, progress)
        show.step(f"{loaded:,} flights of 2013 are in topic {topics.FLIGHTS}, {topics.PARTITIONS} partitions")
        _run_worker(show, servers, directory)
        show.step(f"Spark: python examples/delays_by_hour.py, groupBy(window, airport), upserts into {HOURS}")
        killed = _run_spark(show, servers, directory, loaded)
        show.step("the proof: read_committed output against a computation straight from the CSV file")
        with show.busy("reading everything back"):
            rows = prove(servers, flights, killed)
        show.table(rows)
    wrong = [row.check for row in rows if not row.passed]
    if wrong:
        raise NotProven(f"exactly-once was violated or could not be verified: {'; '.join(wrong)}")
    tries = f", {killed.hit.attempts} tries" if killed.hit.attempts > 1 else ""
    show.console.print(f"[bold green]Exactly once[/], shown in {show.total_s:.0f} s{tries}.", soft_wrap=True)
    return rows


def _run_worker(show: Show, servers: str, directory: Path) -> None:
    arguments = ["eos", "run", f"{_EXAMPLES / 'departures.py'}:app", "--bootstrap-servers", servers, "--until-end"]
    with Child("worker", arguments, directory) as worker:
        worker.start()
        with show.busy("a worker: eos run examples/departures.py"):
            _wait_for_exit(worker)
    count = sum(end_offsets(servers, DEPARTURES, topics.QUIET).stable.values())
    show.step(f"a worker has converted them to departures: eos run examples/departures.py ({count:,} offsets)")


def _wait_for_exit(child: Child) -> None:
    deadline = time.monotonic() + _WORK_TIMEOUT_S
    while (code := child.exit_code()) is None:
        if time.monotonic() > deadline:
            raise NotProven(f"{child.name} did not end within {_WORK_TIMEOUT_S:.0f} s: {child.log_path}")
        time.sleep(0.05)
    if code != 0:
        raise NotProven(f"{child.name} ended with exit code {code}: {child.log_path}")


def _run_spark(show: Show, servers: str, directory: Path, flights: int) -> Killed:
    """Run the query to its end, and kill its driver once while its transaction is open and has records."""
    program = [str(_EXAMPLES / "delays_by_hour.py"), servers, str(directory / "checkpoint"), str(flights // _BATCHES)]
    with (
        Child("spark", program, directory, module=False) as driver,
        _end_all_jvms(driver),
        contextlib.closing(Witness(servers, lambda: None, outputs=(HOURS,))) as witness,
    ):
        killed = _kill_in_mid_batch(show, driver, witness)
        driver.start()
        show.event("the driver is started again: first it ends the transaction that it left open")
        with show.busy("the query continues"):
            _wait_for_exit(driver)
        show.event(f"the query is done: {_batches(driver)} batches committed")
        return killed


def _kill_in_mid_batch(show: Show, driver: Child, witness: Witness) -> Killed:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        before = _batches(driver)
        driver.start()
        # The first batch after each start may commit, so that missed kills do not lead to an endless loop.
        with show.busy("the driver starts and commits its first batch"):
            _wait_for(driver, lambda before=before: _batches(driver) > before)
        _wait_for(driver, lambda: witness.has_records_of(TRANSACTIONAL_ID))
        jvms = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        # Once all the driver's processes have ended, any commit in flight has reached the broker.
        psutil.wait_procs(jvms, _JVM_EXIT_TIMEOUT_S)
        if hit := witness.find_open_transaction_by(TRANSACTIONAL_ID, attempt):
            batches = _batches(driver)
            show.event(f"SIGKILL to the driver after {batches} batches, in a transaction ({hit})", "red")
            return Killed(hit, batches)
    raise NotProven(f"{MAX_ATTEMPTS} SIGKILLs did not hit an open transaction of the query: {driver.log_path}")


def _wait_for(driver: Child, probe: object) -> None:
    assert callable(probe)
    deadline = time.monotonic() + _WORK_TIMEOUT_S
    while not probe():
        if (code := driver.exit_code()) is not None:
            raise NotProven(f"the query ended with exit code {code} before it was killed: {driver.log_path}")
        if time.monotonic() > deadline:
            raise NotProven(f"the query made no progress within {_WORK_TIMEOUT_S:.0f} s: {driver.log_path}")
        time.sleep(0.01)


def _batches(driver: Child) -> int:
    return driver.log().count("batch committed")


@contextlib.contextmanager
def _end_all_jvms(driver: Child) -> Iterator[None]:
    """End the driver's JVM and tasks when the block ends in any way: after a kill they would end by themselves, but
    only later."""
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess, AssertionError):
            left = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
            for process in psutil.wait_procs(left, 10)[1]:
                process.kill()


# ------------------------------------------------------------------------------------------------------------ the proof


def expectation(flights: int) -> tuple[int, dict[str, Totals]]:
    """Return how many flights departed, and the totals for each airport and hour."""
    count: Counter[str] = Counter()
    minutes: Counter[str] = Counter()
    late: Counter[str] = Counter()
    for row in data.rows(flights):
        if row["dep_delay"] == "NA":
            continue
        key = f"{row['origin']} {row['time_hour'][:13]}:00Z"
        count[key] += 1
        minutes[key] += int(row["dep_delay"])
        late[key] += int(row["dep_delay"]) > data.LATE_MINUTES
    return count.total(), {key: (count[key], minutes[key], late[key]) for key in count}


def prove(servers: str, flights: int, killed: Killed) -> list[Row]:
    """Return the rows of the table."""
    departed, expected = expectation(flights)
    departures = read_topic(servers, DEPARTURES, config=topics.QUIET)
    upserts = read_topic(servers, HOURS, config=topics.QUIET)
    uncommitted = len(read_topic(servers, HOURS, "read_uncommitted", topics.QUIET))
    found, repeated, growing = _last_of_each(upserts)
    wrong = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
    ends = end_offsets(servers, [DEPARTURES, HOURS, MARKERS], topics.QUIET)
    hanging = sum(ends.stable[place] != ends.log_end[place] for place in ends.log_end)
    why = f"for example {wrong[0]}: {expected.get(wrong[0])} expected, {found.get(wrong[0])} seen" if wrong else ""
    totals = [[sum(row[at] for row in rows.values()) for at in range(3)] for rows in (expected, found)]
    named = ("flights counted", "minutes of delay", "late flights")
    return [
        Row(
            "departures written by the worker", f"{departed:,}", f"{len(departures):,}", departed == len(departures) > 0
        ),
        Row(
            "airport hours with wrong numbers",
            "0",
            f"{len(wrong):,} of {len(expected):,}",
            not wrong and bool(found),
            why,
        ),
        *(
            Row(f"{name}, all airports and hours", f"{right:,}", f"{seen:,}", right == seen)
            for name, right, seen in zip(named, *totals, strict=True)
        ),
        Row("upserts repeated or out of order", "0", f"{repeated:,} of {len(upserts):,}", repeated == 0 < growing),
        Row("partitions with a hanging transaction", "0", f"{hanging} of {len(ends.log_end)}", hanging == 0),
        at_least_one("SIGKILLs inside an open transaction", int(killed.hit.partitions > 0)),
        at_least_one("batches committed before the SIGKILL", killed.batches),
        at_least_one("aborted records a read_uncommitted reader gets", uncommitted - len(upserts)),
    ]


def _last_of_each(upserts: Log) -> tuple[dict[str, Totals], int, int]:
    """Return the last value of each key, and how many upserts repeated, or increased, the previous count of their key.

    Each batch adds flights to the hours that it touches, so a batch that was written twice repeats a count.
    """
    found: dict[str, Totals] = {}
    repeated = growing = 0
    for key, value in zip(upserts.keys, upserts.values, strict=True):
        name, row = (key or b"").decode(), json.loads(value or b"{}")
        before = found.get(name, (0, 0, 0))[0]
        growing += row["flights"] > before
        repeated += row["flights"] <= before
        found[name] = (row["flights"], row["minutes"], row["late"])
    return found, repeated, growing
