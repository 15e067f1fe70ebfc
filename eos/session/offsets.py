"""What a transaction commits of its input: where each partition goes on, and what stands beside each offset.

Owns when places that nothing is new of are committed again, and their notes (eos/kafka/admin/group_history.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import TopicPartition

from eos.kafka.admin.group_history import GroupHistory
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Committed, parse_metadata, read_metadata
from eos.session.committer import Commit
from eos.session.participants import Outcome, Participant
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
        self._places = GroupHistory(settings, settings["group.id"], world)
        self._due = world.now()  # when the places of all partitions are to be committed again
        self._number = 0  # of the last transaction whose commit was started
        self._stamp: dict[str, object] = {}  # what stands beside its offsets

    def to_commit(self, new_starts: Mapping[Partition, int], patience_s: float = 0.0) -> dict[Partition, int]:
        """Return the offsets that the open transaction commits: the next one of each partition that it took records
        of, the unmoved one of each that a participant writes for and, when they have been due for `patience_s`, those
        of all other partitions. `new_starts` are the membership's."""
        offsets = dict(new_starts) | self._positions.offsets()
        unmoved = {
            partition for participant in self._participants for partition in participant.writes()
        } - offsets.keys()
        due = self._world.now() >= self._due + patience_s
        if not (due or unmoved):
            return offsets
        places = self._positions.places()
        return {partition: at for partition, at in places.items() if due or partition in unmoved} | offsets

    def commits_of(self, offsets: Mapping[Partition, int], producer: TransactionalProducer) -> list[TopicPartition]:
        self._number += 1
        self._stamp, commits = self._successor.owner(producer) | {"n": self._number}, list[TopicPartition]()
        for partition, offset in offsets.items():
            beside = dict(self._stamp)
            for participant in self._participants:
                beside |= participant.beside(partition)
            commits.append(TopicPartition(*partition, offset, json.dumps(beside, separators=(",", ":"))))
        return commits

    def outcome_of(self, offsets: Mapping[Partition, int], stable: Mapping[Partition, Committed]) -> Outcome:
        """Return the outcome of the last commit that was started, by what is committed now. An offset alone does not
        tell: another member may have handled the same records after the brokers aborted ours. What stands beside it
        does."""
        if not offsets or any(stable[partition].offset < offset for partition, offset in offsets.items()):
            return Outcome.ABORTED
        return Outcome.COMMITTED if any(self._is_ours(at) for at in stable.values()) else Outcome.UNKNOWN

    def _is_ours(self, at: Committed) -> bool:
        return bool(self._stamp) and parse_metadata(read_metadata(at)).items() >= self._stamp.items()

    def committed(self, done: Commit) -> None:
        self._places.add_committed(done.offsets)
        if done.started_at >= self._due and done.offsets.keys() >= self._positions.places().keys():
            self._due = done.started_at + _PLACES_S

    def close(self) -> None:
        self._places.close()
