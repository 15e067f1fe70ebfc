"""Readiness is checked without clients: a load balancer sends none before the shim is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from eos.shim import Shim, ShimSettings
from tests.shim.fake_broker import FakeBroker


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eos.shim.server._TRY_AGAIN_S", 0.1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def come(shim: Shim) -> None:
    """Connect as a client, send a request, and stay until the shim closes the connection."""
    reader, writer = await asyncio.open_connection(*shim.addresses[0])
    writer.write(bytes.fromhex("0000000a00120000000000010000"))  # ApiVersions v0
    assert await reader.read() == b""
    writer.close()


def shim_to(broker: FakeBroker) -> Shim:
    return Shim(ShimSettings(upstream=(("127.0.0.1", broker.port),), listen=("127.0.0.1", 0)))


def test_shim_is_ready_again_when_a_broker_returns() -> None:
    async def run() -> None:
        with FakeBroker() as broker:
            shim = shim_to(broker)
            await shim.start()
            assert shim.not_ready_reason is None
        await come(shim)
        assert shim.not_ready_reason == "no broker can be reached"
        made = shim.connections_made
        with FakeBroker(port=broker.port):
            await until(lambda: shim.not_ready_reason is None)
        assert shim.connections_made == made
        # Check a second time.
        await come(shim)
        assert shim.not_ready_reason == "no broker can be reached"
        with FakeBroker(port=broker.port):
            await until(lambda: shim.not_ready_reason is None)
        await shim.stop()

    asyncio.run(run())


def test_shim_that_waits_for_brokers_can_be_stopped() -> None:
    async def run() -> set[str]:
        with FakeBroker() as broker:
            shim = shim_to(broker)
            await shim.start()
        await come(shim)
        await shim.stop()
        assert shim.not_ready_reason == "stopping"
        return {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}

    assert asyncio.run(run()) == set()
