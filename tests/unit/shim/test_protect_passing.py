"""Produce requests are forwarded once their head is complete, with the same bytes as if they were collected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol import producer as protocol

from eos.shim.errors import ProtocolError
from eos.shim.health import CountingJob
from eos.shim.pipeline import Connection, Exchange, Job, Pipeline
from eos.shim.protect import ProtectJob, translate
from eos.shim.protect.machine import Identity, State
from eos.shim.trace import History, TraceJob
from eos.shim.trace.model import NO_ANSWER, Step
from eos.shim.wire import api
from eos.shim.wire.frames import FrameSplitter, Handling, Piece
from eos.shim.wire.headers import REQUEST_HEAD
from tests.unit.shim.test_frames import cut
from tests.unit.shim.test_protect_frames import NEW, OLD, produce_request, records

versions = st.sampled_from(list(translate.VERSIONS[api.PRODUCE]))
cuts = st.lists(st.integers(1, 400), max_size=40)
SHAPES: dict[str, dict[str, dict[int, bytes | None]]] = {
    "one batch": {"a": {3: records(10, size=60)}},
    "two batches": {"a": {3: records(10, 13)}},
    "two partitions": {"a": {3: records(10), 4: records(2)}},
    "two topics": {"a": {3: records(10)}, "b": {3: records(5)}},
    "no records": {"a": {3: None}},
}


class Passed:
    """Pass requests through the reader and protection, in chunks from one reused buffer."""

    def __init__(self, upstream: Identity = NEW, known: bool = True, before: Sequence[Job] = ()) -> None:
        self.job = ProtectJob()
        self.job.on_broker_versions({"broker 1": {api.END_TXN: 5}})
        if known:
            self.job.machine.note_init("t", OLD, 1)
            self.job.machine.check_open("t", OLD, 1, "mark")
            self.job.machine._known["t"].real = upstream
            for connection in (1, 2):  # the broker accepted requests on them before
                self.job._accept(Exchange(Connection(connection, "c", "b", 0), api.END_TXN, 3, 1), "t")
        self.pipeline = Pipeline([*before, self.job], 1 << 20)
        self.exchanges: list[Exchange] = []
        self.splitter = FrameSplitter(REQUEST_HEAD.size, 1 << 20, self._open)
        self.out = b""
        self._buffer = memoryview(bytearray(1 << 20))

    def _open(self, data: Piece, pos: int) -> Handling:
        size, key, version, correlation_id = REQUEST_HEAD.unpack_from(data, pos)
        self.exchanges.append(Exchange(Connection(1, "c", "b", 0), key, version, correlation_id))
        return self.pipeline.request(self.exchanges[-1], size + 4)

    def feed(self, chunk: bytes) -> bytes:
        """Return the forwarded bytes, copied before the next read overwrites the buffer."""
        self._buffer[: len(chunk)] = chunk
        made = b"".join(self.splitter.feed(self._buffer[: len(chunk)]))
        self._buffer[: len(chunk)] = b"\xee" * len(chunk)
        self.out += made
        return made


def collected(frame: bytes, version: int) -> bytes:
    request = translate.read_produce(frame, version, len(frame))
    return bytes(translate.rewrite_produce(frame, request, NEW, dict.fromkeys(request.partitions, 0)))


@given(st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=4), versions, cuts)
def test_produce_stream_output_does_not_depend_on_pieces(shapes: list[str], version: int, steps: list[int]) -> None:
    frames = [produce_request(version, "t", SHAPES[shape]) for shape in shapes]
    passed = Passed()
    for chunk in cut(b"".join(frames), steps):
        passed.feed(chunk)
    assert passed.out == b"".join(collected(frame, version) for frame in frames)
    assert passed.splitter.between_frames
    assert len(passed.exchanges) == len(frames)


@pytest.mark.parametrize("version", translate.VERSIONS[api.PRODUCE])
def test_single_batch_is_forwarded_before_its_end(version: int) -> None:
    for shape, at_once in (("one batch", True), ("two batches", False), ("two partitions", False)):
        frame = produce_request(version, "t", SHAPES[shape])
        passed = Passed()
        assert bool(passed.feed(frame[:-5])) is at_once
        passed.feed(frame[-5:])
        assert passed.out == collected(frame, version)


@given(versions, st.sampled_from(["one batch", "two topics"]), cuts)
def test_refused_produce_is_answered_after_its_end(version: int, shape: str, steps: list[int]) -> None:
    frame = produce_request(version, "t", SHAPES[shape])
    passed = Passed(known=False)
    chunks = cut(frame, steps)
    for chunk in chunks[:-1]:
        passed.feed(chunk)
    assert [exchange.answer for exchange in passed.exchanges] in ([], [None])
    passed.feed(chunks[-1])
    assert passed.out == b""
    answer = passed.exchanges[0].answer
    assert answer is not None
    response = protocol.ProduceResponse.decode(answer, version=version, header=True, framed=True)
    codes = {(t.name, each.index): each.error_code for t in response.responses for each in t.partition_responses}
    assert codes == {(topic, index): 47 for topic, partitions in SHAPES[shape].items() for index in partitions}


@given(versions, st.sampled_from(list(SHAPES)), st.data())
def test_damaged_produce_in_chunks_is_handled_like_a_whole_frame(version: int, shape: str, data: st.DataObject) -> None:
    frame = bytearray(produce_request(version, "t", SHAPES[shape]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(REQUEST_HEAD.size, len(frame) - 1))] = data.draw(st.integers(0, 255))
    passed = Passed()
    try:
        for chunk in cut(bytes(frame), data.draw(cuts)):
            passed.feed(chunk)
    except ProtocolError:
        return
    # However the frame is divided, only identity, sequence and checksum of a batch change.
    different = [at for at, (old, new) in enumerate(zip(frame, passed.out, strict=False)) if old != new]
    assert len(passed.out) in (0, len(frame))
    allowed = 4 + 14
    assert len(different) <= allowed * 2


def test_produce_without_transactional_id_is_unchanged() -> None:
    frame = produce_request(9, None, SHAPES["two topics"])
    passed = Passed()
    assert passed.feed(frame[:50]) == frame[:50]
    passed.feed(frame[50:])
    assert passed.out == frame


def test_invalid_produce_head_is_read_rarely() -> None:
    batch = records(1, size=60_000)
    frame = bytearray(produce_request(9, "t", {"a": {0: batch}}))
    frame[frame.index(batch) + 16] = 1  # its magic
    passed = Passed()
    with pytest.raises(ProtocolError):
        for chunk in cut(bytes(frame), [1000] * 400):
            passed.feed(chunk)
    assert passed.out == b""


@pytest.mark.parametrize("shape", ["one batch", "two topics"])
@pytest.mark.parametrize("step", [7, 1 << 20])
def test_client_side_jobs_see_the_clients_frames(shape: str, step: int) -> None:
    for known in (True, False):
        steps, counting = list[Step](), CountingJob()
        passed = Passed(known=known, before=[counting, TraceJob(History(), steps.append)])
        frame = produce_request(9, "t", SHAPES[shape])
        for chunk in cut(frame, [step] * (len(frame) // step)):
            passed.feed(chunk)
        assert passed.out == (collected(frame, 9) if known else b"")
        if known:
            passed.pipeline.connection_closed(passed.exchanges[0].connection)
        (seen,) = steps
        assert (seen.producer_id, seen.epoch) == OLD
        assert seen.errors == ([NO_ANSWER] if known else ["INVALID_PRODUCER_EPOCH"])
        assert dict(counting.errors) == ({} if known else {("Produce", "INVALID_PRODUCER_EPOCH"): 1})


@pytest.mark.parametrize("step", [7, 1 << 20])
def test_response_job_sees_responses_of_protection(step: int) -> None:
    counting = CountingJob()
    assert not counting.wants_request(api.PRODUCE, 9)
    passed = Passed(known=False, before=[counting])
    for chunk in cut(produce_request(9, "t", SHAPES["one batch"]), [step] * 400):
        passed.feed(chunk)
    assert dict(counting.errors) == {("Produce", "INVALID_PRODUCER_EPOCH"): 1}


# A Produce in progress and its transaction.

LATER = Identity(NEW.producer_id, NEW.epoch + 1)


def again(passed: Passed, frame: bytes, connection: int) -> tuple[bytes, bytes | None]:
    """Send the same request on another connection, and return the upstream bytes and the response."""
    exchange = Exchange(Connection(connection, "c", "b", 0), api.PRODUCE, 9, 77)
    handling: Any = passed.pipeline.request(exchange, len(frame))
    return bytes(handling.feed(frame)), exchange.answer


def sequences(sent: bytes) -> list[int]:
    return [batch.written.first for batch in translate.read_produce(sent, 9, len(sent)).batches]


def error(answer: bytes | None) -> int:
    assert answer is not None
    response = protocol.ProduceResponse.decode(answer, version=9, header=True, framed=True)
    return int(response.responses[0].partition_responses[0].error_code)


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("end", ["commit", "abort", "init"])
def test_produce_keeps_its_identity_if_transaction_ends_meanwhile(end: str, renews: bool) -> None:
    """The broker refuses it by this identity, so no record can enter the transaction open at that time."""
    passed = Passed()
    machine, (known,) = passed.job.machine, passed.job.machine._known.values()
    known.renews = renews
    frame = produce_request(9, "t", {"a": {3: records(7)}})
    before = passed.feed(frame[:-9])
    assert before
    if end == "init":
        machine.note_init("t", LATER, 2, renews)
    elif machine.note_end("t", machine.check_end("t", OLD, 1, end == "commit", "end"), LATER):
        assert machine.renew("t", OLD, 1) == LATER
    else:
        machine.check_open("t", OLD, 1, "next")
    passed.feed(frame[-9:])
    request = translate.read_produce(frame, 9, len(frame))
    assert passed.out == translate.rewrite_produce(frame, request, NEW, {("a", 3): 0})
    assert passed.splitter.between_frames
    # The next request on this connection is decided independently.
    _, answer = again(passed, frame, 1)
    assert error(answer) == (47 if end == "init" or (end == "abort" and renews) else 19)


@pytest.mark.parametrize("renews", [True, False])
def test_interrupted_produce_counts_once_after_a_retry(renews: bool) -> None:
    passed = Passed()
    machine, (known,) = passed.job.machine, passed.job.machine._known.values()
    known.renews = renews
    frame = produce_request(9, "t", {"a": {3: records(0)}})
    passed.feed(frame[:-9])
    passed.pipeline.connection_closed(passed.exchanges[0].connection)
    sent, answer = again(passed, frame, 2)
    if not renews:
        assert (sent, error(answer)) == (b"", 19)
        sent, answer = again(passed, frame, 2)
    assert (sequences(sent), answer) == ([0], None)
    machine.note_end("t", machine.check_end("t", OLD, 1, True, "end"), LATER)
    machine.check_open("t", OLD, 1, "next")
    # Three records were sent, so the next base sequence upstream is 0, and no record was counted twice.
    sent, _ = again(passed, produce_request(9, "t", {"a": {3: records(3)}}), 2)
    assert sequences(sent) == [0]


def test_refused_produce_stays_refused_until_its_end() -> None:
    """Its connection may be trusted by then, but the discarded bytes are lost."""
    passed = Passed()
    machine, (known,) = passed.job.machine, passed.job.machine._known.values()
    known.trusted[("produce", 0)] = 2
    frame = produce_request(9, "t", {"a": {3: records(0)}})
    assert passed.feed(frame[:-9]) == b""
    known.trusted[("produce", 0)] = 1
    assert passed.feed(frame[-9:]) == b""
    assert error(passed.exchanges[0].answer) == 19
    assert known.bases == {}
    assert machine.state("t") is State.OPEN
    passed.feed(frame)
    assert sequences(passed.out) == [0]
