"""Each share of the Kafka partitions is written at most once per epoch: tasks ask the driver before their first record.

Owns the claims of the present attempt and the socket on which tasks ask. Why: a broker compares sequence numbers, not
contents, so a second run of a task under the same (producer id, epoch) could be deduplicated in silence against other
rows of the first; Spark runs a task again after a failure, a lost executor or a lost shuffle file, and does not say.
A second claim poisons the epoch: the driver aborts the transaction and begins anew. It must never grant a share
twice, and never answer for an attempt that is over.

The socket takes only who knows the key: question and answer each carry an HMAC over both sides' nonces. Nothing of a
stranger's is read but a few hundred bytes, and only so many callers are heard at once: the others wait in the kernel's
queue, and who is silent for a second makes room for them. A task that got no answer asks again, by the name of its
call: what was granted to that call is granted to it again, and to nobody else.
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

_BACKLOG = 4096  # callers that wait to be heard; the kernel's own limit is below or the same
_NONCE = 32
_MAC = hashlib.sha256().digest_size
_LENGTH = 4
_LONGEST = 1 << 16  # of a question or an answer, in bytes
_PATIENCE_S = 1.0  # with a caller: from its turn to its question's last byte
_MOST = 64  # callers at once
_PORTS = 16  # behind the one that was asked for, as spark.port.maxRetries
_DEADLINE_S = 60.0  # of a claim
_TRY_S = 10.0  # of one question: a full queue may have lost the connection, and only one side knows
_PAUSE_S = 0.1


class Office(Protocol):
    """Where a claim is made: Claims in the driver, a ClaimOffice anywhere."""

    def claim(self, attempt: Identity, share: int, who: str) -> str | None: ...


class Claims:
    """Who may write what, without I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: Identity | None = None
        self._granted: dict[int, tuple[str, str | None]] = {}  # to whom, and to which call
        self._poison: str | None = None

    def begin(self, attempt: Identity) -> None:
        with self._lock:
            self._attempt, self._granted, self._poison = attempt, {}, None

    def end(self) -> tuple[frozenset[int], str | None]:
        """Nothing is granted any more. Returns the granted shares, and why they must not be committed if so."""
        with self._lock:
            self._attempt = None
            return frozenset(self._granted), self._poison

    def claim(self, attempt: Identity, share: int, who: str, call: str | None = None) -> str | None:
        """None: granted. Else why not, one sentence. A `call` with a name may ask again; without one each is new."""
        with self._lock:
            if attempt != self._attempt:
                return f"epoch {attempt.epoch} of producer {attempt.producer_id} is over"
            if self._poison is not None:
                return f"this epoch is given up: {self._poison}"
            if share not in self._granted:
                self._granted[share] = who, call
            elif call is None or self._granted[share][1] != call:
                self._poison = f"share {share} was claimed by {self._granted[share][0]} and again by {who}"
            return self._poison

    @property
    def poison(self) -> str | None:
        """Why the present epoch must not be committed, None while it may."""
        with self._lock:
            return self._poison


@dataclass(frozen=True)
class ClaimOffice:
    """Where a task asks; travels to the executors with the task."""

    host: str
    port: int
    key: bytes

    def claim(self, attempt: Identity, share: int, who: str, deadline_s: float = _DEADLINE_S) -> str | None:
        """As `Claims.claim`. Raises Unreachable when the driver gives no answer in that time.

        Asked until there is an answer: a driver that is busy, or has no file left, closes or loses connections.
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
        """Raises OSError where no answer came, Unreachable for one of somebody else."""
        with socket.create_connection((self.host, self.port), _left(deadline)) as connection:
            theirs, ours = _received(connection, _NONCE, deadline), secrets.token_bytes(_NONCE)
            connection.sendall(ours + _sealed(self.key, b"question", ours + theirs, question))
            length = int.from_bytes(_received(connection, _LENGTH, deadline))
            mac, text = _received(connection, _MAC, deadline), _received(connection, min(length, _LONGEST), deadline)
        if not hmac.compare_digest(mac, _mac(self.key, b"answer", ours + theirs, text)):
            raise Unreachable(f"{self.host}:{self.port} is not this query's driver")
        answer: str | None = json.loads(text)
        return answer


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def _received(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Raises OSError at the deadline, and for an end that comes too early."""
    found = b""
    while len(found) < size:
        connection.settimeout(_left(deadline))
        piece = connection.recv(size - len(found))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        found += piece
    return found


def _mac(key: bytes, what: bytes, nonces: bytes, text: bytes) -> bytes:
    return hmac.digest(key, what + nonces + text, "sha256")


def _sealed(key: bytes, what: bytes, nonces: bytes, text: bytes) -> bytes:
    """Length, HMAC, text."""
    return len(text).to_bytes(_LENGTH) + _mac(key, what, nonces, text) + text


class ClaimServer:
    """Answers claims on a thread of its own until `close`. `host`: this machine, as executors see it; `bind`: the
    address to listen on; `port`: the first that is tried, 0: any. Raises ConfigurationError."""

    def __init__(self, host: str, bind: str, port: int = 0) -> None:
        self.claims = Claims()
        self._key = secrets.token_bytes(_NONCE)
        listening = _listen(bind, port)
        self.office = ClaimOffice(host, listening.getsockname()[1], self._key)
        self._tell_again = 0.0
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve(listening))
        threading.Thread(target=self._run, name="eos-claims", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
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
                    callers.create_task(self._hear(await self._accepted(listening), room))

    async def _accepted(self, listening: socket.socket) -> socket.socket:
        """The next caller. One that has gone, or a process without files left, is not the end of it."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
                return connection
            except OSError as error:
                self._tell(error)
                await asyncio.sleep(_PAUSE_S)

    def _tell(self, error: OSError) -> None:
        """One line in ten seconds: without files left each attempt to accept fails."""
        if self._loop.time() >= self._tell_again:
            self._tell_again = self._loop.time() + 10
            log.warning("tasks' claims wait", error=str(error))

    async def _hear(self, connection: socket.socket, room: asyncio.Semaphore) -> None:
        try:
            with connection:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._answer(connection)
        except (OSError, EOFError, ValueError, TypeError):
            pass  # not one of our tasks, or one that died, or that asks again; any other error would end the server
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
            connection, _sealed(self._key, b"answer", theirs + ours, json.dumps(answer).encode())
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
                    f"executors' claims cannot be listened for at {bind}:{tried}: {error.strerror or error} "
                    "(spark.driver.bindAddress, eos.spark.claims.port)"
                ) from error
    raise AssertionError("the last port is listened on or raises")


def place_of(setting: Callable[[str], str | None]) -> tuple[str, str]:
    """The driver's address as executors see it, and the one to listen on, by Spark's settings: where Spark's own driver
    listens. Executors of a local master are threads of this process."""
    if (setting("spark.master") or "").startswith("local") and "cluster" not in (setting("spark.master") or ""):
        return "127.0.0.1", "127.0.0.1"
    host = setting("spark.driver.host") or "127.0.0.1"
    return host, setting("spark.driver.bindAddress") or host
