"""An own loop without a broker: eos.testing.Session hands out, commits and aborts like a session."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import eos
import eos.testing
from eos import Record
from eos.errors import ConfigurationError, IllegalState

WORDS = [("words", "to"), ("words", "be"), ("words", None), ("words", "bad", "k")]


def shout(session: Iterable[eos.Transaction]) -> None:
    for txn in session:
        for record in txn.records:
            if record.value == b"bad":
                txn.dead_letter(record, ValueError("not that word"))
            elif record.value is not None:
                txn.send("loud-words", record.value.upper(), key=record.key)


@pytest.mark.parametrize("size", [None, 1, 3])
def test_session_loop_runs_to_end_of_records(size: int | None) -> None:
    with eos.testing.Session(WORDS, size=size, group="shop") as session, session.stopping_on_signals():
        shout(session)
    assert session.ran.values("loud-words") == [b"TO", b"BE"]
    assert session.transactions == (2 if size == 3 else 4 if size == 1 else 1)
    (letter,) = session.ran.to("words.dlq")
    assert (letter.value, letter.key, session.ran.dead_letters) == (b"bad", b"k", 1)
    assert [header for header in letter.headers if header[0] != "eos-dlq-trace"] == [
        ("eos-dlq-topic", b"words"),
        ("eos-dlq-partition", b"0"),
        ("eos-dlq-offset", b"3"),
        ("eos-dlq-timestamp", b"-1"),
        ("eos-dlq-app", b"shop"),
        ("eos-dlq-exception", b"ValueError"),
        ("eos-dlq-message", b"not that word"),
    ]


def test_aborted_records_are_handed_out_again_without_outputs() -> None:
    with eos.testing.Session([("in", str(n)) for n in range(6)], size=4) as session:
        seen: list[bytes | None] = []
        with pytest.raises(ZeroDivisionError):
            for txn in session:
                for record in txn.records:
                    seen.append(record.value)
                    txn.send("out", record.value)
                    if len(seen) == 2:
                        raise ZeroDivisionError
        assert session.ran.sent == []
        for txn in session:
            batch = txn.take(3)
            txn.give_back(1)
            for record in batch[:2]:
                txn.send("out", record.value)
            if len(session.ran.sent) == 2:
                txn.abort()
                session.stop()
            elif not session.ran.sent:
                assert txn.commit()
        with pytest.raises(IllegalState, match="this transaction has ended"):
            txn.send("out", b"late")
    assert session.ran.values("out") == [b"0", b"1"]
    assert (session.transactions, session.aborts) == (1, 2)


def test_break_out_of_the_loop_does_not_commit_the_open_transaction() -> None:
    with eos.testing.Session([("in", "a"), ("in", "b")], size=1) as session:
        for txn in session:
            for record in txn.records:
                txn.send("out", record.value)
            if session.transactions == 1:
                break
    assert session.ran.values("out") == [b"a"]


def test_wrong_test_setup_is_explained() -> None:
    with pytest.raises(ConfigurationError, match="size=0: a transaction has at least one record"):
        eos.testing.Session([], size=0)
    with eos.testing.Session([("in", "a")]) as session, pytest.raises(IllegalState, match="or always aborts"):
        for txn in session:
            txn.take(1)
            txn.abort()
    with eos.testing.Session([Record("in", 0, 0)], destinations=["out"]) as session:
        with pytest.raises(TypeError):
            next(session).send("out", object())
        with pytest.raises(ConfigurationError, match="sent to uot, which is not in destinations="):
            next(session).send("uot", b"x")
        with pytest.raises(IllegalState, match="takes no record, or always aborts"):
            for _ in session:
                pass
        with pytest.raises(ConfigurationError, match="no output goes to 'uot': outputs go to out"):
            session.ran.values("uot")
