"""Break connections: garbage, leaks, huge frames, slow and half-closed peers, and stops of the shim."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

from eos.broker.node import free_ports
from eos.shim.wire.cursor import uvarint
from tests.shim.fake_broker import FakeBroker
from tests.shim.shims import RunningShim, eventually, refused, running
from tests.support.wire import Wire

MIB = 1024 * 1024


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


def frame(api_key: int, version: int, correlation_id: int, body: bytes = b"") -> bytes:
    head = api_key.to_bytes(2, "big") + version.to_bytes(2, "big") + correlation_id.to_bytes(4, "big") + b"\xff\xff"
    return (len(head) + len(body)).to_bytes(4, "big") + head + body


def closed(shim: RunningShim, reason: str) -> None:
    (event,) = eventually(lambda: shim.named("connection closed"))
    assert reason in event["reason"]


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: kafka\r\n\r\n", "a frame of 1195725856 bytes"),
        (bytes.fromhex("160301020001000001fc0303") + bytes(100), "a frame of 369295618 bytes"),
        (bytes(64), "a frame of 0 bytes"),
        (b"\0\0\0\x10" + b"\x7f\xff" * 20, "it requests API 32767"),
    ],
    ids=["http", "tls", "zeros", "no-api"],
)
def test_garbage_first_bytes_close_the_connection_with_one_line(
    broker: FakeBroker, garbage: bytes, reason: str
) -> None:
    with running(broker.address) as shim:
        with Wire(shim.bootstrap_servers) as wire:
            wire.socket.sendall(garbage)
            assert wire.ended()
        closed(shim, reason)
        with Wire(shim.bootstrap_servers) as wire:  # The next client is still served.
            assert wire.ask(MetadataRequest(version=4, topics=[])).brokers


def test_leaked_address_in_unknown_version_closes_the_connection() -> None:
    def answer(request: bytes) -> bytes:
        return b"\0\0\0\x01" + b"\0\x09127.0.0.1" + upstream.port.to_bytes(4, "big") + b"more"

    with FakeBroker(answer) as upstream, running(upstream.address) as shim:
        with Wire(shim.bootstrap_servers) as wire:
            wire.socket.sendall(frame(3, 99, 5))
            assert wire.ended(), "the response must not reach the client"
        closed(shim, f"the upstream address {upstream.address} is in a response to Metadata v99")


def test_unreadable_response_is_not_forwarded() -> None:
    with FakeBroker(lambda request: b"\x7f" * 40) as broker, running(broker.address) as shim:
        with Wire(shim.bootstrap_servers) as wire:
            wire.socket.sendall(frame(3, 1, 5))
            assert wire.ended()
        closed(shim, "does not fit into its frame")


def test_response_out_of_order_is_not_forwarded() -> None:
    def take(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"\0\0\0\x08" + (77).to_bytes(4, "big") + b"body")

    with FakeBroker(take=take) as broker, running(broker.address) as shim:
        with Wire(shim.bootstrap_servers) as wire:
            wire.socket.sendall(frame(36, 0, 5))
            assert wire.ended()
        closed(shim, "request 77 out of order")


def test_unknown_apis_and_versions_are_forwarded_unchanged() -> None:
    seen: list[bytes] = []

    def answer(request: bytes) -> bytes:
        seen.append(request)
        return bytes(range(256)) * 2000

    with FakeBroker(answer) as broker, running(broker.address) as shim, Wire(shim.bootstrap_servers) as wire:
        for number, (key, version) in enumerate([(500, 3), (19, 99), (36, 7), (1, 99), (0, 99)]):
            body = os.urandom(70) if key else b"\x00" + b"\x00" + b"\xff\xff" + os.urandom(50)
            sent = frame(key, version, number, body)
            wire.socket.sendall(sent)
            got = wire.receive()
            assert seen[-1] == sent[4:]
            assert got[4:8] == number.to_bytes(4, "big")
            assert got[8:] == bytes(range(256)) * 2000
        assert len(seen) == 5


def test_sasl_handshake_v0_is_refused_with_one_line(broker: FakeBroker) -> None:
    with running(broker.address) as shim:
        with Wire(shim.bootstrap_servers) as wire:
            wire.socket.sendall(frame(17, 0, 1, b"\0\x05PLAIN"))
            assert wire.ended()
        closed(shim, "SaslHandshake v0 is not supported")


def memory(shim: RunningShim) -> int:
    return int(psutil.Process(shim.process.pid).memory_info().rss)


def test_huge_frame_is_streamed_without_being_kept() -> None:
    received = threading.Event()
    total = 90 * MIB

    def take(connection: socket.socket) -> None:
        left = total
        while left > 0:
            left -= len(connection.recv(MIB))
        received.set()
        head = (total + 4).to_bytes(4, "big") + (9).to_bytes(4, "big")
        connection.sendall(head)
        for _ in range(total // MIB):
            connection.sendall(bytes(MIB))

    with FakeBroker(take=take) as broker, running(broker.address) as shim, Wire(shim.bootstrap_servers) as wire:
        before = memory(shim)
        most = before
        head = (total - 4).to_bytes(4, "big") + frame(36, 1, 9)[4:]
        wire.socket.sendall(head + bytes(MIB - len(head)))
        for _ in range(total // MIB - 1):
            wire.socket.sendall(bytes(MIB))
            most = max(most, memory(shim))
        eventually(received.is_set)
        got = 0
        while got < total + 8:
            got += len(wire.socket.recv(MIB))
            most = max(most, memory(shim))
        assert got == total + 8
        assert most - before < 16 * MIB, f"{(most - before) / MIB:.0f} MiB more while {total / MIB:.0f} MiB passed"


@pytest.mark.parametrize("slow", ["broker", "client"])
def test_slow_reader_pauses_the_other_side(slow: str) -> None:
    go, ended = threading.Event(), threading.Event()

    def take(connection: socket.socket) -> None:
        connection.settimeout(60)
        if slow == "broker":
            go.wait(60)
            left = 60 * MIB
            while left > 0:
                left -= len(connection.recv(MIB))
        else:
            connection.recv(1000)
            connection.sendall((60 * MIB - 4).to_bytes(4, "big") + (9).to_bytes(4, "big"))
            for _ in range(60):
                connection.sendall(bytes(MIB)[8:] if not _ else bytes(MIB))
        ended.set()

    with FakeBroker(take=take) as broker, running(broker.address) as shim, Wire(shim.bootstrap_servers) as wire:
        before = memory(shim)
        if slow == "broker":
            data = memoryview((60 * MIB - 4).to_bytes(4, "big") + frame(36, 1, 9)[4:] + bytes(60 * MIB - 14))
            wire.socket.setblocking(False)
            sent = 0

            def stuck() -> bool:
                """Return True once the socket buffers are full and nothing could be sent for a while."""
                nonlocal sent
                wire.socket.settimeout(1.0)
                try:
                    while True:
                        sent += wire.socket.send(data[sent : sent + MIB])
                except TimeoutError:
                    return True

            assert stuck()
            assert sent < 40 * MIB, "the shim took more than socket buffers hold"
            assert memory(shim) - before < 16 * MIB
            go.set()
            wire.socket.settimeout(20)
            wire.socket.sendall(data[sent:])
        else:
            wire.socket.sendall(frame(36, 1, 9))
            # Only the client can block the broker: the broker's sender does not end while the client does not read.
            assert not ended.wait(2)
            assert memory(shim) - before < 16 * MIB
            left = 60 * MIB
            while left > 0:
                left -= len(wire.socket.recv(MIB))
        eventually(ended.is_set)


def test_half_closed_client_gets_its_response() -> None:
    saw_end = threading.Event()

    def take(connection: socket.socket) -> None:
        data = b""
        while piece := connection.recv(1000):
            data += piece
        saw_end.set()
        connection.sendall(b"\0\0\0\x08" + data[8:12] + b"late")
        connection.close()

    with FakeBroker(take=take) as broker, running(broker.address) as shim, Wire(shim.bootstrap_servers) as wire:
        wire.socket.sendall(frame(36, 1, 9))
        wire.socket.shutdown(socket.SHUT_WR)
        eventually(saw_end.is_set)  # The end of the client's half reaches the broker.
        assert wire.receive()[8:] == b"late"
        assert wire.ended()
        eventually(lambda: not shim.connections())


def test_broker_close_ends_client_after_last_response() -> None:
    def take(connection: socket.socket) -> None:
        data = connection.recv(1000)
        connection.sendall((4 + 3 * MIB).to_bytes(4, "big") + data[8:12] + bytes(3 * MIB))
        connection.close()

    with FakeBroker(take=take) as broker, running(broker.address) as shim, Wire(shim.bootstrap_servers) as wire:
        wire.socket.sendall(frame(36, 1, 9))
        assert len(wire.receive()) == 8 + 3 * MIB
        assert wire.ended()


def test_many_connections_leave_no_resources(broker: FakeBroker) -> None:
    with running(broker.address) as shim:

        def burst(count: int) -> None:
            wires = [Wire(shim.bootstrap_servers) for _ in range(count)]
            for wire in wires:
                wire.send(MetadataRequest(version=4, topics=[]))
            for wire in wires:
                assert wire.receive()
                wire.socket.close()
            eventually(lambda: not shim.connections())

        burst(200)
        files, size = psutil.Process(shim.process.pid).num_fds(), memory(shim)
        for _ in range(4):
            burst(200)
        # The last descriptor is closed a moment after its connection ends.
        eventually(lambda: psutil.Process(shim.process.pid).num_fds() <= files)
        assert memory(shim) - size < 8 * MIB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_shim_delivers_pending_responses(number: signal.Signals) -> None:
    asked, go = threading.Event(), threading.Event()

    def answer(request: bytes) -> bytes:
        asked.set()
        go.wait(60)
        return b"answered"

    with FakeBroker(answer) as broker, running(broker.address) as shim:
        idle, busy = Wire(shim.bootstrap_servers), Wire(shim.bootstrap_servers)
        idle.ask(ApiVersionsRequest(version=0))
        busy.socket.sendall(frame(36, 1, 9))
        eventually(asked.is_set)
        shim.process.send_signal(number)
        assert idle.ended(), "an idle connection stayed open"
        assert shim.process.poll() is None
        go.set()
        assert busy.receive()[8:] == b"answered"
        assert busy.ended()
        assert shim.process.wait(10) == 0


def test_stopped_shim_completes_a_request_in_progress() -> None:
    """Stop during a Produce, which a busy producer always has in progress; without its rest, the stop would time
    out."""
    began = threading.Event()
    sent = frame(36, 1, 9, bytes(MIB))

    def take(connection: socket.socket) -> None:
        left = len(sent)
        while left > 0:
            left -= len(connection.recv(MIB))
            began.set()
        connection.sendall(b"\0\0\0\x08" + (9).to_bytes(4, "big") + b"done")

    with FakeBroker(take=take) as broker, running(broker.address) as shim:
        idle, busy = Wire(shim.bootstrap_servers), Wire(shim.bootstrap_servers)
        busy.socket.sendall(sent[: MIB // 2])
        eventually(began.is_set)
        shim.process.send_signal(signal.SIGTERM)
        assert idle.ended()
        busy.socket.sendall(sent[MIB // 2 :] + frame(36, 1, 10, b"the next one is not taken any more"))
        assert busy.receive()[8:] == b"done"
        assert busy.ended()
        assert shim.process.wait(30) == 0
        assert not shim.named("drain timed out"), "the stop waited until its timeout"


def test_wrong_arguments_end_with_sentence_and_exit_code(broker: FakeBroker) -> None:
    free, taken = free_ports(2)
    there = broker.address
    with socket.create_server(("127.0.0.1", taken)):
        for arguments, code, sentence in [
            (
                ("--upstream", f"127.0.0.1:{free}"),
                69,
                f"no upstream broker answered: 127.0.0.1:{free} (Connection refused",
            ),
            (("--upstream", there, "--listen", f"127.0.0.1:{taken}"), 69, f"cannot listen on 127.0.0.1:{taken}"),
            (("--upstream", "nonsense"), 78, "--upstream nonsense: expected HOST:PORT"),
            (("--upstream", ""), 78, "upstream: expected HOST:PORT"),
            (("--upstream", f"{there},{there}"), 78, "upstream names an address twice"),
            (("--upstream", there, "--listen", "0.0.0.0:0"), 78, "--advertise HOST[:PORT]"),
            (("--upstream", there, "--tls-cert", "nowhere.pem"), 78, "nowhere.pem does not exist"),
            (("--upstream", there, "--tls-key", "nowhere.pem"), 78, "--tls-key needs --tls-cert"),
            (("--upstream", there, "--upstream-ca", "nowhere.pem"), 78, "nowhere.pem does not exist"),
            (
                ("--upstream", there, "--upstream-cert", "any.pem"),
                78,
                "--client-ca FILE, or allow all clients with --trust-clients",
            ),
            (("--upstream", there, "--client-ca", "any.pem"), 78, "--client-ca needs --tls-cert"),
            (("--upstream", there, "--max-connections", "0"), 78, "--max-connections 0: must be at least 1"),
            (
                ("--upstream", there, "--max-connections-per-address", "0"),
                78,
                "--max-connections-per-address 0: must be",
            ),
            (("--upstream", there, "--idle-timeout", "0"), 78, "--idle-timeout must be above 0"),
            (("--upstream", there, "--max-control-bytes", "10"), 78, "10: Kafka needs at least 1024"),
            (("--upstream", there, "--log-format", "xml"), 64, "--log-format xml: must be one of human, json"),
            ((), 64, "--upstream"),
        ]:
            refused(code, sentence, *arguments)


def test_error_names_an_upstream_that_is_not_kafka() -> None:
    class Web(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(100)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))

    # An earlier test's client, whose broker had this port, may send requests first.
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            refused(69, "a response of 1213486160 bytes", "--upstream", f"127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()


def test_clients_get_the_advertised_address(broker: FakeBroker) -> None:
    (port,) = free_ports(1)
    options = ("--listen", f"127.0.0.1:{port}", "--advertise", "shim.example:7000")
    with running(broker.address, *options) as shim, Wire(f"127.0.0.1:{port}") as wire:
        (told,) = wire.ask(MetadataRequest(version=4, topics=[])).brokers
        assert (told.host, told.port) == ("shim.example", 7000)
        assert shim.addresses == ["shim.example:7000"]


def test_unfinished_heads_stay_within_the_memory_limit() -> None:
    """Send 119 KB on each connection, 107 MB in all, where 33 MiB are allowed; a connection itself takes 20 KB."""
    unfinished = struct.pack(">ihhih", 600_000, 0, 9, 1, -1) + b"\1\x63" + uvarint(120_000) + bytes(119_000)
    options = ("--max-frame-bytes", str(MIB))
    with FakeBroker() as broker, running(broker.address, *options) as shim, ExitStack() as stack:
        address, port = shim.bootstrap_servers.rsplit(":", 1)
        before = memory(shim)
        for _ in range(900):
            client = stack.enter_context(socket.create_connection((address, int(port)), 20))
            with contextlib.suppress(ConnectionError):
                client.sendall(unfinished)
        (first, *_) = eventually(lambda: shim.named("connection closed"))
        assert "connections have used up their memory" in first["reason"]
        with Wire(shim.bootstrap_servers) as wire:  # This request is answered after all of them.
            assert wire.ask(MetadataRequest(version=4, topics=[])).brokers
        assert memory(shim) - before < (33 + 18 + 13) * MIB
