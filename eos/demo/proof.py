"""Compares the contents of Kafka with the expectation, as rows of a table.

Owns the verdicts. It compares with the expectation from the CSV (keys, counts, sums), and lets eos.testing.checker
judge the lineage of every record (by its key, which names one flight). It must never read the App, and a row that
examined nothing has failed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eos.demo import topics
from eos.demo.contrast import Contrast
from eos.demo.data import LATE_MINUTES, Expectation
from eos.testing import checker
from eos.testing.checker import Ends, Outputs, Report, TopicPartition
from eos.testing.history import Log, committed_offsets, end_offsets, read_topic


@dataclass(frozen=True)
class Row:
    """Holds one line of the table; `why` names the error if the check failed."""

    check: str
    expected: str
    seen: str
    passed: bool
    why: str = ""


@dataclass(frozen=True, eq=False)
class Found:
    """Holds the records read after the run: flights and committed outputs, and a count with read_uncommitted."""

    flights: Log
    outputs: Log  # the records of topics.OUTPUTS, in this order
    uncommitted: int  # records that a read_uncommitted reader gets from the same topics
    committed: Mapping[TopicPartition, int]
    ends: Ends


def read(servers: str) -> Found:
    """Read everything that the verdicts need. Raise Unavailable if a topic cannot be read to its end."""
    return Found(
        flights=read_topic(servers, topics.FLIGHTS, config=topics.QUIET),
        outputs=read_topic(servers, topics.OUTPUTS, "read_committed", topics.QUIET),
        uncommitted=len(read_topic(servers, topics.OUTPUTS, "read_uncommitted", topics.QUIET)),
        committed=committed_offsets(servers, topics.GROUP, topics.FLIGHTS, topics.QUIET),
        ends=end_offsets(servers, [topics.FLIGHTS, *topics.OUTPUTS], topics.QUIET),
    )


def exactly_once_rows(expected: Expectation, found: Found) -> list[Row]:
    """Return the rows about the App's output."""
    report = check_lineage(expected, found)
    by_topic = [
        [key for key, topic in zip(found.outputs.keys, found.outputs.topic, strict=True) if topic == index]
        for index in range(len(topics.OUTPUTS))
    ]
    return [
        _compare_keys("flights loaded", expected.keys, found.flights.keys),
        _compare_keys(f"records in {topics.DELAYS}", expected.keys, by_topic[0]),
        _compare_keys(f"records in {topics.LATE} (> {LATE_MINUTES} min)", expected.late, by_topic[1]),
        _rule_row("records lost", report, "no_losses"),
        _rule_row("records duplicated", report, "no_duplicates"),
        _rule_row("records without an input", report, "no_unexpected_outputs"),
        _rule_row("records out of order", report, "order"),
        _rule_row("flights in only one of two topics", report, "atomic"),
        _rule_row("offsets that disagree with the output", report, "offsets_match_outputs"),
        _rule_row("partitions with a hanging transaction", report, "stable_end"),
        compare_minutes(expected, found.outputs),
    ]


def check_lineage(expected: Expectation, found: Found) -> Report:
    """Return the checker's report; an output's source is the flight that its key names, and its copy number is the
    index of its topic."""
    flights, outputs = found.flights, found.outputs
    row_of = {key: row for row, key in enumerate(flights.keys)}
    rows = np.array([row_of.get(key, -1) for key in outputs.keys], np.int64)
    # Index -1 finds the extra row at the end: a key that no flight has violates no_unexpected_outputs.
    partitions, offsets = np.append(flights.partition, -1), np.append(flights.offset, -1)
    late = np.fromiter((key in expected.late for key in flights.keys), np.bool_, len(flights.keys))
    return checker.check(
        flights.inputs(),
        Outputs(
            topics=outputs.topics,
            topic=outputs.topic,
            partition=outputs.partition,
            offset=outputs.offset,
            source_topic=np.zeros(len(rows), np.int32),
            source_partition=partitions[rows],
            source_offset=offsets[rows],
            copy=outputs.topic,
        ),
        fan_out=1 + late.astype(np.int64),
        committed=found.committed,
        complete=True,
        ends=found.ends,
    )


def compare_minutes(expected: Expectation, outputs: Log) -> Row:
    """Compare the sum of delays of each airline, from the values in DELAYS, with the expectation."""
    seen: Counter[str] = Counter()
    for value, topic in zip(outputs.values, outputs.topic, strict=True):
        if topic == 0:
            delay = json.loads(value or b"{}")
            seen[delay["carrier"]] += delay["minutes"]
    carriers = sorted({*expected.minutes, *seen})
    wrong = [
        f"{c}: {expected.minutes[c]:,} expected, {seen[c]:,} seen" for c in carriers if expected.minutes[c] != seen[c]
    ]
    return Row(
        f"minutes of delay, all {len(carriers)} airlines equal",
        f"{expected.minutes.total():,}",
        f"{seen.total():,}",
        bool(carriers) and not wrong,
        "; ".join(wrong),
    )


def fault_rows(found: Found, kills: int, pauses: int, contrast: Contrast) -> list[Row]:
    """Return the rows that show that the faults hit open transactions and do damage; without them the other rows prove
    nothing."""
    return [
        at_least_one("SIGKILLs inside an open transaction", kills),
        at_least_one("pauses beyond the transaction's timeout", pauses),
        at_least_one("aborted records a read_uncommitted reader gets", found.uncommitted - len(found.outputs)),
        at_least_one("duplicated by a killed at-least-once loop", contrast.doubled),
    ]


def _compare_keys(check: str, expected: Sequence[bytes] | set[bytes], seen: Sequence[bytes | None]) -> Row:
    """Compare two collections of keys as multisets."""
    missing, extra = Counter[bytes | None](expected), Counter(seen)
    missing, extra = missing - extra, extra - missing
    why = [f"{count.total():,} {what}, for example {next(iter(count))!r}" for what, count in
           (("missing", missing), ("too many", extra)) if count]  # fmt: skip
    return Row(check, f"{len(expected):,}", f"{len(seen):,}", bool(expected) and not why, "; ".join(why))


def _rule_row(check: str, report: Report, rule: str) -> Row:
    verdict = report[rule]
    why = "" if verdict.holds else verdict.sentence
    return Row(check, "0", f"{verdict.violations:,} of {verdict.examined:,}", verdict.holds, why)


def at_least_one(check: str, count: int) -> Row:
    return Row(
        check, "at least 1", f"{count:,}", count >= 1, "" if count >= 1 else "none was found, so the run proves nothing"
    )
