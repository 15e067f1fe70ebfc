"""Admission: which clients may connect, idle timeouts, and the limit for clients that do not read responses."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eos.errors import ConfigurationError
from eos.shim import Shim, ShimSettings
from eos.shim.limited_warnings import LINES_PER_HOST
from eos.shim.link import MOST_UNANSWERED, PauseReason
from eos.shim.memory import MemoryBudget
from eos.shim.pipeline import Exchange, Job
from eos.shim.server import counted_address
from eos.shim.settings import check_relay, server_tls
from eos.shim.wire import api
from eos.shim.wire.cursor import uvarint
from eos.shim.wire.frames import FRAMES_PER_TURN
from tests.shim.fake_broker import FakeBroker
from tests.support.secure import make_pki
from tests.unit.shim.test_link import ANSWERED, FORWARDED, Meddling, answer, connect, frame, run, until

MIB = 1024 * 1024
UNANSWERED = 40


async def ended(reader: asyncio.StreamReader, answered: int = 0) -> bool:
    """Return whether at most this many bytes of responses arrived before the end."""
    try:
        return len(await reader.read()) == answered
    except ConnectionError:
        return True


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(vars(record)["fields"].get("reason")) for record in caplog.records if hasattr(record, "fields")]


HELLO = struct.pack(">ihhih", 10, api.API_VERSIONS, 0, 1, -1)
HALF = frame(0, 1, b"")[:13]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"", "the client sent no request"),
        (b"\0\0\0\x30\0\0", "the client sent no request"),
        (HALF, "the client sent no request"),
        (HELLO, "the client did not complete its login"),
        (HELLO + frame(api.SASL_HANDSHAKE, 1), "the client did not complete its login"),
        (HELLO + frame(FORWARDED, 1, bytes(100))[:50], "the client did not complete its login"),
    ],
    ids=["nothing", "part", "part of a Produce", "ApiVersions", "a login's first step", "part of a request"],
)
def test_connection_without_login_is_closed_in_time(
    first: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(shim: Shim, broker: FakeBroker) -> None:
        asking, silent = await connect(shim), await connect(shim)
        asking[1].write(frame(FORWARDED, 1))
        silent[1].write(first)
        assert await asking[0].readexactly(9)
        await ended(silent[0])
        asking[1].write(frame(FORWARDED, 2))
        assert await asking[0].readexactly(9)
        assert shim.connections == 1

    run(work, login_timeout_s=0.3)
    assert reasons(caplog).count(f"{reason} (0.3 s)") == 1


def test_connection_waiting_for_its_broker_is_not_idle(caplog: pytest.LogCaptureFixture) -> None:
    """A first JoinGroup may wait for minutes, and a paused broker admits no client."""

    async def work(shim: Shim, broker: FakeBroker) -> None:
        clients = []
        for kind in (UNANSWERED, api.SASL_HANDSHAKE, FORWARDED):
            clients.append(await connect(shim))
            clients[-1][1].write(frame(kind, 1))
        assert await ended(clients[-1][0], 9)
        looks = [link.timeout_check for link in shim._links]
        await until(
            lambda: not set(looks) & {link.timeout_check for link in shim._links}
        )  # the timeout was checked again
        assert shim.connections == 2

    run(
        work,
        FakeBroker(lambda request: b"x" if request[1] == FORWARDED else None),
        login_timeout_s=0.5,
        idle_timeout_s=0.2,
    )
    assert reasons(caplog).count("the connection is idle (0.2 s)") == 1


def test_upstream_connection_opens_with_first_valid_request() -> None:
    asked = list[bytes]()

    async def work(shim: Shim, broker: FakeBroker) -> None:
        accepted = 0
        begin = broker._begin

        def counted(connection: socket.socket) -> None:
            nonlocal accepted
            accepted += 1
            begin(connection)

        broker._begin = counted  # type: ignore[method-assign]
        silent, garbage = await connect(shim), await connect(shim)
        garbage[1].write(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        assert await ended(garbage[0])
        half = await connect(shim)
        half[1].write(frame(FORWARDED, 1)[:6])
        half[1].write_eof()
        assert await ended(half[0]), "a client that ended before its first request is still there"
        await until(lambda: shim.connections == 1)
        assert accepted == 0
        silent[1].write(frame(FORWARDED, 1))
        assert await silent[0].readexactly(9)
        assert accepted == 1

    run(work, FakeBroker(lambda request: asked.append(request) or b"x"))
    assert len(asked) == 1


def test_connection_limit_closes_oldest_silent_client_or_refuses_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(shim: Shim, broker: FakeBroker) -> None:
        asking, silent = await connect(shim), await connect(shim)
        asking[1].write(frame(FORWARDED, 1))
        assert await asking[0].readexactly(9)
        await until(lambda: shim.connections == 2)
        later = await connect(shim)
        later[1].write(frame(FORWARDED, 1))
        assert await later[0].readexactly(9)
        assert await ended(silent[0])
        too_many = await connect(shim)
        assert await ended(too_many[0])
        for reader, writer in (asking, later):
            writer.write(frame(FORWARDED, 2))
            assert await reader.readexactly(9)
        later[1].close()
        await until(lambda: shim.connections == 1)
        again = await connect(shim)
        again[1].write(frame(FORWARDED, 1))
        assert await again[0].readexactly(9)

    run(work, most_connections=2, most_per_address=2)
    assert reasons(caplog) == [
        "the client sent no request (another client connected)",
        "2 connections from 127.0.0.1 are open (--max-connections-per-address)",
    ]


async def connect_from(shim: Shim, host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*shim.addresses[0], local_addr=(host, 0))


async def asks(client: tuple[asyncio.StreamReader, asyncio.StreamWriter], api_key: int = FORWARDED) -> None:
    client[1].write(frame(api_key, 1))
    assert await client[0].readexactly(9)


@pytest.mark.parametrize("first", [api.SASL_HANDSHAKE, FORWARDED], ids=["not let in", "let in"])
def test_address_limit_closes_unauthenticated_connections_first(first: int, caplog: pytest.LogCaptureFixture) -> None:
    async def work(shim: Shim, broker: FakeBroker) -> None:
        honest = await connect_from(shim, "127.0.0.3")
        await asks(honest)
        strangers = []
        for _ in range(3):
            strangers.append(await connect_from(shim, "127.0.0.2"))
            await asks(strangers[-1], first)
        strangers.append(await connect_from(shim, "127.0.0.2"))
        assert await ended(strangers[0 if first == api.SASL_HANDSHAKE else 3][0])
        for _ in range(4):  # a closed connection frees its address's share
            other = await connect_from(shim, "127.0.0.3")
            await asks(other)
            other[1].close()
            await until(lambda: shim._connections_by_address["127.0.0.3"] == 1)
        await asks(honest)
        for _, writer in (*strangers, honest):
            writer.close()
        await until(lambda: not shim.connections)
        assert not shim._connections_by_address
        assert not shim._addresses

    run(work, most_connections=5, most_per_address=3)
    reason = {
        api.SASL_HANDSHAKE: "the client did not complete its login (another client connected)",
        FORWARDED: "3 connections from 127.0.0.2 are open (--max-connections-per-address)",
    }[first]
    assert reasons(caplog) == [reason]


def test_new_client_replaces_one_of_many_without_login(caplog: pytest.LogCaptureFixture) -> None:
    async def work(shim: Shim, broker: FakeBroker) -> None:
        strangers = [await connect_from(shim, f"127.0.1.{number}") for number in range(1, 51)]
        for stranger in strangers:
            await asks(stranger, api.SASL_HANDSHAKE)
        assert shim.connections == 50
        newcomer = await connect(shim)
        await asks(newcomer)
        assert await ended(strangers[0][0])

    run(work, most_connections=50)
    assert reasons(caplog) == ["the client did not complete its login (another client connected)"]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "::ffff:10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_ipv6_network_counts_as_one_address(host: str, address: str) -> None:
    assert counted_address(host) == address


@pytest.mark.parametrize(("said", "most", "places"), [(None, 2_000, 1_500), (None, 1, 1), (7, 2_000, 7)])
def test_address_limit_is_three_quarters_by_default(said: int | None, most: int, places: int) -> None:
    settings = ShimSettings((("a", 1),), ("127.0.0.1", 0), most_connections=most, most_per_address=said)
    assert settings.limit_per_address == places


def test_accept_continues_after_system_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def work(shim: Shim, broker: FakeBroker) -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [errno.EMFILE, errno.ECONNABORTED, errno.EMFILE]

        async def failing(sock: socket.socket) -> Any:
            if failures:
                raise OSError(failures.pop(), "no")
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", failing)
        for _ in range(3):
            reader, writer = await connect(shim)
            writer.write(frame(FORWARDED, 1))
            assert await reader.readexactly(9)
        assert not failures

    run(work)
    assert sum("accept failed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("kind", [FORWARDED, ANSWERED])
def test_pipelined_requests_are_answered_in_order(kind: int) -> None:
    count = 5 * MOST_UNANSWERED

    async def work(shim: Shim, broker: FakeBroker) -> None:
        reader, writer = await connect(shim)
        writer.write(b"".join(frame(kind, number, b"body") for number in range(count)))
        writer.write_eof()
        body = b"ours" if kind == ANSWERED else b"x"
        assert await reader.read() == b"".join(answer(number, body) for number in range(count))

    run(work, jobs=(Meddling(),))


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_requests_sent_before_disconnect_reach_the_broker(secure: bool, tmp_path: Path) -> None:
    count, seen = 3 * MOST_UNANSWERED, list[bytes]()
    pki = make_pki(tmp_path)
    trusting = ssl.create_default_context(cafile=str(pki / "ca.pem")) if secure else None

    async def work(shim: Shim, broker: FakeBroker) -> None:
        _, writer = await asyncio.open_connection(*shim.addresses[0], ssl=trusting)

        def produce(number: int) -> bytes:  # v3 with acks=0: there is no response
            return struct.pack(">ihhihhhii", 22, api.PRODUCE, 3, number, -1, -1, 0, 100, 0)

        writer.write(b"".join(produce(number) for number in range(count)))
        await writer.drain()
        if secure:
            writer.close()
        else:
            writer.write_eof()
        await until(lambda: len(seen) == count)
        writer.close()
        await until(lambda: not shim.connections)

    tls = server_tls(str(pki / "server.pem"), str(pki / "server.key")) if secure else None
    run(work, FakeBroker(lambda request: seen.append(request)), tls=tls)
    assert [int.from_bytes(request[4:8], "big") for request in seen] == list(range(count))


@pytest.mark.parametrize("leaves", ["reset", "stays"])
def test_busy_client_does_not_starve_another_client(leaves: str) -> None:
    """Each turn of the loop handles a share of the frames, even after the end of a connection."""

    count, turn, handled = 25_000, 0, Counter[int]()  # how many of its requests in each turn of the loop

    class Counting(Meddling):
        def request(self, exchange: Exchange, frame: bytes) -> bytes:
            handled[turn] += 1
            return super().request(exchange, frame)

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def work(shim: Shim, broker: FakeBroker) -> None:
        counting = asyncio.create_task(turns())
        honest, greedy = await connect(shim), await connect(shim)
        await asks(honest)
        greedy[1].write(frame(ANSWERED, 1, b"body") * count)
        assert await greedy[0].readexactly(12)
        if leaves == "reset":
            greedy[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            greedy[1].transport.abort()
            await until(lambda: shim.connections == 1)
        else:
            await until(lambda: handled.total() == count)
        await asks(honest)
        greedy[1].transport.abort()
        counting.cancel()

    run(work, jobs=(Counting(),))
    assert handled.total() > FRAMES_PER_TURN
    assert max(handled.values()) <= FRAMES_PER_TURN


class Large(Meddling):
    """A broker that answers each request with 20 KB."""

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        exchange.answer = answer(exchange.correlation_id, bytes(20_000))
        return b""


def test_client_that_does_not_read_the_shims_responses_is_paused() -> None:
    async def work(shim: Shim, broker: FakeBroker) -> int:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.setblocking(False)
            await loop.sock_connect(client, shim.addresses[0])
            await until(lambda: len(shim._links) == 1)
            (link,) = shim._links
            piece, sent, is_full = frame(ANSWERED, 1, b"body") * 20_000, 0, False
            while not (is_full and link.client._pause_reasons & PauseReason.UNREAD):
                try:
                    sent += client.send(piece[sent % len(piece) :])
                    is_full = False
                    assert sent < 60 * MIB
                except BlockingIOError:
                    is_full = True
                await asyncio.sleep(0)
            assert link.client._transport is not None
            assert link.client._transport.get_write_buffer_size() < 3 * MIB
            # Reading continues after the client has read its responses.
            got, most = b"", link.client._transport.get_write_buffer_size() + 2 * MIB
            while len(got) < most:
                got += await loop.sock_recv(client, MIB)
            ours = answer(1, bytes(20_000))
            assert got == (ours * (len(got) // len(ours) + 1))[: len(got)]
            return sent

    assert run(work, jobs=(Large(),)) < 30 * MIB


def test_unanswered_requests_of_a_connection_are_bounded() -> None:
    async def work(shim: Shim, broker: FakeBroker) -> int:
        _, writer = await connect(shim)
        writer.write(frame(FORWARDED, 1, b"b") * 20_000)
        await until(lambda: any(link.client._pause_reasons & PauseReason.UNANSWERED for link in shim._links))
        (link,) = shim._links
        most = len(link._pending)
        writer.transport.abort()
        return most

    assert run(work, FakeBroker(lambda request: None)) < MOST_UNANSWERED + 100


def test_responses_of_the_shim_after_a_pending_one_are_bounded() -> None:
    async def work(shim: Shim, broker: FakeBroker) -> int:
        _, writer = await connect(shim)
        writer.write(frame(FORWARDED, 1, b"b") + frame(ANSWERED, 1, b"b") * 5_000)
        await until(lambda: any(link.client._pause_reasons & PauseReason.UNANSWERED for link in shim._links))
        (link,) = shim._links
        own_response_bytes = sum(len(exchange.answer or b"") for exchange in link._pending)
        assert own_response_bytes == link.connection.own_response_bytes
        writer.transport.abort()
        return own_response_bytes

    assert run(work, FakeBroker(lambda request: None), jobs=(Large(),)) < 3 * MIB


class Collects(Job):
    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key == FORWARDED


class Answers(Meddling):
    """20 KB for each request, at once."""

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        if exchange.api_key == ANSWERED:
            exchange.answer = answer(exchange.correlation_id, bytes(20_000))
            return b""
        return frame


def unfinished_head() -> bytes:
    """Return the start of a Produce request with a tag of 120 KB before its acks."""
    tags = b"\1\x63" + uvarint(120_000)
    return struct.pack(">ihhih", 600_000, api.PRODUCE, 9, 1, -1) + tags + bytes(119_000)


HOLDING = {
    "an unfinished head": unfinished_head(),
    "a part of a frame that is collected": struct.pack(">ihhih", 600_000, FORWARDED, 1, 1, -1) + bytes(119_000),
    "unanswered requests": frame(UNANSWERED, 1) * 1_000,
    "answers behind one that the broker owes": frame(UNANSWERED, 1) + frame(ANSWERED, 1) * 40,
}


@pytest.mark.parametrize("held", HOLDING)
def test_memory_limit_closes_longest_holders_first(held: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client that waits for its response or sends a large request is not disconnected."""

    async def work(shim: Shim, broker: FakeBroker) -> None:
        memory = shim._memory = MemoryBudget(4 * MIB, 100)
        waiting = await connect(shim)
        waiting[1].write(frame(UNANSWERED, 1))
        await until(lambda: memory.total > 0)
        strangers, newest = [], 1
        for newest in range(2, 72):
            strangers.append(await connect(shim))
            strangers[-1][1].write(HOLDING[held])
            await until(
                lambda newest=newest: any(
                    link.number == newest and link._account.held > memory.share for link in shim._links
                )
            )
            assert memory.total <= memory.limit
            assert memory.total >= sum(link._held_bytes() for link in shim._links if link.client.is_writable)
        assert await ended(strangers[0][0])
        large = await connect(shim)
        large[1].write(frame(FORWARDED, 2, bytes(MIB)))
        assert await large[0].readexactly(9)
        assert not waiting[0].at_eof()
        for _, writer in (*strangers, waiting, large):
            writer.transport.abort()
        await until(lambda: not shim.connections)
        assert memory.total == 0

    broker = FakeBroker(lambda request: None if request[1] == UNANSWERED else b"x")
    run(work, broker, (Collects(), Answers()), largest_control=2 * MIB)
    lines = [reason for reason in reasons(caplog) if "used up their memory" in reason]
    assert len(lines) == LINES_PER_HOST
    assert set(lines) == set(reasons(caplog)) - {"None"}


@pytest.mark.parametrize(
    ("certificate", "client_ca", "trusted", "refused"),
    [
        (None, None, False, False),
        ("shim.pem", None, False, True),
        ("shim.pem", "ca.pem", False, False),
        ("shim.pem", None, True, False),
    ],
)
def test_upstream_certificate_needs_client_ca_or_trust(
    certificate: str | None, client_ca: str | None, trusted: bool, refused: bool
) -> None:
    if not refused:
        check_relay(certificate, client_ca, trusted)
        return
    with pytest.raises(ConfigurationError, match=r"--client-ca FILE, or allow all clients with --trust-clients"):
        check_relay(certificate, client_ca, trusted)
