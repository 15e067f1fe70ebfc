"""Test the holding proxy, and what a bare confluent-kafka producer does and reports on a bad network.

The session's replacement rule relies on these facts about the client; tests/shim/test_protect.py with `--no-protect`
shows the losses without the rule. When one of these tests fails, the client or the broker has changed: review the facts
before you change the rule. Nothing here imports a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

import pytest

from eos.broker import LocalKafka
from tests.support.proxy import ApiKey, Fault, HoldingProxy, Rule
from tests.support.raw import Background, RawProducer, raw_producer
from tests.support.reading import (
    create_topic,
    settled_values,
    transaction_of,
    visible_values,
    wait_until,
)


def enum_name(value: object) -> str | None:
    return value.name if isinstance(value, Enum) else None


@pytest.fixture
def proxy(kafka: LocalKafka) -> Iterator[HoldingProxy]:
    with HoldingProxy.before(kafka) as proxy:
        yield proxy


@pytest.fixture
def topic(kafka: LocalKafka, names: Callable[[str], str]) -> str:
    return create_topic(kafka.bootstrap_servers, names("out"), partitions=2)


@pytest.fixture
def raw(kafka: LocalKafka, proxy: HoldingProxy, names: Callable[[str], str]) -> Iterator[RawProducer]:
    with raw_producer(kafka.proxied_servers, names("tx")) as raw:
        yield raw


# The proxy itself.


def held_commit(proxy: HoldingProxy, raw: RawProducer, topic: str) -> tuple[Rule, Background]:
    """Return the rule that holds an EndTxn, and the commit of one record that waits for it."""
    hold = proxy.on(ApiKey.EndTxn, Fault.HOLD_REQUEST, transactional_id=raw.transactional_id)
    raw.begin()
    raw.send(topic, "one")
    return hold, Background(raw.commit)


def test_held_end_txn_delays_the_commit_until_its_release(
    kafka: LocalKafka, proxy: HoldingProxy, raw: RawProducer, topic: str
) -> None:
    hold, commit = held_commit(proxy, raw, topic)
    assert hold.wait().fields["committed"] is True
    assert commit.running
    assert transaction_of(kafka.bootstrap_servers, raw.transactional_id).state == "Ongoing"
    assert visible_values(kafka.bootstrap_servers, topic) == {0: [], 1: []}
    hold.release()
    commit.result()
    assert hold.answer().error == 0
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"one"], 1: []}


def test_held_request_arrives_after_its_client_disconnected(
    kafka: LocalKafka, proxy: HoldingProxy, raw: RawProducer, topic: str
) -> None:
    hold, commit = held_commit(proxy, raw, topic)
    hold.wait()
    assert proxy.cut_all() >= 1
    commit.result()  # The retry on a new connection succeeded.
    # While the markers are written, the coordinator answers 51 CONCURRENT_TRANSACTIONS to every request.
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"one"], 1: []}
    hold.release()
    assert hold.answer().error == 0
    assert len(proxy.seen(ApiKey.EndTxn, raw.transactional_id)) == 2


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=enum_name)
def test_commit_survives_a_cut_around_end_txn(
    kafka: LocalKafka, proxy: HoldingProxy, raw: RawProducer, topic: str, fault: Fault
) -> None:
    cut = proxy.on(ApiKey.EndTxn, fault, transactional_id=raw.transactional_id)
    raw.commit_one(topic, "one")
    cut.wait()
    # There may be several requests: until the markers are written, the coordinator asks the client to retry its commit.
    first, *retries = proxy.seen(ApiKey.EndTxn, raw.transactional_id)
    assert retries
    assert first.connection not in {retry.connection for retry in retries}
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"one"], 1: []}


def test_dropped_request_is_retried_after_the_socket_timeout(
    kafka: LocalKafka, proxy: HoldingProxy, topic: str, names: Callable[[str], str]
) -> None:
    with raw_producer(kafka.proxied_servers, names("tx"), socket_timeout_ms=1000) as raw:
        hole = proxy.on(ApiKey.EndTxn, Fault.BLACKHOLE, transactional_id=raw.transactional_id)
        raw.commit_one(topic, "one")
        first, retry = proxy.seen(ApiKey.EndTxn, raw.transactional_id)
    assert hole.hit
    assert retry.seen_at - first.seen_at > 0.9
    assert settled_values(kafka.bootstrap_servers, topic) == {0: [b"one"], 1: []}


def test_unused_rule_fails_the_test(proxy: HoldingProxy) -> None:
    rule = proxy.on(ApiKey.EndTxn, Fault.CUT_BEFORE, nth=3, transactional_id="nobody")
    with pytest.raises(AssertionError, match=r"CUT_BEFORE of EndTxn no. 3 .*nobody never fired within"):
        rule.wait(0.05)
    with pytest.raises(AssertionError, match=r"never fired: \[CUT_BEFORE of EndTxn"):
        proxy.check()
    proxy._rules.clear()


# What a bare producer causes.


@pytest.mark.deep_for("AddPartitionsToTxn")
@pytest.mark.parametrize("api", [ApiKey.AddPartitionsToTxn, ApiKey.AddOffsetsToTxn], ids=enum_name)
def test_late_add_partitions_starts_a_hanging_transaction(
    kafka: LocalKafka,
    proxy: HoldingProxy,
    raw: RawProducer,
    topic: str,
    names: Callable[[str], str],
    api: ApiKey,
) -> None:
    servers = kafka.bootstrap_servers
    late = proxy.on(api, Fault.LATE_COPY, transactional_id=raw.transactional_id)
    raw.begin()
    raw.send(topic, "one")
    raw.send_offset(names("group"), topic, 5)
    raw.commit()
    assert late.hit
    wait_until(
        "the end of the transaction",
        lambda: transaction_of(servers, raw.transactional_id).state == "CompleteCommit",
    )
    assert late.deliver_late().error == 0
    ghost = transaction_of(servers, raw.transactional_id)
    assert (ghost.state, len(ghost.partitions)) == ("Ongoing", 1)
    raw.commit_one(topic, "two")  # The hanging transaction becomes a part of the next real one.
    assert settled_values(servers, topic)[0] == [b"one", b"two"]


# How a client notices its own retry.


@pytest.mark.parametrize(
    ("api", "call", "at_least_s"),
    [
        # librdkafka waits retry.backoff.ms (100) minus 20 % jitter, or a constant 500 ms for TxnOffsetCommit.
        (ApiKey.EndTxn, "commit_transaction", 0.080),
        (ApiKey.AddOffsetsToTxn, "send_offsets_to_transaction", 0.080),
        (ApiKey.TxnOffsetCommit, "send_offsets_to_transaction", 0.500),
    ],
    ids=enum_name,
)
def test_retried_call_takes_at_least_the_backoff(
    proxy: HoldingProxy,
    raw: RawProducer,
    topic: str,
    names: Callable[[str], str],
    api: ApiKey,
    call: str,
    at_least_s: float,
) -> None:
    def consume_and_produce() -> float:
        raw.begin()
        raw.send(topic, "one")
        raw.send_offset(names("group"), topic, 5)
        raw.commit()
        return raw.durations_s[call][-1]

    consume_and_produce()  # The first call also finds the coordinators.
    # Take the fastest of several calls, because other load on the machine sometimes slows a healthy call.
    fastest_s = min(consume_and_produce() for _ in range(5))
    assert fastest_s < at_least_s, "a healthy call is not faster than a retried one, so its duration shows nothing"
    late = proxy.on(api, Fault.LATE_COPY, transactional_id=raw.transactional_id)
    assert consume_and_produce() >= at_least_s
    assert late.hit


@pytest.mark.parametrize("api", [ApiKey.EndTxn, ApiKey.AddOffsetsToTxn, ApiKey.AddPartitionsToTxn], ids=enum_name)
def test_statistics_count_a_coordinator_disconnect_after_a_retry(
    proxy: HoldingProxy, raw: RawProducer, topic: str, names: Callable[[str], str], api: ApiKey
) -> None:
    def consume_and_produce() -> dict[str, object]:
        raw.begin()
        raw.send(topic, "one")
        raw.send_offset(names("group"), topic, 5)
        raw.commit()
        return raw.coordinator()

    before, quiet = consume_and_produce(), consume_and_produce()
    assert (quiet["connects"], quiet["disconnects"]) == (before["connects"], before["disconnects"])
    proxy.on(api, Fault.LATE_COPY, transactional_id=raw.transactional_id)
    after = consume_and_produce()
    assert after["disconnects"] == int(str(quiet["disconnects"])) + 1
    assert after["connects"] == int(str(quiet["connects"])) + 1
