"""Serves the HTTP requests of a worker or a supervisor: /livez, /readyz, /metrics, the page at / and its data.

Owns the responses; their contents come from eos.health.status, and eos/probes.py serves them. No response contains a
secret.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec

from eos import log
from eos.errors import ConfigurationError, UsageError
from eos.health import metrics
from eos.health.board import Board
from eos.health.status import Status
from eos.probes import Answer, HealthServer, Request, render_metrics


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, or of `PORT` on every interface, for outside probes. Raise UsageError."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UsageError(f"--http-port {text}: expected PORT or HOST:PORT")
    return host.strip("[]"), int(port)


@contextmanager
def serve(address: tuple[str, int], board: Board) -> Iterator[HealthServer]:
    """Fill the board and serve it. Raise ConfigurationError if the server cannot listen."""
    try:
        server = HealthServer(address, _answers(board))
    except OSError as error:
        raise ConfigurationError(f"--http-port {address[0]}:{address[1]}: {error.strerror or error}") from error
    board.start()
    try:
        with server:
            log.info("health", port=server.port, paths="/ /livez /readyz /metrics")
            yield server
    finally:
        board.stop()


def _answers(board: Board) -> Mapping[str, Callable[[Request], Answer]]:
    return {
        "/": lambda _: _page(),
        "/livez": lambda _: _probe([(s.live, s) for s in board.statuses()]),
        "/readyz": lambda _: _probe([(s.ready, s) for s in board.statuses()]),
        "/metrics": lambda request: render_metrics(lambda: metrics.collect_metrics(board.statuses()), request.accept),
        "/status.json": lambda request: _status(board, request.query),
    }


def _page() -> Answer:
    body = importlib.resources.files("eos.health").joinpath("page.html").read_bytes()
    return Answer(HTTPStatus.OK, body, "text/html; charset=utf-8")


def _probe(verdicts: list[tuple[bool, Status]]) -> Answer:
    """Return 200 if all verdicts are good and there is at least one worker; the body has a line for each."""
    lines = [f"{'ok' if well else 'NOT OK'} {s.instance}: {s.reason}\n" for well, s in verdicts]
    well = bool(verdicts) and all(well for well, _ in verdicts)
    return Answer(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, "".join(lines).encode())


def _status(board: Board, query: str) -> Answer:
    try:
        since = float(parse_qs(query).get("since", ["0"])[0])
    except ValueError:
        return Answer(HTTPStatus.BAD_REQUEST, b"since must be seconds since the epoch\n")
    return Answer(HTTPStatus.OK, msgspec.json.encode(board.view(since)), "application/json")
