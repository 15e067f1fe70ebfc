"""Run an upstream that fails on command as no real broker does: odd responses, no reading, no response, an early
end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from kafka.protocol.metadata import ApiVersionsResponse, MetadataResponse

Answer = Callable[[bytes], bytes | None]


def metadata(port: int) -> bytes:
    """Return a Metadata v4 response without its size that names one broker."""
    broker = MetadataResponse.MetadataResponseBroker(version=4, node_id=1, host="127.0.0.1", port=port, rack=None)
    response = MetadataResponse(
        version=4, throttle_time_ms=0, brokers=[broker], cluster_id="c", controller_id=1, topics=[]
    )
    return bytes(response.encode(version=4))


def _is_shims_own(connection: socket.socket) -> bool:
    """Return whether a connection is the shim's own: it begins with ApiVersions v0, or ended without a request."""
    return connection.recv(8, socket.MSG_PEEK | socket.MSG_WAITALL)[4:] in (b"", b"\0\x12\0\0")


class FakeBroker:
    """Answer ApiVersions v0 and Metadata v4 as a single broker; `answer` answers the rest.

    `answer` gets a whole request and returns the body after the correlation id, or None for no response. `take` gets
    all bytes of a connection that does not begin with ApiVersions v0, as the shim's own queries do.
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
            self._listener.shutdown(
                socket.SHUT_RDWR
            )  # wakes the thread in `accept`, which would accept one more connection
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
