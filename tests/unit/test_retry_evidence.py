"""Evidence that a request of a transaction may have been sent twice, and healthy cases without evidence."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from confluent_kafka import Producer

from eos.session.producer.retry_evidence import COORDINATOR, RetryEvidence, Statistics, decode_statistics
from tests.support.reading import wait_until

# One statistics event in librdkafka's layout (STATISTICS.md), shortened where a value has no name of its own.
WINDOW = {"min": 303, "max": 1205, "avg": 512, "sum": 9216, "stddev": 210, "p50": 479, "p99": 1207, "cnt": 18}
REALISTIC: dict[str, Any] = {
    "name": "rdkafka#producer-3",
    "client_id": "rdkafka",
    "type": "producer",
    "ts": 5016483227792,
    "time": 1795243992,
    "age": 2200114,
    "replyq": 0,
    "msg_cnt": 0,
    "msg_size": 0,
    "msg_max": 100000,
    "brokers": {
        "127.0.0.1:9092/bootstrap": {
            "name": "127.0.0.1:9092/bootstrap",
            "nodeid": -1,
            "nodename": "127.0.0.1:9092",
            "source": "configured",
            "state": "DOWN",
            "tx": 2,
            "txretries": 0,
            "connects": 1,
            "disconnects": 1,
            "int_latency": WINDOW,
            "req": {"ApiVersion": 1, "Metadata": 1},
            "toppars": {},
        },
        "127.0.0.1:9092/1": {
            "name": "127.0.0.1:9092/1",
            "nodeid": 1,
            "nodename": "127.0.0.1:9092",
            "source": "learned",
            "state": "UP",
            "stateage": 2101770,
            "outbuf_cnt": 0,
            "tx": 23,
            "txbytes": 4011,
            "txerrs": 0,
            "txretries": 0,
            "req_timeouts": 0,
            "rx": 23,
            "connects": 1,
            "disconnects": 0,
            "rtt": WINDOW,
            "throttle": WINDOW,
            "req": {"Produce": 9, "Metadata": 2, "TxnOffsetCommit": 9, "FindCoordinator": 2, "ApiVersion": 1},
            "toppars": {"out-0": {"topic": "out", "partition": 0}},
        },
        "TxnCoordinator": {
            "name": "TxnCoordinator",
            "nodeid": 1,
            "nodename": "127.0.0.1:9092",
            "source": "logical",
            "state": "UP",
            "tx": 29,
            "txretries": 0,
            "req_timeouts": 0,
            "connects": 1,
            "disconnects": 0,
            "req": {
                "Produce": 0,
                "InitProducerId": 1,
                "AddPartitionsToTxn": 9,
                "AddOffsetsToTxn": 9,
                "EndTxn": 9,
                "ApiVersion": 1,
            },
            "toppars": {},
        },
    },
    "topics": {"out": {"topic": "out", "partitions": {"0": {"partition": 0, "txmsgs": 9, "msgs": 9}}}},
    "eos": {
        "idemp_state": "Assigned",
        "idemp_stateage": 2098,
        "txn_state": "Ready",
        "txn_stateage": 4,
        "txn_may_enq": False,
        "producer_id": 4007,
        "producer_epoch": 3,
        "epoch_cnt": 0,
    },
    "tx": 54,
    "rx": 54,
}


def statistics(end_txn: int = 0, epoch: int = 0, **coordinator: Any) -> Statistics:
    """Return a snapshot; keywords change the transaction coordinator's entry."""
    made = copy.deepcopy(REALISTIC)
    made["eos"]["producer_epoch"] = epoch
    made["brokers"][COORDINATOR]["req"]["EndTxn"] = end_txn
    made["brokers"][COORDINATOR] |= coordinator
    return decode_statistics(json.dumps(made))


BOOTSTRAP, ORDINARY, CONNECTED_AT = "127.0.0.1:9092/bootstrap", "127.0.0.1:9092/1", 1_000_000


def of_broker(name: str, **entry: Any) -> Statistics:
    """Return a snapshot with a changed entry of this broker and no requests to the transaction coordinator."""
    made = copy.deepcopy(REALISTIC)
    made["brokers"][name] |= entry
    made["brokers"][COORDINATOR]["req"] = {}
    return decode_statistics(json.dumps(made))


def counted(ts: int, sent: int = 1, changes: dict[str, dict[str, Any] | None] | None = None) -> Statistics:
    """Return a snapshot of the time `ts` in microseconds, with each request of a transaction sent `sent` times.

    All connections are up since CONNECTED_AT. `changes` maps names of entries to changes; None removes an entry.
    """
    made = copy.deepcopy(REALISTIC)
    made["ts"] = ts
    brokers = made["brokers"]
    for name in (COORDINATOR, ORDINARY):
        brokers[name] |= {"state": "UP", "stateage": ts - CONNECTED_AT}
    brokers[COORDINATOR]["req"] |= {"EndTxn": sent, "AddOffsetsToTxn": sent}
    brokers[ORDINARY]["req"]["TxnOffsetCommit"] = sent
    for name, change in (changes or {}).items():
        if change is None:
            del brokers[name]
        else:
            brokers.setdefault(name, {"nodeid": 2, "connects": 0, "disconnects": 0, "req": {}, "state": "INIT"})
            brokers[name] |= change
    return decode_statistics(json.dumps(made))


def after_slow_call(call: str, before: Statistics | None) -> RetryEvidence:
    """Return the evidence after a transaction in which this call lasted from second 5 to second 5.4."""
    evidence = RetryEvidence(one_clock=True)
    if before is not None:
        evidence.add_statistics(before)
    for name in ("send_offsets", "commit"):
        evidence.begin_call()
        if name == "commit":
            evidence.expect_end_txn()
        evidence.return_from(name, 400 if name == call else 30, 5.4)
    return evidence


def make_call(evidence: RetryEvidence, call: str, took_ms: float) -> None:
    """Make a call without later statistics: if slow, it counts as a retry."""
    evidence.begin_call()
    evidence.return_from(call, took_ms, 0.0)
    if evidence.has_undecided_calls:
        evidence.stop_waiting()


def healthy() -> RetryEvidence:
    """Return the evidence after a first snapshot without any sign of a retry."""
    evidence = RetryEvidence()
    evidence.add_statistics(statistics())
    assert evidence.reason is None
    return evidence


# ---- decoding ----------------------------------------------------------------------------------------------


def test_statistics_contain_epoch_and_coordinator_counters() -> None:
    decoded = decode_statistics(json.dumps(REALISTIC))
    assert (decoded.eos.producer_id, decoded.eos.producer_epoch) == (4007, 3)
    coordinator = decoded.brokers[COORDINATOR]
    assert (coordinator.nodeid, coordinator.connects, coordinator.disconnects, coordinator.req_timeouts) == (1, 1, 0, 0)
    assert coordinator.req["EndTxn"] == 9
    assert decoded.brokers[BOOTSTRAP].nodeid == -1


def test_real_statistics_of_librdkafka_can_be_decoded() -> None:
    texts: list[str] = []
    quiet = logging.getLogger("test.quiet")
    quiet.disabled = True
    producer = Producer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "transactional.id": "t",
            "statistics.interval.ms": 20,
            "stats_cb": texts.append,
            "logger": quiet,
        }
    )

    def has_reported_its_brokers() -> bool:
        # The first report may come before the bootstrap broker is added.
        producer.poll(0.05)
        return bool(texts) and "127.0.0.1:1/bootstrap" in texts[-1]

    wait_until("statistics with the bootstrap broker", has_reported_its_brokers, 20)
    decoded = decode_statistics(texts[-1])
    assert (decoded.eos.producer_id, decoded.eos.producer_epoch) == (-1, -1), "before the init"
    assert COORDINATOR in decoded.brokers
    assert "127.0.0.1:1/bootstrap" in decoded.brokers
    without_topics = texts[-1].replace('"topics":{', '"topics":{ not parsed')
    assert without_topics != texts[-1]
    assert decode_statistics(without_topics) == decoded, "topics come after the brokers and before eos"


def test_statistics_in_another_order_are_decoded_whole() -> None:
    in_order = decode_statistics(json.dumps(REALISTIC, separators=(",", ":")))
    another = json.dumps(dict(reversed(REALISTIC.items())), separators=(",", ":"))
    assert decode_statistics(another) == in_order == decode_statistics(json.dumps(REALISTIC))


# ---- healthy -----------------------------------------------------------------------------------------------


def test_five_hundred_healthy_transactions_give_no_evidence() -> None:
    evidence = RetryEvidence()
    for number in range(1, 501):
        make_call(evidence, "send_offsets", 37)  # the slowest healthy call measured
        evidence.expect_end_txn()
        evidence.add_statistics(statistics(end_txn=number - 1))  # EndTxn is on its way
        make_call(evidence, "commit", 37)
        evidence.add_statistics(statistics(end_txn=number))
    assert evidence.reason is None


def test_more_requests_of_other_kinds_are_no_evidence() -> None:
    """librdkafka repeats AddPartitionsToTxn after CONCURRENT_TRANSACTIONS, in 8 % of healthy transactions."""
    evidence = healthy()
    evidence.add_statistics(statistics(req={"EndTxn": 0, "AddPartitionsToTxn": 20, "AddOffsetsToTxn": 10}))
    assert evidence.reason is None


def test_empty_transaction_without_end_txn_is_no_evidence() -> None:
    evidence = healthy()
    evidence.expect_end_txn()
    evidence.add_statistics(statistics(end_txn=0))
    assert evidence.reason is None


def test_changes_of_the_bootstrap_connection_are_no_evidence() -> None:
    evidence = healthy()
    evidence.add_statistics(of_broker(BOOTSTRAP, disconnects=5, connects=5))
    assert evidence.reason is None


def test_changes_during_init_producer_id_are_no_evidence() -> None:
    evidence = RetryEvidence()
    evidence.add_statistics(statistics(epoch=-1))
    evidence.add_statistics(statistics(epoch=-1, connects=9, disconnects=8, req_timeouts=7, end_txn=6))
    assert evidence.reason is None
    evidence.add_statistics(statistics(epoch=0))
    assert evidence.reason is None, "not compared with a snapshot of the init either"


# ---- cuts of a connection (H3) --------------------------------------------------------------------------------


def test_cut_after_add_partitions_is_detected_by_the_connection() -> None:
    evidence = healthy()
    evidence.add_statistics(statistics(connects=2, disconnects=1))
    make_call(evidence, "send_offsets", 1.3)
    evidence.expect_end_txn()
    make_call(evidence, "commit", 0.3)
    assert evidence.reason is not None
    assert "connection to the transaction coordinator was lost" in evidence.reason


@pytest.mark.parametrize(
    ("call", "took_ms"),
    [
        *[pytest.param("send_offsets", ms, id=f"AddOffsetsToTxn-{ms}") for ms in (84, 110, 143)],
        *[pytest.param("send_offsets", ms, id=f"TxnOffsetCommit-{ms}") for ms in (505, 508, 524)],
        *[pytest.param("commit", ms, id=f"EndTxn-{ms}") for ms in (83, 107, 132)],
    ],
)
def test_cut_after_any_other_request_is_detected_by_its_duration(call: str, took_ms: float) -> None:
    """The statistics may not show it: a recreated broker handle restarts its counters."""
    evidence = healthy()
    evidence.add_statistics(of_broker(ORDINARY, connects=1, disconnects=0, req={}))
    assert evidence.reason is None
    make_call(evidence, call, took_ms)
    assert evidence.reason is not None
    assert evidence.reason.startswith(f"{call} took {took_ms} ms: it may have been sent twice")


def test_extra_end_txn_is_evidence_in_the_first_statistics() -> None:
    evidence = RetryEvidence()
    evidence.expect_end_txn()
    evidence.add_statistics(statistics(end_txn=2))
    assert evidence.reason == "2 EndTxn requests for 1 transactions"


def test_connection_lost_during_init_producer_id_is_no_evidence() -> None:
    """A cluster that has just created its transaction log closes the connection once."""
    evidence = RetryEvidence()
    evidence.add_statistics(statistics(disconnects=1))
    evidence.begin_transaction()
    evidence.add_statistics(statistics(disconnects=1))
    assert evidence.reason is None
    evidence.add_statistics(statistics(disconnects=2))
    assert evidence.reason is not None


def test_lost_connection_in_the_first_statistics_is_evidence() -> None:
    evidence = RetryEvidence()
    evidence.begin_transaction()
    evidence.add_statistics(statistics(disconnects=1))
    assert evidence.reason == "the connection to the transaction coordinator was lost"


@pytest.mark.parametrize(
    "changed",
    [{"disconnects": 1}, {"connects": 2}, {"connects": 0}, {"req_timeouts": 1}],
    ids=["disconnected", "connected again", "counters started again", "not answered"],
)
def test_coordinator_connection_change_is_evidence_of_a_retry(changed: dict[str, int]) -> None:
    evidence = healthy()
    evidence.add_statistics(statistics(**changed))
    assert evidence.reason is not None
    assert "coordinator" in evidence.reason


def test_vanished_coordinator_entry_is_evidence() -> None:
    evidence = healthy()
    evidence.add_statistics(counted(AFTER, changes={COORDINATOR: None}))
    assert evidence.reason == "the transaction coordinator's entry vanished from the statistics"


def test_lost_connection_to_an_ordinary_broker_is_evidence() -> None:
    """TxnOffsetCommit goes to the group's coordinator, over an ordinary broker's connection."""
    evidence = healthy()
    evidence.add_statistics(of_broker(ORDINARY, disconnects=1))
    assert evidence.reason == "the connection to 127.0.0.1:9092/1 was lost"


def test_first_reason_to_replace_a_producer_is_kept() -> None:
    evidence = healthy()
    make_call(evidence, "commit", 90)
    evidence.add_statistics(statistics(disconnects=1))
    assert evidence.reason is not None
    assert evidence.reason.startswith("commit took 90 ms")


# ---- a slow call, decided by the statistics after it -------------------------------------------------------

SLOW_CALLS = pytest.mark.parametrize("call", ["send_offsets", "commit"])
BEFORE, INSIDE, AFTER = 4_900_000, 5_200_000, 5_500_000


@SLOW_CALLS
def test_slow_call_with_expected_request_counts_is_no_evidence(call: str) -> None:
    evidence = after_slow_call(call, counted(BEFORE, 0))
    assert evidence.has_undecided_calls
    evidence.add_statistics(counted(AFTER))
    assert (evidence.reason, evidence.has_undecided_calls) == (None, False)


def test_repeated_add_offsets_after_an_answer_is_no_evidence() -> None:
    """The broker answers CONCURRENT_TRANSACTIONS while it writes the markers of the previous transaction."""
    evidence = after_slow_call("send_offsets", counted(BEFORE, 0))
    again = {COORDINATOR: {"txretries": 2, "req": {"EndTxn": 1, "AddOffsetsToTxn": 3}}}
    evidence.add_statistics(counted(AFTER, changes=again))
    assert (evidence.reason, evidence.has_undecided_calls) == (None, False)


@SLOW_CALLS
def test_statistics_emitted_during_a_call_decide_nothing(call: str) -> None:
    """Such statistics may be older than the cut: they count the first copy, and the second is not sent yet."""
    evidence = after_slow_call(call, counted(BEFORE, 0))
    evidence.add_statistics(counted(INSIDE))
    assert evidence.has_undecided_calls
    evidence.add_statistics(counted(5_400_000))
    assert evidence.has_undecided_calls, "made at the moment of the return"
    evidence.add_statistics(counted(AFTER))
    assert (evidence.reason, evidence.has_undecided_calls) == (None, False)


UNKNOWN_NOW, REPLACED = "is no longer known", "was replaced by another one"


@pytest.mark.parametrize(
    ("call", "changes", "because"),
    [
        ("commit", {COORDINATOR: {"req": {"EndTxn": 2}}}, "EndTxn"),
        ("commit", {COORDINATOR: {"req": {"EndTxn": 0}}}, "EndTxn was sent 0 times instead of 1"),
        ("commit", {COORDINATOR: {"stateage": 100_000}}, f"the connection to {COORDINATOR} {REPLACED}"),
        ("commit", {COORDINATOR: {"state": "TRY_CONNECT"}}, f"the connection to {COORDINATOR} {REPLACED}"),
        ("commit", {COORDINATOR: None}, "vanished"),
        (
            "send_offsets",
            {COORDINATOR: {"req": {"EndTxn": 1, "AddOffsetsToTxn": 0}}},
            "AddOffsetsToTxn was sent 0 times",
        ),
        ("send_offsets", {COORDINATOR: {"req_timeouts": 1}}, "timed out"),
        ("send_offsets", {ORDINARY: {"req": {"TxnOffsetCommit": 2}}}, "TxnOffsetCommit was sent 2 times"),
        ("send_offsets", {"other:1/2": {"req": {"TxnOffsetCommit": 1}}}, "TxnOffsetCommit was sent 2 times"),
        # The broker handle was recreated: its counters restarted, and the one counted request is the second copy.
        ("send_offsets", {ORDINARY: {"stateage": 100_000}}, f"the connection to {ORDINARY} {REPLACED}"),
        ("send_offsets", {ORDINARY: {"state": "DOWN"}}, f"the connection to {ORDINARY} {REPLACED}"),
        (
            "send_offsets",
            {ORDINARY: None, "renamed:9092/1": {"req": {"TxnOffsetCommit": 1}, "state": "UP"}},
            "renamed:9092/1 was unknown before the call",
        ),
        ("send_offsets", {ORDINARY: None}, "TxnOffsetCommit was sent 0 times"),
        ("commit", {ORDINARY: None}, f"{ORDINARY} {UNKNOWN_NOW}"),
        ("commit", {ORDINARY: {"disconnects": 1}}, "was lost"),
    ],
)
def test_slow_call_counts_as_a_retry_with_its_reason(call: str, changes: dict[str, Any], because: str) -> None:
    evidence = after_slow_call(call, counted(BEFORE, 0))
    evidence.add_statistics(counted(AFTER, changes=changes))
    assert evidence.reason is not None
    assert because in evidence.reason
    assert not evidence.has_undecided_calls


UNKNOWN = {"nodeid": 2, "state": "INIT", "connects": 0}


@pytest.mark.parametrize(
    ("now", "cleared"),
    [
        ({"connects": 1, "disconnects": 0}, True),
        ({"connects": 2, "disconnects": 0}, False),
        ({"connects": 1, "disconnects": 1}, False),
    ],
)
def test_first_send_offsets_may_connect_to_the_group_coordinator(now: dict[str, Any], cleared: bool) -> None:
    before = {ORDINARY: {"req": {}}, "other:1/2": UNKNOWN}
    later = {ORDINARY: {"req": {}}, "other:1/2": {"state": "UP", "req": {"TxnOffsetCommit": 1}} | now}
    evidence = after_slow_call("send_offsets", counted(BEFORE, 0, before))
    evidence.add_statistics(counted(AFTER, changes=later))
    assert (evidence.reason is None) is cleared


def test_slow_call_without_earlier_statistics_is_a_retry() -> None:
    """A broker handle recreated during the call looks like one that existed all the time."""
    evidence = after_slow_call("send_offsets", None)
    evidence.add_statistics(counted(INSIDE))
    evidence.add_statistics(counted(AFTER))
    assert evidence.reason is not None
    assert "there are no statistics from before the call" in evidence.reason


def test_statistics_emitted_during_a_call_are_not_from_before_it() -> None:
    """The connection broke early in the call, and later statistics know only the next connection."""
    evidence = RetryEvidence(one_clock=True)
    evidence.add_statistics(counted(BEFORE, 0))
    evidence.begin_call()
    evidence.add_statistics(counted(INSIDE, 0, {ORDINARY: {"stateage": 100_000}}))
    evidence.return_from("send_offsets", 600, 5.4)
    offsets_only = {COORDINATOR: {"req": {"AddOffsetsToTxn": 1}}, ORDINARY: {"stateage": AFTER - INSIDE + 100_000}}
    evidence.add_statistics(counted(AFTER, 1, offsets_only))
    assert evidence.reason is not None
    assert REPLACED in evidence.reason


def test_slow_send_offsets_can_be_judged_while_the_commit_runs() -> None:
    evidence = RetryEvidence(one_clock=True)
    evidence.add_statistics(counted(BEFORE, 0))
    evidence.begin_call()
    evidence.return_from("send_offsets", 400, 5.4)
    evidence.begin_call()
    evidence.expect_end_txn()
    evidence.add_statistics(counted(AFTER, 1, {COORDINATOR: {"req": {"AddOffsetsToTxn": 1}}}))
    assert not evidence.has_undecided_calls, "EndTxn is not a request of send_offsets"
    evidence.return_from("commit", 400, 5.8)
    assert evidence.has_undecided_calls
    evidence.add_statistics(counted(5_900_000))
    assert (evidence.reason, evidence.has_undecided_calls) == (None, False)


def test_slow_call_counts_as_retry_without_statistics_or_common_clock() -> None:
    evidence = after_slow_call("commit", counted(BEFORE, 0))
    evidence.stop_waiting()
    assert evidence.reason == (
        "commit took 400 ms: it may have been sent twice; a late copy will find a new epoch and be refused "
        "(no statistics rule it out)"
    )
    evidence = RetryEvidence(one_clock=False)
    evidence.add_statistics(counted(BEFORE, 0))
    evidence.begin_call()
    evidence.return_from("commit", 400, 5.4)
    assert (evidence.reason is None, evidence.has_undecided_calls) == (False, False)


def test_five_hundred_transactions_with_far_broker_give_no_evidence() -> None:
    evidence, ts = RetryEvidence(one_clock=True), CONNECTED_AT + 1
    evidence.add_statistics(counted(ts, 0))
    for number in range(1, 501):
        for call, took_ms in (("send_offsets", 410), ("commit", 220)):
            evidence.begin_call()
            if call == "commit":
                evidence.expect_end_txn()
            ts += took_ms * 1000
            evidence.return_from(call, took_ms, ts / 1e6)
        assert evidence.has_undecided_calls
        ts += 50_000
        evidence.add_statistics(counted(ts, number))
        assert not evidence.has_undecided_calls
    assert evidence.reason is None


# ---- the backoff -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["send_offsets", "commit"])
@pytest.mark.parametrize("backoff_ms", [50, 100, 250, 500])
def test_call_of_eighty_percent_of_the_backoff_counts_as_a_retry(call: str, backoff_ms: int) -> None:
    evidence = RetryEvidence(backoff_ms)
    make_call(evidence, call, 0.8 * backoff_ms - 0.5)
    assert evidence.reason is None
    make_call(evidence, call, 0.8 * backoff_ms)
    assert evidence.reason is not None


def test_long_backoff_does_not_hide_a_txn_offset_commit_retry() -> None:
    evidence = RetryEvidence(1_000)
    make_call(evidence, "commit", 508)
    assert evidence.reason is None, "EndTxn itself waits for retry.backoff.ms"
    make_call(evidence, "send_offsets", 505)
    assert evidence.reason is not None
