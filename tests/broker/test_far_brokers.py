"""Run against a distant broker: a producer is kept until a request is sent twice, and is replaced then.

The test counts requests on the wire before they are delayed. The client notices a cut there immediately, while earlier
requests are still on their way to the broker. test_late_requests.py produces each kind of late request separately.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from confluent_kafka import Producer

from eos import Settings, TransactSession
from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.testing.checker import check
from eos.testing.history import committed_offsets, end_offsets, read_topic
from eos.testing.lineage import stamp
from tests.support.delay import Delay
from tests.support.proxy import ApiKey, HoldingProxy, proxied_port
from tests.support.reading import create_topic, settled_ends

ONCE = (ApiKey.AddOffsetsToTxn, ApiKey.TxnOffsetCommit, ApiKey.EndTxn)
SENT_TWICE = "sent twice"


def runs(short: int, long: int) -> pytest.MarkDecorator:
    """Parametrize with `short` transactions at 60 ms (0: none), and with `long` ones at each delay and version in long
    runs."""
    cases = [pytest.param("kafka", 60, short, id=f"60ms-{short}")] if short else []
    very_long = [pytest.mark.long, pytest.mark.timeout(1800)]
    cases += [
        pytest.param(version, ms, long, marks=very_long, id=f"{version}-{ms}ms-{long}")
        for version in ("kafka", "kafka392")
        for ms in (20, 40, 60, 100)
    ]
    return pytest.mark.parametrize(("broker", "each_way_ms", "count"), cases)


@dataclass
class Loop:
    """Run a session through the proxies with one record per transaction, and call `begun` at each begin."""

    kafka: LocalKafka
    servers: str
    names: Callable[[str], str]
    count: int
    on_begin: Callable[[TransactSession], None]

    def run(self) -> TransactSession:
        near = self.kafka.bootstrap_servers
        self.source, self.target = create_topic(near, self.names("in")), create_topic(near, self.names("out"))
        producer = Producer({"bootstrap.servers": near, "log_level": 0})
        for number in range(self.count):
            producer.produce(self.source, b"%d" % number, partition=0)
        assert producer.flush(30) == 0
        self.transactional_id, self.group = self.names("tx"), self.names("group")
        settings = {
            "bootstrap.servers": self.servers,
            "group.id": self.group,
            "transactional.id": self.transactional_id,
            "eos.transaction.max.records": 1,
            "eos.transaction.interval.ms": 1,
            "linger.ms": 0,
        }
        with TransactSession(Settings(settings), [self.source], until_end=True) as session:
            for txn in session:
                self.on_begin(session)
                for record in txn.records:
                    txn.send(self.target, stamp(0, record.partition, record.offset), partition=0)
        return session

    def check(self) -> None:
        near = self.kafka.bootstrap_servers
        settled_ends(near, [self.target])
        check(
            read_topic(near, [self.source]).inputs(),
            read_topic(near, [self.target]).outputs(),
            committed=committed_offsets(near, self.group, [self.source]),
            complete=True,
            ends=end_offsets(near, [self.target]),
        ).raise_if_violated()


@runs(8, 300)
def test_healthy_producer_is_not_replaced_at_any_latency(
    request: pytest.FixtureRequest, broker: str, each_way_ms: int, count: int, names: Callable[[str], str]
) -> None:
    kafka: LocalKafka = request.getfixturevalue(broker)
    with Delay(proxied_port(kafka), kafka.proxied_upstream, each_way_ms):
        loop = Loop(kafka, kafka.proxied_servers, names, count, on_begin=lambda session: None)
        began = time.monotonic()
        counters = loop.run().counters
    assert counters.transactions >= count
    assert time.monotonic() - began > count * 8 * each_way_ms / 1000, "the broker was too fast for its distance"
    assert counters.replacements == {}
    loop.check()


class Wire:
    """Cut all connections at random moments, and record for each transaction whether a request was sent twice."""

    def __init__(self, proxy: HoldingProxy, longest_s: float, seed: int) -> None:
        self.proxy, self.longest_s, self.random = proxy, longest_s, random.Random(seed)
        self.began_at = 0.0
        self.client: object = None
        self.timer: threading.Timer | None = None
        self.cuts = 0
        self.found: Counter[str] = Counter()
        self.missed: list[str] = []

    def on_begin(self, session: TransactSession) -> None:
        now, client = time.monotonic(), session.producer.client
        if self.client is not None:
            self._judge(session, replaced=client is not self.client)
        self.began_at, self.client = now, client
        if self.timer is not None:
            self.timer.join()
        self.timer = None
        if self.random.random() < 0.75:
            self.timer = threading.Timer(self.random.uniform(0, self.longest_s), self._cut)
            self.timer.start()

    def _cut(self) -> None:
        self.cuts += self.proxy.cut_all() > 0

    def _judge(self, session: TransactSession, replaced: bool) -> None:
        repeated = []
        for api in (*ONCE, ApiKey.AddPartitionsToTxn):
            requests = self.proxy.seen(api, since=self.began_at)
            # The client also repeats an AddPartitionsToTxn on the same connection, after CONCURRENT_TRANSACTIONS.
            times = len(requests) if api in ONCE else len({request.connection for request in requests})
            if times > 1:
                repeated.append(f"{api.name} {times} times")
        what = SENT_TWICE if repeated else "sent once"
        self.found[f"{what}, {'replaced' if replaced else 'kept'}"] += 1
        if repeated and not replaced:
            self.missed.append(f"transaction {session.counters.transactions}: {', '.join(repeated)}")


@runs(0, 30)
def test_request_sent_twice_replaces_the_producer(
    request: pytest.FixtureRequest, broker: str, each_way_ms: int, count: int, names: Callable[[str], str]
) -> None:
    kafka: LocalKafka = request.getfixturevalue(broker)
    port = proxied_port(kafka)
    upstream_port = free_ports(1, [port])[0]
    with (
        Delay(upstream_port, kafka.proxied_upstream, each_way_ms),
        HoldingProxy(port, ("127.0.0.1", upstream_port)) as proxy,
    ):
        # A transaction takes five or six round trips.
        wire = Wire(proxy, longest_s=12 * each_way_ms / 1000, seed=each_way_ms)
        loop = Loop(kafka, kafka.proxied_servers, names, count, wire.on_begin)
        counters = loop.run().counters
        if wire.timer is not None:
            wire.timer.join()
    print(f"{broker} {each_way_ms} ms: {wire.cuts} cuts, {dict(wire.found)}, {counters.replacements}")
    assert wire.cuts >= count // 2
    assert any(SENT_TWICE in kind for kind in wire.found), "no cut hit a request, so the test shows nothing"
    assert wire.missed == []
    loop.check()
