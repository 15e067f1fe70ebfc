"""Each share of the Kafka partitions is written at most once per epoch: tasks ask the driver before their first record.

Owns the claims of the present attempt and the socket on which tasks ask. Why: a broker compares sequence numbers, not
contents, so a second run of a task under the same (producer id, epoch) could be deduplicated in silence against other
rows of the first; Spark runs a task again after a failure, a lost executor or a lost shuffle file, and does not say.
A second claim poisons the epoch: the driver aborts the transaction and begins anew. It must never grant a share
twice, and never answer for an attempt that is over.

The socket takes only who knows the key (multiprocessing.connection's challenge); what travels on it is JSON, nothing is
unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, Protocol

from spark_connector.recordbatch import Identity

_BACKLOG = 128


class Office(Protocol):
    """Where a claim is made: Claims in the driver, a ClaimOffice anywhere."""

    def claim(self, attempt: Identity, share: int, who: str) -> str | None: ...


class Claims:
    """Who may write what, without I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: Identity | None = None
        self._granted: dict[int, str] = {}
        self._poison: str | None = None

    def begin(self, attempt: Identity) -> None:
        with self._lock:
            self._attempt, self._granted, self._poison = attempt, {}, None

    def end(self) -> tuple[frozenset[int], str | None]:
        """Nothing is granted any more. Returns the granted shares, and why they must not be committed if so."""
        with self._lock:
            self._attempt = None
            return frozenset(self._granted), self._poison

    def claim(self, attempt: Identity, share: int, who: str) -> str | None:
        """None: granted. Else why not, one sentence."""
        with self._lock:
            if attempt != self._attempt:
                return f"epoch {attempt.epoch} of producer {attempt.producer_id} is over"
            if share in self._granted:
                self._poison = f"share {share} was claimed by {self._granted[share]} and again by {who}"
                return self._poison
            if self._poison is not None:
                return f"this epoch is given up: {self._poison}"
            self._granted[share] = who
            return None

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

    def claim(self, attempt: Identity, share: int, who: str) -> str | None:
        """As `Claims.claim`. Raises OSError when the driver does not answer."""
        with Client((self.host, self.port), authkey=self.key) as connection:
            _send_at_once(connection)
            connection.send_bytes(json.dumps([attempt.producer_id, attempt.epoch, share, who]).encode())
            answer: str | None = json.loads(connection.recv_bytes(1 << 16))
        return answer


def _send_at_once(connection: Connection[Any, Any]) -> None:
    """The question follows the last word of the handshake, and would be kept back for its acknowledgement, which the
    other side delays: 40 ms of each task."""
    with socket.socket(fileno=os.dup(connection.fileno())) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class ClaimServer:
    """Answers claims on threads of its own until `close`. `host`: this machine, as executors see it."""

    def __init__(self, host: str, bind: str = "") -> None:
        self.claims = Claims()
        self._closed, self._everywhere = False, not bind
        self._key = secrets.token_bytes(32)
        # Without the key: its challenge would be waited for on the accepting thread, one silent caller blocking all.
        self._listener: Any = Listener((bind, 0), backlog=_BACKLOG)
        self.office = ClaimOffice(host, self._listener.address[1], self._key)
        threading.Thread(target=self._accept, name="eos-claims", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        # A thread inside accept() does not notice that its socket is closed: one more connection wakes it.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1" if self._everywhere else self.office.host, self.office.port)).close()

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            if self._closed:
                connection.close()
                self._listener.close()
                return
            threading.Thread(target=self._answer, args=(connection,), name="eos-claim", daemon=True).start()

    def _answer(self, connection: Connection[Any, Any]) -> None:
        with connection:
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                producer_id, epoch, share, who = json.loads(connection.recv_bytes(1 << 16))
                answer = self.claims.claim(Identity(producer_id, epoch), share, who)
                connection.send_bytes(json.dumps(answer).encode())
            except (OSError, EOFError, AuthenticationError, ValueError):
                return  # not one of our tasks, or one that died: it got no grant, and a granted one counts as running
