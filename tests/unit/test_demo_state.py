"""The check of `eos demo --state`: the errors that it detects."""

from __future__ import annotations

import json
from datetime import datetime

import numpy as np
import pytest

from eos.app.cells import cell_of
from eos.app.windows import windowed_key
from eos.demo import state
from eos.demo.faults import Hit
from eos.demo.proof import Row
from eos.kafka.client.cluster import TransactionalIdState
from eos.testing.checker import Ends
from eos.testing.history import Log

FLIGHTS = 2_000
Final = list[tuple[str, tuple[int, int, int]]]


def log_of(keys: list[bytes], values: list[bytes | None]) -> Log:
    count = len(keys)
    return Log(
        topics=("topic",),
        topic=np.zeros(count, np.int32),
        partition=np.zeros(count, np.int32),
        offset=np.arange(count, dtype=np.int64),
        timestamp=np.zeros(count, np.int64),
        keys=keys,
        values=values,
    )


def encode(total: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("flights", "minutes", "longest"), total, strict=True))


def log_of_hours(sums: Final) -> Log:
    keys, values = list[bytes](), list[bytes | None]()
    for name, total in sums:
        airline, begins = name.split(" ")
        keys.append(airline.encode())
        values.append(json.dumps({"begins": f"{begins}:00:00Z", "total": encode(total)}).encode())
    return log_of(keys, values)


def log_of_changes(sums: Final, closed: Final) -> Log:
    """Return a changelog: a sum for each hour, and a tombstone for the closed ones."""
    cells = {}
    for name, _ in (*sums, *closed):
        airline, begins = name.split(" ")
        start_ms = int(datetime.fromisoformat(f"{begins}:00:00Z").timestamp() * 1000)
        cells[name] = cell_of("total", windowed_key(airline.encode(), start_ms))
    values = [json.dumps(encode(total)).encode() for _, total in (*sums, *closed)]
    keys = [*cells.values(), *(cells[name] for name, _ in closed)]
    return log_of(keys, [*values, *[None] * len(closed)])


def right() -> tuple[Final, Final]:
    """Return the final sums and the sums that are kept of a correct run."""
    final, still_open = state.expectation(FLIGHTS)
    return list(final.items()), list(still_open.items())


def proof(
    monkeypatch: pytest.MonkeyPatch, final: Final, kept: Final, reads: tuple[int, int] = (3, 9), late: int = 0
) -> dict[str, Row]:
    outputs, nothing = log_of_hours(final), log_of([], [])
    there = {
        state.BY_HOUR: outputs,
        state.CHANGELOG: log_of_changes(kept, final[:1]),
        state.BY_AIRLINE: nothing,
        state.LATE: log_of([b"AA"] * late, [None] * late),
    }

    def read(_: str, topic: str | tuple[str, ...], isolation: str = "read_committed", config: object = None) -> Log:
        if isinstance(topic, str):
            return there[topic]
        count = sum(len(there[name]) for name in topic) + 5
        return log_of([b""] * count, [None] * count)

    ends = {(state.BY_HOUR, 0): 10}
    monkeypatch.setattr(state, "read_topic", read)
    monkeypatch.setattr(state, "end_offsets", lambda *_: Ends(stable=ends, log_end=ends))
    hit = Hit("delays-per-hour-a", TransactionalIdState("Ongoing", 1, 0, 0), 2, 1)
    return {row.check: row for row in state.prove("nowhere", FLIGHTS, state.Killed((hit, hit), *reads))}


def wrong(rows: dict[str, Row]) -> set[str]:
    return {check for check, row in rows.items() if not row.passed}


DEPARTURES, MINUTES, AGAIN = "departures summed", "minutes of delay in final sums", "final sums sent again"
FINAL = "airlines and hours with a wrong final sum"
KEPT = "airlines and open hours with a wrong sum in the changelog"


def test_proof_passes_a_correct_history(monkeypatch: pytest.MonkeyPatch) -> None:
    final, kept = right()
    assert final
    assert kept
    rows = proof(monkeypatch, final, kept)
    assert (wrong(rows), len(rows)) == (set(), 11)


def test_proof_finds_a_repeated_missing_or_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    final, kept = right()
    assert wrong(proof(monkeypatch, [*final, final[-1]], kept)) == {AGAIN}
    assert wrong(proof(monkeypatch, final[:-1], kept)) >= {DEPARTURES, FINAL}
    name, (flights, minutes, longest) = kept[3]
    stale = [*kept[:3], (name, (flights - 1, minutes, longest)), *kept[4:]]
    assert wrong(proof(monkeypatch, final, stale)) == {DEPARTURES, KEPT}
    assert "expected" in proof(monkeypatch, final, stale)[KEPT].why
    assert wrong(proof(monkeypatch, [*final, kept[0]], kept[1:])) >= {FINAL, KEPT}


def test_proof_finds_a_late_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(proof(monkeypatch, *right(), late=1)) == {"flights that came too late for their hour"}


def test_proof_finds_ineffective_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(wrong(proof(monkeypatch, *right(), reads=(9, 9)))) == 1
    assert len(wrong(proof(monkeypatch, *right(), reads=(0, 0)))) == 2
