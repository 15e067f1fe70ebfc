"""Pause workers past their transaction timeout, or until a newer instance has replaced them.

A worker past its timeout continues by itself. A replaced one stops with exit code 79, names its successor, and harms
nobody. The second half of the file creates every row of the ownership table with bare producers and queries
eos/kafka/admin/ownership.py, which decides between the two by the state at the coordinator.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaException

from eos.broker import LocalKafka
from eos.errors import CallFailed, Unavailable
from eos.kafka.admin.ownership import Identity, Owner, Progress, Situation, judge, settle
from eos.kafka.client.cluster import ClusterAdmin, TransactionalIdState
from eos.kafka.client.settings import Settings
from eos.session.producer.producer import TransactionalProducer
from eos.session.recovery import MOST_REBUILDS
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.raw import Background, RawProducer, raw_producer
from tests.support.reading import create_topic, wait_until

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipeline, Pipelines, WorkerProcess
pytest_plugins = ["tests.support.pipeline"]

RECORDS = 2_000
FENCED, TEMPORARY = 79, 75
TIMEOUT_MS = 2_000
LONG_MS = 30_000
SHORT_MS = 2_000  # A record must be acknowledged within this time, too.
HAS_TIME = {"transaction.timeout.ms": str(LONG_MS)}  # for producers that must not abort, however slow the machine is
CONSUMER = {"group.protocol": "consumer"}
VERSIONS = ["kafka", "kafka392"]


@pytest.fixture(params=VERSIONS)
def broker(request: pytest.FixtureRequest) -> LocalKafka:
    """Run each test on both versions, because transaction.version decides what an epoch means."""
    found: LocalKafka = request.getfixturevalue(request.param)
    return found


def paused_in_transaction(
    pipeline: Pipeline, step: str, settings: dict[str, str]
) -> tuple[WorkerProcess, TransactionalIdState]:
    """Return a worker that is paused at this step of its third transaction, and its state at the coordinator."""
    membership = {} if settings.get("group.protocol") == "consumer" else {"session.timeout.ms": "10000"}
    worker = pipeline.worker(settings=membership | settings, holds=[(step, 3)])
    worker.wait_at(step, 3)
    before = pipeline.wait_state("Ongoing", timeout_s=2.5)
    worker.pause()
    return worker, before


# Real workers.


@pytest.mark.deep_for("kafka-flushed", "kafka-offsets sent", "kafka392-*")
@pytest.mark.parametrize(
    ("broker", "step"),
    [("kafka", "flush"), ("kafka", "flushed"), ("kafka", "offsets sent"), ("kafka392", "flushed")],
    indirect=["broker"],
)
def test_worker_paused_past_its_transaction_timeout_continues(
    broker: LocalKafka, step: str, pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(broker, RECORDS)
    settings = {"transaction.timeout.ms": str(TIMEOUT_MS), "session.timeout.ms": "10000"}
    worker = pipeline.worker(settings=settings, until_end=True, holds=[(step, 3)])
    worker.wait_at(step, 3)
    before = pipeline.wait_state("Ongoing", timeout_s=2.5)
    worker.pause()
    wait_until(
        "the broker ends the transaction",
        lambda: any(
            found.state == "CompleteAbort"
            and (found.producer_id, found.epoch) == (before.producer_id, before.epoch + 1)
            for found in pipeline.describe()
        ),
    )
    worker.resume()
    worker.release()
    assert worker.wait() == 0, worker.final_output
    assert Owner.OWN_TIMEOUT.value in worker.log
    pipeline.verify()


@pytest.mark.takes(39)
@pytest.mark.deep
def test_worker_with_only_timed_out_transactions_stops(kafka: LocalKafka, pipelines: Pipelines) -> None:
    """Use transactions of one record, because larger ones would be followed by smaller ones."""
    pipeline = pipelines.on(kafka, RECORDS)
    settings = {"transaction.timeout.ms": str(SHORT_MS), "session.timeout.ms": "10000"}
    settings["eos.transaction.max.records"] = "1"
    times = range(1, MOST_REBUILDS + 2)
    worker = pipeline.worker(settings=settings, holds=[("flushed", nth) for nth in times])
    for nth in times:
        worker.wait_at("flushed", nth)
        pipeline.wait_not_open()
        worker.release()
    assert worker.wait() == TEMPORARY, worker.final_output
    assert f"{len(times)} rebuilds without one commit" in worker.final_output
    assert (
        f"sending the outputs of one record took longer than transaction.timeout.ms={SHORT_MS}" in worker.final_output
    )
    assert worker.log.count("rebuilt from the committed offsets") == MOST_REBUILDS
    pipeline.finish()
    pipeline.verify()


def assert_fenced(
    worker: WorkerProcess, *idle_or_open: TransactionalIdState, since: str = "since|started|initialised after"
) -> None:
    """Check that the worker stopped with 79 and named both epochs and the time of the newer instance.

    The time comes from its open transaction, its first commit, or our own last commit.
    """
    assert worker.wait(30) == FENCED, worker.final_output
    sentence = worker.final_output
    ours = [d for d in idle_or_open if f"ours: producer id {d.producer_id} epoch {d.epoch};" in sentence]
    assert ours, sentence
    theirs = re.search(r"now producer id (\d+) epoch (\d+) in state (\w+)", sentence)
    assert theirs is not None, sentence
    assert (int(theirs[1]), int(theirs[2])) > (ours[0].producer_id, ours[0].epoch), sentence
    assert re.search(rf"\b({since}) \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", sentence), sentence
    assert "Traceback" not in worker.log


def assert_unaffected(successor: WorkerProcess) -> None:
    assert successor.wait() == 0, successor.final_output
    assert "aborts=0" in successor.log
    assert "warning fenced" not in successor.log
    assert "rebuilt" not in successor.log


def wait_until_past(before: TransactionalIdState, timeout_ms: int) -> None:
    wait_until("the transaction is past its timeout", lambda: time.time() * 1000 > before.start_ms + timeout_ms + 100)


ZOMBIES = pytest.mark.parametrize(
    ("broker", "timeout_ms", "settings"),
    [
        pytest.param("kafka", LONG_MS, {}, id="before-its-timeout-classic"),
        pytest.param("kafka", LONG_MS, CONSUMER, id="before-its-timeout-consumer"),
        pytest.param("kafka", TIMEOUT_MS, {}, id="past-its-timeout-classic"),
        pytest.param("kafka", TIMEOUT_MS, CONSUMER, id="past-its-timeout-consumer"),
        pytest.param("kafka392", TIMEOUT_MS, {}, id="kafka392"),
    ],
    indirect=["broker"],
)


@pytest.mark.deep_for("before-its-timeout-consumer", "past-its-timeout-classic", "kafka392")
@ZOMBIES
def test_zombie_resumed_during_its_successors_transaction_is_fenced(
    broker: LocalKafka, timeout_ms: int, settings: dict[str, str], pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(broker, RECORDS)
    if settings == CONSUMER:
        pipeline.set_group_session_timeout(2_000)
    zombie, before = paused_in_transaction(pipeline, "flush", settings | {"transaction.timeout.ms": str(timeout_ms)})
    # The hold below must not last longer than the successor's own timeout.
    successor = pipeline.worker(settings=settings | HAS_TIME, until_end=True, holds=[("offsets sent", 1)])
    successor.wait_at("offsets sent", 1)
    if timeout_ms == TIMEOUT_MS:
        wait_until_past(before, timeout_ms)
    pipeline.wait_state("Ongoing")
    zombie.resume()
    zombie.release()
    assert_fenced(zombie, before, since="in state Ongoing since")
    pipeline.wait_state("Ongoing", timeout_s=1)
    successor.release()
    assert_unaffected(successor)
    pipeline.verify()


@pytest.mark.deep_for("before-its-timeout-classic", "past-its-timeout-consumer")
@ZOMBIES
def test_zombie_resumed_after_its_successor_finished_is_fenced(
    broker: LocalKafka, timeout_ms: int, settings: dict[str, str], pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(broker, RECORDS)
    if settings == CONSUMER:
        pipeline.set_group_session_timeout(2_000)
    zombie, before = paused_in_transaction(pipeline, "flushed", settings | {"transaction.timeout.ms": str(timeout_ms)})
    successor = pipeline.worker(settings=settings | HAS_TIME)
    pipeline.wait_handled(pipeline.loaded)
    if timeout_ms == TIMEOUT_MS:
        wait_until_past(before, timeout_ms)
    pipeline.wait_not_open()
    zombie.resume()
    zombie.release()
    assert_fenced(zombie, before, since="started")
    pipeline.load_transaction(300)
    pipeline.wait_handled(pipeline.loaded)
    successor.terminate()
    assert_unaffected(successor)
    pipeline.verify()


def test_idle_zombie_is_fenced_by_an_idle_successor(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, RECORDS)
    # After a slow last commit, the worker would replace its own producer during the ownership check.
    zombie = pipeline.worker(keep_producer=True)
    pipeline.wait_handled(pipeline.loaded)
    pipeline.wait_not_open()
    before = pipeline.describe()
    zombie.pause()
    successor = pipeline.worker(settings=HAS_TIME)
    successor.wait_line("IDLE")
    zombie.resume()
    assert_fenced(zombie, *before, since="initialised after")
    pipeline.load_transaction(300)
    pipeline.wait_handled(pipeline.loaded)
    successor.terminate()
    assert_unaffected(successor)
    pipeline.verify()


def test_worker_that_joins_after_a_newer_init_stops(kafka: LocalKafka, pipelines: Pipelines) -> None:
    """Its join takes the membership from the newer instance, but it must never take the transactional.id back."""
    pipeline = pipelines.on(kafka, RECORDS)
    older = pipeline.worker(settings=HAS_TIME, holds=[("join", 1)])
    older.wait_at("join", 1)
    before = pipeline.describe()
    newer = pipeline.worker(settings=HAS_TIME)
    pipeline.wait_handled(pipeline.loaded)
    older.release()
    pipeline.load_transaction(300)
    assert_fenced(older, *before)
    assert "producer replaced" not in older.log
    pipeline.wait_handled(pipeline.loaded)
    newer.terminate()
    assert newer.wait() == 0, newer.final_output
    pipeline.verify()


@pytest.mark.deep
def test_idle_zombie_in_the_consumer_protocol_is_fenced_at_next_record(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, RECORDS)
    pipeline.set_group_session_timeout(2_000)
    zombie = pipeline.worker(settings=CONSUMER, keep_producer=True)  # keep_producer: see the previous test
    pipeline.wait_handled(pipeline.loaded)
    pipeline.wait_not_open()
    before = pipeline.describe()
    successor = pipeline.worker(settings=CONSUMER | HAS_TIME)
    pipeline.wait_members(2)
    successor.wait_log("partitions assigned")
    pipeline.load_transaction(300)
    assert_fenced(zombie, *before)
    pipeline.wait_handled(pipeline.loaded)
    successor.terminate()
    assert_unaffected(successor)
    pipeline.verify()


@pytest.mark.deep
def test_zombie_is_fenced_although_its_successor_was_killed(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, RECORDS)
    zombie, before = paused_in_transaction(pipeline, "flushed", {"transaction.timeout.ms": str(TIMEOUT_MS)})
    successor = pipeline.worker(holds=[("flushed", 2)])
    successor.wait_at("flushed", 2)
    successor.kill()
    pipeline.wait_not_open()
    wait_until_past(before, TIMEOUT_MS)
    zombie.resume()
    zombie.release()
    assert_fenced(zombie, before)
    pipeline.finish()
    pipeline.verify()


@pytest.mark.deep_for("kafka392")
def test_group_member_without_the_id_is_not_a_newer_instance(broker: LocalKafka, pipelines: Pipelines) -> None:
    """Let another consumer join under the worker's instance id and leave without a LeaveGroup.

    The same happens after a session that ended unnoticed, when the response to librdkafka's own new join is lost: the
    group then knows the instance under a member id that the worker never received, and refuses the worker. The matrix
    found it; the worker ended with 79.
    """
    pipeline = pipelines.on(broker, RECORDS)
    worker = pipeline.worker(until_end=True, holds=[("committed", 3)], settings={"transaction.timeout.ms": LONG_MS})
    worker.wait_at("committed", 3)
    with closing(
        Consumer(
            {
                "bootstrap.servers": pipeline.servers,
                "group.id": pipeline.app,
                "group.instance.id": f"{pipeline.app}-one",
                "partition.assignment.strategy": "roundrobin",
                "enable.auto.commit": False,
            }
        )
    ) as other:
        other.subscribe(pipeline.sources)
        wait_until(
            "the other consumer has its membership", lambda: other.poll(0.1) is not None or bool(other.assignment())
        )
    worker.release()
    assert worker.wait() == 0, worker.final_output
    assert "rejoined the group" in worker.log
    pipeline.verify()


# The rows of the ownership table, with bare producers.

Start = Callable[..., RawProducer]


@pytest.fixture
def producer(broker: LocalKafka, names: Callable[[str], str]) -> Iterator[Start]:
    """Start a producer with the one transactional.id of this test."""
    made: list[RawProducer] = []

    def start(timeout_ms: int = LONG_MS) -> RawProducer:
        settings = {"transaction_timeout_ms": timeout_ms, "message_timeout_ms": timeout_ms}
        made.append(RawProducer(broker.bootstrap_servers, names("tx"), **settings))
        return made[-1]

    yield start
    for raw in made:
        with suppress(KafkaException):  # close() of a fenced producer raises this
            raw.producer.close()


@pytest.fixture
def topic(broker: LocalKafka, names: Callable[[str], str]) -> str:
    return create_topic(broker.bootstrap_servers, names("out"), 2)


@pytest.fixture
def ask(broker: LocalKafka, names: Callable[[str], str]) -> Iterator[Callable[[], TransactionalIdState | None]]:
    with ClusterAdmin(Settings({"bootstrap.servers": broker.bootstrap_servers})) as admin:
        yield lambda: admin.describe(names("tx"))


Ask = Callable[[], TransactionalIdState | None]


def identity(raw: RawProducer) -> Identity:
    eos = raw.settle(2)["eos"]
    return Identity(eos["producer_id"], eos["producer_epoch"])


def situation(mine: Identity, acknowledged: bool = True, late: bool = False) -> Situation:
    reach = Progress.ACKNOWLEDGED if acknowledged else Progress.NOTHING
    return Situation(mine, reach, age_ms=SHORT_MS + 500 if late else 10, timeout_ms=SHORT_MS)


def wait_for(ask: Ask, mine: Identity, bumps: int, state: str) -> TransactionalIdState:
    """Wait until the coordinator reports our epoch plus `bumps` in this state, which proves the row."""

    def row() -> TransactionalIdState | None:
        found = ask()
        assert found is not None
        reached = (found.producer_id, found.epoch, found.state) == (mine.producer_id, mine.epoch + bumps, state)
        return found if reached else None

    return wait_until(f"epoch +{bumps} {state}", row)


@pytest.mark.deep_for("kafka392")
def test_producer_still_owns_its_id_after_its_transactions_ended(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer()
    raw.commit_one(topic, "one")
    mine = identity(raw)
    assert judge(situation(mine), wait_for(ask, mine, 0, "CompleteCommit")) is Owner.MINE
    raw.begin()
    raw.send(topic, "two")
    raw.abort()
    assert judge(situation(mine), wait_for(ask, mine, 0, "CompleteAbort")) is Owner.MINE
    raw.begin()
    raw.commit()
    assert judge(situation(mine), wait_for(ask, mine, 0, "CompleteAbort")) is Owner.MINE, (
        "an unused transaction must leave no trace"
    )


@pytest.mark.deep_for("kafka392")
def test_timeout_of_our_first_transaction_is_judged_as_ours(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer(SHORT_MS)
    raw.begin()
    raw.send(topic, "one")
    mine = identity(raw)
    wait_for(ask, mine, 1, "CompleteAbort")
    assert settle(situation(mine, late=True), ask)[0] is Owner.OWN_TIMEOUT
    assert judge(situation(mine, late=False), ask()) is Owner.ABORTED_EARLY, (
        "the transaction must be younger than its timeout"
    )
    with pytest.raises(KafkaException):
        raw.commit()


@pytest.mark.deep_for("kafka392")
def test_our_timeout_is_judged_as_ours_while_the_abort_is_prepared(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer(SHORT_MS)
    raw.commit_one(topic, "one")
    mine = identity(raw)
    raw.begin()
    raw.send(topic, "two")
    wait_until("the epoch is bumped", lambda: getattr(ask(), "epoch", None) == mine.epoch + 1)
    owner, answer = settle(situation(mine, late=True), ask)
    assert owner is Owner.OWN_TIMEOUT
    assert answer is not None
    assert answer.state == "CompleteAbort"


@pytest.mark.deep_for("kafka392")
def test_instance_initialised_during_our_transaction_counts_as_newer(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer()
    raw.begin()
    raw.send(topic, "one")
    mine = identity(raw)
    second = producer()
    answer = wait_for(ask, mine, 2, "Empty")
    assert judge(situation(mine), answer) is Owner.NEWER
    assert judge(situation(mine, late=True), answer) is Owner.NEWER
    second.begin()
    second.send(topic, "two")
    assert judge(situation(mine, late=True), wait_for(ask, mine, 2, "Ongoing")) is Owner.NEWER


def test_init_of_another_instance_is_not_judged_as_our_timeout(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer()
    raw.begin()
    raw.send(topic, "one")
    mine = identity(raw)
    init = Background(producer)
    wait_until("the init of the second producer arrives", lambda: getattr(ask(), "epoch", None) != mine.epoch)
    # The latest possible case: only the second response, 1.5 s later, shows that it was not our own timeout.
    assert settle(situation(mine, late=True), ask)[0] is Owner.NEWER
    init.result()


def test_init_of_a_killed_instance_is_judged_as_our_own_timeout(
    broker: LocalKafka, producer: Start, topic: str, ask: Ask, names: Callable[[str], str]
) -> None:
    with HoldingProxy.before(broker) as proxy:
        raw = producer()
        raw.begin()
        raw.send(topic, "one")
        mine = identity(raw)
        # The first InitProducerId of the new producer fences ours and must be retried, which this producer never does.
        died = proxy.on(ApiKey.InitProducerId, Fault.BLACKHOLE, nth=2, transactional_id=names("tx"))
        with pytest.raises(KafkaException):
            RawInit(broker.proxied_servers, names("tx"))
        died.wait()
        answer = wait_for(ask, mine, 1, "CompleteAbort")
        assert judge(situation(mine), answer) is Owner.ABORTED_EARLY, (
            "the group must decide, because nobody owns the id"
        )
        # The other producer has done no work, so continuing is right: our init fences it if it comes back.
        assert settle(situation(mine, late=True), ask)[0] is Owner.OWN_TIMEOUT


class RawInit(RawProducer):
    """Start a producer whose init times out after two seconds."""

    def call(self, name: str, *arguments: object) -> None:
        super().call(name, *((2,) if name == "init_transactions" else arguments))


@pytest.mark.deep_for("kafka392")
def test_instance_initialised_while_ours_was_idle_counts_as_newer(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer()
    raw.commit_one(topic, "one")
    mine = identity(raw)
    second = producer(SHORT_MS)
    assert judge(situation(mine, False), wait_for(ask, mine, 1, "Empty")) is Owner.NEWER
    second.commit_one(topic, "two")
    assert judge(situation(mine, False), wait_for(ask, mine, 1, "CompleteCommit")) is Owner.NEWER
    second.begin()
    second.send(topic, "three")
    second.abort()
    answer = wait_for(ask, mine, 1, "CompleteAbort")
    # The coordinator alone cannot distinguish this from our own late request, so the session queries the group.
    assert judge(situation(mine, False), answer) is Owner.UNKNOWN_TIMEOUT
    # If we had an open transaction, the epoch would be E+2: our clock stopped, or the group decides.
    assert judge(situation(mine), answer) is Owner.ABORTED_EARLY
    second.begin()
    second.send(topic, "four")
    timed_out = wait_for(ask, mine, 2, "CompleteAbort")
    assert judge(situation(mine, late=True), timed_out) is Owner.NEWER


@pytest.mark.deep_for("kafka392")
def test_instance_with_the_next_epoch_counts_as_newer_after_a_wait(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer()
    raw.commit_one(topic, "one")
    mine = identity(raw)
    second = producer()
    second.begin()
    second.send(topic, "two")
    answer = wait_for(ask, mine, 1, "Ongoing")
    assert judge(situation(mine, False), answer) is Owner.ASK_AGAIN
    assert settle(situation(mine, False), ask, patience_s=1.0)[0] is Owner.NEWER


@pytest.mark.deep_for("kafka392")
def test_instance_initialised_after_our_timeout_counts_as_newer(producer: Start, topic: str, ask: Ask) -> None:
    raw = producer(SHORT_MS)
    raw.begin()
    raw.send(topic, "one")
    mine = identity(raw)
    wait_for(ask, mine, 1, "CompleteAbort")
    second = producer(SHORT_MS)
    late = situation(mine, late=True)
    assert judge(late, wait_for(ask, mine, 2, "Empty")) is Owner.NEWER
    second.begin()
    second.send(topic, "two")
    assert judge(late, wait_for(ask, mine, 2, "Ongoing")) is Owner.NEWER
    second.abort()
    assert judge(late, wait_for(ask, mine, 2, "CompleteAbort")) is Owner.NEWER
    second.begin()
    second.send(topic, "three")
    assert judge(late, wait_for(ask, mine, 3, "CompleteAbort")) is Owner.NEWER


def test_timed_out_transaction_of_a_late_request_is_judged_as_ours(
    kafka: LocalKafka, names: Callable[[str], str]
) -> None:
    servers, name = kafka.bootstrap_servers, names("tx")
    topic = create_topic(servers, names("out"))
    with (
        ClusterAdmin(Settings({"bootstrap.servers": servers})) as admin,
        HoldingProxy.before(kafka) as proxy,
        raw_producer(kafka.proxied_servers, name, transaction_timeout_ms=3_000, message_timeout_ms=3_000) as raw,
    ):
        late = proxy.on(ApiKey.AddPartitionsToTxn, Fault.LATE_COPY, transactional_id=name)
        raw.commit_one(topic, "one")
        mine = identity(raw)
        assert late.deliver_late().error == 0, "the late copy must open a transaction"
        wait_for(lambda: admin.describe(name), mine, 1, "CompleteAbort")
        assert settle(situation(mine, acknowledged=False), lambda: admin.describe(name))[0] is Owner.UNKNOWN_TIMEOUT


@pytest.mark.deep_for("kafka392")
def test_unknown_id_has_no_owner(ask: Ask) -> None:
    def answered() -> bool:
        with suppress(Unavailable):  # the first query creates the transaction log
            assert ask() is None
            return True
        return False

    wait_until("a coordinator", answered)
    assert settle(situation(Identity(1, 0)), ask)[0] is Owner.EXPIRED


def test_epoch_bump_of_our_client_after_a_timeout_is_judged_as_ours(
    kafka: LocalKafka, names: Callable[[str], str]
) -> None:
    """Let records time out: librdkafka then aborts and takes the next epoch itself (KIP-360).

    A member that the group fences at this moment must not treat the epoch as a newer instance's. The failure matrix
    found it.
    """
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("tx")
    settings = Settings({"bootstrap.servers": kafka.proxied_servers, "message.timeout.ms": 1_500, "linger.ms": 0})
    producer = TransactionalProducer(settings, name)
    with HoldingProxy.before(kafka) as proxy:
        try:
            producer.start(time.monotonic() + 20)
            before = producer.poll_identity()
            assert before is not None
            proxy.on(ApiKey.Produce, Fault.BLACKHOLE, transactional_id=name)
            producer.begin()
            producer.send(topic, b"never acknowledged")
            with pytest.raises(CallFailed, match="_MSG_TIMED_OUT"):
                producer.flush()
            producer.abort()
            with ClusterAdmin(Settings({"bootstrap.servers": kafka.bootstrap_servers})) as admin:
                described = admin.describe(name)
            assert described is not None
            assert described.epoch == before.epoch + 1, "librdkafka must take the next epoch by itself"
            known = producer.poll_identity(fresh=True)
            assert known == Identity(described.producer_id, described.epoch)
            situation = Situation(known, Progress.SENT, age_ms=2_000, timeout_ms=10_000)
            assert judge(situation, described) is Owner.MINE
        finally:
            producer.close()
