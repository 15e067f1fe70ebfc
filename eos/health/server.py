"""The HTTP server of a worker or a supervisor: /livez, /readyz, /metrics, the page at / and its data.

Owns addresses, threads and responses; the contents come from eos.health.status. It is read-only, and no response
contains a secret. It uses few daemon threads and a time limit for each connection, so that it never delays or ends the
worker.
"""

from __future__ import annotations

import importlib.resources
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from eos import log
from eos.errors import ConfigurationError, UsageError
from eos.health import metrics
from eos.health.board import Board
from eos.health.status import Status

_MOST_CONNECTIONS = 32
_CONNECTION_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, or of `PORT` on every interface, for outside probes. Raise UsageError."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UsageError(f"--http-port {text}: expected PORT or HOST:PORT")
    return host.strip("[]"), int(port)


class HealthServer:
    """Serves a board from `start` on, on its own threads. Raises ConfigurationError if it cannot listen."""

    def __init__(self, address: tuple[str, int], board: Board) -> None:
        self._board = board
        try:
            self._server = _Server(address, board)
        except OSError as error:
            raise ConfigurationError(f"--http-port {address[0]}:{address[1]}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="eos-health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._board.start()
        self._thread.start()
        log.info("health", port=self.port, paths="/ /livez /readyz /metrics")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.stop()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a slow client does not delay the end

    def __init__(self, address: tuple[str, int], board: Board) -> None:
        self.board = board
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
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
        log.debug("an HTTP request ended early", client=client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CONNECTION_TIMEOUT_S
    server_version, sys_version = "eos", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        answers: dict[str, Callable[[], None]] = {
            "/": self._page,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/status.json": lambda: self._status(url.query),
        }
        answer = answers.get(url.path)
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, b"there is /, /livez, /readyz, /metrics and /status.json\n", _TEXT)
        else:
            answer()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http", request=format % args)

    def _probe(self, verdicts: list[tuple[bool, Status]]) -> None:
        """Send 200 if all verdicts are good and there is at least one worker; the body has a line for each."""
        lines = [f"{'ok' if well else 'NOT OK'} {s.instance}: {s.reason}\n" for well, s in verdicts]
        well = bool(verdicts) and all(well for well, _ in verdicts)
        code = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(code, "".join(lines).encode(), _TEXT)

    def _livez(self) -> None:
        self._probe([(s.live, s) for s in self.server.board.statuses()])

    def _readyz(self) -> None:
        self._probe([(s.ready, s) for s in self.server.board.statuses()])

    def _metrics(self) -> None:
        try:
            body, content_type = metrics.exposition(self.server.board.statuses, self.headers.get("Accept", ""))
        except ImportError:
            sentence = "the metrics need prometheus-client: pip install 'eos-kafka[metrics]'\n"
            self._send(HTTPStatus.NOT_IMPLEMENTED, sentence.encode(), _TEXT)
            return
        self._send(HTTPStatus.OK, body, content_type)

    def _status(self, query: str) -> None:
        try:
            since = float(parse_qs(query).get("since", ["0"])[0])
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"since must be seconds since the epoch\n", _TEXT)
            return
        self._send(HTTPStatus.OK, msgspec.json.encode(self.server.board.view(since)), "application/json")

    def _page(self) -> None:
        body = importlib.resources.files("eos.health").joinpath("page.html").read_bytes()
        self._send(HTTPStatus.OK, body, "text/html; charset=utf-8")

    def _send(self, code: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
