"""What a transaction commits of its input: where each partition goes on, and what stands beside each offset.

Owns when places that nothing is new of are committed again, and their notes (eos/kafka/places.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import TopicPartition

from eos.kafka.places import Places
from eos.kafka.settings import Settings
from eos.kafka.world import World
from eos.session.lanes import UnderWay
from eos.session.participants import Participant
from eos.session.positions import Positions
from eos.session.positions import TopicPartition as Partition
from eos.session.producer import TransactionalProducer
from eos.session.successor import Successor

# How old the commit of a partition's place may become while we have it, and how soon after its start an idle session
# commits all anew. Under group.protocol=consumer the brokers count offsets.retention.minutes from each offset's own
# commit (measured, 4.3.1): a partition without new records would lose its place as soon as the group is empty.
_PLACES_S, IDLE_PLACES_S = 6 * 3600.0, 60.0


class Offsets:
    def __init__(
        self,
        settings: Settings,
        positions: Positions[Any],
        participants: Sequence[Participant],
        successor: Successor,
        world: World,
    ) -> None:
        self._positions, self._participants, self._successor, self._world = positions, participants, successor, world
        self._places = Places(settings, settings["group.id"], world)
        self._due = world.now()  # when the places of all partitions are to be committed again

    def to_commit(self, new_starts: Mapping[Partition, int], patience_s: float = 0.0) -> dict[Partition, int]:
        """Where each partition goes on behind the open transaction; with places that nothing of is new, when they are
        due since `patience_s`. `new_starts`: of the membership."""
        offsets = dict(new_starts) | self._positions.offsets()
        if self._world.now() < self._due + patience_s:
            return offsets
        return self._positions.places() | offsets

    def commits_of(self, offsets: Mapping[Partition, int], producer: TransactionalProducer) -> list[TopicPartition]:
        owner, commits = self._successor.owner(producer), []
        for partition, offset in offsets.items():
            beside = dict(owner)
            for participant in self._participants:
                beside |= participant.beside(partition)
            commits.append(TopicPartition(*partition, offset, json.dumps(beside, separators=(",", ":"))))
        return commits

    def committed(self, done: UnderWay) -> None:
        self._places.committed(done.offsets)
        if done.set_out_at >= self._due and done.offsets.keys() >= self._positions.places().keys():
            self._due = done.set_out_at + _PLACES_S

    def close(self) -> None:
        self._places.close()
