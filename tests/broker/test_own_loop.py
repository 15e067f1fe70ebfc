"""`TransactSession` in the hands of people who own their loop: what ends a transaction, and what comes again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, TopicPartition

import eos
from eos import Transaction, TransactSession
from eos.broker import LocalKafka
from eos.errors import Action, CallFailed, Fenced, IllegalState
from eos.plain import Transactions
from tests.support.reading import create_topic, ends_of, settled_ends, settled_values, stable_offset, wait_until

COUNT = 10


class Loop:
    def __init__(self, kafka: LocalKafka, names: Callable[[str], str]) -> None:
        self.servers, self.source, self.target = kafka.bootstrap_servers, names("in"), names("out")
        self.group, self.transactional_id, self._load = names("group"), names("tx"), names("load")
        create_topic(self.servers, self.source)
        create_topic(self.servers, self.target)
        self.load(range(COUNT))

    def load(self, numbers: range) -> None:
        with eos.transaction({"bootstrap.servers": self.servers, "transactional.id": self._load}) as txn:
            for number in numbers:
                txn.send(self.source, str(number))
        settled_ends(self.servers, [self.source])  # a session that ends at the end would not wait for them

    def session(self, **more: object) -> TransactSession:
        settings = {
            "bootstrap.servers": self.servers,
            "group.id": self.group,
            "transactional.id": self.transactional_id,
            "eos.transaction.interval.ms": 500,  # all records in one transaction, unless the body says otherwise
            **more,
        }
        return TransactSession(settings, [self.source], until_end=True)

    def finish(self) -> None:
        with self.session() as session:
            for txn in session:
                for record in txn.records:
                    txn.send(self.target, record.value)

    def copied(self) -> list[bytes | None]:
        return settled_values(self.servers, self.target)[0]


@pytest.fixture
def loop(kafka: LocalKafka, names: Callable[[str], str]) -> Loop:
    return Loop(kafka, names)


ALL = [b"%d" % number for number in range(COUNT)]


def test_the_end_of_the_body_commits(loop: Loop) -> None:
    loop.finish()
    assert loop.copied() == ALL
    assert stable_offset(loop.servers, loop.group, loop.source) == COUNT + 1  # with the marker behind them


def test_records_that_a_break_left_unseen_come_again(loop: Loop) -> None:
    with loop.session() as session:
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
                if record.offset % 3 == 2:
                    break
    assert loop.copied() == ALL


def test_an_iterator_that_is_kept_does_not_count_what_it_did_not_hand_out(loop: Loop) -> None:
    with loop.session() as session:
        for txn in session:
            kept = txn.records
            txn.send(loop.target, next(kept).value)
    assert loop.copied() == ALL


def test_records_may_be_collected_before_they_are_handled(loop: Loop) -> None:
    with loop.session() as session:
        for txn in session:
            for record in list(txn.records):
                txn.send(loop.target, record.value)
    assert loop.copied() == ALL


def test_an_exception_out_of_the_body_aborts(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError), loop.session() as session:
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
                _ = 1 // (record.offset - 5)
    assert loop.copied() == []
    assert stable_offset(loop.servers, loop.group, loop.source) < 0
    loop.finish()
    assert loop.copied() == ALL


def test_leaving_the_loop_aborts_unless_the_transaction_was_committed(loop: Loop) -> None:
    def one(session: TransactSession) -> Transaction:
        txn = next(session)
        txn.send(loop.target, next(txn.records).value)
        return txn

    with loop.session() as session:
        assert one(session).commit()
        one(session)
    assert loop.copied() == ALL[:1]
    loop.finish()
    assert loop.copied() == ALL


def test_a_loop_that_a_newer_instance_fenced_cannot_be_entered_again(loop: Loop) -> None:
    with contextlib.closing(loop.session()) as new:
        with loop.session() as old:
            txn = next(old)
            txn.send(loop.target, next(txn.records).value)
            new.start()
            with pytest.raises(Fenced):
                txn.commit()
            for _ in range(2):
                with pytest.raises(Fenced):
                    next(old)
        for txn in new:
            for record in txn.records:
                txn.send(loop.target, record.value)
        assert new.counters.rebuilds == 0, "the old one left the id alone"
    assert loop.copied() == ALL


def test_an_aborted_transaction_hands_the_same_records_out_again(loop: Loop) -> None:
    with loop.session() as session:
        first = next(session)
        seen = list(first.records)
        first.send(loop.target, b"never seen")
        first.abort()
        with pytest.raises(IllegalState, match="this transaction has ended"):
            first.send(loop.target, b"too late")
        second = next(session)
        assert list(second.records) == seen
        for record in seen:
            second.send(loop.target, record.value)
        assert second.commit()
        assert session.counters.replacements == {"abort": 1}
    assert loop.copied() == ALL


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_aborts_at_random_places_of_a_backlog_lose_nothing_and_keep_the_order(
    protocol: str, kafka: LocalKafka, names: Callable[[str], str]
) -> None:
    """A rewind sends the consumer back while its queue holds tens of thousands of records, ends of partitions
    included: none of those may come out any more."""
    servers, source, target, partitions, transactions = kafka.bootstrap_servers, names("in"), names("out"), 3, 9
    create_topic(servers, source, partitions)
    create_topic(servers, target, partitions)
    expected: list[list[bytes]] = [[] for _ in range(partitions)]
    loading = {"bootstrap.servers": servers, "transactional.id": names("load")}
    with Transactions(loading) as load:
        for number in range(transactions):
            with contextlib.suppress(ZeroDivisionError), load.begin() as txn:
                for i in range(9_000):
                    txn.send(source, b"%d" % i, partition=i % partitions)
                _ = 1 // (number % 3 - 2)  # the last one too: partitions end in aborted records
            if number % 3 != 2:
                for i in range(9_000):
                    expected[i % partitions].append(b"%d" % i)
    chance = random.Random(f"rewind {protocol}")
    settings: dict[str, Any] = {
        "bootstrap.servers": servers,
        "group.id": names("group"),
        "transactional.id": names("tx"),
        "group.protocol": protocol,
        "eos.transaction.interval.ms": 4_000,
        "eos.transaction.max.records": 20_000,
    }
    aborted = 0
    with TransactSession(settings, [source], until_end=True) as session:
        for txn in session:
            assert isinstance(txn, Transaction)
            for _ in range(chance.randint(1, 8)):
                records = txn.take(chance.randint(1, 4_000))
                txn.give_back(kept := chance.randint(0, len(records)))
                for record in records[: len(records) - kept]:
                    txn.send(target, record.value, partition=record.partition)
            if aborted < 8 and chance.random() < 0.6:
                txn.abort()
                aborted += 1
    assert aborted == 8
    found = settled_values(servers, target)
    assert sum(map(len, found.values())) == 54_000
    for partition in range(partitions):
        assert found[partition] == expected[partition], f"partition {partition}"
    ends = ends_of(servers, [TopicPartition(source, p) for p in range(partitions)], IsolationLevel.READ_COMMITTED)
    assert [stable_offset(servers, settings["group.id"], source, p) for p in range(partitions)] == ends


def test_a_session_that_aborted_does_not_take_its_id_back_from_a_newer_one(loop: Loop) -> None:
    """Its producer is replaced before the next transaction, and the replacement's init would take the id."""
    with contextlib.closing(loop.session()) as newer:
        with loop.session() as older:
            txn = next(older)
            txn.send(loop.target, next(txn.records).value)
            txn.abort()
            newer.start()
            for _ in range(2):
                with pytest.raises(Fenced, match="a newer instance took over"):
                    next(older)
        for txn in newer:
            for record in txn.records:
                txn.send(loop.target, record.value)
    assert loop.copied() == ALL


def test_a_consumer_that_cannot_go_back_is_given_up_and_the_group_joined_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker can be made to fail a seek of a partition that is being fetched: the call itself is replaced."""
    with loop.session() as session:
        txn = next(session)
        txn.send(loop.target, next(txn.records).value)
        first = session.consumer

        def fails(targets: object) -> None:
            raise CallFailed("seek", Action.REBUILD, RuntimeError("not fetching"))

        monkeypatch.setattr(session.membership, "go_back", fails)
        txn.abort()
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
        assert session.consumer is not first
    assert loop.copied() == ALL


def test_while_a_commit_is_waited_for_the_records_of_a_backlog_are_fetched(loop: Loop) -> None:
    count = 8_000
    loop.load(range(COUNT, count))
    waiting: list[int] = []

    with loop.session(**{"eos.producers": "1", "eos.transaction.interval.ms": 5_000}) as session:

        def hold(step: str) -> None:
            # On the thread that commits: the loop's own does what is looked for here.
            if step == "offsets sent" and len(waiting) == 1:
                wait_until("records to be fetched", lambda: len(session._positions) > waiting[0])
                waiting.append(len(session._positions))

        session.on_event = hold
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
                if not waiting and session.taken >= 2_500:  # no backlog is looked for behind less than 2,000
                    break
            if not waiting:
                waiting.append(len(session._positions))
    assert len(waiting) == 2
    assert loop.copied() == [b"%d" % number for number in range(count)]
