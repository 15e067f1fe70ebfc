"""What of the intake can be said without Kafka."""

from __future__ import annotations

from types import SimpleNamespace

from eos.errors import Action, CallFailed
from eos.kafka.settings import Settings
from eos.kafka.world import World
from eos.session.intake import Intake
from eos.session.observe import Pulse
from eos.session.pacing import Pacing

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t", "auto.offset.reset": "latest"}


def test_where_a_partition_began_under_latest_is_known_to_every_consumer_until_it_is_committed() -> None:
    """The first one that took its place could be given up as well before it begins anything."""
    client = SimpleNamespace(close=lambda: None)
    world = World(consumer=lambda configuration: client, background=lambda name, run: None)  # type: ignore[arg-type, return-value]
    intake = intake_of(world)
    intake._membership = intake._made()
    intake.membership.starts.uncommitted = {("in", 0): 5}
    intake._failure = CallFailed("consume", Action.REJOIN, RuntimeError("of the consumer that goes"))
    for _ in range(2):
        intake.begin_anew()
        assert intake.membership.starts.known == {("in", 0): 5}
        assert intake._failure is None


def intake_of(world: World) -> Intake:
    return Intake(
        Settings(SETTINGS),
        ["in"],
        Pacing(0.1, 5),
        [],
        until_end=False,
        stopping=lambda: False,
        rebalances={},
        pulse=Pulse(world.now),
        world=world,
    )
