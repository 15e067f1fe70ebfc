"""The shim's probes are answered on its event loop, and are 503 where that does not answer."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from eos.errors import Unavailable
from eos.shim.health import Sources, serve
from eos.shim.health import http as health

SOURCES = Sources(lambda: (1, 2), lambda: {"request": {26: (3, 300)}}, dict, lambda: {"commit": 4})


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(30)
    made.close()


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_probes_and_metrics_show_the_state_of_the_loop(loop: asyncio.AbstractEventLoop) -> None:
    reasons: list[str | None] = [None, "no broker can be reached"]
    with serve(("127.0.0.1", 0), loop, lambda: reasons.pop(0), SOURCES) as server:
        assert ask(server.port, "/livez") == (200, "ok\n")
        assert ask(server.port, "/readyz") == (200, "ok\n")
        assert ask(server.port, "/readyz") == (503, "no broker can be reached\n")
        assert ask(server.port, "/else") == (404, "there is /livez /readyz /metrics\n")
        status, metrics = ask(server.port, "/metrics")
    assert status == 200
    assert 'eos_shim_frames_total{api="EndTxn",direction="request"} 3.0' in metrics


def test_probes_fail_while_the_loop_hangs(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOP_TIMEOUT_S", 0.1)
    hanging = threading.Event()
    loop.call_soon_threadsafe(hanging.wait, 60)
    with serve(("127.0.0.1", 0), loop, lambda: None, SOURCES) as server:
        assert ask(server.port, "/livez") == (503, "the event loop does not answer\n")
        hanging.set()
        monkeypatch.setattr(health, "LOOP_TIMEOUT_S", 30.0)
        assert ask(server.port, "/livez") == (200, "ok\n")


def test_used_port_is_unavailable(loop: asyncio.AbstractEventLoop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(Unavailable, match="Address already in use"), serve(address, loop, lambda: None, SOURCES):
            pass
