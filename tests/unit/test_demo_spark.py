"""The check of `eos demo --spark`: the errors that it detects."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eos.demo import spark
from eos.demo.faults import Hit
from eos.demo.proof import Row
from eos.kafka.client.cluster import TransactionalIdState
from eos.testing.checker import Ends
from eos.testing.history import Log

FLIGHTS = 2_000


def log_of(topic: str, rows: list[tuple[str, dict[str, int]]]) -> Log:
    count = len(rows)
    return Log(
        topics=(topic,),
        topic=np.zeros(count, np.int32),
        partition=np.zeros(count, np.int32),
        offset=np.arange(count, dtype=np.int64),
        timestamp=np.zeros(count, np.int64),
        keys=[key.encode() for key, _ in rows],
        values=[json.dumps(row).encode() for _, row in rows],
    )


def proof(
    monkeypatch: pytest.MonkeyPatch, upserts: list[tuple[str, dict[str, int]]], hanging: int = 0, aborted: int = 5
) -> dict[str, Row]:
    """Return the rows by name, for a Kafka with these upserts."""
    departed, _ = spark.expectation(FLIGHTS)
    right = log_of(spark.HOURS, upserts)

    def read(_: str, topic: str, isolation: str = "read_committed", config: object = None) -> Log:
        if topic == spark.DEPARTURES:
            return log_of(topic, [("flight", {})] * departed)
        return right if isolation == "read_committed" else log_of(topic, upserts + upserts[:aborted])

    ends = {(topic, 0): 10 for topic in (spark.DEPARTURES, spark.HOURS, spark.MARKERS)}
    stable = {**ends, (spark.HOURS, 0): 10 - hanging}
    monkeypatch.setattr(spark, "read_topic", read)
    monkeypatch.setattr(spark, "end_offsets", lambda *_: Ends(stable=stable, log_end=ends))
    hit = Hit(spark.TRANSACTIONAL_ID, TransactionalIdState("Ongoing", 1, 0, 0), 2, 1)
    return {row.check: row for row in spark.prove("nowhere", FLIGHTS, spark.Killed(hit, 1))}


def right_upserts() -> list[tuple[str, dict[str, int]]]:
    """Return two upserts of each hour: half of the count, then all of it."""
    _, expected = spark.expectation(FLIGHTS)
    names = ("flights", "minutes", "late")
    first = [
        (key, {"flights": count // 2, "minutes": 1, "late": 0}) for key, (count, _, _) in expected.items() if count > 1
    ]
    return first + [(key, dict(zip(names, totals, strict=True))) for key, totals in expected.items()]


def test_proof_passes_correct_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = proof(monkeypatch, right_upserts())
    assert [name for name, row in rows.items() if not row.passed] == []


def test_proof_finds_a_repeated_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    upserts = right_upserts()
    rows = proof(monkeypatch, upserts + upserts[-40:])
    assert [name for name, row in rows.items() if not row.passed] == ["upserts repeated or out of order"]


def test_proof_finds_lost_or_repeated_flights(monkeypatch: pytest.MonkeyPatch) -> None:
    upserts = right_upserts()
    key, row = upserts[-1]
    rows = proof(monkeypatch, [*upserts[:-1], (key, {**row, "flights": row["flights"] + 1})])
    assert not rows["airport hours with wrong numbers"].passed
    assert key in rows["airport hours with wrong numbers"].why
    assert not rows["flights counted, all airports and hours"].passed
    assert not proof(monkeypatch, upserts[:-1])["airport hours with wrong numbers"].passed
    assert not proof(monkeypatch, [])["airport hours with wrong numbers"].passed


def test_proof_finds_hanging_transaction_and_ineffective_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = proof(monkeypatch, right_upserts(), hanging=3, aborted=0)
    wrong = ["partitions with a hanging transaction", "aborted records a read_uncommitted reader gets"]
    assert [name for name, row in rows.items() if not row.passed] == wrong
