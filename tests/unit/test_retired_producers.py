"""Statistics of idle, hung and replaced producers are read, so that they do not accumulate."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import Any

import pytest

from eos.errors import CallFailed
from eos.kafka.admin.ownership import Identity
from eos.kafka.client import watchdog
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import CallHung
from eos.kafka.client.world import REAL
from eos.session.producer import client as client_module
from eos.session.producer.client import Client
from eos.session.producer.producer import TransactionalProducer
from eos.session.producer.states import Event
from eos.session.session import TransactSession
from tests.support import reading

UNREACHABLE: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t"}
OFTEN = UNREACHABLE | {"statistics.interval.ms": 10}


wait_until = functools.partial(reading.wait_until, timeout=30)


def with_a_client(transactional: TransactionalProducer) -> Client:
    """Give the producer a client and mark it as initialised, which would need a broker."""
    client = transactional._client = Client(transactional._settings, "t", reports=False)
    transactional._machine.fire(Event.INITIALISED)
    return client


@pytest.mark.usefixtures("uncollected")
def test_replaced_client_is_destroyed_without_gc() -> None:
    client = Client(Settings(UNREACHABLE), "t", reports=False)
    reference = weakref.ref(client)
    client.retire()
    del client
    wait_until("the client is still there, and with it librdkafka's threads", lambda: reference() is None)
    wait_until("the retiring thread ends", lambda: all(t.name != "eos-retire" for t in threading.enumerate()))


@pytest.mark.usefixtures("uncollected")
def test_client_with_a_hung_call_is_drained_and_then_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "ABANDONED_POLL_S", 0.01)
    client = Client(Settings(OFTEN), "t", reports=False)
    hang = threading.Event()
    with pytest.raises(CallHung):
        client.watchdog.call(hang.wait, timeout_s=0.01)
    client.retire()
    reference = weakref.ref(client)
    del client
    wait_until(
        "its statistics are read, so it is not destroyed", lambda: getattr(reference(), "statistics_seen", 0) > 3
    )
    hang.set()
    wait_until("it is destroyed", lambda: reference() is None)


@pytest.mark.usefixtures("uncollected")
def test_client_with_a_failed_call_is_destroyed_without_gc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_LOOKS_UNTIL_COLLECTED", -1)
    transactional = TransactionalProducer(Settings(UNREACHABLE | {"eos.call.timeout.ms": "100"}), "t")
    client = with_a_client(transactional)
    with pytest.raises(CallFailed, match="init: _TIMED_OUT"):
        transactional._call(client, "init", client.init_transactions, deadline=time.monotonic())
    reference = weakref.ref(client)
    del client
    transactional.close()
    wait_until(
        "the failure's traceback holds the client, and with it librdkafka's threads", lambda: reference() is None
    )


@pytest.mark.usefixtures("uncollected")
def test_referenced_client_is_drained_and_collected_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "ABANDONED_POLL_S", 0.01)
    monkeypatch.setattr(client_module, "_LOOKS_UNTIL_COLLECTED", 50)
    client = Client(Settings(OFTEN), "t", reports=False)
    held: list[Any] = [client.producer]
    held.append(held)
    client.retire()
    reference = weakref.ref(client)
    del client, held
    wait_until("its statistics are read while it is held", lambda: getattr(reference(), "statistics_seen", 0) > 3)
    wait_until("it is collected and destroyed", lambda: reference() is None)
    wait_until("the retiring thread ends", lambda: all(t.name != "eos-retire" for t in threading.enumerate()))


def test_statistics_of_an_idle_client_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's function may run for minutes, or a kept producer may be idle."""
    monkeypatch.setattr(client_module, "IDLE_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "IDLE_INTERVAL_S", 0.01)
    client = Client(Settings(OFTEN), "t", reports=False)
    threads: set[str] = set()
    client._user_stats = lambda text: threads.add(threading.current_thread().name)
    wait_until("its statistics are read", lambda: client.statistics_seen > 3)
    assert threads == {"eos-t"}
    client.retire()
    wait_until("its thread ends", lambda: all(t.name != "eos-t" for t in threading.enumerate()))


def test_callback_error_of_an_idle_client_is_kept_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "IDLE_INTERVAL_S", 0.01)
    client = Client(Settings(OFTEN), "t", reports=False)

    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    client._user_stats = interrupted
    wait_until("it is kept", lambda: isinstance(client._callback_error, KeyboardInterrupt))
    assert client.watchdog.call(int, "7", timeout_s=10) == 7, "the thread continues"
    client.retire()


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="the host's clocks: Linux")
def test_transaction_ages_while_the_host_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's timeout continues, so the age uses CLOCK_BOOTTIME, and not time.monotonic(), which stops."""
    transactional = TransactionalProducer(Settings(OFTEN), "t")
    with_a_client(transactional)
    slept, now = 0.0, time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda which: now(which) + (slept if which == time.CLOCK_BOOTTIME else 0)
    )
    transactional._open_since, slept = REAL.boot_clock(), 60.0
    monkeypatch.setattr(transactional, "poll_identity", lambda fresh: Identity(1, 1))
    try:
        situation = transactional.describe_fenced()
        assert situation is not None
        assert 60_000 <= situation.age_ms < 90_000
    finally:
        transactional.close()


def test_idle_session_reads_its_producers_statistics() -> None:
    session = TransactSession(OFTEN, ["in"])
    client = with_a_client(session.producer)

    def read() -> bool:
        session._loop._replace_while_idle()
        return client.statistics_seen > 3

    try:
        wait_until("its statistics are read", read)
    finally:
        session.close()
