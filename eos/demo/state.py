"""Runs `eos demo --state`: delays per airline and day in keyed state, with two kills and a deleted folder.

Two workers are each killed in an open transaction, and the folder of one is deleted. This module owns the order of this
demo and its proof. The expectation is computed directly from the CSV file. Nothing here shares code with
examples/delays_by_day.py, which it judges. It must never leave a process behind.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import NewTopic

from eos.app.cells import parse_cell
from eos.demo import data, topics
from eos.demo.faults import Hit, NotProven, Witness, kill_in_a_transaction
from eos.demo.process import Child
from eos.demo.proof import Row, at_least_one
from eos.demo.show import Show
from eos.demo.story import Workers, directory_for_logs, example, kafka_for, target
from eos.testing.history import Log, end_offsets, read_topic

APP, BY_AIRLINE, BY_DAY = "delays-by-day", "delays-by-airline", "delays-by-day"
CHANGELOG = f"{APP}-add-changelog"
_COMPACT = {"cleanup.policy": "compact"}
_TOPICS = (
    *(NewTopic(name, topics.PARTITIONS) for name in (topics.FLIGHTS, BY_AIRLINE, BY_DAY)),
    NewTopic(CHANGELOG, topics.PARTITIONS, config=_COMPACT),
)
_TRANSACTIONS = 3_000  # approximate number for both steps; small transactions, so that work is left when the kills come
_FIRST_KILL_AT, _SECOND_KILL_AT = 0.1, 0.3  # fractions of the flights to sum
_EXAMPLE = "delays_by_day"

Totals = dict[str, tuple[int, int, int]]
"""By airline and day: flights, minutes, the longest delay."""


@dataclass(frozen=True)
class Killed:
    """Holds the transactions that the kills left open, and the changes read again with and without a folder."""

    hits: tuple[Hit, Hit]
    read_with_folder: int
    read_without: int


def run_demo(show: Show, bootstrap_servers: str | None, flights: int) -> list[Row]:
    """Run the whole demo and return the table's rows. Raise EosError: Unavailable, NotProven, ..."""
    show.title(
        f"eos demo --state: {flights:,} real flights summed by key, two SIGKILLs and a lost folder; are the sums right?"
    )
    with (
        directory_for_logs() as directory,
        kafka_for(show, bootstrap_servers) as servers,
        topics.created_topics(servers, delete=bootstrap_servers is not None, wanted=_TOPICS, groups=(APP,)),
    ):
        with show.bar("loading", flights) as progress:
            loaded = topics.load(servers, flights, progress)
        show.step(f"{loaded:,} flights of 2013 are in topic {topics.FLIGHTS}, {topics.PARTITIONS} partitions")
        show.step("two workers: eos run examples/delays_by_day.py --instance a (or b), each with a folder of its own")
        show.code(example(_EXAMPLE))
        killed = _run_workers(show, servers, directory, loaded)
        show.step("the proof: outputs and changelog against sums straight from the CSV file, key by key")
        with show.busy("reading everything back"):
            rows = prove(servers, flights, killed)
        show.table(rows)
    if wrong := [row.check for row in rows if not row.holds]:
        raise NotProven(f"not exactly once, or not shown to be: {'; '.join(wrong)}")
    show.console.print(f"[bold green]Exactly once[/], shown in {show.total_s:.0f} s.", soft_wrap=True)
    return rows


def _worker(servers: str, instance: str, directory: Path, flights: int) -> Child:
    settings = {
        "eos.state.dir": _folder(directory, instance),
        "eos.transaction.max.records": max(10, 2 * flights // _TRANSACTIONS),
        "group.instance.id": instance,  # a static member: after a restart it gets the same partitions
        # Fetched records are handled in order: with small fetches both steps advance at the same time.
        "max.partition.fetch.bytes": 50_000,
        "queued.max.messages.kbytes": 500,
    }
    arguments = ["eos", "run", target(_EXAMPLE), "--instance", instance, "--bootstrap-servers", servers, "--until-end"]
    for name, value in settings.items():
        arguments += ["-X", f"{name}={value}"]
    return Child(instance, arguments, directory)


def _folder(directory: Path, instance: str) -> Path:
    return directory / f"state-of-{instance}"


def _run_workers(show: Show, servers: str, directory: Path, flights: int) -> Killed:
    with (
        _worker(servers, "a", directory, flights) as a,
        _worker(servers, "b", directory, flights) as b,
        show.bar("handling", flights) as progress,
        contextlib.closing(topics.Follower(servers, APP)) as follower,
        contextlib.closing(topics.Follower(servers, APP, BY_AIRLINE)) as sums,
    ):

        def wait_for(part: float) -> None:
            while sums.committed() < part * flights:
                workers.tick()
                time.sleep(0.02)

        workers = Workers([a, b], follower, progress)
        with contextlib.closing(Witness(servers, workers.tick, outputs=(BY_AIRLINE, BY_DAY), group=APP)) as witness:
            workers.start()
            wait_for(_FIRST_KILL_AT)
            first, read_with = _kill(show, a, witness, None)
            wait_for(_SECOND_KILL_AT)
            second, read_without = _kill(show, b, witness, _folder(directory, "b"))
            workers.wait_for_exit()
        show.event(f"both workers are done: {flights:,} flights in {time.monotonic() - workers.began:.1f} s")
        return Killed((first, second), read_with, read_without)


def _kill(show: Show, worker: Child, witness: Witness, folder: Path | None) -> tuple[Hit, int]:
    """Kill the worker, delete the folder if given, and restart it; return the hit and the number of changes read."""
    hit = kill_in_a_transaction(worker, witness)
    show.event(
        f"SIGKILL to worker {worker.name} in a transaction ({hit.transactional_id}: {hit.found.state}, records in "
        f"{hit.partitions} partitions)",
        "red",
    )
    if folder is not None:
        shutil.rmtree(folder)
        show.event(f"the folder of worker {worker.name} is deleted", "red")
    before = len(worker.log())
    worker.start()
    witness.wait_for_log(worker, "state restored", skip=before)
    keys, read = map(int, re.findall(r"state restored .* keys=(\d+) read=(\d+)", worker.log()[before:])[0])
    how = "without its folder" if folder else "with its folder"
    show.event(f"worker {worker.name} is started again {how}: {keys:,} sums, {read:,} changes read from the changelog")
    return hit, read


# ------------------------------------------------------------------------------------------------------------ the proof


def expectation(flights: int) -> Totals:
    expected: Totals = {}
    for row in data.rows(flights):
        if row["dep_delay"] != "NA":
            key, delay = f"{row['carrier']} {row['time_hour'][:10]}", int(row["dep_delay"])
            count, minutes, longest = expected.get(key, (0, 0, 0))
            expected[key] = count + 1, minutes + delay, max(longest, delay)
    return expected


def prove(servers: str, flights: int, killed: Killed) -> list[Row]:
    """Return the rows of the table."""
    expected = expectation(flights)
    departed = sum(count for count, _, _ in expected.values())
    outputs = read_topic(servers, BY_DAY, config=topics.QUIET)
    between = read_topic(servers, BY_AIRLINE, config=topics.QUIET)
    uncommitted = len(read_topic(servers, (BY_AIRLINE, BY_DAY), "read_uncommitted", topics.QUIET))
    changes = read_topic(servers, CHANGELOG, config=topics.QUIET)
    found, uneven = _last_totals(outputs)
    cells = [(parse_cell(cell or b""), value) for cell, value in zip(changes.keys, changes.values, strict=True)]
    kept = {key.decode(): _total(value) for (store, key, _), value in cells if store}
    ends = end_offsets(servers, [t.topic for t in _TOPICS], topics.QUIET)
    hanging = sum(ends.stable[place] != ends.log_end[place] for place in ends.log_end)
    minutes = [sum(total[1] for total in totals.values()) for totals in (expected, found)]
    hits = sum(hit.found.state == "Ongoing" and hit.partitions > 0 for hit in killed.hits)
    return [
        Row("departures summed", f"{departed:,}", f"{len(outputs):,}", departed == len(outputs) > 0),
        _compare_totals("airlines and days with a wrong sum in the output", expected, found),
        _compare_totals("airlines and days with a wrong sum in the changelog", expected, kept),
        Row("minutes of delay", f"{minutes[0]:,}", f"{minutes[1]:,}", minutes[0] == minutes[1]),
        Row("sums that skip or repeat a flight", "0", f"{uneven:,} of {len(outputs):,}", uneven == 0 < len(outputs)),
        Row(
            "changes in the changelog, fewer than sums",
            f"< {len(outputs):,}",
            f"{len(changes):,}",
            0 < len(changes) < len(outputs),
        ),
        Row("partitions with a hanging transaction", "0", f"{hanging} of {len(ends.log_end)}", hanging == 0),
        Row("SIGKILLs inside an open transaction", "2", f"{hits}", hits == 2),
        at_least_one("changes read again without a folder", killed.read_without),
        Row(
            "changes read again with a folder",
            f"< {killed.read_without:,}",
            f"{killed.read_with_folder:,}",
            killed.read_with_folder < killed.read_without,
        ),
        at_least_one("aborted records a read_uncommitted reader gets", uncommitted - len(between) - len(outputs)),
    ]


def _compare_totals(check: str, expected: Totals, found: Totals) -> Row:
    wrong = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
    why = f"for example {wrong[0]}: {expected.get(wrong[0])} expected, {found.get(wrong[0])} seen" if wrong else ""
    return Row(check, "0", f"{len(wrong):,} of {len(expected):,}", bool(expected) and not wrong, why)


def _total(value: bytes | None) -> tuple[int, int, int]:
    total = json.loads(value or b"{}")
    return total.get("flights", 0), total.get("minutes", 0), total.get("longest", 0)


def _last_totals(outputs: Log) -> tuple[Totals, int]:
    """Return the last sum of each key, and how many sums do not have exactly one flight more than the one before."""
    found: Totals = {}
    uneven = 0
    for key, value in zip(outputs.keys, outputs.values, strict=True):
        name = (key or b"").decode()
        before = found.get(name, (0, 0, 0))[0]
        found[name] = _total(value)
        uneven += found[name][0] != before + 1
    return found, uneven
