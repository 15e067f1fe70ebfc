"""The check of `eos demo --state`: the errors that it detects."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eos.app.cells import cell_of
from eos.demo import state
from eos.demo.faults import Hit
from eos.demo.proof import Row
from eos.kafka.client.cluster import TransactionalIdState
from eos.testing.checker import Ends
from eos.testing.history import Log

FLIGHTS = 2_000
Records = list[tuple[bytes, tuple[int, int, int]]]


def log_of(records: Records) -> Log:
    count = len(records)
    return Log(
        topics=("topic",),
        topic=np.zeros(count, np.int32),
        partition=np.zeros(count, np.int32),
        offset=np.arange(count, dtype=np.int64),
        timestamp=np.zeros(count, np.int64),
        keys=[key for key, _ in records],
        values=[json.dumps(dict(zip(("flights", "minutes", "longest"), t, strict=True))).encode() for _, t in records],
    )


def right() -> tuple[Records, Records]:
    """Return outputs and changes of a correct run: all minutes of a key with its last flight."""
    expected = state.expectation(FLIGHTS)
    outputs = [
        (key.encode(), (count, total[1] if count == total[0] else 0, total[2]))
        for key, total in expected.items()
        for count in range(1, total[0] + 1)
    ]
    return outputs, [(cell_of("total", key.encode()), total) for key, total in expected.items()]


def proof(
    monkeypatch: pytest.MonkeyPatch, outputs: Records, changes: Records, reads: tuple[int, int] = (3, 9)
) -> dict[str, Row]:
    there = {state.BY_DAY: outputs, state.CHANGELOG: changes, state.BY_AIRLINE: outputs}

    def read(_: str, topic: str | tuple[str, ...], isolation: str = "read_committed", config: object = None) -> Log:
        return log_of(there[topic] if isinstance(topic, str) else outputs * 2 + outputs[:5])

    ends = {(state.BY_DAY, 0): 10}
    monkeypatch.setattr(state, "read_topic", read)
    monkeypatch.setattr(state, "end_offsets", lambda *_: Ends(stable=ends, log_end=ends))
    hit = Hit("delays-by-day-a", TransactionalIdState("Ongoing", 1, 0, 0), 2, 1)
    return {row.check: row for row in state.prove("nowhere", FLIGHTS, state.Killed((hit, hit), *reads))}


def wrong(rows: dict[str, Row]) -> set[str]:
    return {check for check, row in rows.items() if not row.holds}


SUMS, KEPT = "airlines and days with a wrong sum in the output", "airlines and days with a wrong sum in the changelog"
UNEVEN = "sums that skip or repeat a flight"


def test_correct_history_passes_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = proof(monkeypatch, *right())
    assert (wrong(rows), len(rows)) == (set(), 11)


def test_repeated_or_missing_flight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, changes = right()
    assert wrong(proof(monkeypatch, [*outputs, outputs[-1]], changes)) == {"departures summed", UNEVEN}
    assert wrong(proof(monkeypatch, outputs[:-1], changes)) >= {"departures summed", SUMS}
    key, (flights, minutes, longest) = changes[3]
    stale = [*changes, (key, (flights - 1, minutes, longest))]
    assert wrong(proof(monkeypatch, outputs, stale)) == {KEPT}
    assert "expected" in proof(monkeypatch, outputs, stale)[KEPT].why


def test_ineffective_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(wrong(proof(monkeypatch, *right(), reads=(9, 9)))) == 1
    assert len(wrong(proof(monkeypatch, *right(), reads=(0, 0)))) == 2
