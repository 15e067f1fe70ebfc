"""Ensures that each share of the Kafka partitions is written at most once per epoch: tasks claim it at the driver.

Owns the claims of the current attempt and the socket that receives them. A broker compares sequence numbers, not
contents. So it could silently deduplicate a second run of a task under the same (producer id, epoch) against different
rows of the first run. Spark runs a task again after a failure, a lost executor or a lost shuffle file, and does not
report it. A second claim for a share poisons the epoch: the driver aborts the transaction and starts a new attempt.
This module must never grant a share twice, and never answer for an attempt that has ended.

Only clients with the key are served: request and response each carry an HMAC over both sides' nonces. The server reads
at most a few hundred bytes from an unauthenticated client, and serves a limited number of clients at once. The others
wait in the kernel's queue, and a client that is silent for a second is disconnected. A task without a response repeats
its request under the same call name. The same grant then goes to that call again, and to no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from eos import log
from eos.errors import ConfigurationError
from eos.kafka.admin.ownership import Identity
from spark_connector.wire import Unreachable

_BACKLOG = 4096  # clients that wait for a connection; the kernel's own limit is the same or lower
_NONCE = 32
_MAC = hashlib.sha256().digest_size
_LENGTH = 4
_LONGEST = 1 << 16  # bytes of a request or response
_PATIENCE_S = 1.0  # time that a client has from its connection to the last byte of its request
_MOST = 64  # clients at once
_PORTS = 16  # number of ports to try after the requested one, as spark.port.maxRetries
_DEADLINE_S = 60.0  # time for a claim, with all its requests
_TRY_S = 10.0  # time for one request: the server may have lost the connection without a notice to the client
_PAUSE_S = 0.1


class ClaimReceiver(Protocol):
    """Receives claims: `Claims` in the driver's process, a `ClaimClient` in any other."""

    def claim(self, attempt: Identity, share: int, who: str) -> str | None: ...


class Claims:
    """Holds the grants of the current attempt, without I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: Identity | None = None
        self._granted: dict[int, tuple[str, str | None]] = {}  # the task and the call that the share is granted to
        self._refusal_reason: str | None = None

    def begin(self, attempt: Identity) -> None:
        with self._lock:
            self._attempt, self._granted, self._refusal_reason = attempt, {}, None

    def end(self) -> tuple[frozenset[int], str | None]:
        """End the attempt. Return the granted shares, and why they must not be committed (None if they may be)."""
        with self._lock:
            self._attempt = None
            return frozenset(self._granted), self._refusal_reason

    def claim(self, attempt: Identity, share: int, who: str, call: str | None = None) -> str | None:
        """Claim a share; return None if it is granted, else the reason in one sentence.

        A named `call` may repeat its claim; without a name each claim is new.
        """
        with self._lock:
            if attempt != self._attempt:
                return f"epoch {attempt.epoch} of producer {attempt.producer_id} is over"
            if self._refusal_reason is not None:
                return f"this epoch is given up: {self._refusal_reason}"
            if share not in self._granted:
                self._granted[share] = who, call
            elif call is None or self._granted[share][1] != call:
                self._refusal_reason = f"share {share} was claimed by {self._granted[share][0]} and again by {who}"
            return self._refusal_reason

    @property
    def poison(self) -> str | None:
        """Return why the current epoch must not be committed, or None if it may be committed."""
        with self._lock:
            return self._refusal_reason


@dataclass(frozen=True)
class ClaimClient:
    """Holds the driver's address for claims; the task carries it to the executors."""

    host: str
    port: int
    key: bytes

    def claim(self, attempt: Identity, share: int, who: str, deadline_s: float = _DEADLINE_S) -> str | None:
        """Claim a share as `Claims.claim` does. Raise Unreachable if the driver does not respond in time.

        The request is repeated until a response arrives: a driver that is busy or out of file descriptors closes or
        loses connections.
        """
        call = secrets.token_hex(16)
        question = json.dumps([attempt.producer_id, attempt.epoch, share, who, call]).encode()
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                return self._ask(question, min(deadline, time.monotonic() + _TRY_S))
            except OSError as error:
                if time.monotonic() + _PAUSE_S >= deadline:
                    where = f"{self.host}:{self.port}"
                    raise Unreachable(
                        f"the driver gave no answer at {where} within {deadline_s:.0f} s ({error}): executors must "
                        "reach it there (spark.driver.host, and eos.spark.claims.port for a port of your choice)"
                    ) from error
                time.sleep(_PAUSE_S)

    def _ask(self, question: bytes, deadline: float) -> str | None:
        """Send one request. Raise OSError if no response arrives, and Unreachable if another program answers."""
        with socket.create_connection((self.host, self.port), _seconds_left(deadline)) as connection:
            theirs, ours = _receive(connection, _NONCE, deadline), secrets.token_bytes(_NONCE)
            connection.sendall(ours + _seal(self.key, b"question", ours + theirs, question))
            length = int.from_bytes(_receive(connection, _LENGTH, deadline))
            mac, text = _receive(connection, _MAC, deadline), _receive(connection, min(length, _LONGEST), deadline)
        if not hmac.compare_digest(mac, _mac(self.key, b"answer", ours + theirs, text)):
            raise Unreachable(f"{self.host}:{self.port} is not this query's driver")
        answer: str | None = json.loads(text)
        return answer


def _seconds_left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes. Raise OSError at the deadline, or if the connection ends early."""
    found = b""
    while len(found) < size:
        connection.settimeout(_seconds_left(deadline))
        piece = connection.recv(size - len(found))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        found += piece
    return found


def _mac(key: bytes, what: bytes, nonces: bytes, text: bytes) -> bytes:
    return hmac.digest(key, what + nonces + text, "sha256")


def _seal(key: bytes, what: bytes, nonces: bytes, text: bytes) -> bytes:
    """Return a message: length, HMAC, text."""
    return len(text).to_bytes(_LENGTH) + _mac(key, what, nonces, text) + text


class ClaimServer:
    """Answers claims on its own thread until `close`.

    `host`: this machine's address for executors. `bind`: the address to listen on. `port`: the first port to try, 0:
    any. Raises ConfigurationError.
    """

    def __init__(self, host: str, bind: str, port: int = 0) -> None:
        self.claims = Claims()
        self._key = secrets.token_bytes(_NONCE)
        listening = _listen(bind, port)
        self.claims_client = ClaimClient(host, listening.getsockname()[1], self._key)
        self._loop = asyncio.new_event_loop()
        self._waits = log.Reminder(self._loop.time, at_once=True)
        self._serving = self._loop.create_task(self._serve(listening))
        threading.Thread(target=self._run, name="eos-claims", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._serving.cancel)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._loop.close()

    async def _serve(self, listening: socket.socket) -> None:
        room = asyncio.Semaphore(_MOST)
        with listening:
            listening.setblocking(False)
            async with asyncio.TaskGroup() as callers:
                while True:
                    await room.acquire()
                    callers.create_task(self._serve_client(await self._accept(listening), room))

    async def _accept(self, listening: socket.socket) -> socket.socket:
        """Accept the next client.

        A client that disconnects, or a lack of file descriptors, does not stop the server.
        """
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
                return connection
            except OSError as error:
                self._log_rarely(error)
                await asyncio.sleep(_PAUSE_S)

    def _log_rarely(self, error: OSError) -> None:
        """Log at most one line every ten seconds: without file descriptors each attempt to accept fails."""
        if self._waits.tick():
            log.warning("tasks' claims wait", error=str(error))

    async def _serve_client(self, connection: socket.socket, room: asyncio.Semaphore) -> None:
        try:
            with connection:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._answer(connection)
        except (OSError, EOFError, ValueError, TypeError):
            pass  # a foreign client, or a task that died or repeats its request; any other error would end the server
        finally:
            room.release()

    async def _answer(self, connection: socket.socket) -> None:
        ours = secrets.token_bytes(_NONCE)
        await self._loop.sock_sendall(connection, ours)
        theirs = await self._read(connection, _NONCE)
        length = int.from_bytes(await self._read(connection, _LENGTH))
        if length > _LONGEST:
            return
        mac, text = await self._read(connection, _MAC), await self._read(connection, length)
        if not hmac.compare_digest(mac, _mac(self._key, b"question", theirs + ours, text)):
            return
        producer_id, epoch, share, who, call = json.loads(text)
        answer = self.claims.claim(Identity(producer_id, epoch), share, who, call)
        await self._loop.sock_sendall(
            connection, _seal(self._key, b"answer", theirs + ours, json.dumps(answer).encode())
        )

    async def _read(self, connection: socket.socket, size: int) -> bytes:
        found = b""
        while len(found) < size:
            piece = await self._loop.sock_recv(connection, size - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found


def _listen(bind: str, port: int) -> socket.socket:
    for tried in range(port, port + _PORTS + 1):
        try:
            return socket.create_server((bind, tried), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or tried == port + _PORTS:
                raise ConfigurationError(
                    f"cannot listen for executors' claims at {bind}:{tried}: {error.strerror or error} "
                    "(spark.driver.bindAddress, eos.spark.claims.port)"
                ) from error
    raise AssertionError("the loop returns or raises at its last port")


def driver_addresses(setting: Callable[[str], str | None]) -> tuple[str, str]:
    """Return the driver's address for executors, and the address to listen on, from the settings of Spark's own driver.

    Executors of a local master are threads of this process.
    """
    if (setting("spark.master") or "").startswith("local") and "cluster" not in (setting("spark.master") or ""):
        return "127.0.0.1", "127.0.0.1"
    host = setting("spark.driver.host") or "127.0.0.1"
    return host, setting("spark.driver.bindAddress") or host
