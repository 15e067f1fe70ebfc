"""Run our own transactions through a protecting shim: the client's own epochs decide the ownership of an id."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.errors import Fenced, Temporary
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.plain import Transactions
from eos.session.producer.producer import TransactionalProducer
from tests.shim.shims import RunningShim, running, start
from tests.support.reading import create_topic, settled_values, transaction_of, wait_until
from tests.support.sessions import decide_replacement_if_broken

pytestmark = pytest.mark.takes(38)

Names = Callable[[str], str]


@pytest.fixture(scope="module")
def shim(kafka: LocalKafka) -> Iterator[RunningShim]:
    with running(kafka.bootstrap_servers, "--protect") as shim:
        yield shim


@pytest.fixture
def settings(shim: RunningShim, names: Names) -> dict[str, Any]:
    return {"bootstrap.servers": shim.bootstrap_servers, "transactional.id": names("id"), "linger.ms": 0}


@pytest.fixture
def topic(kafka: LocalKafka, names: Names) -> str:
    return create_topic(kafka.bootstrap_servers, names("out"))


def send(transactions: Transactions, topic: str, *values: str) -> None:
    for value in values:
        with transactions.begin() as txn:
            txn.send(topic, value, partition=0)


def test_describe_transactions_shows_the_clients_epoch(
    kafka: LocalKafka, settings: dict[str, Any], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a slow machine, the producer is replaced and takes its own epoch.
    monkeypatch.setattr(TransactionalProducer, "decide_replacement", decide_replacement_if_broken)
    with Transactions(settings) as transactions, ClusterAdmin(Settings(settings)) as admin:
        send(transactions, topic, "1", "2", "3")
        mine = transactions._producer.poll_identity()
        assert mine is not None
        real = transaction_of(kafka.bootstrap_servers, settings["transactional.id"])
        assert (real.producer_id, real.producer_epoch) == (mine.producer_id, mine.epoch + 3)
        seen = admin.describe(settings["transactional.id"])
        assert seen is not None
        assert (seen.producer_id, seen.epoch) == (mine.producer_id, mine.epoch)


def test_transaction_after_its_timeout_can_be_retried(kafka: LocalKafka, settings: dict[str, Any], topic: str) -> None:
    def timed_out() -> bool:
        return transaction_of(kafka.bootstrap_servers, settings["transactional.id"]).state == "CompleteAbort"

    with Transactions(settings | {"transaction.timeout.ms": 3_000}) as transactions:
        send(transactions, topic, "1", "2")
        with pytest.raises(Temporary, match=r"exceeded transaction\.timeout\.ms=3000"), transactions.begin() as txn:
            txn.send(topic, "too slow", partition=0)
            transactions._producer.flush()
            wait_until("the broker ends the transaction", timed_out)
        send(transactions, topic, "again")
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"1", b"2", b"again"]


def test_aborted_instance_continues_until_a_newer_one_starts(
    kafka: LocalKafka, settings: dict[str, Any], topic: str
) -> None:
    with Transactions(settings) as old:
        send(old, topic, "1", "2")
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError), old.begin() as txn:
                txn.send(topic, "aborted", partition=0)
                _ = 1 // 0
            send(old, topic, "3")
        with contextlib.suppress(ZeroDivisionError), old.begin() as txn:
            txn.send(topic, "aborted", partition=0)
            _ = 1 // 0
        with Transactions(settings) as new:
            send(new, topic, "new")
            with pytest.raises(Fenced, match="a newer instance took over"), old.begin():
                pass
            send(new, topic, "newer")
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"1", b"2", b"3", b"3", b"new", b"newer"]


def test_shim_restart_without_journal_is_not_a_newer_instance(kafka: LocalKafka, names: Names, topic: str) -> None:
    """Restart the shim without its journal: it no longer knows the epochs of clients, and must give none that looks
    newer."""
    listen = ("--protect", "--listen", f"127.0.0.1:{free_ports(1)[0]}")
    first = start(kafka.bootstrap_servers, *listen)
    settings = {"bootstrap.servers": first.bootstrap_servers, "transactional.id": names("id"), "linger.ms": 0}
    with Transactions(settings) as transactions:
        send(transactions, topic, "1", "2", "3")
        first.process.kill()
        first.process.wait()
        with running(kafka.bootstrap_servers, *listen):

            def continues() -> bool:
                try:
                    send(transactions, topic, "4")
                except Temporary:
                    return False  # the restart fenced this producer, which then checks the ownership and can retry
                return True

            wait_until("a transaction through the new shim", continues, 60)
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"1", b"2", b"3", b"4"]
