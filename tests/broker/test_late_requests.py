"""Test the replacement rule both ways: the effect of a late request with a kept and with a replaced producer.

Each scenario runs the same faults with a kept producer (`never`), where the checker must find the damage, and with a
replaced one as in the product (`auto`), where it must find none. The late request is a real one: the proxy cuts the
connection after the client sent it, the client's retry succeeds, and the proxy delivers the kept bytes later.

The scenarios also run with the delays of distant brokers, where a healthy call takes longer than a retried one nearby.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from confluent_kafka import Producer

from eos import Record, Settings, Transaction, TransactSession
from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.kafka.client.world import REAL, World
from eos.plain import Transactions
from eos.session.outcomes import Listener
from eos.session.producer.producer import TransactionalProducer
from eos.testing.checker import Inputs, Report, check
from eos.testing.history import committed_offsets, end_offsets, read_topic
from eos.testing.lineage import stamp
from tests.support.delay import Delay
from tests.support.proxy import ApiKey, Fault, HoldingProxy, proxied_port
from tests.support.reading import TooSlow, create_topic, settled_ends, transaction_of, wait_until
from tests.support.sessions import decide_replacement_if_broken

INVALID_PRODUCER_EPOCH = 47
COPIES = 2
SHORT = {"transaction.timeout.ms": 3_000}  # for tests that wait until the broker aborts a transaction at its timeout


class Scenario:
    """Set up one input partition, one output topic with a partition per copy, and one record per transaction."""

    def __init__(self, kafka: LocalKafka, proxy: HoldingProxy, names: Callable[[str], str], replace: str) -> None:
        self.kafka, self.proxy = kafka, proxy
        self.source, self.target = names("in"), names("out")
        create_topic(kafka.bootstrap_servers, self.source)
        create_topic(kafka.bootstrap_servers, self.target, partitions=COPIES)
        self.group = names("group")
        self.transactional_id = names("tx")
        self.replace = replace

    def load(self, count: int) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers, "log_level": 0})
        for number in range(count):
            producer.produce(self.source, b"%d" % number, partition=0)
        assert producer.flush(30) == 0

    def session(
        self, proxied: bool = True, listener: Listener | None = None, world: World = REAL, **more: object
    ) -> TransactSession:
        servers = self.kafka.proxied_servers if proxied else self.kafka.bootstrap_servers
        settings = {
            "bootstrap.servers": servers,
            "group.id": self.group,
            "transactional.id": self.transactional_id,
            "transaction.timeout.ms": 10_000,
            "eos.transaction.max.records": 1,
            "eos.transaction.interval.ms": 1,
            "linger.ms": 0,
        }
        return TransactSession(
            Settings(settings | more), [self.source], until_end=not proxied, listener=listener, world=world
        )

    def finish(self) -> Report:
        """Let a successor handle the remaining records, then judge everything."""
        with self.session(proxied=False) as successor:
            for txn in successor:
                for record in txn.records:
                    send(txn, self.target, record, range(COPIES))
        servers = self.kafka.bootstrap_servers
        settled_ends(servers, [self.target])
        return check(
            read_topic(servers, [self.source]).inputs(),
            read_topic(servers, [self.target]).outputs(),
            fan_out=COPIES,
            committed=committed_offsets(servers, self.group, [self.source]),
            complete=True,
            ends=end_offsets(servers, [self.target]),
        )


def send(txn: Transaction, target: str, record: Record, copies: range) -> None:
    for copy in copies:
        txn.send(target, stamp(0, record.partition, record.offset, copy), partition=copy)


def handle(session: TransactSession, target: str) -> Transaction:
    """Take the next transaction and send all its copies; the next iteration of the loop commits it."""
    txn = next(session)
    (record,) = txn.records
    send(txn, target, record, range(COPIES))
    return txn


@contextmanager
def holding(kafka: LocalKafka, each_way_ms: int) -> Iterator[HoldingProxy]:
    """Return a holding proxy in front of a broker with this delay. The client notices a cut immediately, which is the
    hardest case because a retry then adds little to the duration of a call."""
    upstream, listen_port = kafka.proxied_upstream, proxied_port(kafka)
    with ExitStack() as stack:
        if each_way_ms:
            far = stack.enter_context(Delay(free_ports(1, [listen_port])[0], upstream, each_way_ms))
            upstream = ("127.0.0.1", far.listen_port)
        yield stack.enter_context(HoldingProxy(listen_port, upstream))


def far(*in_short: int, versions: tuple[str, ...] = ("kafka", "kafka392")) -> pytest.MarkDecorator:
    """Parametrize with a near broker and with each of these delays; only those in `in_short` run outside of long
    runs."""
    return pytest.mark.parametrize(
        ("broker", "each_way_ms"),
        [
            pytest.param(version, ms, marks=() if version == "kafka" and ms in (0, *in_short) else pytest.mark.long)
            for version in versions
            for ms in (0, 20, 40, 60, 100)
        ],
        indirect=True,
    )


@pytest.fixture
def each_way_ms(request: pytest.FixtureRequest) -> int:
    return int(getattr(request, "param", 0))


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> LocalKafka:
    return request.getfixturevalue(getattr(request, "param", "kafka"))


@pytest.fixture
def proxy(broker: LocalKafka, each_way_ms: int) -> Iterator[HoldingProxy]:
    with holding(broker, each_way_ms) as proxy:
        yield proxy


@pytest.fixture(params=["never", "auto"])
def scenario(
    request: pytest.FixtureRequest,
    broker: LocalKafka,
    proxy: HoldingProxy,
    names: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Scenario:
    if request.param == "never":
        monkeypatch.setattr(TransactionalProducer, "decide_replacement", decide_replacement_if_broken)
    return Scenario(broker, proxy, names, request.param)


def judged(scenario: Scenario, report: Report, *, broken: set[str]) -> None:
    """Check that `auto` has no violation, and that `never` has exactly the expected ones."""
    if scenario.replace == "auto":
        report.raise_if_violated()
    else:
        assert broken <= set(report.violated), f"the checker did not find the damage: {report}"


@pytest.mark.deep_for("*-60")
@far(60)
def test_late_commit_duplicates_a_record_unless_producer_is_replaced(
    scenario: Scenario,
) -> None:
    scenario.load(2)
    late = scenario.proxy.on(ApiKey.EndTxn, Fault.LATE_COPY, transactional_id=scenario.transactional_id)
    with scenario.session() as session:
        handle(session, scenario.target)
        txn = next(session)  # Commits the first transaction: its EndTxn was cut, and the client's retry succeeded.
        assert late.hit
        (record,) = txn.records
        send(txn, scenario.target, record, range(1))
        session.producer.flush()
        error = late.deliver_late().error
        send(txn, scenario.target, record, range(1, COPIES))
        session.producer.flush()
        # Here the session closes, which aborts.
    assert error == (INVALID_PRODUCER_EPOCH if scenario.replace == "auto" else 0)
    judged(scenario, scenario.finish(), broken={"no_duplicates"})


@far()
def test_late_abort_loses_outputs_unless_producer_is_replaced(
    scenario: Scenario,
) -> None:
    scenario.load(1)
    late = scenario.proxy.on(ApiKey.EndTxn, Fault.LATE_COPY, transactional_id=scenario.transactional_id)
    with scenario.session() as session:
        txn = handle(session, scenario.target)
        session.producer.flush()
        txn.abort()  # Cut and retried: the records are delivered again.
        assert late.hit
        txn = handle(session, scenario.target)
        session.producer.flush()
        error = late.deliver_late().error
        assert txn.commit(), "the client reports a successful commit in both cases"
    assert error == (INVALID_PRODUCER_EPOCH if scenario.replace == "auto" else 0)
    judged(scenario, scenario.finish(), broken={"no_losses"})


@far()
def test_lost_acknowledgement_loses_a_record_unless_producer_is_replaced(
    scenario: Scenario,
) -> None:
    """Lose an acknowledgement without any input, so that only the sequence number of the record matters (H2b)."""
    settings = {
        "bootstrap.servers": scenario.kafka.proxied_servers,
        "transactional.id": scenario.transactional_id,
        "linger.ms": 0,
        # The client repeats the Produce only after 5 s, so that the abort begins before that.
        "retry.backoff.ms": 5_000,
        "retry.backoff.max.ms": 5_000,
        "transaction.timeout.ms": 30_000,
    }
    with Transactions(settings) as transactions:
        with transactions.begin() as txn:
            txn.send(scenario.target, stamp(0, 0, 0), partition=0)
        with pytest.raises(InterruptedError), transactions.begin() as txn:
            cut = scenario.proxy.on(ApiKey.Produce, Fault.CUT_AFTER, transactional_id=scenario.transactional_id)
            aborted = txn.send(scenario.target, stamp(0, 0, 1), partition=0)
            cut.wait()
            assert cut.answer().error == 0
            wait_for_disconnect(transactions)
            raise InterruptedError
        assert aborted.error is not None
        with transactions.begin() as txn:
            sent = txn.send(scenario.target, stamp(0, 0, 2), partition=0)
    assert sent.error is None, "the client reports a committed record in both cases"
    servers = scenario.kafka.bootstrap_servers
    settled_ends(servers, [scenario.target])
    zeros = np.zeros(2, np.int32)
    wanted = Inputs(topics=("sends",), topic=zeros, partition=zeros, offset=np.array([0, 2]))
    judged(
        scenario, check(wanted, read_topic(servers, [scenario.target]).outputs(), complete=True), broken={"no_losses"}
    )


@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_record_with_lost_acknowledgement_is_written_once(scenario: Scenario) -> None:
    """Lose an acknowledgement without an abort (K6): librdkafka sends the batch again.

    The test has no input, because offsets may wait on a cut connection and the transaction would then be aborted.
    """
    servers, transactional_id = scenario.kafka.proxied_servers, scenario.transactional_id
    settings = {"bootstrap.servers": servers, "transactional.id": transactional_id, "linger.ms": 0}
    with Transactions(settings) as transactions:
        for number in range(3):
            with transactions.begin() as txn:
                if number == 1:
                    cut = scenario.proxy.on(ApiKey.Produce, Fault.CUT_AFTER, transactional_id=transactional_id)
                txn.send(scenario.target, stamp(0, 0, number), partition=0)
    assert cut.answer().error == 0, "the broker did not append the record"
    first, again = scenario.proxy.seen(ApiKey.Produce, transactional_id)[1:3]
    assert first == cut.request
    assert again.fields["topic_data"] == first.fields["topic_data"], (
        "the retry is not the same batch with its sequence number"
    )
    zeros = np.zeros(3, np.int32)
    wanted = Inputs(topics=("sends",), topic=zeros, partition=zeros, offset=np.arange(3))
    settled_ends(scenario.kafka.bootstrap_servers, [scenario.target])
    outputs = read_topic(scenario.kafka.bootstrap_servers, [scenario.target]).outputs()
    check(wanted, outputs, complete=True).raise_if_violated()


def wait_for_disconnect(transactions: Transactions) -> None:
    """Wait until the client has noticed the cut; an earlier abort would first send the in-flight record again."""
    producer = transactions._producer

    def noticed() -> bool:
        producer.poll(0.05)
        return producer.client.evidence.reason is not None

    wait_until("the client to notice the cut", noticed)


@pytest.mark.deep_for("*-40")
@far(40, versions=("kafka",))
def test_late_offset_commit_rewinds_unless_producer_is_replaced(scenario: Scenario) -> None:
    late_offset_commit(scenario)


@pytest.mark.parametrize(
    ("broker", "each_way_ms"),
    [("kafka392", 0), *(pytest.param("kafka392", ms, marks=pytest.mark.long) for ms in (20, 40, 60, 100))],
    indirect=True,
)
@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_late_offset_commit_is_refused_on_kafka_3_9(
    scenario: Scenario,
) -> None:
    late_offset_commit(scenario)


def late_offset_commit(scenario: Scenario) -> None:
    scenario.load(2)
    late = scenario.proxy.on(ApiKey.TxnOffsetCommit, Fault.LATE_COPY)
    errors = []

    def deliver(step: str) -> None:
        if step == "offsets sent" and watching and not errors:
            errors.append(late.deliver_late().error)

    watching = False
    with scenario.session(world=World(step=deliver)) as session:
        handle(session, scenario.target)
        handle(session, scenario.target)  # Commits the first transaction, whose TxnOffsetCommit was cut and retried.
        assert late.hit
        watching = True
        assert session._loop._end()
    if scenario.replace == "never":
        assert errors == [0], "the broker applied the late TxnOffsetCommit"
    else:
        assert errors
        assert errors != [0]
    judged(scenario, scenario.finish(), broken={"no_duplicates"})


SELDOM = {"statistics.interval.ms": 1_000}  # the longest allowed interval: statistics come long after a retried call
NO_CUT = {"socket.timeout.ms": 1_000, "socket.max.fails": 0}  # a request that times out is retried on its connection


def wait_for_statistics(session: TransactSession) -> None:
    """Wait for new statistics, so that the next ones are a whole interval away."""
    producer = session.producer
    seen = producer.client.statistics_seen

    def came() -> bool:
        producer.poll(0.01)
        return producer.client.statistics_seen > seen

    wait_until("new statistics", came)


@pytest.mark.deep_for("*TxnOffsetCommit that timed out")
@pytest.mark.deep_for("*AddOffsetsToTxn", "*-TxnOffsetCommit")
@pytest.mark.parametrize(
    ("api", "fault", "settings"),
    [
        pytest.param(ApiKey.EndTxn, Fault.LATE_COPY, SELDOM, id="EndTxn"),
        pytest.param(ApiKey.AddOffsetsToTxn, Fault.LATE_COPY, SELDOM, id="AddOffsetsToTxn"),
        pytest.param(ApiKey.TxnOffsetCommit, Fault.LATE_COPY, SELDOM, id="TxnOffsetCommit"),
        # These requests time out without a lost connection.
        pytest.param(ApiKey.AddOffsetsToTxn, Fault.BLACKHOLE, NO_CUT, id="AddOffsetsToTxn that timed out"),
        pytest.param(ApiKey.TxnOffsetCommit, Fault.BLACKHOLE, NO_CUT, id="TxnOffsetCommit that timed out"),
    ],
)
@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_next_transaction_after_a_retry_waits_for_statistics(
    scenario: Scenario, api: ApiKey, fault: Fault, settings: dict[str, int]
) -> None:
    scenario.load(2)
    with scenario.session(**settings) as session:
        handle(session, scenario.target)
        wait_for_statistics(session)
        late = scenario.proxy.on(api, fault)
        handle(session, scenario.target)  # commits the first transaction
        assert late.hit
        assert session.producer.replacements == {"retry": 1}
        assert late.deliver_late().error == INVALID_PRODUCER_EPOCH
        assert session._loop._end()
    scenario.finish().raise_if_violated()


@pytest.mark.deep_for("*AddOffsetsToTxn", "*TxnOffsetCommit")
@pytest.mark.parametrize(
    "api", [ApiKey.EndTxn, ApiKey.AddOffsetsToTxn, ApiKey.TxnOffsetCommit], ids=lambda api: api.name
)
@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_producer_is_kept_after_a_slow_call_without_retry(scenario: Scenario, api: ApiKey) -> None:
    """Delay an answer for longer than a retry takes, as a busy broker does."""
    scenario.load(2)
    with scenario.session() as session:
        handle(session, scenario.target)
        slow = scenario.proxy.on(api, Fault.HOLD_RESPONSE)
        release = threading.Timer(0.6, slow.release)
        release.start()
        handle(session, scenario.target)  # commits the first transaction
        release.join()
        assert slow.hit
        assert session.producer.replacements == {}
        assert session._loop._end()
    scenario.finish().raise_if_violated()


@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_new_producer_is_kept_after_a_slow_call(scenario: Scenario) -> None:
    """Keep a new producer after a slow call; else small transactions of a slow coordinator would replace each
    producer."""
    scenario.load(2)
    with scenario.session(**SELDOM) as session:
        handle(session, scenario.target).abort()
        slow = scenario.proxy.on(ApiKey.AddOffsetsToTxn, Fault.HOLD_RESPONSE)
        release = threading.Timer(1.0, lambda: slow.wait() and slow.release())
        handle(session, scenario.target)
        release.start()
        handle(session, scenario.target)  # commits the first transaction
        release.join()
        assert session.producer.replacements == {"abort": 1}
        assert session._loop._end()
    scenario.finish().raise_if_violated()


@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_producer_is_kept_after_transactions_without_outputs(scenario: Scenario) -> None:
    """Send only offsets: their first request meets the markers of the transaction before, and is retried once
    answered."""
    scenario.load(60)
    handled = 0
    with scenario.session(**{"eos.transaction.max.records": 1}) as session:
        for txn in session:
            handled += len(list(txn.records))
            if handled == 60:
                session.stop_requested = True
        assert session.producer.replacements == {}
        assert session.counters.transactions == 60


@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_session_survives_a_late_copy_of_its_init(scenario: Scenario) -> None:
    """Let a late InitProducerId take the next epoch while the session is idle.

    To the coordinator, an init of a newer instance looks the same.
    """
    scenario.load(2)
    late = scenario.proxy.on(ApiKey.InitProducerId, Fault.LATE_COPY, transactional_id=scenario.transactional_id)
    with scenario.session() as session:
        # The cut belongs to the init. In statistics that come after the first transaction began, it would be a reason
        # to replace the producer, and the replacement would notice the epoch earlier.
        session.producer._wait_for_first_statistics()
        assert handle(session, scenario.target).commit()
        if why := session.producer.decide_replacement():
            raise TooSlow(why)
        servers, transactional_id = scenario.kafka.bootstrap_servers, scenario.transactional_id
        wait_until(
            "the end of the transaction", lambda: transaction_of(servers, transactional_id).state == "CompleteCommit"
        )
        assert late.deliver_late().error == 0, "the coordinator must accept it"
        assert not handle(session, scenario.target).commit()
        assert handle(session, scenario.target).commit()
        assert session.counters.rebuilds == 1
    scenario.finish().raise_if_violated()


@far(versions=("kafka",))
def test_idle_session_survives_a_late_add_partitions(scenario: Scenario) -> None:
    """Deliver a late AddPartitionsToTxn. No record is lost either way; after a replacement the broker refuses the
    request."""
    scenario.load(1)
    servers, transactional_id = scenario.kafka.bootstrap_servers, scenario.transactional_id
    late = scenario.proxy.on(ApiKey.AddPartitionsToTxn, Fault.LATE_COPY, transactional_id=transactional_id)
    ghosts: list[str] = []
    loaded: list[bool] = []

    class Idle(Listener):
        def on_idle(self) -> None:
            if loaded or not late.hit:
                return
            # Statistics arrive within 0.2 s, and an idle session under `auto` has then replaced its producer. Under
            # `never` the coordinator accepts the late request as soon as the commit's control records are written.
            state = transaction_of(servers, transactional_id).state
            ready = state == "CompleteCommit" if scenario.replace == "never" else bool(session.producer.replacements)
            if ready and not ghosts:
                late.deliver_late()
                state = transaction_of(servers, transactional_id).state
                ghosts.append(state)
            if ghosts and state in ("Empty", "CompleteAbort"):
                loaded.append(True)
                scenario.load(1)

    with scenario.session(listener=Idle(), **SHORT) as session:
        assert handle(session, scenario.target).commit()
        assert late.hit
        assert handle(session, scenario.target) is not None
        if scenario.replace == "auto":
            assert session._loop._end()
            assert ghosts == ["Empty"], "the broker refused the late request"
            assert session.counters.rebuilds == 0
        else:
            assert not session._loop._end(), "the timeout of the late transaction fenced this producer"
            assert ghosts == ["Ongoing"]
            assert session.counters.rebuilds == 1
    scenario.finish().raise_if_violated()


@pytest.mark.parametrize("scenario", ["auto"], indirect=True)
def test_consumer_without_its_coordinator_is_replaced(scenario: Scenario) -> None:
    """Cut off only this consumer: another client can query the group, and its answer shows that waiting is useless."""
    scenario.load(3)
    with scenario.session(**SHORT) as session:
        assert handle(session, scenario.target).commit()
        txn = handle(session, scenario.target)
        session.producer.flush()
        wait_until(
            "the broker to abort it at its timeout",
            lambda: (
                transaction_of(scenario.kafka.bootstrap_servers, scenario.transactional_id).state == "CompleteAbort"
            ),
        )
        held = scenario.proxy.on(ApiKey.OffsetFetch, Fault.HOLD_REQUEST)
        assert not txn.commit()
        assert held.hit
        assert session.counters.rebuilds == 1, "the session must continue even after it joined again"
        txn = handle(session, scenario.target)
        assert txn.commit()
    scenario.finish().raise_if_violated()
