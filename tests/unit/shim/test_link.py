"""Jobs that answer requests themselves: the client gets all responses in the order of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.shim import Shim, ShimSettings
from eos.shim.addresses.book import Endpoint
from eos.shim.errors import ProtocolError
from eos.shim.link import Link, PauseReason, ReadBuffer
from eos.shim.memory import MemoryBudget
from eos.shim.pipeline import Exchange, Job, Pipeline
from eos.shim.settings import server_tls
from eos.shim.wire.frames import Piece
from tests.shim.fake_broker import FakeBroker
from tests.support.secure import make_pki

FORWARDED, ANSWERED, CHANGED, REFUSED = 35, 37, 38, 39


def frame(api_key: int, correlation_id: int, body: bytes = b"") -> bytes:
    payload = api_key.to_bytes(2, "big") + b"\0\1" + correlation_id.to_bytes(4, "big") + b"\xff\xff" + body
    return len(payload).to_bytes(4, "big") + payload


def answer(correlation_id: int, body: bytes) -> bytes:
    payload = correlation_id.to_bytes(4, "big") + body
    return len(payload).to_bytes(4, "big") + payload


class IgnoringObserver:
    """Observe a link without a shim."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def link_opened(self, link: Link) -> None:
        pass

    def link_needs_broker(self, link: Link) -> None:
        pass

    def link_logged_in(self, link: Link) -> None:
        pass

    def link_failed(self, link: Link, sender: str, error: Exception) -> None:
        self.reasons.append(f"{sender}: {error}")

    def link_closed(self, link: Link) -> None:
        pass


def a_link(pipeline: Pipeline, number: int = 1, buffer: ReadBuffer | None = None, largest: int = 1 << 30) -> Link:
    endpoint = Endpoint(("127.0.0.1", 1))
    return Link(
        number, endpoint, pipeline, largest, IgnoringObserver(), buffer or ReadBuffer(), MemoryBudget(1 << 30, 1)
    )


class Meddling(Job):
    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key in (ANSWERED, CHANGED, REFUSED)

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key == CHANGED

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        if exchange.api_key == REFUSED:
            raise ProtocolError("refused")
        if exchange.api_key == ANSWERED:
            exchange.answer = answer(exchange.correlation_id, b"ours")
            return b""
        exchange.notes[self] = "remembered"
        return frame[:-1] + b"!"

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        assert exchange.notes[self] == "remembered"
        return answer(exchange.correlation_id, frame[8:].upper())


def run(
    work: Callable[[Shim, FakeBroker], Awaitable[Any]],
    broker: FakeBroker | None = None,
    jobs: tuple[Job, ...] = (),
    **settings: Any,
) -> Any:
    """Run `work` with a shim between it and a broker, and return its result."""

    async def inside(broker: FakeBroker) -> Any:
        given = {"drain_timeout_s": 0.2} | settings
        shim = Shim(ShimSettings((("127.0.0.1", broker.port),), ("127.0.0.1", 0), **given), jobs)
        await shim.start()
        try:
            async with asyncio.timeout(30):
                return await work(shim, broker)
        finally:
            await shim.stop()

    with broker or FakeBroker(lambda request: b"x") as there:
        return asyncio.run(inside(there))


async def connect(shim: Shim) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*shim.addresses[0])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def through_a_shim(broker: FakeBroker, sent: bytes, expected: int) -> bytes:
    async def work(shim: Shim, broker: FakeBroker) -> bytes:
        reader, writer = await connect(shim)
        writer.write(sent)
        got = await (reader.readexactly(expected) if expected else reader.read())
        writer.close()
        return got

    return run(work, broker, (Meddling(),))


@pytest.mark.parametrize("order", ["FAFACA", "AAF", "ACA", "AFAAAFC"])
def test_responses_of_jobs_keep_request_order(order: str) -> None:
    seen: list[bytes] = []

    def broker_answers(request: bytes) -> bytes:
        seen.append(request)
        return b"theirs " + request[10:]

    keys = {"F": FORWARDED, "A": ANSWERED, "C": CHANGED}
    sent = b"".join(frame(keys[kind], number, b"body") for number, kind in enumerate(order))
    bodies = {"F": b"theirs body", "A": b"ours", "C": b"THEIRS BOD!"}
    expected = b"".join(answer(number, bodies[kind]) for number, kind in enumerate(order))
    assert through_a_shim(FakeBroker(broker_answers), sent, len(expected)) == expected
    assert len(seen) == sum(kind != "A" for kind in order)


def test_protocol_error_of_a_job_closes_the_connection() -> None:
    seen: list[bytes] = []

    def broker_answers(request: bytes) -> bytes:
        seen.append(request)
        return b"x"

    with contextlib.suppress(ConnectionResetError):
        assert through_a_shim(FakeBroker(broker_answers), frame(REFUSED, 1, b"body"), 0) == b""
    assert seen == []


class Keeping(asyncio.Transport):
    """A transport that sends nothing and keeps its buffers without a copy, like asyncio since Python 3.12."""

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes: list[Piece] = []
        self.closed = self.reading_stopped = False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading_stopped = True

    def resume_reading(self) -> None:
        self.reading_stopped = False

    def write(self, data: Any) -> None:
        self.held_bytes.append(data)

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.held_bytes))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200_000)), min_size=2, max_size=12))
def test_unsent_bytes_survive_the_next_read(reads: list[tuple[int, int]]) -> None:
    """All connections read into one buffer."""
    buffer, pipeline = ReadBuffer(), Pipeline([], 1 << 30)
    links = [a_link(pipeline, number, buffer) for number in range(3)]
    transports = [Keeping() for _ in links]
    for link, transport in zip(links, transports, strict=True):
        link.upstream.connection_made(transport)
    sent = [b"" for _ in links]
    for number, (at, size) in enumerate(reads):
        chunk = frame(FORWARDED, number, bytes([number]) * size)
        view = links[at].client.get_buffer(-1)
        view[: len(chunk)] = chunk
        links[at].client.buffer_updated(len(chunk))
        sent[at] += chunk
    assert [b"".join(transport.held_bytes) for transport in transports] == sent
    # A side that does not read must not keep a whole buffer for each small unsent piece.
    for transport in transports:
        assert sum(isinstance(piece, memoryview) for piece in transport.held_bytes) <= 1


def test_link_counts_unsent_and_unhandled_bytes() -> None:
    link = a_link(Pipeline([], 1 << 30))
    upstream = Keeping()

    def comes(data: bytes) -> int:
        link.client.get_buffer(-1)[: len(data)] = data
        link.client.buffer_updated(len(data))
        return link.memory.total

    link._request_broker()
    early = frame(FORWARDED, 1, bytes(1_000))
    assert comes(early) >= len(early)
    link.upstream.connection_made(upstream)
    link.client.clear_pause(PauseReason.CONNECTING)
    assert len(early) <= comes(frame(FORWARDED, 2)) < 3_000
    upstream.held_bytes.clear()
    # A view would keep the whole read buffer.
    assert comes(frame(FORWARDED, 3, bytes(100_000))) >= len(link.client._buffer.view)
    upstream.held_bytes.clear()
    link.upstream.resume_writing()
    assert link.memory.total < 3_000
    link.client.pause_for(PauseReason.FULL)
    many = frame(FORWARDED, 4) * 10_000
    upstream.held_bytes.clear()
    assert comes(many) > len(many) * 0.9
    assert link.client._unhandled is not None
    link.abort()


def test_early_requests_are_sent_first_upstream() -> None:
    """An event loop may read despite a pause (Python 3.11.2 does, if paused when the connection is made)."""

    async def early_and_later(shim: Shim, broker: FakeBroker) -> bytes:
        began = shim.link_opened

        def began_with_data(link: Link) -> None:
            early = frame(FORWARDED, 0, b"early")
            link.client.get_buffer(-1)[: len(early)] = early
            link.client.buffer_updated(len(early))
            began(link)

        shim.link_opened = began_with_data  # type: ignore[method-assign]
        reader, writer = await connect(shim)
        writer.write(frame(FORWARDED, 1, b"later"))
        got = await reader.readexactly(len(answer(0, b"early") + answer(1, b"later")))
        writer.close()
        return got

    broker = FakeBroker(lambda request: request[10:])
    assert run(early_and_later, broker) == answer(0, b"early") + answer(1, b"later")


def test_link_disables_nagles_algorithm_on_both_sides() -> None:
    """Nagle's algorithm and a delayed ACK cost 40 ms for each Produce response that follows another."""

    async def delays(shim: Shim, broker: FakeBroker) -> list[int]:
        reader, writer = await connect(shim)
        writer.write(frame(FORWARDED, 1))
        await reader.readexactly(8)
        (link,) = shim._links
        transports = [side._transport for side in (link.client, link.upstream)]
        sockets = [transport.get_extra_info("socket") for transport in transports if transport is not None]
        writer.close()
        return [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets]

    assert run(delays) == [1, 1]


@pytest.mark.usefixtures("uncollected")
def test_closed_link_is_freed_without_garbage_collection() -> None:
    """Otherwise links of a thousand former clients would stay in memory until the timeout."""
    links: list[weakref.ref[Link]] = []

    async def come_and_go(shim: Shim, broker: FakeBroker) -> None:
        began = shim.link_opened

        def noted(link: Link) -> None:
            links.append(weakref.ref(link))
            began(link)

        shim.link_opened = noted  # type: ignore[method-assign]
        for number in range(3):
            reader, writer = await connect(shim)
            writer.write(frame(CHANGED, number, b"body"))
            await reader.readexactly(8)
            writer.close()
        await until(lambda: not shim.connections and not any(link() for link in links))

    run(come_and_go, jobs=(Meddling(),))
    assert len(links) == 3


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("aborted", [False, True])
def test_closed_tls_link_is_freed_without_garbage_collection(aborted: bool, tmp_path: Path) -> None:
    """asyncio reads each TLS connection into a buffer of 256 KiB, which lives as long as the transport is
    referenced."""
    pki = make_pki(tmp_path)
    tls = server_tls(str(pki / "server.pem"), str(pki / "server.key"))
    trusting = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    came = 0

    async def come_and_go(shim: Shim, number: int) -> None:
        nonlocal came
        reader, writer = await asyncio.open_connection(*shim.addresses[0], ssl=trusting)
        writer.write(frame(FORWARDED, number, b"body"))
        came += len(await reader.readexactly(9))
        writer.transport.abort() if aborted else writer.close()

    async def grown_by(shim: Shim, broker: FakeBroker) -> int:
        await come_and_go(shim, 0)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20):
            await come_and_go(shim, number)
        await until(lambda: not shim.connections)
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grown = run(grown_by, tls=tls)
    finally:
        tracemalloc.stop()
    assert came == 21 * 9
    assert grown < 10 * 256 * 1024


@pytest.mark.parametrize("gone", ["client", "upstream"])
def test_bytes_for_a_closed_side_are_dropped(gone: str) -> None:
    """A closed transport must not be mistaken for one that is not connected yet."""
    link = a_link(Pipeline([], 1 << 30))
    transports = {"client": Keeping(), "upstream": Keeping()}
    link.client._transport, link.upstream._transport = transports.values()
    side: Any = getattr(link, gone)
    side.connection_lost(None)
    assert (side.is_closed, side.never_connected) == (True, False)
    assert [name for name, transport in transports.items() if transport.closed] == list({*transports} - {gone})
    side.write([b"late"])
    side.write_eof()
    side.pause_for(PauseReason.FULL)
    side.clear_pause(PauseReason.FULL)
    for late in (side.close, side.abort, side.reset):
        late()
    assert not any(transport.held_bytes for transport in transports.values())
    assert not side._unsent


def test_no_piece_is_written_after_a_failed_write() -> None:
    """asyncio warns of each write after the fifth into a connection that it has found lost."""

    class Breaking(Keeping):
        def write(self, data: Any) -> None:
            super().write(data)
            self.closed = True

    link = a_link(Pipeline([], 1 << 30))
    link.upstream._transport = transport = Breaking()
    link.upstream.write([bytes(100_000)] * 9)
    assert len(transport.held_bytes) == 1
