"""The journal of identity pairs: what a restarted shim restores, and what it must not trust."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.errors import ConfigurationError
from eos.shim.protect import journal as module
from eos.shim.protect.journal import Journal
from eos.shim.protect.machine import (
    CONCURRENT_TRANSACTIONS,
    INVALID_PRODUCER_EPOCH,
    End,
    Identity,
    Machine,
    Pair,
    Refused,
    Written,
)

V, R = Identity(4000, 7), Identity(4000, 9)
P0 = ("out", 0)


def pair(name: str, real: Identity = R) -> Pair:
    return Pair(name, V, real, True, None, End(3, Identity(4000, 8), True), [("out", 0, 12), ("out", 1, 0)])


def written(path: Path, *lines: Pair | str) -> list[Pair]:
    """Return what a shim restores that starts after a kill of one that wrote these lines."""
    first = Journal(path)
    for line in lines:
        if isinstance(line, str):
            first.write_opened(line)
        else:
            first.write_pair(line)
    first.close()
    second = Journal(path)
    second.close()
    return second.restored_pairs


def test_journal_restores_the_last_pair_of_each_id(tmp_path: Path) -> None:
    newer = pair("a", Identity(5000, 0))
    assert written(tmp_path / "j", pair("a"), pair("b"), newer) == [newer, pair("b")]


def test_journal_forgets_ids_with_an_open_transaction(tmp_path: Path) -> None:
    assert written(tmp_path / "j", pair("a"), pair("b"), "a") == [pair("b")]
    assert written(tmp_path / "j", pair("a"), "a", pair("a")) == [pair("b"), pair("a")]


def test_journal_ignores_only_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, pair("a"), pair("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert written(path) == [pair("a")]
    path.write_bytes(b"[1" + whole)
    with pytest.raises(ConfigurationError, match="cannot be read at line 1"):
        Journal(path)


def test_journal_is_shortened_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW_LINES", 20)
    path = tmp_path / "j"
    lines = [line for number in range(200) for line in ("a", pair("a", Identity(4000, number)))]
    assert written(path, pair("b"), *lines) == [pair("b"), pair("a", Identity(4000, 199))]
    first = Journal(path)
    for number in range(300):
        first.write_pair(pair("a", Identity(4000, number)))
    assert len(path.read_bytes().splitlines()) < 60
    first.close()


def test_journal_in_use_is_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j")
    with pytest.raises(ConfigurationError, match="in use by another shim"):
        Journal(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j").close()


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 9), max_size=3)), max_size=8), st.booleans())
def test_restored_client_continues(transactions: list[tuple[bool, list[int]]], renews: bool) -> None:
    """Run the same transactions in one machine and in another that is stored and restored after each."""

    def outcome(restarts: bool) -> list[object]:
        machine, virtual, sequence, seen = Machine(), V, 0, list[object]()
        machine.note_init("t", V, 1, renews)
        for committed, counts in transactions:
            seen.append(_again(machine.check_open, "t", virtual, 1, "add"))
            for count in counts:
                batch = [Written(P0, sequence, count)]
                seen.append(_again(machine.check_produce, "t", virtual, 1, 0, batch))
                sequence += count
            end = _again(machine.check_end, "t", virtual, 1, committed, "end")
            told = machine.note_end("t", end, Identity(end.identity.producer_id, end.identity.epoch + 1))
            if told:
                virtual, sequence = machine.renew("t", virtual, 1) or virtual, 0
            kept = machine.pair("t")
            assert kept is not None
            if restarts:
                machine = Machine()
                machine.restore(kept)
            seen.append((told, machine.state("t"), machine.real("t")))
        return seen

    assert outcome(True) == outcome(False)


def _again(call: Callable[..., Any], *arguments: Any) -> Any:
    """Send as a live client does: it repeats a request that is refused without a fence."""
    try:
        return call(*arguments)
    except Refused as refused:
        if refused.code == INVALID_PRODUCER_EPOCH:
            raise
        return call(*arguments)


def test_restored_client_has_no_trusted_connection(tmp_path: Path) -> None:
    machine = Machine()
    (restored,) = written(tmp_path / "j", pair("a"))
    machine.restore(restored)
    for code, call in (
        (CONCURRENT_TRANSACTIONS, lambda connection: machine.check_end("a", V, connection, True, "late end")),
        (CONCURRENT_TRANSACTIONS, lambda connection: machine.check_open("a", V, connection, "add")),
    ):
        for connection in (1, 2):
            with pytest.raises(Refused) as caught:
                call(connection)
            assert caught.value.code == code
    assert machine.check_open("a", V, 1, "add") == R
    with pytest.raises(Refused):
        machine.check_offset_commit("a", V, 1, "g", 0, "offsets")
