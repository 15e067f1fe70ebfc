"""The trace: steps decoded from requests and responses, their transactions, and the HTML page."""

from __future__ import annotations

import json
import struct
import uuid
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.metadata import FindCoordinatorRequest, FindCoordinatorResponse
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

from eos.shim.pipeline import Connection, Exchange
from eos.shim.trace import History, Step, TraceJob, page, text
from eos.shim.trace.model import NO_ANSWER
from eos.shim.wire import api
from eos.shim.wire.batches import Batch, ProduceHead, fetch_response, produce_request
from eos.shim.wire.walk import Walk
from tests.unit.shim.messages import framed, producing


class Wire:
    """A TraceJob that is fed frames encoded by kafka-python; `steps` are the emitted steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.history = History()
        self.job = TraceJob(self.history, self.steps.append)
        self.connection = Connection(3, "client:1", "broker 7 (kafka:9092)", 7)
        self._count = 0

    def ask(self, request: Any) -> Exchange:
        self._count += 1
        frame = framed(request, self._count, client_id="c")
        exchange = Exchange(self.connection, request.API_KEY, request.API_VERSION, self._count)
        assert self.job.wants_request(exchange.api_key, exchange.version)
        stream = self.job.request_stream(exchange, len(frame))
        seen = (
            self.job.request(exchange, frame) if stream is None else stream.feed(frame[:20]) + stream.feed(frame[20:])
        )
        assert seen == frame
        return exchange

    def answer(self, exchange: Exchange, response: Any) -> Step:
        frame = framed(response, exchange.correlation_id)
        assert self.job.response(exchange, frame) == frame
        return self.steps[-1]

    def end(self, version: int = 1, commit: bool = True, epoch: int = 5, error: int = 0, new: int = -1) -> Step:
        identity = {"transactional_id": "t", "producer_id": 4000, "producer_epoch": epoch}
        exchange = self.ask(EndTxnRequest(version=version, committed=commit, **identity))
        bumped = {"producer_id": 4000, "producer_epoch": new} if version >= 5 else {}
        return self.answer(exchange, EndTxnResponse(version=version, throttle_time_ms=0, error_code=error, **bumped))

    def add(self, epoch: int = 5, error: int = 0) -> Step:
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(version=0, name="out", partitions=[0, 3])
        request = AddPartitionsToTxnRequest(
            version=0,
            v3_and_below_transactional_id="t",
            v3_and_below_producer_id=4000,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[topic],
        )
        result = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
        partitions = [
            result.AddPartitionsToTxnPartitionResult(version=0, partition_index=p, partition_error_code=error)
            for p in (0, 3)
        ]
        answer = result(version=0, name="out", results_by_partition=partitions)
        return self.answer(
            self.ask(request),
            AddPartitionsToTxnResponse(version=0, throttle_time_ms=0, results_by_topic_v3_and_below=[answer]),
        )

    def init(self, epoch: int, error: int = 0) -> Step:
        request = InitProducerIdRequest(
            version=4, transactional_id="t", transaction_timeout_ms=1, producer_id=-1, producer_epoch=-1
        )
        answer = InitProducerIdResponse(
            version=4, throttle_time_ms=0, error_code=error, producer_id=4000, producer_epoch=epoch
        )
        return self.answer(self.ask(request), answer)

    def produce(self, index: int, records: bytes, version: int = 9, offset: int = 0, error: int = 0) -> Step:
        """Produce to a partition of `out`."""
        asked = self.ask(producing(version, "t", {"out": {index: records}}))
        result = ProduceResponse.TopicProduceResponse
        answered = result.PartitionProduceResponse(
            version=version,
            index=index,
            error_code=error,
            base_offset=offset,
            log_append_time_ms=-1,
            log_start_offset=0,
        )
        results = [result(version=version, name="out", partition_responses=[answered])]
        response = ProduceResponse(version=version, throttle_time_ms=0, responses=results)
        return self.answer(asked, response)


@pytest.fixture
def wire() -> Wire:
    return Wire()


def batch(
    producer_id: int, epoch: int, sequence: int, records: int, body: bytes, control: bool = False, offset: int = 77
) -> bytes:
    """Return a record batch whose records are `body`, with an arbitrary checksum."""
    after_length = struct.pack(
        ">ibIhiqqqhii", 0, 2, 0, 0x30 if control else 0x10, records - 1, 0, 0, producer_id, epoch, sequence, records
    )
    return struct.pack(">qi", offset, len(after_length) + len(body)) + after_length + body


def marker(commit: bool) -> bytes:
    # length, attributes, deltas, key of 4 bytes (version, type), value of 6 (version, coordinator epoch), no headers
    record = b"\0\0\0\x08" + b"\0\0" + (b"\0\1" if commit else b"\0\0") + b"\x0c" + bytes(6) + b"\0"
    return bytes([len(record) * 2]) + record


def test_steps_have_number_identity_and_content(wire: Wire) -> None:
    exchange = wire.ask(FindCoordinatorRequest(version=2, key="t", key_type=1))
    found = wire.answer(
        exchange, FindCoordinatorResponse(version=2, throttle_time_ms=0, error_code=0, node_id=7, host="h", port=1)
    )
    assert (found.number, found.coordinator) == ("1", "broker 7")
    assert wire.init(5).new_epoch == 5
    added = wire.add()
    assert (added.number, added.partitions, added.producer_id, added.epoch) == ("4.1", ["out-0", "out-3"], 4000, 5)
    exchange = wire.ask(
        AddOffsetsToTxnRequest(version=3, transactional_id="t", producer_id=4000, producer_epoch=5, group_id="g")
    )
    offsets = wire.answer(exchange, AddOffsetsToTxnResponse(version=3, throttle_time_ms=0, error_code=0))
    assert (offsets.number, offsets.group) == ("4.3", "g")
    topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    partition = topic.TxnOffsetCommitRequestPartition(
        version=3, partition_index=2, committed_offset=120, committed_leader_epoch=-1, committed_metadata=None
    )
    exchange = wire.ask(
        TxnOffsetCommitRequest(
            version=3,
            transactional_id="t",
            group_id="g",
            producer_id=4000,
            producer_epoch=5,
            generation_id=1,
            member_id="m",
            group_instance_id=None,
            topics=[topic(version=3, name="in", partitions=[partition])],
        )
    )
    result = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
    committed = wire.answer(
        exchange,
        TxnOffsetCommitResponse(
            version=3,
            throttle_time_ms=0,
            topics=[
                result(
                    version=3,
                    name="in",
                    partitions=[result.TxnOffsetCommitResponsePartition(version=3, partition_index=2, error_code=14)],
                )
            ],
        ),
    )
    assert committed.offsets == {"in-2": 120}
    assert committed.errors == ["COORDINATOR_LOAD_IN_PROGRESS"]
    assert committed.is_retriable
    ended = wire.end()
    assert (ended.number, ended.outcome, ended.errors) == ("5.1", "commit", [])
    assert [step.number for step in wire.steps] == ["1", "2", "4.1", "4.3", "4.4", "5.1"]
    assert {step.transaction for step in wire.steps} == {1}
    assert {step.connection for step in wire.steps} == {3}
    assert {step.broker for step in wire.steps} == {"broker 7"}
    (transaction,) = wire.history.transactions
    assert (transaction.state, transaction.epoch) == ("committed", 5)


@pytest.mark.parametrize("version", [3, 8, 9, 12])
def test_produce_step_counts_all_batches(wire: Wire, version: int) -> None:
    records = batch(4000, 5, 10, 3, b"x" * 50) + batch(4000, 5, 13, 2, b"y" * 9)
    step = wire.produce(4, records, version, error=47)
    assert (step.number, step.partitions, step.records, step.bytes) == ("4.2", ["out-4"], 5, len(records))
    assert (step.producer_id, step.epoch, step.first_sequence) == (4000, 5, 10)
    assert step.errors == ["INVALID_PRODUCER_EPOCH"]
    assert not step.is_retriable


def test_non_transactional_produce_has_no_step(wire: Wire) -> None:
    exchange = wire.ask(producing(9, None, {}))
    response = ProduceResponse(version=9, throttle_time_ms=0, responses=[])
    wire.job.response(exchange, framed(response, exchange.correlation_id))
    assert wire.steps == []


def test_step_without_response_is_marked_as_unanswered(wire: Wire) -> None:
    wire.ask(EndTxnRequest(version=1, transactional_id="t", producer_id=1, producer_epoch=0, committed=True))
    wire.job.connection_closed(wire.connection)
    (step,) = wire.steps
    assert step.errors == [NO_ANSWER]
    assert wire.history.transactions[0].state == "open", "the outcome is unknown"


def test_transactions_are_separated_by_ends_and_inits(wire: Wire) -> None:
    wire.init(5)
    wire.add()
    wire.end()
    wire.add(error=51)
    wire.add()
    wire.end(commit=False)
    wire.add()
    wire.init(6)
    wire.add(epoch=6)
    fenced = wire.end(epoch=5, error=47)
    wire.end(epoch=6)
    assert [each.state for each in wire.history.transactions] == ["committed", "aborted", "abandoned", "committed"]
    assert fenced.transaction == 3, "later steps of a fenced producer belong to its own transaction"
    assert wire.history.counts == {"committed": 2, "aborted": 1, "abandoned": 1, "steps": 11, "errors": 1}


def test_kip_890_epoch_continues_with_next_transaction(wire: Wire) -> None:
    wire.init(5)
    wire.add(epoch=5)
    assert wire.end(version=5, epoch=5, new=6).new_epoch == 6
    wire.add(epoch=6)
    wire.end(version=5, epoch=6, new=7)
    assert [(each.number, each.state, each.epoch) for each in wire.history.transactions] == [
        (1, "committed", 5),
        (2, "committed", 6),
    ]


def test_abort_with_unknown_producer_id_is_an_abort(wire: Wire) -> None:
    wire.add()
    end = wire.end(commit=False, error=59)
    assert (end.errors, end.outcome) == ([], "abort")
    assert wire.init(6).transaction == 2
    assert wire.add(6).transaction == 2
    assert wire.history.counts["aborted"] == 1
    assert wire.history.counts["errors"] == wire.history.counts["abandoned"] == 0


def test_history_keeps_only_the_last_transactions(wire: Wire) -> None:
    wire.job.history = wire.history = History(keep=5)
    for number in range(50):
        wire.add(epoch=number)
        wire.end(version=5, epoch=number, new=number + 1)
        other = f"one of many {number}"
        wire.history.add(Step(other, "EndTxn", 1.0, producer_id=number, epoch=0, outcome="commit", ms=1.0))
    history = wire.history
    assert len(history.transactions) == 5
    assert history.counts["committed"] == 100
    assert len(history._current) <= 5
    assert sum(map(len, history._by_producer_id.values())) <= 5
    assert len(history._last_of_identity) <= 5


def fetched(data: bytes) -> bytes:
    """Return a Fetch response v4 with one partition of `out`."""
    partition = struct.pack(">ihqq", 3, 0, 9, 9) + b"\xff\xff\xff\xff" + len(data).to_bytes(4, "big") + data
    body = bytes(4) + bytes(4) + b"\0\0\0\1" + b"\0\3out" + b"\0\0\0\1" + partition
    return len(body).to_bytes(4, "big") + body


def test_fetched_marker_is_added_once_to_its_transaction() -> None:
    wire, two = Wire(), batch(4000, 5, 0, 2, b"xx")
    for number, commit in enumerate([True, False, True]):
        wire.produce(3, two, offset=10 * number)
        wire.end(commit=commit)
    wire.produce(3, two, offset=30)
    # A reader from the beginning gets these markers: of the second transaction, of another producer, and one that is
    # cut off.
    frame = fetched(
        batch(4000, 5, 0, 2, b"xx", offset=10)
        + batch(4000, 5, -1, 1, marker(False), control=True, offset=12)
        + batch(9999, 5, -1, 1, marker(True), control=True, offset=13)
        + b"cut short"
    )
    for _ in range(2):
        exchange = Exchange(wire.connection, api.FETCH, 4, 1)
        stream = wire.job.response_stream(exchange, len(frame))
        assert stream is not None
        assert b"".join(stream.feed(frame[i : i + 7]) for i in range(0, len(frame), 7)) == frame
    (step,) = [step for step in wire.steps if step.name == "Marker"]
    assert (step.number, step.transactional_id, step.transaction) == ("5.2", "t", 2)
    assert (step.outcome, step.offsets) == ("abort", {"out-3": 12})


@given(st.binary(max_size=300), st.sampled_from([3, 9, 13]))
def test_garbage_never_breaks_the_batch_walk(data: bytes, version: int) -> None:
    wire = Wire()
    frame = len(data).to_bytes(4, "big") + data
    for key, stream in (
        (api.PRODUCE, wire.job.request_stream(Exchange(wire.connection, api.PRODUCE, version, 1), len(frame))),
        (api.FETCH, wire.job.response_stream(Exchange(wire.connection, api.FETCH, version + 2, 1), len(frame))),
    ):
        assert stream is not None, key
        assert stream.feed(frame) == frame
    wire.job.request(Exchange(wire.connection, api.END_TXN, 3, 1), frame)
    assert all(isinstance(step, Step) for step in wire.steps)


def test_batches_are_found_in_every_version() -> None:
    data = ProduceRequest.TopicProduceData
    for version in range(3, 14):
        heads: list[ProduceHead] = []
        batches: list[Batch] = []
        partition = data.PartitionProduceData(version=version, index=1, records=batch(1, 2, 3, 4, b"z"))
        named = {"topic_id": uuid.UUID(bytes=b"i" * 16)} if version >= 13 else {"name": "out"}
        topic = data(version=version, partition_data=[partition, partition], **named)
        request = ProduceRequest(version=version, transactional_id="t", acks=1, timeout_ms=9, topic_data=[topic])
        walk = Walk(produce_request(version, heads.append, batches.append))
        walk.feed(framed(request, client_id=None))
        assert walk.is_complete
        assert heads == [ProduceHead("t", 1)]
        assert [(b.topic, b.partition, b.producer_id, b.epoch, b.base_sequence, b.records) for b in batches] == [
            (b"i" * 16 if version >= 13 else "out", 1, 1, 2, 3, 4)
        ] * 2
    assert Walk(fetch_response(4, batches.append)).is_complete is False


def test_steps_are_formatted_as_text_and_json(wire: Wire) -> None:
    wire.init(5)
    wire.add()
    step = wire.end(version=5, new=6)
    line = text.line(step)
    for part in ("t #1", "5.1 EndTxn", "commit -> producer 4000 epoch 6", "[4000/5]", "ok", " ms  broker 7"):
        assert part in line
    decoded = json.loads(text.json_line(step))
    assert decoded["step"] == "5.1"
    assert (decoded["name"], decoded["outcome"], decoded["new_epoch"], decoded["transaction"]) == (
        "EndTxn",
        "commit",
        6,
        1,
    )
    assert "errors" not in decoded


def test_trace_page_is_self_contained_and_escapes_names(wire: Wire, tmp_path: Path) -> None:
    wire.init(5)
    wire.add()
    wire.end()
    for number in range(200):
        wire.add(error=51 if number % 9 else 0)
    wire.history.add(Step("<script>&", "EndTxn", 1.0, outcome="abort", errors=["INVALID_TXN_STATE"], ms=1.0))
    made = page.render(wire.history, "Transactions <here>")
    xml.etree.ElementTree.fromstring(
        made.removeprefix("<!doctype html>")
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width">', "")
    )
    assert "<script" not in made
    assert "&lt;script&gt;&amp;" in made
    assert "http" not in made, "the page loads an external resource"
    assert "more steps" in made
    assert made.count("<svg") == 3
    file = tmp_path / "trace.html"
    page.write(file, made)
    assert file.read_text() == made
    assert [each.name for each in tmp_path.iterdir()] == ["trace.html"]
    assert "No transaction has passed yet" in page.render(History(), "empty")


def test_snapshot_does_not_change_with_new_steps(wire: Wire) -> None:
    wire.init(5)
    wire.add()
    seen = wire.history.snapshot()
    before = [(each.state, [step.name for step in each.steps]) for each in seen.transactions]
    wire.add()
    wire.end()
    assert [(each.state, [step.name for step in each.steps]) for each in seen.transactions] == before
    assert [(each.state, len(each.steps)) for each in wire.history.transactions] != [(s, len(n)) for s, n in before]
    assert seen.counts["steps"] < wire.history.counts["steps"]
    assert "committed" in page.render(wire.history, "now")
