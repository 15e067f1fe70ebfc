"""Use `TransactSession` in a user's loop: the ends of a transaction, and the records that are delivered again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import Consumer, IsolationLevel, TopicPartition

import eos
from eos import Transaction, TransactSession
from eos.broker import LocalKafka
from eos.errors import (
    Fenced,
    IllegalState,
    InputGone,
    PoisonRecord,
    Temporary,
    Unavailable,
)
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.world import REAL, World
from eos.plain import Transactions
from eos.session.consumer import lag
from eos.session.outcomes import Listener
from tests.support.proxy import ApiKey, Fault, HoldingProxy
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
        # A session with `until_end` would not wait for the transaction's markers.
        settled_ends(self.servers, [self.source])

    def session(
        self, listener: Listener | None = None, world: World = REAL, *, until_end: bool = True, **more: object
    ) -> TransactSession:
        settings = {
            "bootstrap.servers": self.servers,
            "group.id": self.group,
            "transactional.id": self.transactional_id,
            "eos.transaction.interval.ms": 500,  # All records are in one transaction unless the body decides otherwise.
            **more,
        }
        return TransactSession(settings, [self.source], until_end=until_end, listener=listener, world=world)

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


def test_loop_commits_at_the_end_of_its_body(loop: Loop) -> None:
    loop.finish()
    assert loop.copied() == ALL
    # The offset after the records and their marker.
    assert stable_offset(loop.servers, loop.group, loop.source) == COUNT + 1


def test_records_not_taken_before_a_break_are_redelivered(loop: Loop) -> None:
    with loop.session() as session:
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
                if record.offset % 3 == 2:
                    break
    assert loop.copied() == ALL


def test_saved_record_iterator_commits_only_the_records_it_returned(loop: Loop) -> None:
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


def test_exception_in_the_loop_body_aborts_the_transaction(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError), loop.session() as session:
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
                _ = 1 // (record.offset - 5)
    assert loop.copied() == []
    assert stable_offset(loop.servers, loop.group, loop.source) < 0
    loop.finish()
    assert loop.copied() == ALL


def test_leaving_the_loop_aborts_an_open_transaction(loop: Loop) -> None:
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


def test_rejected_and_refused_records_become_dead_letters(loop: Loop) -> None:
    dead_letter_topic = create_topic(loop.servers, f"{loop.source}.dlq")
    refused: dict[int, PoisonRecord] = {}
    with loop.session() as session:
        while not session.stop_requested:
            try:
                for txn in session:
                    for record in txn.records:
                        if (error := refused.get(record.offset)) is not None:
                            txn.dead_letter(record, error)
                        elif record.value == b"3":
                            txn.dead_letter(record, ValueError("not that one"))
                        else:
                            txn.send(loop.target, (record.value or b"") * (3_000_000 if record.value == b"5" else 1))
                session.stop()
            except PoisonRecord as error:
                refused[error.offset] = error
    assert [(error.topic, error.offset) for error in refused.values()] == [(loop.source, 5)]
    assert loop.copied() == [value for value in ALL if value not in (b"3", b"5")]
    assert settled_values(loop.servers, dead_letter_topic)[0] == [b"3", b"5"]
    assert session.counters.dead_letters == 2


def test_missing_output_topic_is_named_at_the_start_or_first_send(
    loop: Loop,
) -> None:
    nowhere, soon = f"{loop.target}-nowhere", {"topic.metadata.propagation.max.ms": 300}
    named = TransactSession(loop.session(**soon).settings, [loop.source], destinations=[nowhere])
    with pytest.raises(Unavailable, match=f"topic {nowhere} does not exist at .*`eos topic create {nowhere}`"), named:
        pass
    advice = f"topic {nowhere} does not exist: `eos topic create {nowhere}` creates it"
    with pytest.raises(Unavailable, match=advice), loop.session(**soon) as session:
        for txn in session:
            for record in txn.records:
                txn.send(nowhere, record.value)


def test_aborted_transaction_returns_the_same_records_again(loop: Loop) -> None:
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


class Stuttering:
    """Deliver the last record of each batch twice, as librdkafka has done."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def consume(self, *args: Any) -> list[Any]:
        messages: list[Any] = self._consumer.consume(*args)
        return [*messages, *[message for message in messages[-1:] if message.error() is None]]


def test_record_delivered_twice_by_the_client_is_handled_once(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with loop.session() as session:
        session.group_consumer.consumer = Stuttering(session.consumer)  # type: ignore[assignment]
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
        assert session.counters.repeated > 0
        assert session.counters.records_in == COUNT
    assert loop.copied() == ALL
    assert caplog.text.count("repeated records dropped") == 1


def damage(kafka: LocalKafka, topic: str, offset: int, at: int = -5) -> None:
    """Flip a bit on the broker's disk in the batch of partition 0 that begins at `offset`. `at`: bytes after the
    batch length, or before its end if negative."""
    segment = kafka.log_path(0).parent / "data" / f"{topic}-0" / f"{0:020}.log"
    with segment.open("r+b") as file:
        while int.from_bytes(file.read(8)) != offset:
            file.seek(int.from_bytes(file.read(4)), os.SEEK_CUR)
        length = int.from_bytes(file.read(4))
        file.seek(at if at > 0 else length + at, os.SEEK_CUR)
        there = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([there[0] ^ 1]))


def test_damaged_batch_stops_the_loop_after_earlier_commits(loop: Loop, kafka: LocalKafka) -> None:
    """Damage a batch: no record of it is copied, and restarts end the same way until an operator decides."""
    first = COUNT + 1  # after the control record
    loop.load(range(COUNT, 2 * COUNT))
    damage(kafka, loop.source, first)
    for handled in (COUNT, 0):
        with pytest.raises(InputGone, match=rf"{loop.source}\[0\]@{first} cannot be read"):  # noqa: SIM117
            with loop.session() as session:
                for txn in session:
                    for record in txn.records:
                        txn.send(loop.target, record.value)
        assert session.counters.records_in == handled
    assert loop.copied() == ALL


def test_stalled_partition_is_logged(
    loop: Loop, kafka: LocalKafka, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage the length of a record without checksums: librdkafka then stops there for ever and reports nothing."""
    monkeypatch.setattr(lag, "_STALLED_S", 2.0)
    damage(kafka, loop.source, 0, at=49)

    class Stops(Listener):
        def on_idle(self) -> None:
            session.stop_requested = "partition stalled" in caplog.text

    with loop.session(Stops(), **{"check.crcs": False}) as session:
        assert next(session, None) is None
    assert loop.copied() == []


def test_committed_offset_past_the_end_stops_the_loop(loop: Loop) -> None:
    """Commit an offset past the end, as after an unclean election.

    A loop that waited would later continue in the middle of new records.
    """
    outside = Consumer({"bootstrap.servers": loop.servers, "group.id": loop.group})
    outside.commit(offsets=[TopicPartition(loop.source, 0, COUNT + 3)], asynchronous=False)
    outside.close()
    ends = f"is committed at offset {COUNT + 3}, but the topic now holds 0 to {COUNT + 1}; to continue, reset"

    class Loads(Listener):
        read = 0

        def on_idle(self) -> None:
            self.read += bool(session._parts.group_consumer.assignment.reading)
            if self.read == 10:  # after a second, in which the client has learned that the offset does not exist
                loop.load(range(COUNT, 2 * COUNT))

    with pytest.raises(InputGone, match=ends), loop.session(Loads(), until_end=False) as session:
        next(session)


@pytest.mark.takes(43)
@pytest.mark.deep_for("consumer")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_random_aborts_of_a_backlog_keep_records_and_order(
    protocol: str, kafka: LocalKafka, names: Callable[[str], str]
) -> None:
    """Abort at random while the consumer's queue holds tens of thousands of records and ends of partitions.

    After the rewind, none of these queued records may be returned.
    """
    servers, source, target, partitions, transactions = kafka.bootstrap_servers, names("in"), names("out"), 3, 9
    create_topic(servers, source, partitions)
    create_topic(servers, target, partitions)
    expected: list[list[bytes]] = [[] for _ in range(partitions)]
    loading = {"bootstrap.servers": servers, "transactional.id": names("load")}
    with Transactions(loading) as load:
        for number in range(transactions):
            with contextlib.suppress(ZeroDivisionError), load.begin() as txn:
                for i in range(4_500):
                    txn.send(source, b"%d" % i, partition=i % partitions)
                # The last transaction aborts too, so that partitions end with aborted records.
                _ = 1 // (number % 3 - 2)
            if number % 3 != 2:
                for i in range(4_500):
                    expected[i % partitions].append(b"%d" % i)
    chance = random.Random(f"rewind {protocol}")
    settings: dict[str, Any] = {
        "bootstrap.servers": servers,
        "group.id": names("group"),
        "transactional.id": names("tx"),
        "group.protocol": protocol,
        "eos.transaction.interval.ms": 2_000,
        "eos.transaction.max.records": 20_000,
    }
    aborted = 0
    with TransactSession(settings, [source], until_end=True) as session:
        for txn in session:
            assert isinstance(txn, Transaction)
            for _ in range(chance.randint(1, 8)):
                records = txn.take(chance.randint(1, 2_000))
                txn.give_back(kept := chance.randint(0, len(records)))
                for record in records[: len(records) - kept]:
                    txn.send(target, record.value, partition=record.partition)
            if aborted < 8 and chance.random() < 0.6:
                txn.abort()
                aborted += 1
    assert aborted == 8
    found = settled_values(servers, target)
    assert sum(map(len, found.values())) == 27_000
    for partition in range(partitions):
        assert found[partition] == expected[partition], f"partition {partition}"
    ends = ends_of(servers, [TopicPartition(source, p) for p in range(partitions)], IsolationLevel.READ_COMMITTED)
    assert [stable_offset(servers, settings["group.id"], source, p) for p in range(partitions)] == ends


def test_aborted_session_does_not_fence_a_newer_session(loop: Loop) -> None:
    """Abort in a fenced session: its producer is replaced before the next transaction, and an init would take the id
    back."""
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


def test_backlog_is_fetched_during_a_commit(loop: Loop) -> None:
    count = 8_000
    loop.load(range(COUNT, count))
    waiting: list[int] = []

    def hold(step: str) -> None:
        # Wait on the committing thread, because the loop's own thread must be free to fetch.
        if step == "offsets sent" and len(waiting) == 1:
            wait_until("records to be fetched", lambda: len(session._parts.positions) > waiting[0])
            waiting.append(len(session._parts.positions))

    with loop.session(world=World(step=hold), **{"eos.transaction.interval.ms": 5_000}) as session:
        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
                if (
                    not waiting and session.taken >= 2_500
                ):  # A worker with less than 2,000 waiting records has no backlog.
                    break
            if not waiting:
                waiting.append(len(session._parts.positions))
    assert len(waiting) == 2
    assert loop.copied() == [b"%d" % number for number in range(count)]


def test_session_on_a_suspended_machine_is_not_treated_as_replaced(
    loop: Loop,
) -> None:
    """Pause the session as a suspended virtual machine: the broker's clock advances, its own does not."""
    stood_still = World(boot_clock=lambda: 1.0)
    timeout = {"transaction.timeout.ms": 1_000, "message.timeout.ms": 1_000}
    with loop.session(world=stood_still, **timeout) as session, ClusterAdmin(session.settings) as admin:

        def timed_out() -> bool:
            told = admin.describe(loop.transactional_id)
            return told is not None and told.state == "CompleteAbort"

        for txn in session:
            for record in txn.records:
                txn.send(loop.target, record.value)
            if not session.counters.rebuilds:
                session.producer.flush()
                wait_until("the broker to abort the transaction", timed_out, timeout=30)
        assert session.counters.rebuilds_by_cause == {"timeout": 1}
    assert loop.copied() == ALL


def test_two_loops_of_one_group_share_its_partitions(loop: Loop, names: Callable[[str], str]) -> None:
    """Run two loops without a group.instance.id, which would let them fence each other for ever."""
    source, group = create_topic(loop.servers, names("two"), partitions=2), names("shared")
    settings = {"bootstrap.servers": loop.servers, "group.id": group}
    sessions = [TransactSession({**settings, "transactional.id": f"{group}-{n}"}, [source]) for n in (1, 2)]

    def run(session: TransactSession) -> None:
        with session:
            for txn in session:
                for record in txn.records:
                    txn.send(loop.target, record.value)

    def each_handled_one() -> bool:
        assert not any(run.done() for run in runs)
        with eos.transaction({"bootstrap.servers": loop.servers, "transactional.id": names("more")}) as txn:
            for partition in range(2):
                txn.send(source, "more", partition=partition)
        return all(session.counters.transactions for session in sessions)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, session) for session in sessions]
        try:
            wait_until("records handled by each", each_handled_one, timeout=30)
        finally:
            for session in sessions:
                session.stop_requested = True
        for ended in runs:
            ended.result(timeout=30)
    assert [session.counters.rebuilds for session in sessions] == [0, 0]


# ---- exceptions from the loop itself: of a callback, of a signal -----------------------------------------------


def run_to_the_end(session: TransactSession, target: str, stopped_by: type[BaseException]) -> int:
    """Enter the same loop again after each exception, as in a notebook, and return the number of exceptions."""
    again = 0
    while True:
        try:
            for txn in session:
                for record in txn.records:
                    txn.send(target, record.value)
            return again
        except stopped_by:
            again += 1


def test_callback_error_in_a_poll_loses_no_records(loop: Loop) -> None:
    """Raise in a callback inside a poll: confluent-kafka then drops the records that `consume` has taken."""
    loop.load(range(COUNT, 600))
    raised: list[str] = []

    def interrupt(text: str) -> None:
        # Raise during the poll that holds all of these 600 records and waits for more.
        if json.loads(text)["type"] == "consumer" and session._parts.positions.committed and len(raised) < 3:
            raised.append(text)
            raise KeyboardInterrupt

    with loop.session(**{"stats_cb": interrupt, "statistics.interval.ms": 50}) as session:
        again = run_to_the_end(session, loop.target, KeyboardInterrupt)
        assert 0 < again <= len(raised)
    assert loop.copied() == [b"%d" % number for number in range(600)]


def test_callback_error_leaves_the_loop_and_loses_nothing(kafka: LocalKafka, loop: Loop) -> None:
    loop.load(range(COUNT, 600))
    told: list[str] = []

    def fail(error: object) -> None:
        told.append(str(error))
        raise LookupError(f"of the error callback: {error}")

    with HoldingProxy.before(kafka) as proxy:
        proxy.on(ApiKey.Fetch, Fault.CUT_AFTER, nth=2)
        # No other client fetches through the proxy.
        settings = {"bootstrap.servers": kafka.proxied_servers, "error_cb": fail, "eos.places.topic": ""}
        with loop.session(**settings) as session:
            assert run_to_the_end(session, loop.target, LookupError) > 0
    assert told
    assert loop.copied() == [b"%d" % number for number in range(600)]


class Interrupts:
    """Raise KeyboardInterrupt at random moments of the block until `count` have come; a short block may end before."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")  # shown when the test fails
        self._dice = random.Random(seed)
        self._armed = False
        signal.signal(signal.SIGUSR1, self._come)

    def __enter__(self) -> None:
        if self.left:
            self._armed = True
            after_s = self._dice.choice((0.01, 0.1, 1.0)) * self._dice.random()
            self._timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGUSR1))
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._armed = False
        self._timer.cancel()
        self._timer.join()

    def _come(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self.left -= 1
            raise KeyboardInterrupt


@pytest.mark.parametrize("wanted", [12, pytest.param(120, marks=[pytest.mark.long, pytest.mark.timeout(1_800)])])
def test_loop_interrupted_anywhere_and_reentered_is_exactly_once(loop: Loop, wanted: int) -> None:
    """Interrupt at random moments, as Ctrl-C does in a notebook: in a poll, the body, a commit or a recovery."""
    settings = {"eos.transaction.interval.ms": 5, "eos.transaction.max.records": 50}
    interrupts, count = Interrupts(wanted), COUNT
    while interrupts.left:
        loop.load(range(count, count + 400))
        count, done = count + 400, False
        while not done:
            # Temporary: many interrupts cause too many rebuilds without a commit. Then a new session is started.
            with contextlib.suppress(Temporary), loop.session(**settings) as session:
                while not done:
                    with contextlib.suppress(KeyboardInterrupt), interrupts:
                        for txn in session:
                            for record in txn.records:
                                txn.send(loop.target, record.value)
                        done = True
    assert loop.copied() == [b"%d" % number for number in range(count)]
