"""Bounds on what the shim reads, keeps and logs for a client, for any request in any chunks."""

from __future__ import annotations

import logging
import struct
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eos.shim import events
from eos.shim.errors import Malformed, ProtocolError
from eos.shim.limited_warnings import INTERVAL_S, LINES_PER_HOST, LINES_PER_INTERVAL, LimitedWarnings
from eos.shim.memory import MemoryBudget
from eos.shim.pipeline import Connection, Exchange, Job, Pipeline
from eos.shim.protect import translate
from eos.shim.protect.machine import Identity
from eos.shim.trace import decode
from eos.shim.wire import api, messages, walk
from eos.shim.wire.cursor import LONGEST_STRING_BYTES, MOST_ELEMENTS, MOST_TAGS, Cursor, uvarint
from eos.shim.wire.frames import FRAMES_PER_TURN, HANDLED_BYTES_PER_TURN, UNCHANGED, FrameSplitter, Handling, Piece
from eos.shim.wire.headers import LONGEST_HEAD_BYTES, REQUEST_HEAD, AcksReader
from eos.shim.wire.walk import Layout, Walk
from tests.unit.shim.messages import requests
from tests.unit.shim.test_frames import cut, framed
from tests.unit.shim.test_protect_frames import produce_request
from tests.unit.shim.test_protect_passing import SHAPES, Passed, collected
from tests.unit.shim.test_unreadable import CLASSES, KEYS

ENDLESS = b"\xff" * 100_000


def produce_head(version: int, behind: bytes, client_id: bytes = b"") -> bytes:
    return struct.pack(">ihhih", 90 << 20, api.PRODUCE, version, 1, len(client_id)) + client_id + behind


# The head of a Produce request.


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        (ENDLESS, "a varint is longer"),
        (b"\0" + ENDLESS, "a varint is longer"),
        (b"\1" + ENDLESS, "a varint is longer"),
        (b"\1\5" + ENDLESS, "a varint is longer"),
        (uvarint(MOST_TAGS + 1), "tagged fields"),
        (b"\1\5" + uvarint(80 << 20), "a head of more than"),
        (b"\0" + uvarint(80 << 20), "a head of more than"),
    ],
)
def test_produce_with_endless_head_is_malformed_early(behind: bytes, reason: str) -> None:
    whole = produce_head(9, behind)
    with pytest.raises(Malformed, match=reason):
        AcksReader(9).read(whole[: 30 + len(uvarint(80 << 20))], 0)
    reader = AcksReader(9)
    with pytest.raises(Malformed, match=reason):
        for end in range(REQUEST_HEAD.size, len(whole) + 1):
            reader.read(whole[:end], 0)


class Counted(bytes):
    """A buffer that counts its reads and the bytes read."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        type(self).looks += 1 if isinstance(at, int) else len(range(*at.indices(len(self))))
        return super().__getitem__(at)


def test_acks_reader_continues_where_it_stopped() -> None:
    tags = uvarint(MOST_TAGS) + b"\x63\x02ab" * MOST_TAGS
    whole = produce_head(9, tags + uvarint(3_001) + b"t" * 3_000 + b"\xff\xff", b"c" * 3_000)
    reader, Counted.looks, found = AcksReader(9), 0, []
    for end in range(REQUEST_HEAD.size, len(whole) + 1):
        found.append(reader.read(Counted(whole[:end]), 0))
    assert found[-1] == -1
    assert set(found[:-1]) == {None}
    # Each new byte costs two or three reads, all of the incomplete field.
    assert Counted.looks < 4 * len(whole)


@given(st.integers(0, MOST_TAGS), st.integers(0, 300), st.integers(0, 300))
def test_longest_valid_produce_heads_are_read(tags: int, client: int, name: int) -> None:
    section = uvarint(tags) + b"\x63\x01a" * tags
    whole = produce_head(9, section + uvarint(name + 1) + b"t" * name + b"\0\1", b"c" * client)
    assert AcksReader(9).read(whole, 0) == 1
    longest = b"c" * LONGEST_STRING_BYTES
    whole = produce_head(9, section + uvarint(LONGEST_STRING_BYTES + 1) + longest + b"\0\1", longest)
    assert AcksReader(9).read(whole, 0) == 1
    assert len(whole) < LONGEST_HEAD_BYTES


def test_produce_sent_byte_by_byte_is_read_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    read = translate.read_produce

    def counted(head: Piece, version: int, size: int) -> translate.Produce:
        nonlocal looks
        looks += 1
        return read(head, version, size)

    monkeypatch.setattr(translate, "read_produce", counted)
    for shape, most in (("one batch", 9), ("two batches", 9), ("two topics", 9), ("no records", 9)):
        frame = produce_request(9, "t" * 200, SHAPES[shape])
        passed, looks = Passed(), 0
        passed.job.machine.note_init("t" * 200, Identity(5, 0), 1)
        for at in range(len(frame)):
            passed.feed(frame[at : at + 1])
        assert 0 < looks <= most
        assert passed.splitter.between_frames


def test_produce_stream_counts_held_bytes_until_decided() -> None:
    frame = produce_request(9, "t", SHAPES["two partitions"])
    passed = Passed()
    passed.feed(frame[:-5])
    connection = passed.exchanges[-1].connection
    assert connection.held_bytes == len(frame) - 5
    passed.feed(frame[-5:])
    assert connection.held_bytes == passed.exchanges[-1].counted_bytes
    assert passed.out == collected(frame, 9)


# The frames of a connection.


@given(st.integers(1, 300), st.lists(st.integers(1, 4_000), max_size=10), st.booleans())
def test_work_in_one_turn_of_a_connection_is_bounded(count: int, steps: list[int], whole: bool) -> None:
    opened = most = 0

    def open_frame(data: Piece, pos: int) -> Handling:
        nonlocal opened
        opened += 1
        return (lambda frame: frame) if whole else UNCHANGED

    splitter = FrameSplitter(12, 1 << 20, open_frame)
    data, out = b"".join(framed(b"%08d" % number * 3) for number in range(count)), b""
    for chunk in cut(data, steps):
        rest: Piece | None = chunk
        while rest is not None:
            before = opened
            out += b"".join(splitter.feed(rest))
            rest = splitter.rest
            most = max(most, opened - before)
    assert out == data
    assert (opened, splitter.between_frames) == (count, True)
    assert most <= FRAMES_PER_TURN


def test_each_large_whole_frame_takes_one_turn() -> None:
    splitter = FrameSplitter(12, 1 << 20, lambda data, pos: lambda frame: frame)
    frame = framed(bytes(HANDLED_BYTES_PER_TURN))
    assert b"".join(splitter.feed(frame * 3)) == frame
    assert splitter.rest == frame * 2
    assert not splitter.between_frames


def test_splitter_counts_held_bytes() -> None:
    """Count the bytes of a collected frame, and those of a frame whose head is incomplete."""
    frame = framed(b"x" * 100)
    collecting = FrameSplitter(12, 1 << 20, lambda data, pos: lambda frame: frame)
    opening = FrameSplitter(12, 1 << 20, lambda data, pos: UNCHANGED if len(data) - pos > 90 else None)
    for splitter in (collecting, opening):
        for at in range(0, 80, 20):
            splitter.feed(frame[at : at + 20])
            assert splitter.held_bytes == at + 20
        assert splitter.feed(frame[80:]) == [frame]
        assert splitter.held_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.booleans()), max_size=80))
@example([(number, 20, False) for number in range(5)] + [(0, 20, True), (5, 20, False)])
def test_memory_budget_evicts_longest_holder_above_its_share(
    steps: list[tuple[int, int, bool]],
) -> None:
    memory, held, evicted = MemoryBudget(100, 10), [0] * 10, list[int]()
    accounts = [memory.open(lambda n=n: held[n], lambda n=n: evicted.append(n)) for n in range(10)]  # type: ignore[misc]
    is_open, large = [True] * 10, list[int]()  # the longest first
    for number, units, renews in steps:
        if not is_open[number]:
            continue
        if renews:
            accounts[number].start_request()
        held[number] = units
        if number in large and (renews or units <= 10):
            large.remove(number)
        if number not in large and units > 10:
            large.append(number)
        accounts[number].count()
        if sum(held) > 100:
            assert evicted
        for gone in evicted:
            assert gone == large.pop(0)
            is_open[gone], held[gone] = False, 0
        evicted.clear()
        assert memory.total == sum(held) <= 100
    for account in accounts:
        account.close()
    assert memory.total == 0


def test_memory_budget_measures_again_before_eviction() -> None:
    """A socket that takes waiting bytes notifies no one."""
    memory, evicted, held = MemoryBudget(300, 2), list[int](), [200] * 2
    accounts = [memory.open(lambda n=n: held[n], lambda n=n: evicted.append(n)) for n in range(2)]  # type: ignore[misc]
    accounts[0].count()
    held[0] = 0
    accounts[1].count()
    assert (memory.total, evicted) == (held[1], [])


def test_memory_budget_never_evicts_below_share() -> None:
    memory, evicted, held = MemoryBudget(1000, 10), list[int](), [100] * 9 + [0]
    accounts = [memory.open(lambda n=n: held[n], lambda n=n: evicted.append(n)) for n in range(10)]  # type: ignore[misc]
    for held[9] in (100, 101):
        for account in accounts:
            account.count()
    assert evicted == [9]


class Reads(Job):
    def wants_request(self, api_key: int, version: int) -> bool:
        return True

    def wants_response(self, api_key: int, version: int) -> bool:
        return True


def test_control_limit_applies_to_all_requests_but_produce() -> None:
    pipeline = Pipeline([Reads()], 1_000_000, 2_000)
    connection = Connection(1, "c", "b", 0)
    for key, size, passes in (
        (api.PRODUCE, 1_000_000, True),
        (api.PRODUCE, 1_000_001, False),
        (api.END_TXN, 2_000, True),
        (api.END_TXN, 2_001, False),
        (api.API_VERSIONS, 2_001, False),
    ):
        exchange = Exchange(connection, key, 3, 1)
        if passes:
            assert callable(pipeline.request(exchange, size))
        else:
            with pytest.raises(ProtocolError, match=f"{api.api_name(key)} v3: {size} bytes exceed the limit"):
                pipeline.request(exchange, size)
    assert callable(pipeline.response(Exchange(connection, api.METADATA, 9, 1), 900_000)), (
        "responses of the broker are not limited"
    )


def test_pipeline_caches_only_versions_that_kafka_has() -> None:
    pipeline = Pipeline([Reads()], 1_000_000)
    for key in range(1_000):
        for version in range(0, 101, 20):
            exchange = Exchange(Connection(1, "c", "b", 0), key, version, 1)
            pipeline.request(exchange, 20)
            pipeline.response(exchange, 20)
    assert set(pipeline.traffic.requests) == set(range(api.NEWEST_KNOWN + 1)) | {api.UNKNOWN}
    assert len(pipeline._for_request) < 200
    assert len(pipeline._for_response) < 200


# Messages.


def flexible(data: bytes) -> Cursor:
    return Cursor(data, 0, flexible=True)


def test_cursor_limits_tags_strings_and_elements() -> None:
    flexible(uvarint(MOST_TAGS) + b"\5\0" * MOST_TAGS).skip_tags()
    with pytest.raises(Malformed, match="101 tagged fields"):
        flexible(uvarint(MOST_TAGS + 1) + b"\5\0" * (MOST_TAGS + 1)).skip_tags()
    assert len(flexible(uvarint(LONGEST_STRING_BYTES + 1) + b"a" * 40_000).string() or "") == LONGEST_STRING_BYTES
    with pytest.raises(Malformed, match="a string of 32768 bytes"):
        flexible(uvarint(LONGEST_STRING_BYTES + 2) + b"a" * 40_000).string()
    half = uvarint(MOST_ELEMENTS // 2 + 1)
    cursor = flexible(half * 3 + bytes(MOST_ELEMENTS))
    assert cursor.count() == cursor.count() == MOST_ELEMENTS // 2
    with pytest.raises(Malformed, match=f"more than {MOST_ELEMENTS} elements"):
        cursor.count()


def test_walk_limits_field_size_and_field_count() -> None:
    def name(at: Walk) -> Layout:
        yield from walk.text(True)

    with pytest.raises(Malformed, match="a string of"):
        Walk(name).feed(uvarint(80 << 20))

    def tags(at: Walk) -> Layout:
        yield from walk.tags(True)

    with pytest.raises(Malformed, match="tagged fields"):
        Walk(tags).feed(uvarint(80 << 20))

    def numbers(at: Walk) -> Layout:
        while True:
            yield from walk.int16()

    Walk(numbers, 101).feed(bytes(200))
    with pytest.raises(Malformed, match="too many fields"):
        Walk(numbers, 101).feed(bytes(202))


@pytest.mark.parametrize("key", KEYS)
def test_request_check_reads_any_version_to_its_end(key: int) -> None:
    cls = CLASSES[key]

    @settings(max_examples=10)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        for version in range(cls.max_version + 1):
            frame = data.draw(requests(cls, version))
            messages.check_request(cls, frame, version)
            if len(frame) > REQUEST_HEAD.size + 2:
                with pytest.raises(Malformed):
                    messages.check_request(cls, frame[:-1], version)

    check()


def end_txn(tags: bytes) -> bytes:
    payload = struct.pack(">hhih", api.END_TXN, 3, 1, -1) + b"\0\2t" + struct.pack(">qhb", 1, 1, 1) + tags
    return framed(payload)


@pytest.mark.parametrize(
    "frame",
    [
        end_txn(uvarint(101) + b"\5\0" * 101 + bytes(100)),
        framed(struct.pack(">hhih", api.END_TXN, 3, 1, -1) + uvarint(101) + b"\5\0" * 101 + bytes(100)),
    ],
    ids=["in the body", "in the header"],
)
def test_oversized_request_is_not_decoded(frame: bytes) -> None:
    with pytest.raises(Malformed, match="101 tagged fields"):
        messages.read_request(frame, api.END_TXN, 3)
    with pytest.raises(Malformed, match="101 tagged fields"):
        decode.request_steps(api.END_TXN, 3, frame, 0.0)
    assert (
        messages.read_request(end_txn(uvarint(99) + b"\5\0" * 99 + bytes(200)), api.END_TXN, 3).transactional_id == "t"
    )


def test_null_transactional_id_is_malformed() -> None:
    """Brokers refuse an empty name, and the page of the trace could not show it."""
    payload = struct.pack(">hhih", api.END_TXN, 1, 1, -1) + b"\xff\xff" + struct.pack(">qhb", 1, 1, 1)
    with pytest.raises(Malformed, match="null"):
        decode.request_steps(api.END_TXN, 1, framed(payload), 0.0)


def test_too_many_batches_in_a_partition_are_malformed() -> None:
    header = struct.pack(">qiibIhiqqqhii", 0, 49, 0, 2, 0, 0x10, 0, 0, 0, 5, 0, 0, 0)
    with pytest.raises(Malformed, match="more than 1000 record batches"):
        translate._read_batches(header * 1_001, 0, len(header) * 1_001, ("t", 0))
    assert len(translate._read_batches(header * 1_000, 0, len(header) * 1_000, ("t", 0))) == 1_000


# The log.


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 20)), max_size=300))
def test_limited_warnings_report_each_warning_once(steps: list[tuple[int, float]]) -> None:
    now, emitted = 0.0, list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = emitted.append  # type: ignore[method-assign]
    events.logger.addHandler(handler)
    try:
        complaints = LimitedWarnings("closed", "more closed", lambda: now)
        for host, seconds in steps:
            now += seconds
            complaints.warn(f"10.0.0.{host}:4711", "why", connection=1)
        complaints.flush()
    finally:
        events.logger.removeHandler(handler)
    fields: list[dict[str, Any]] = [vars(record)["fields"] for record in emitted]
    alone = [each for each in fields if "client" in each]
    assert len(alone) + sum(each["count"] for each in fields if "count" in each) == len(steps)
    intervals = now / INTERVAL_S + 1
    assert len(fields) <= intervals * (LINES_PER_INTERVAL + 1)
    for host in {each["client"] for each in alone}:
        assert sum(each["client"] == host for each in alone) <= intervals * LINES_PER_HOST


def test_event_values_are_cut_and_have_no_line_ends(caplog: pytest.LogCaptureFixture) -> None:
    events.warning("refused", name="t" * 40_000, forged="x\n2026 error all is lost", count=3)
    (record,) = caplog.records
    assert len(record.getMessage()) < 1_000
    assert "(40000 characters)" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert vars(record)["fields"]["count"] == 3
