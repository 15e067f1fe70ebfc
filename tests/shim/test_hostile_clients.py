"""Run hostile clients against a real shim and broker, in parallel with an honest client.

The honest client must get each response within a second. The shim must stay small, and must log which clients it
disconnected and why. All tests share one shim; each hostile client has its own address.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from kafka.protocol.metadata import ApiVersionsRequest

from eos.broker import LocalKafka
from eos.shim.wire import api
from eos.shim.wire.cursor import uvarint
from tests.shim import hostile_clients
from tests.shim.hostile_clients import MIB, Honest, connect, frame, head, send_until_closed, send_until_full
from tests.shim.shims import RunningShim, eventually, running
from tests.support.reading import create_topic
from tests.support.wire import Wire

pytestmark = pytest.mark.takes(34)

ENDLESS = b"\xff" * MIB
EMPTY_TAGS = b"\x63\x00" * (MIB // 2)


@pytest.fixture(scope="module")
def shim(kafka: LocalKafka) -> Iterator[RunningShim]:
    with running(kafka.bootstrap_servers) as shim:
        yield shim


@pytest.fixture
def honest(shim: RunningShim, kafka: LocalKafka, names: Callable[[str], str]) -> Iterator[Honest]:
    """Run an honest client before and during the test, and check its response times at the end."""
    topic = names("honest")
    create_topic(kafka.bootstrap_servers, topic)
    with Honest(shim, kafka.bootstrap_servers, topic) as honest:
        eventually(lambda: honest.asked >= 3 or honest.failure)
        yield honest
        asked = honest.asked
        eventually(lambda: honest.asked >= asked + 3 or honest.failure)
    honest.check()


def assert_refused(shim: RunningShim, host: str, reason: str) -> None:
    """Check that the log names the client and the reason, and that its lines are few and short."""
    closed_events = eventually(
        lambda: [e for e in shim.named("connection closed") if str(e["client"]).startswith(f"{host}:")], 10
    )
    reasons = {str(event["reason"]) for event in closed_events}
    assert all(reason in each for each in reasons), reasons
    lines = list(shim.events)
    assert len(lines) < 200
    assert max(len(str(line)) for line in lines) < 2_000


HEAD_END = b"\0\2t\xff\xff\0\0\1\0"  # no tags, transactional.id "t", acks -1, timeout


@pytest.mark.parametrize(
    ("host", "start", "piece", "reason"),
    [
        ("127.0.0.2", b"", ENDLESS, "a varint is longer than five bytes"),
        ("127.0.0.3", b"\0", ENDLESS, "a varint is longer than five bytes"),
        ("127.0.0.4", uvarint(40 * MIB), EMPTY_TAGS, "tagged fields"),
        ("127.0.0.5", b"\1\x63" + uvarint(80 * MIB), bytes(MIB), "a head of more than 131072 bytes"),
        ("127.0.0.6", HEAD_END + b"\3\2a\1" + uvarint(40 * MIB), EMPTY_TAGS, "tagged fields"),
    ],
    ids=["a count without an end", "a name without an end", "tags", "one tag", "tags after a topic"],
)
def test_empty_80_mb_produce_is_refused(
    shim: RunningShim, honest: Honest, host: str, start: bytes, piece: bytes, reason: str
) -> None:
    with connect(shim, host) as hostile:
        send_until_closed(hostile, head(api.PRODUCE, 9, 10 + len(start) + 80 * MIB) + start, piece, 80 * MIB)
        assert_refused(shim, host, reason)


@pytest.mark.parametrize(
    ("api_key", "version"),
    [
        (api.END_TXN, 3),
        (api.INIT_PRODUCER_ID, 4),
        (api.API_VERSIONS, 3),
        (api.TXN_OFFSET_COMMIT, 3),
        (api.ADD_PARTITIONS_TO_TXN, 3),
    ],
)
def test_60_mb_control_frame_is_refused(shim: RunningShim, honest: Honest, api_key: int, version: int) -> None:
    host = f"127.0.1.{api_key}"
    with connect(shim, host) as hostile:
        taken = send_until_closed(hostile, head(api_key, version, 60 * MIB), bytes(MIB), 60 * MIB)
        assert taken < 30 * MIB
        assert_refused(shim, host, "exceed the limit of 2097152 for messages that are read whole")


def test_api_versions_full_of_tags_keeps_the_shim_responsive(shim: RunningShim, honest: Honest) -> None:
    asked = frame(api.API_VERSIONS, 3, b"\0\2x\2x" + uvarint(900_000) + EMPTY_TAGS[:1_800_000])
    with ExitStack() as stack:
        for _ in range(4):
            hostile = stack.enter_context(connect(shim, "127.0.0.7"))
            send_until_full(hostile, asked, 5 * len(asked))


def test_requests_with_unread_responses_use_bounded_memory(shim: RunningShim, honest: Honest) -> None:
    """Send requests that the shim itself answers, because the identity is unknown, and read no response."""
    asked = frame(api.END_TXN, 1, b"\0\x09strangers" + struct.pack(">qhb", 5, 5, 1)) * 10_000
    taken, before = list[int](), psutil.Process(shim.process.pid).memory_info().rss
    with ExitStack() as stack:
        flooding = [stack.enter_context(connect(shim, "127.0.0.8")) for _ in range(4)]
        threads = [
            threading.Thread(target=lambda s=s: taken.append(send_until_full(s, asked, 60 * MIB))) for s in flooding
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        grown = psutil.Process(shim.process.pid).memory_info().rss - before
    assert max(taken) < 40 * MIB, "the shim continued to read"
    assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB are kept for a client that reads nothing"


def test_300_silent_connections_open_no_broker_connections(
    shim: RunningShim, kafka: LocalKafka, honest: Honest
) -> None:
    port = int(kafka.bootstrap_servers.rsplit(":", 1)[1])

    def upstream() -> int:
        return sum(remote == port for _, remote in shim.connections())

    before = upstream()
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(shim, "127.0.0.9")) for _ in range(300)]
        eventually(lambda: len(shim.connections()) >= 300)
        for hostile in silent[:50]:
            hostile.sendall(b"\0\0\0")  # as long as a frame's size field
        assert upstream() <= before + 2  # One of them may be the honest client's next connection.


def test_requests_sent_byte_by_byte_keep_the_shim_responsive(shim: RunningShim, honest: Honest) -> None:
    long_head = head(api.PRODUCE, 9, 50 * MIB) + bytes([100]) + b"\x63\0" * 99
    asked = [long_head, head(api.END_TXN, 3, MIB) + bytes(300), head(api.TXN_OFFSET_COMMIT, 3, MIB) + bytes(300)]
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(shim, "127.0.0.10")) for _ in range(90)]
        for at in range(150):
            for number, hostile in enumerate(slow):
                hostile.sendall(asked[number % len(asked)][at : at + 1])


def test_unfinished_frames_close_the_first_stalled_connection(shim: RunningShim, honest: Honest) -> None:
    """Send 450 MB of unfinished frames: the shim closes the connection that stopped first.

    A broker allocates a whole frame when it begins, so ten much larger ones would exhaust its 1 GB.
    """
    produce = head(api.PRODUCE, 9, 40 * MIB) + HEAD_END + b"\3"
    commit = head(api.TXN_OFFSET_COMMIT, 3, 2 * MIB - 100)
    with ExitStack() as stack:
        for number in range(110):
            hostile = stack.enter_context(connect(shim, "127.0.0.11"))
            if number % 11:
                send_until_closed(hostile, commit, bytes(3 * MIB // 2), MIB)
            else:
                send_until_closed(hostile, produce, bytes(MIB), 30 * MIB)
        assert_refused(shim, "127.0.0.11", "connections have used up their memory")


def test_all_versions_of_kafka_are_offered(shim: RunningShim, kafka: LocalKafka) -> None:
    """Compare ApiVersions with the broker's, for which the shim was built; a newer client learns the version to use."""
    newest = api.NEWEST[api.API_VERSIONS]
    with Wire(kafka.bootstrap_servers) as direct, Wire(shim.bootstrap_servers) as through:
        for version in range(ApiVersionsRequest.max_version + 1):
            asked = ApiVersionsRequest(version=version, client_software_name="x", client_software_version="1")
            offered = direct.ask(asked)
            for each in offered.api_keys:
                if each.api_key == api.TXN_OFFSET_COMMIT:  # the only limited API, see api.NEWEST
                    each.max_version = min(each.max_version, api.NEWEST[api.TXN_OFFSET_COMMIT])
            assert through.ask(asked) == offered
        through.socket.sendall(frame(api.API_VERSIONS, newest + 1, b"\0\2x\2x\0", 99))
        assert through.receive()[4:] == bytes.fromhex("00000063 0023 00000001 0012 0000") + newest.to_bytes(2, "big")


@pytest.mark.parametrize(
    ("seconds", "per_key"),
    [(4.0, 15), pytest.param(600.0, 400, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
    ids=["seconds", "ten minutes"],
)
def test_random_frames_keep_the_shim_responsive(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path, seconds: float, per_key: int
) -> None:
    """Send random frames for seconds, or for ten minutes as `python -m tests.shim.hostile_clients` does."""
    topic = names("honest")
    create_topic(kafka.bootstrap_servers, topic)
    seed = int(time.time())
    print(f"seed {seed}")
    with hostile_clients.guarded_shim(kafka.bootstrap_servers, tmp_path) as shim:
        with Honest(shim, kafka.bootstrap_servers, topic) as honest:
            assert hostile_clients.random_frames(shim, seconds, per_key, seed) > 20
        honest.check()
        assert len(shim.events) < 100 + 60 * (seconds / 60 + 1)
        assert shim.named("connection closed")
