"""An upstream that does what no real broker does on command: odd answers, no reading, no answer, an early end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from kafka.protocol.metadata import ApiVersionsResponse, MetadataResponse

Answer = Callable[[bytes], bytes | None]


def metadata(port: int) -> bytes:
    """A Metadata v4 answer, without its size, that names one broker."""
    broker = MetadataResponse.MetadataResponseBroker(version=4, node_id=1, host="127.0.0.1", port=port, rack=None)
    response = MetadataResponse(
        version=4, throttle_time_ms=0, brokers=[broker], cluster_id="c", controller_id=1, topics=[]
    )
    return bytes(response.encode(version=4))


def _is_shims_own(connection: socket.socket) -> bool:
    """Its questions begin with ApiVersions v0; a connection that ended without a word may count as one."""
    return connection.recv(8, socket.MSG_PEEK | socket.MSG_WAITALL)[4:] in (b"", b"\0\x12\0\0")


class FakeBroker:
    """Answers ApiVersions v0 and Metadata v4 like a broker of its own; the rest is `answer`'s.

    `answer` gets a whole request and returns the body behind the correlation id; None: no answer. A connection that
    does not begin with ApiVersions v0, as the shim's own questions do, is `take`'s alone, bytes and all.
    """

    def __init__(
        self, answer: Answer = lambda frame: None, take: Callable[[socket.socket], None] | None = None, port: int = 0
    ) -> None:
        self.answer, self.take = answer, take
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeBroker:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`, which would take one more
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._begin, args=(connection,), daemon=True).start()

    def _begin(self, connection: socket.socket) -> None:
        if self.take is None or _is_shims_own(connection):
            self._serve(connection)
        else:
            self.take(connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            while True:
                head = reader.read(4)
                if len(head) < 4:
                    return
                frame = reader.read(int.from_bytes(head, "big"))
                key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
                if (key, version) == (18, 0):
                    body: bytes | None = bytes(ApiVersionsResponse(version=0, error_code=0, api_keys=[]).encode())
                elif (key, version) == (3, 4):
                    body = metadata(self.port)
                else:
                    body = self.answer(frame)
                if body is not None:
                    payload = frame[4:8] + body
                    connection.sendall(len(payload).to_bytes(4, "big") + payload)
