"""Answer /livez, /readyz and /metrics of a shim, on the threads of eos/probes.py.

The module owns the responses. Threads can report a hanging event loop: /livez runs a function on the loop, and returns
503 if the loop does not run it in time. It must never be reachable through the ports of clients.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from eos.errors import Unavailable
from eos.probes import Answer, HealthServer, Request, render_metrics
from eos.shim.health import metrics
from eos.shim.settings import Address

LOOP_TIMEOUT_S = 5.0


@contextmanager
def serve(
    address: Address,
    loop: asyncio.AbstractEventLoop,
    not_ready_reason: Callable[[], str | None],
    sources: metrics.Sources,
) -> Iterator[HealthServer]:
    """Serve the three paths. `not_ready_reason` returns why clients would not be served now, or None.

    `not_ready_reason` and the sources are called on `loop`. Raises Unavailable if the port is in use.
    """

    def readyz(_: Request) -> Answer:
        reason = not_ready_reason()
        code = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
        return Answer(code, f"{reason or 'ok'}\n".encode())

    answers: dict[str, Callable[[Request], Answer]] = {
        "/livez": lambda _: Answer(HTTPStatus.OK, b"ok\n"),
        "/readyz": readyz,
        "/metrics": lambda request: render_metrics(lambda: metrics.families(sources), request.accept),
    }
    try:
        server = HealthServer(address, {path: _on_loop(loop, answer) for path, answer in answers.items()})
    except OSError as error:
        raise Unavailable(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error
    with server:
        yield server


def _on_loop(loop: asyncio.AbstractEventLoop, answer: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    """Return a function that runs `answer` on the event loop, and returns 503 if the loop does not run it in time."""

    async def run(request: Request) -> Answer:
        return answer(request)

    def ask(request: Request) -> Answer:
        try:
            return asyncio.run_coroutine_threadsafe(run(request), loop).result(LOOP_TIMEOUT_S)
        except (concurrent.futures.TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the event loop does not answer\n")

    return ask
