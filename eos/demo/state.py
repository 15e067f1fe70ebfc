"""Runs `eos demo --state`: final delays per airline and hour, with two kills and a deleted folder.

Two workers are each killed in an open transaction, and the folder of one is deleted. This module owns the order of this
demo and its proof. The expectation is computed by pandas from the CSV file. Nothing here shares code with
examples/delays_per_hour.py, which it judges. It must never leave a process behind.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from confluent_kafka.admin import NewTopic

from eos.app.cells import parse_cell
from eos.app.windows import split_windowed_key
from eos.demo import data, topics
from eos.demo.faults import Hit, NotProven, Witness, kill_in_a_transaction
from eos.demo.process import Child
from eos.demo.proof import Row, at_least_one
from eos.demo.show import Show
from eos.demo.story import Workers, directory_for_logs, example, kafka_for, target
from eos.testing.history import Log, end_offsets, read_topic

APP, BY_AIRLINE, BY_HOUR, LATE = "delays-per-hour", "delays-by-airline", "delays-per-hour", "late-delays"
CHANGELOG = f"{APP}-add-changelog"
_COMPACT = {"cleanup.policy": "compact"}
_FOREVER = {"retention.ms": "-1"}  # keep the flights, whose timestamps are in 2013
# The topics that a transaction writes to. Most transactions of the second step close no hour: they change sums, so they
# write to the changelog alone.
_WRITTEN = (BY_AIRLINE, BY_HOUR, CHANGELOG)
_TOPICS = (
    *(NewTopic(name, topics.PARTITIONS, config=_FOREVER) for name in (topics.FLIGHTS, BY_AIRLINE, BY_HOUR, LATE)),
    NewTopic(CHANGELOG, topics.PARTITIONS, config=_COMPACT),
)
_HOUR, _GRACE = timedelta(hours=1), timedelta(days=1)
_HOURS = "%Y-%m-%dT%H"
# Approximate number of transactions of both steps; they are small, so that work is left when the kills come.
_TRANSACTIONS = 3_000
_FIRST_KILL_AT, _SECOND_KILL_AT = 0.1, 0.3  # fractions of the flights to sum
_EXAMPLE = "delays_per_hour"

Totals = dict[str, tuple[int, int, int]]
"""By airline and hour: flights, minutes, the longest delay."""


@dataclass(frozen=True)
class Killed:
    """Holds the transactions that the kills left open, and the numbers of changelog records read again with and without
    a state folder."""

    hits: tuple[Hit, Hit]
    read_with_folder: int
    read_without: int


def run_demo(show: Show, bootstrap_servers: str | None, flights: int) -> list[Row]:
    """Run the whole demo and return the table's rows. Raise EosError: Unavailable, NotProven, ..."""
    show.title(
        f"eos demo --state: {flights:,} real flights summed by airline and hour, two SIGKILLs and a lost folder; are "
        "the final sums right?"
    )
    with (
        directory_for_logs() as directory,
        kafka_for(show, bootstrap_servers) as servers,
        topics.created_topics(servers, delete=bootstrap_servers is not None, wanted=_TOPICS, groups=(APP,)),
    ):
        with show.bar("loading", flights) as progress:
            loaded = topics.load(servers, flights, progress, by_day=True)
        show.step(
            f"{loaded:,} flights of 2013 are in topic {topics.FLIGHTS}, {topics.PARTITIONS} partitions, day by day"
        )
        show.step("two workers: eos run examples/delays_per_hour.py --instance a (or b), each with a folder of its own")
        show.code(example(_EXAMPLE))
        killed = _run_workers(show, servers, directory, loaded)
        show.step("the proof: outputs and changelog against pandas' sums from the CSV file, hour by hour")
        with show.busy("reading everything back"):
            rows = prove(servers, flights, killed)
        show.table(rows)
    if wrong := [row.check for row in rows if not row.passed]:
        raise NotProven(f"exactly-once was violated or could not be verified: {'; '.join(wrong)}")
    show.console.print(f"[bold green]Exactly once[/], shown in {show.total_s:.0f} s.", soft_wrap=True)
    return rows


def _worker(servers: str, instance: str, directory: Path, flights: int) -> Child:
    settings = {
        "eos.state.dir": _folder(directory, instance),
        "eos.transaction.max.records": max(10, 2 * flights // _TRANSACTIONS),
        "group.instance.id": instance,  # a static member: after a restart it gets the same partitions
        # With small fetches both steps advance at the same time. With large ones, a worker would handle many records of
        # one step before the next step's.
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
        with contextlib.closing(Witness(servers, workers.tick, outputs=_WRITTEN, group=APP)) as witness:
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
    show.event(f"SIGKILL to worker {worker.name} in a transaction ({hit})", "red")
    if folder is not None:
        shutil.rmtree(folder)
        show.event(f"the folder of worker {worker.name} is deleted", "red")
    before = len(worker.log())
    worker.start()
    witness.wait_for_log(worker, "state restored", skip=before)
    keys, read = map(int, re.findall(r"state restored .* keys=(\d+) read=(\d+)", worker.log()[before:])[0])
    how = "without its folder" if folder else "with its folder"
    show.event(
        f"worker {worker.name} is started again {how}: {keys:,} entries of state, {read:,} changes read from "
        "the changelog"
    )
    return hit, read


# ------------------------------------------------------------------------------------------------------------ the proof


def expectation(flights: int) -> tuple[Totals, Totals]:
    """Return the totals of the airlines and hours that are over, and of those that are still open."""
    import pandas as pd  # imported here, because the import takes half a second

    columns = ["carrier", "time_hour", "dep_delay"]
    rows = pd.read_csv(data.file_path(), usecols=columns, nrows=flights, parse_dates=["time_hour"])
    closed_until = rows.time_hour.max() - _GRACE
    final: Totals = {}
    still_open: Totals = {}
    delays = rows.dropna().groupby(["carrier", "time_hour"]).dep_delay
    for (airline, begins), *total in delays.agg(["size", "sum", "max"]).itertuples():
        flights, minutes, longest = map(int, total)
        kept = final if begins + _HOUR <= closed_until else still_open
        kept[f"{airline} {begins:{_HOURS}}"] = flights, minutes, longest
    return final, still_open


def prove(servers: str, flights: int, killed: Killed) -> list[Row]:
    """Return the rows of the table."""
    final, still_open = expectation(flights)
    outputs = read_topic(servers, BY_HOUR, config=topics.QUIET)
    between = read_topic(servers, BY_AIRLINE, config=topics.QUIET)
    uncommitted = len(read_topic(servers, _WRITTEN, "read_uncommitted", topics.QUIET))
    late = len(read_topic(servers, LATE, config=topics.QUIET))
    found = _final_totals(outputs)
    changes = read_topic(servers, CHANGELOG, config=topics.QUIET)
    kept = _kept_totals(changes)
    ends = end_offsets(servers, [t.topic for t in _TOPICS], topics.QUIET)
    hanging = sum(ends.stable[place] != ends.log_end[place] for place in ends.log_end)
    departed, summed = (
        sum(count for count, _, _ in (*a.values(), *b.values())) for a, b in ((final, still_open), (found, kept))
    )
    minutes = [sum(total[1] for total in totals.values()) for totals in (final, found)]
    hits = sum(hit.found.state == "Ongoing" and hit.partitions > 0 for hit in killed.hits)
    return [
        Row("departures summed", f"{departed:,}", f"{summed:,}", departed == summed > 0),
        _compare_totals("airlines and hours with a wrong final sum", final, found),
        _compare_totals("airlines and open hours with a wrong sum in the changelog", still_open, kept),
        Row("minutes of delay in final sums", f"{minutes[0]:,}", f"{minutes[1]:,}", minutes[0] == minutes[1]),
        Row(
            "final sums sent again",
            "0",
            f"{len(outputs) - len(found):,} of {len(outputs):,}",
            len(outputs) == len(found),
        ),
        Row("flights that came too late for their hour", "0", f"{late:,}", late == 0),
        Row("partitions with a hanging transaction", "0", f"{hanging} of {len(ends.log_end)}", hanging == 0),
        Row("SIGKILLs inside an open transaction", "2", f"{hits}", hits == 2),
        at_least_one("changelog records read again without a state folder", killed.read_without),
        Row(
            "changelog records read again with a state folder",
            f"< {killed.read_without:,}",
            f"{killed.read_with_folder:,}",
            killed.read_with_folder < killed.read_without,
        ),
        at_least_one(
            "aborted records a read_uncommitted reader gets",
            uncommitted - len(between) - len(outputs) - len(changes),
        ),
    ]


def _compare_totals(check: str, expected: Totals, found: Totals) -> Row:
    wrong = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
    why = f"for example {wrong[0]}: {expected.get(wrong[0])} expected, {found.get(wrong[0])} seen" if wrong else ""
    return Row(check, "0", f"{len(wrong):,} of {len(expected):,}", bool(expected) and not wrong, why)


def _final_totals(outputs: Log) -> Totals:
    """Return the final sums by airline and hour, the last one if there are several."""
    found: Totals = {}
    for key, value in zip(outputs.keys, outputs.values, strict=True):
        hour = json.loads(value or b"{}")
        begins = datetime.fromisoformat(hour["begins"])
        found[f"{(key or b'').decode()} {begins:{_HOURS}}"] = _total(hour["total"])
    return found


def _kept_totals(changes: Log) -> Totals:
    """Return the sums that the changelog keeps, by airline and hour."""
    kept: dict[tuple[bytes, int], bytes] = {}
    for cell, value in zip(changes.keys, changes.values, strict=True):
        store, key, _ = parse_cell(cell or b"")
        if store == "total" and value is None:
            kept.pop(split_windowed_key(key), None)
        elif store == "total" and value is not None:
            kept[split_windowed_key(key)] = value
    return {
        f"{airline.decode()} {datetime.fromtimestamp(begins_ms / 1000, UTC):{_HOURS}}": _total(json.loads(value))
        for (airline, begins_ms), value in kept.items()
    }


def _total(total: dict[str, int]) -> tuple[int, int, int]:
    return total["flights"], total["minutes"], total["longest"]
