"""The frame reader: any division into chunks gives the same frames, and other bytes pass unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.shim.errors import Malformed
from eos.shim.pipeline import Connection, Exchange, Job, Pipeline
from eos.shim.wire.frames import UNCHANGED, FrameSplitter, Handling, Piece, Stream
from eos.shim.wire.headers import REQUEST_HEAD, AcksReader, RequestHead, implausible_reason

LIMIT = 1_000_000
payloads = st.binary(min_size=8, max_size=300)


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def cut(data: bytes, steps: list[int]) -> list[bytes]:
    pieces, pos = [], 0
    for step in steps:
        pieces.append(data[pos : pos + step])
        pos += step
    return [piece for piece in [*pieces, data[pos:]] if piece]


class Upper:
    """A stream that changes bytes."""

    def feed(self, piece: Piece) -> Piece:
        return bytes(piece).upper()


@given(st.lists(st.tuples(payloads, st.sampled_from("pwsd")), max_size=8), st.lists(st.integers(1, 400), max_size=40))
def test_splitter_output_does_not_depend_on_chunks(kinds: list[tuple[bytes, str]], steps: list[int]) -> None:
    whole: list[bytes] = []
    opened = 0

    def handler(frame: bytes) -> bytes:
        whole.append(frame)
        return b"<" + frame + b">"

    def dropped(frame: bytes) -> bytes:
        return b""

    passages: dict[str, Handling] = {"p": UNCHANGED, "w": handler, "s": Upper(), "d": dropped}

    def open_frame(data: bytes, pos: int) -> Handling:
        nonlocal opened
        assert data[pos : pos + 12] == framed(kinds[opened][0])[:12]
        opened += 1
        return passages[kinds[opened - 1][1]]

    splitter = FrameSplitter(12, LIMIT, open_frame)
    data = b"".join(framed(payload) for payload, _ in kinds)
    out = b""
    for chunk in cut(data, steps):
        # As in a connection, frames are read into memory that the next chunk overwrites.
        buffer = bytearray(chunk)
        out += b"".join(splitter.feed(memoryview(buffer)))
        buffer[:] = b"\xee" * len(chunk)
    made = {
        "p": lambda frame: frame,
        "w": lambda frame: b"<" + frame + b">",
        "s": lambda frame: frame.upper(),
        "d": lambda frame: b"",
    }
    assert out == b"".join(made[kind](framed(payload)) for payload, kind in kinds)
    assert whole == [framed(payload) for payload, kind in kinds if kind == "w"]
    assert opened == len(kinds)
    assert splitter.between_frames


def test_chunk_of_unchanged_frames_is_returned_as_is() -> None:
    splitter = FrameSplitter(8, LIMIT, lambda data, pos: UNCHANGED)
    chunk = framed(b"a" * 100) * 3
    assert splitter.feed(chunk)[0] is chunk
    huge = framed(b"b" * 500_000)
    assert splitter.feed(huge[:1000])[0] == huge[:1000]
    rest = huge[1000:]
    assert splitter.feed(rest)[0] is rest
    assert splitter.between_frames


@given(st.binary(max_size=200), st.lists(st.integers(1, 20), max_size=20))
def test_garbage_never_breaks_the_acks_reader(data: bytes, steps: list[int]) -> None:
    splitter = FrameSplitter(12, LIMIT, lambda chunk, pos: UNCHANGED)
    try:
        out = b"".join(piece for chunk in cut(data, steps) for piece in splitter.feed(chunk))
    except Malformed:
        return
    assert data.startswith(out)


@pytest.mark.parametrize("size", [-1, 0, 7, LIMIT + 1, 2**31 - 1])
def test_impossible_frame_size_is_malformed(size: int) -> None:
    splitter = FrameSplitter(12, LIMIT, lambda data, pos: UNCHANGED)
    with pytest.raises(Malformed, match=f"a frame of {size} bytes"):
        splitter.feed(size.to_bytes(4, "big", signed=True) + bytes(20))


def test_unopened_frame_is_offered_again_with_more_bytes() -> None:
    shown: list[int] = []

    def open_frame(data: bytes, pos: int) -> Handling | None:
        shown.append(len(data) - pos)
        return UNCHANGED if len(data) - pos >= 20 else None

    splitter = FrameSplitter(12, LIMIT, open_frame)
    frame = framed(b"x" * 30)
    assert splitter.feed(frame[:15]) == []
    assert not splitter.between_frames
    assert b"".join([*splitter.feed(frame[15:22]), *splitter.feed(frame[22:])]) == frame
    assert shown == [15, 22]
    with pytest.raises(Malformed, match="ends within its header"):
        FrameSplitter(12, LIMIT, lambda data, pos: None).feed(frame)


def test_inserted_frame_is_sent_between_two_frames() -> None:
    def open_frame(data: bytes, pos: int) -> Handling:
        if data[pos + 4 : pos + 5] == b"b":
            splitter.insert(b"OURS")
        return UNCHANGED

    splitter = FrameSplitter(8, LIMIT, open_frame)
    first, second = framed(b"a" * 10), framed(b"b" * 10)
    assert b"".join(splitter.feed(first + second)) == first + b"OURS" + second


@pytest.mark.parametrize(
    "beginning",
    [b"GET / HTTP/1.1\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", bytes.fromhex("160301020001000201fc0303"), b"\0" * 12],
)
def test_first_bytes_of_other_protocols_are_implausible(beginning: bytes) -> None:
    assert implausible_reason(RequestHead._make(REQUEST_HEAD.unpack_from(beginning)), 100 * 1024 * 1024) is not None


def produce(version: int, transactional_id: str | None, acks: int, client_id: str | None) -> bytes:
    from kafka.protocol.producer import ProduceRequest

    request = ProduceRequest(version=version, transactional_id=transactional_id, acks=acks, timeout_ms=1, topic_data=[])
    request.with_header(correlation_id=1, client_id=client_id)
    return bytes(request.encode(header=True, framed=True))


@given(
    st.integers(0, 13), st.none() | st.text(max_size=200), st.sampled_from([-1, 0, 1]), st.none() | st.text(max_size=9)
)
def test_acks_are_found_in_the_first_bytes(
    version: int, transactional_id: str | None, acks: int, client_id: str | None
) -> None:
    frame = b"before" + produce(version, transactional_id, acks, client_id)
    assert AcksReader(version).read(frame, 6) == acks
    reader, anew = AcksReader(version), [AcksReader(version) for _ in range(18, len(frame) + 1)]
    found = [reader.read(frame[:end], 6) for end in range(18, len(frame) + 1)]
    assert found == [each.read(frame[:end], 6) for each, end in zip(anew, range(18, len(frame) + 1), strict=True)]
    missing = found.index(acks)
    assert set(found[:missing]) <= {None}
    assert set(found[missing:]) == {acks}


class Recording(Job):
    def __init__(self, name: str, log: list[str], stream: Stream | None = None) -> None:
        self.name, self.log, self.stream = name, log, stream

    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key == 3

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key == 3

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        self.log.append(f"{self.name} request")
        return frame + self.name.encode()

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        self.log.append(f"{self.name} response")
        return frame + self.name.encode()

    def response_stream(self, exchange: Exchange, size: int) -> Stream | None:
        return self.stream


def test_jobs_see_requests_in_order_and_responses_in_reverse() -> None:
    log: list[str] = []
    pipeline = Pipeline([Recording("outer", log), Recording("inner", log)], LIMIT)
    exchange = Exchange(Connection(1, "c", "b", None), 3, 1, 1)
    request, response = pipeline.request(exchange, 10), pipeline.response(exchange, 10)
    assert callable(request)
    assert callable(response)
    assert request(b"q") == b"qouterinner"
    assert response(b"r") == b"rinnerouter"
    assert log[-4:] == ["outer request", "inner request", "inner response", "outer response"]
    assert pipeline.request(Exchange(exchange.connection, 4, 1, 1), 10) is UNCHANGED


def test_frame_is_collected_if_one_job_needs_it_whole() -> None:
    log: list[str] = []
    upper = Upper()
    exchange = Exchange(Connection(1, "c", "b", None), 3, 1, 1)
    streamed = Pipeline([Recording("a", log, upper)], LIMIT).response(exchange, 10)
    assert not callable(streamed)
    assert streamed.feed(b"x") == b"X"  # type: ignore[union-attr]
    mixed = Pipeline([Recording("a", log, upper), Recording("b", log)], LIMIT).response(exchange, 10)
    assert callable(mixed)
    assert mixed(b"x") == b"XB"
