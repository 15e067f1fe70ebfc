"""Stopping a user's loop over a session: from its body, by signals, and before it has started."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from eos.errors import IllegalState, Temporary
from eos.session.outcomes import Listener
from eos.session.session import TransactSession
from tests.unit.test_world import ALL, SETTINGS, Script


def test_stop_in_the_body_ends_after_the_open_transaction() -> None:
    script = Script()
    with TransactSession(SETTINGS, ["in"], world=script.world) as session:
        for txn in session:
            session.stop()
            for record in txn.records:
                txn.send("out", record.value)
    assert (script.visible, session.counters.transactions) == (ALL[:5], 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_loop_that_waits_for_records(number: signal.Signals) -> None:
    class SignalWhenIdle(Listener):
        def on_idle(self) -> None:
            if session.counters.records_in == len(ALL):
                signal.raise_signal(number)

    script, before = Script(), signal.getsignal(number)
    session = TransactSession(SETTINGS, ["in"], listener=SignalWhenIdle(), world=script.world)
    with session, session.stopping_on_signals():
        for txn in session:
            for record in txn.records:
                txn.send("out", record.value)
    assert (script.visible, script.committed) == (ALL, 10)
    assert signal.getsignal(number) is before


def test_second_signal_aborts_the_open_transaction() -> None:
    script = Script()
    with (
        pytest.raises(Temporary, match=r"requested a second time.*: the open transaction was abandoned"),
        TransactSession(SETTINGS, ["in"], world=script.world) as session,
        session.stopping_on_signals(),
    ):
        for txn in session:
            for record in txn.records:
                txn.send("out", record.value)
                signal.raise_signal(signal.SIGTERM)
    assert (script.visible, script.committed, script.calls[-1]) == ([], -1001, "abort")


def test_first_signal_after_stop_does_not_abort() -> None:
    script = Script()
    with TransactSession(SETTINGS, ["in"], world=script.world) as session, session.stopping_on_signals():
        for txn in session:
            session.stop()
            signal.raise_signal(signal.SIGTERM)
            for record in txn.records:
                txn.send("out", record.value)
    assert script.visible == ALL[:5]


def test_applications_timer_is_restored_after_a_signal() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: received.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 50)
        with TransactSession(SETTINGS, ["in"], world=Script().world) as session:
            with session.stopping_on_signals():
                signal.raise_signal(signal.SIGALRM)
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
            with session.stopping_on_signals():
                signal.raise_signal(signal.SIGTERM)
                assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
            assert 30 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
            signal.raise_signal(signal.SIGALRM)
        assert received == [signal.SIGALRM] * 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_records_polled_during_a_stop_begin_no_transaction() -> None:
    script = Script()
    session = TransactSession(SETTINGS, ["in"], world=script.world)
    with session:
        poll = session._parts.fetcher.gather

        def stopped_meanwhile() -> None:
            poll()
            if len(session._parts.positions):
                session.stop()

        session._parts.fetcher.gather = stopped_meanwhile  # type: ignore[method-assign]
        assert list(session) == []
    assert "begin" not in script.calls


def test_stopping_on_signals_is_refused_outside_the_main_thread() -> None:
    session = TransactSession(SETTINGS, ["in"], world=Script().world)

    def handle_signals() -> None:
        with session.stopping_on_signals():
            pass

    with ThreadPoolExecutor(1) as pool, pytest.raises(IllegalState, match=r"call `session.stop\(\)`"):
        pool.submit(handle_signals).result()


def test_loop_of_an_unstarted_or_closed_session_is_refused() -> None:
    session = TransactSession(SETTINGS, ["in"], world=Script().world)
    with pytest.raises(IllegalState, match="not started, or closed: `with TransactSession"):
        next(session)
    with session:
        next(session).abort()
    with pytest.raises(IllegalState, match="not started, or closed: `with TransactSession"):
        for _ in session:
            pass
