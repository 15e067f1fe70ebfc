"""Tests of the fetcher that need no Kafka."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from eos.errors import Action, CallFailed
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.observe import Pulse
from eos.session.consumer.fetcher import Fetcher
from eos.session.consumer.pacing import Pacing

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t", "auto.offset.reset": "latest"}


def test_uncommitted_start_under_latest_survives_consumer_replacement() -> None:
    """The replacement can be abandoned as well, before it begins a transaction."""
    client = SimpleNamespace(close=lambda: None)
    world = World(consumer=lambda configuration: client, background=lambda name, run: None)  # type: ignore[arg-type, return-value]
    fetcher = intake_of(world)
    fetcher._group_consumer = fetcher._create_consumer()
    fetcher.group_consumer.start_offsets.uncommitted = {("in", 0): 5}
    fetcher._failure = CallFailed("consume", Action.REJOIN, RuntimeError("of the consumer that goes"))
    for _ in range(2):
        fetcher.replace_consumer()
        assert fetcher.group_consumer.start_offsets._earlier_starts == {("in", 0): 5}
        assert fetcher._failure is None


def test_stop_ends_gathering_before_its_interval() -> None:
    """An interval of a minute exceeded `eos.shutdown.timeout.ms` and gave exit code 75 without open work."""
    clock = SimpleNamespace(now=1_000.0)

    def passes(most: int, timeout_s: float) -> None:
        clock.now += timeout_s

    fetcher = intake_of(World(now=lambda: clock.now), interval_s=60.0, stopping=lambda: clock.now >= 1_000.25)
    fetcher._group_consumer = SimpleNamespace(poll=passes, assignment=SimpleNamespace(restoring={}), lost_reason=None)  # type: ignore[assignment]
    fetcher._pacing.begin(1_000.0)
    fetcher.gather()
    assert round(clock.now, 6) == 1_000.3


def intake_of(world: World, interval_s: float = 0.1, stopping: Callable[[], bool] = lambda: False) -> Fetcher:
    return Fetcher(
        Settings(SETTINGS),
        ["in"],
        Pacing(interval_s, 5),
        [],
        Watcher(Settings(SETTINGS), world),
        with_ends=False,
        until_end=False,
        stopping=stopping,
        pulse=Pulse(world.now),
        world=world,
        on_unreadable=lambda *_: None,
    )
