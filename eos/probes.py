"""Serves probes and metrics over HTTP for workers, supervisors and the shim.

Owns the socket, the threads and their limits; the caller provides an answer for each path. It serves GET and HEAD only,
on a few daemon threads and with a time limit for each connection: it must never delay or end the process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from eos import log

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_MAX_CONNECTIONS = 32
_CONNECTION_TIMEOUT_S = 5.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Request(NamedTuple):
    """Holds the parts of a request that an answer may depend on: the query after the path, and the Accept header."""

    query: str = ""
    accept: str = ""


class Answer(NamedTuple):
    """Holds one HTTP response."""

    code: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def render_metrics(families: Callable[[], Iterable[Metric]], accept: str = "") -> Answer:
    """Return the answer to a scrape, with what to install if prometheus-client (extra `metrics`) is missing.

    `families` is called only if prometheus-client can be imported.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        sentence = "metrics need prometheus-client: pip install 'eos-kafka[metrics]'\n"
        return Answer(HTTPStatus.NOT_IMPLEMENTED, sentence.encode())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    encode, content_type = choose_encoder(accept)
    return Answer(HTTPStatus.OK, encode(registry), content_type)


class _Collector:
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


class HealthServer:
    """Listens at once, and serves `answers` by path inside its `with` block. Raises OSError if it cannot listen.

    Each answer is computed on the thread of its connection.
    """

    def __init__(self, address: tuple[str, int], answers: Mapping[str, Callable[[Request], Answer]]) -> None:
        self._server = _Server(address, answers)
        self._thread = threading.Thread(target=self._server.serve_forever, name="eos-health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a slow client must not delay the end of the process

    def __init__(self, address: tuple[str, int], answers: Mapping[str, Callable[[Request], Answer]]) -> None:
        self.handlers = answers
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        host, port = address
        both = not host and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("http request failed", client=client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CONNECTION_TIMEOUT_S
    server_version, sys_version = "eos", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        answer = self.server.handlers.get(url.path)
        if answer is None:
            self._send(Answer(HTTPStatus.NOT_FOUND, f"there is {' '.join(self.server.handlers)}\n".encode()))
        else:
            self._send(answer(Request(url.query, self.headers.get("Accept", ""))))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http", request=format % args)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
