"""Test `eos.transaction` and what readers see: K1, K2, K3, K5, K7, K18 and K20 without an input."""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import eos
from eos.broker import LocalKafka
from eos.errors import (
    CommitOutcomeUnknown,
    ConfigurationError,
    Fenced,
    IllegalState,
    PoisonRecord,
    Temporary,
    Unavailable,
)
from eos.plain import Transactions
from eos.session.producer.producer import TransactionalProducer
from eos.session.producer.states import State
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.reading import create_topic, settled_values, transaction_of, visible_values, wait_until
from tests.support.sessions import decide_replacement_if_broken


@pytest.fixture
def settings(kafka: LocalKafka, names: Callable[[str], str]) -> dict[str, object]:
    return {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": names("tx"), "linger.ms": 0}


@pytest.fixture
def topic(kafka: LocalKafka, names: Callable[[str], str]) -> str:
    return create_topic(kafka.bootstrap_servers, names("out"), partitions=2)


def test_send_reports_topic_partition_and_offset(kafka: LocalKafka, settings: dict[str, object], topic: str) -> None:
    with eos.transaction(settings) as txn:
        sent = [txn.send(topic, f"{n}", partition=n % 2, headers=[("n", b"1")], timestamp_ms=1_000) for n in range(4)]
    assert [(d.topic, d.partition, d.offset, d.error) for d in sent] == [
        (topic, 0, 0, None),
        (topic, 1, 0, None),
        (topic, 0, 1, None),
        (topic, 1, 1, None),
    ]
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"0", b"2"], 1: [b"1", b"3"]}


def test_second_transaction_block_is_refused_and_first_stays_open(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    with Transactions(settings) as transactions:
        with transactions.begin() as first:
            first.send(topic, "a1", partition=0)
            second = transactions.begin()
            with pytest.raises(IllegalState, match="is open: end its block first"):
                second.__enter__()
            first.send(topic, "a2", partition=0)
        with transactions.begin() as next_one:
            with pytest.raises(IllegalState, match="block has ended"):
                first.send(topic, "late", partition=0)
            next_one.send(topic, "b1", partition=0)
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"a1", b"a2", b"b1"], 1: []}


@pytest.mark.parametrize(("broker", "ids"), [("kafka", 1), ("kafka392", 2)])
def test_replaced_producer_commits_offsets_under_a_new_id_before_4_0(
    broker: str,
    ids: int,
    request: pytest.FixtureRequest,
    names: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replace the producer as a session does; tests/broker/test_late_requests.py shows the losses under the same id."""
    monkeypatch.setattr(TransactionalProducer, "decide_replacement", lambda self: "retry: asked by the test")
    servers = request.getfixturevalue(broker).bootstrap_servers
    topic, name = create_topic(servers, names("in")), names("tx")
    settings = {"bootstrap.servers": servers, "transactional.id": name}
    group = Consumer({"bootstrap.servers": servers, "group.id": names("group")})
    used = set()
    with Transactions(settings, offsets=True) as transactions:
        for offset in (3, 7):
            with transactions.begin() as txn:
                assert txn.producer_reinitialised
                used.add(transactions._producer.transactional_id)
                txn.send_offsets([TopicPartition(topic, 0, offset)], group.consumer_group_metadata())
    assert used == set([name, f"{name}-alternate"][:ids])
    assert group.committed([TopicPartition(topic, 0)], timeout=15)[0].offset == 7
    group.close()


def test_exception_in_the_block_aborts_and_is_raised_unchanged(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    with pytest.raises(ZeroDivisionError), eos.transaction(settings) as txn:
        txn.send(topic, "never seen")
        _ = 1 // 0
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [], 1: []}
    assert transaction_of(kafka.bootstrap_servers, str(settings["transactional.id"])).state != "Ongoing"


def test_refused_abort_does_not_hide_the_error_of_the_block(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    """End a block right after its first send, so that EndTxn overtakes AddPartitionsToTxn: INVALID_TXN_STATE."""
    proxied = settings | {"bootstrap.servers": kafka.proxied_servers}
    with HoldingProxy.before(kafka) as proxy, Transactions(proxied) as transactions:
        swallowed = proxy.on(ApiKey.AddPartitionsToTxn, Fault.BLACKHOLE)
        with pytest.raises(ZeroDivisionError), transactions.begin() as txn:
            txn.send(topic, "never seen", partition=0)
            swallowed.wait()
            _ = 1 // 0
        assert transactions._producer.decide_replacement() is not None
        with transactions.begin() as txn:
            txn.send(topic, "seen", partition=0)
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"seen"], 1: []}


def test_transaction_becomes_visible_in_all_partitions(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    with Transactions(settings) as transactions:
        with transactions.begin() as txn:
            for partition in (0, 1):
                txn.send(topic, f"{partition}", partition=partition)
            transactions._producer.flush()
            assert visible_values(kafka.bootstrap_servers, topic) == {0: [], 1: []}
        assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"0"], 1: [b"1"]}


def test_plain_record_after_an_open_transaction_keeps_its_order(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    """Check K20: the last stable offset holds back all records after the first open transaction of a partition."""
    plain = Producer({"bootstrap.servers": kafka.bootstrap_servers, "enable.idempotence": True, "log_level": 0})
    with Transactions(settings) as transactions:
        with transactions.begin() as txn:
            txn.send(topic, "transactional", partition=0)
            transactions._producer.flush()
            plain.produce(topic, b"plain, behind it", partition=0)
            plain.produce(topic, b"plain, elsewhere", partition=1)
            assert plain.flush(30) == 0
            assert visible_values(kafka.bootstrap_servers, topic) == {0: [], 1: [b"plain, elsewhere"]}
        assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"transactional", b"plain, behind it"]


def test_calls_in_the_wrong_order_raise_and_change_nothing(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    with Transactions(settings) as transactions:
        with transactions.begin() as txn:
            kept = txn.send(topic, "kept", partition=0)
            with pytest.raises(IllegalState, match="begin is not possible in state InTransaction"):
                transactions._producer.begin()
        with pytest.raises(IllegalState, match="block has ended"):
            txn.send(topic, "too late", partition=0)
        assert transactions._producer.state is State.READY
    assert kept.error is None
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"kept"]


def test_newer_producer_fences_the_older_producer(kafka: LocalKafka, settings: dict[str, object], topic: str) -> None:
    with Transactions(settings) as old, contextlib.ExitStack() as newer:
        with old.begin() as txn:
            txn.send(topic, "old", partition=0)
        with pytest.raises(Fenced), old.begin() as txn:
            txn.send(topic, "zombie", partition=0)
            new = newer.enter_context(Transactions(settings))
        with new.begin() as txn:
            txn.send(topic, "new", partition=0)
        with pytest.raises(Fenced), old.begin() as txn:
            txn.send(topic, "the zombie begins again", partition=0)
        with new.begin() as txn:
            txn.send(topic, "newer", partition=0)
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"old", b"new", b"newer"]


def test_aborted_producer_does_not_fence_a_newer_producer(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    """Abort in a fenced producer, which is replaced before the next transaction; an init would take the id back."""
    with Transactions(settings) as old:
        with contextlib.suppress(ZeroDivisionError), old.begin() as txn:
            txn.send(topic, "aborted", partition=0)
            _ = 1 // 0
        with Transactions(settings) as new:
            with new.begin() as txn:
                txn.send(topic, "new", partition=0)
            for _ in range(2):
                with pytest.raises(Fenced, match="a newer instance took over"), old.begin():
                    pass
            with new.begin() as txn:
                txn.send(topic, "newer", partition=0)
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"new", b"newer"]


def test_timed_out_transaction_can_be_retried(kafka: LocalKafka, settings: dict[str, object], topic: str) -> None:
    def timed_out() -> bool:
        return transaction_of(kafka.bootstrap_servers, str(settings["transactional.id"])).state == "CompleteAbort"

    with Transactions(settings | {"transaction.timeout.ms": 3_000}) as transactions:
        with pytest.raises(Temporary, match=r"exceeded transaction\.timeout\.ms=3000"), transactions.begin() as txn:
            txn.send(topic, "too slow", partition=0)
            transactions._producer.flush()
            wait_until("the broker ends the transaction", timed_out)
        with transactions.begin() as txn:
            txn.send(topic, "again", partition=0)
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"again"]


def test_refused_commit_without_an_outcome_is_reported_as_unknown(
    kafka: LocalKafka, settings: dict[str, object], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End the transaction with a late EndTxn (H1, row 5): its own EndTxn gets INVALID_TXN_STATE, which shows no
    outcome."""
    monkeypatch.setattr(TransactionalProducer, "decide_replacement", decide_replacement_if_broken)
    proxied = settings | {"bootstrap.servers": kafka.proxied_servers}
    with HoldingProxy.before(kafka) as proxy, Transactions(proxied) as transactions:
        late = proxy.on(ApiKey.EndTxn, Fault.LATE_COPY)
        with pytest.raises(ZeroDivisionError), transactions.begin() as txn:
            txn.send(topic, "aborted", partition=0)
            assert transactions._producer.client.producer.flush(30) == 0, "not acknowledged in 30 s"
            _ = 1 // 0
        late.wait()
        with pytest.raises(CommitOutcomeUnknown, match="INVALID_TXN_STATE"), transactions.begin() as txn:
            txn.send(topic, "perhaps", partition=0)
            assert transactions._producer.client.producer.flush(30) == 0, "not acknowledged in 30 s"
            late.deliver_late()
        with transactions.begin() as txn:
            txn.send(topic, "seen", partition=1)
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [], 1: [b"seen"]}


def test_block_that_ignores_a_refused_send_aborts_with_its_reason(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    with Transactions(settings) as transactions:
        with pytest.raises(PoisonRecord, match="MSG_SIZE_TOO_LARGE") as refused, transactions.begin() as txn:
            txn.send(topic, "small", partition=0)
            transactions._producer.flush()  # Otherwise the abort would have nothing to abort.
            with contextlib.suppress(PoisonRecord):
                txn.send(topic, b"x" * 2_000_000, partition=0)
        assert refused.value.topic == topic
        assert transaction_of(kafka.bootstrap_servers, str(settings["transactional.id"])).state != "Ongoing"
        with transactions.begin() as txn:
            txn.send(topic, "after", partition=0)
    assert settled_values(kafka.bootstrap_servers, topic)[0] == [b"after"]


def test_callback_error_in_the_flush_aborts_and_is_raised_unchanged(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    now = threading.Event()

    def fail(statistics: str) -> None:
        if now.is_set():
            raise ZeroDivisionError

    with Transactions(settings | {"stats_cb": fail, "statistics.interval.ms": 10}) as transactions:
        with pytest.raises(ZeroDivisionError), transactions.begin() as txn:
            txn.send(topic, "never seen", partition=0)
            transactions._producer.flush()
            now.set()
            client = transactions._producer.client
            wait_until("the callback", lambda: transactions._producer.poll(0.01) or client._callback_error, 30)
        assert transaction_of(kafka.bootstrap_servers, str(settings["transactional.id"])).state != "Ongoing"
    assert settled_values(kafka.bootstrap_servers, topic)[0] == []


def test_transaction_timeout_above_the_maximum_is_a_config_error(settings: dict[str, object]) -> None:
    with (
        pytest.raises(ConfigurationError, match="INVALID_TRANSACTION_TIMEOUT"),
        eos.transaction({**settings, "transaction.timeout.ms": 3_600_000}),
    ):
        pass


def test_error_names_the_missing_topic(settings: dict[str, object], names: Callable[[str], str]) -> None:
    with pytest.raises(Unavailable, match=names("nowhere")), eos.transaction(settings) as txn:
        txn.send(names("nowhere"), "lost?")


def test_interrupted_commit_does_not_end_later_transactions(
    kafka: LocalKafka, settings: dict[str, object], topic: str
) -> None:
    """Interrupt a commit, so that its outcome is unknown; the next transaction begins all the same."""
    with HoldingProxy.before(kafka) as proxy:
        name = str(settings["transactional.id"])
        with Transactions(settings | {"bootstrap.servers": kafka.proxied_servers}) as transactions:
            held = proxy.on(ApiKey.EndTxn, Fault.BLACKHOLE, transactional_id=name)

            def interrupt() -> None:
                held.wait()
                _thread.interrupt_main()

            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            with pytest.raises(KeyboardInterrupt), transactions.begin() as txn:
                txn.send(topic, "never answered", partition=0)
            interrupting.join()
            with transactions.begin() as txn:
                txn.send(topic, "the next", partition=0)
    assert b"the next" in settled_values(kafka.bootstrap_servers, topic)[0]
