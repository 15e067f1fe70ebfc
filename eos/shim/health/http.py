"""/livez, /readyz and /metrics on a port and a thread of their own.

Owns that server. A thread, so that an event loop that hangs is seen: /livez asks the loop and answers 503 when it does
not. It must never be reachable through the ports of clients.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from eos.errors import Unavailable
from eos.shim.health import metrics
from eos.shim.settings import Address

LOOP_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Answer = tuple[HTTPStatus, str, bytes]


class HealthServer:
    """`not_ready` gives the reason why clients would not be served now, or None; it is called on `loop`.

    Raises Unavailable: the port is taken.
    """

    def __init__(
        self,
        address: Address,
        loop: asyncio.AbstractEventLoop,
        not_ready: Callable[[], str | None],
        sources: metrics.Sources,
    ) -> None:
        self._loop, self._not_ready, self._sources = loop, not_ready, sources
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # s, for a client that connects and says nothing

            def do_GET(self) -> None:
                status, kind, body = answer(self.path.partition("?")[0])
                with contextlib.suppress(ConnectionError):  # who asked gave up meanwhile
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds: not a line each."""

        try:
            self._server = ThreadingHTTPServer(address, Handler)
        except OSError as error:
            raise Unavailable(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="eos-shim-health", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str) -> Answer:
        if path not in ("/livez", "/readyz", "/metrics"):
            return HTTPStatus.NOT_FOUND, _TEXT, b"/livez, /readyz or /metrics\n"
        if path == "/metrics" and not metrics.available():
            return HTTPStatus.NOT_IMPLEMENTED, _TEXT, b"pip install 'eos-kafka[metrics]'\n"
        try:
            return asyncio.run_coroutine_threadsafe(self._on_loop(path), self._loop).result(LOOP_TIMEOUT_S)
        except (concurrent.futures.TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, b"the event loop does not answer\n"

    async def _on_loop(self, path: str) -> Answer:
        if path == "/metrics":
            return HTTPStatus.OK, _PROMETHEUS, metrics.text(self._sources)
        reason = self._not_ready() if path == "/readyz" else None
        if reason is not None:
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{reason}\n".encode()
        return HTTPStatus.OK, _TEXT, b"ok\n"
