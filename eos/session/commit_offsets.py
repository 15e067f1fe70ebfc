"""Chooses the offsets that a transaction commits, with their metadata. Decides when unchanged offsets are committed
again, and owns the notes about committed offsets (eos/kafka/admin/group_history.py).

Where a participant keeps the offsets outside of Kafka (KeepsOffsets), they decide, and the group's offsets only follow.
So a transaction that sent nothing may defer the commit to the group for a moment. This spares the brokers many small
transactions, and the worker the waits between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from confluent_kafka import TopicPartition

from eos.kafka.admin.group_history import GroupHistory
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Committed, parse_metadata, read_metadata
from eos.session.consumer.fetcher import KeepsOffsets
from eos.session.consumer.positions import Positions
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.outcomes import Commit, Outcome, Participant
from eos.session.producer.ownership import OwnerInfo
from eos.session.producer.producer import TransactionalProducer

_encode = msgspec.json.Encoder().encode

# How old a committed offset may become while its partition is assigned to us, and how soon after its start an idle
# session commits all offsets again. Under group.protocol=consumer brokers count offsets.retention.minutes from each
# offset's own commit (measured, 4.3.1): a partition without new records would lose its committed offset as soon as the
# group is empty.
_REFRESH_S, IDLE_REFRESH_S = 6 * 3600.0, 60.0
_MOST_DEFERRED_S = 1.0  # how long commits to the group may be deferred


class CommitOffsets:
    def __init__(
        self,
        settings: Settings,
        positions: Positions[Any],
        participants: Sequence[Participant],
        owner_info: OwnerInfo,
        world: World,
    ) -> None:
        self._positions, self._participants, self._owner_info, self._world = positions, participants, owner_info, world
        self._history = GroupHistory(settings, settings["group.id"], world)
        self._keepers = [follower for follower in participants if isinstance(follower, KeepsOffsets)]
        self._deferred: frozenset[Partition] = frozenset()  # the partitions whose offsets the group does not have yet
        self._defer_until = 0.0  # World.now(), one moment after the last commit to the group
        self._refresh_at = world.now()  # when all offsets are to be committed again
        self._number = 0  # number of the last commit that was started
        self._stamp: dict[str, object] = {}  # the mark that the last started commit wrote into its offset metadata

    def offsets_to_commit(self, new_starts: Mapping[Partition, int], patience_s: float = 0.0) -> dict[Partition, int]:
        """Return the offsets that the open transaction commits.

        These are:

        - the next offset of each partition from which the transaction took records,
        - the deferred offsets of earlier transactions,
        - the unchanged offset of each partition for which a participant writes,
        - `new_starts`, the start offsets of the group consumer,
        - and all other offsets, once they have been due for `patience_s`.
        """
        deferred = {p: at for p, at in self._positions.committed.items() if p in self._deferred}
        offsets = dict(new_starts) | deferred | self._positions.offsets()
        changed = {partition for participant in self._participants for partition in participant.changed_partitions()}
        unmoved = changed - offsets.keys()
        is_due = self._world.now() >= self._refresh_at + patience_s
        if not (is_due or unmoved):
            return offsets
        # A partition that starts at its beginning has no committed offset at first. A participant needs none.
        unchanged = {partition: at for partition, at in self._positions.committed.items() if partition in unmoved}
        return (self._positions.committed_offsets() if is_due else {}) | unchanged | offsets

    def may_defer(self, offsets: Mapping[Partition, int]) -> bool:
        """Return whether a transaction that sent nothing may leave these offsets to a later one."""
        return self._world.now() < min(self._defer_until, self._refresh_at) and all(
            any(keeper.keeps_offset(partition) for keeper in self._keepers) for partition in offsets
        )

    @property
    def has_deferred(self) -> bool:
        return not self._deferred.isdisjoint(self._positions.committed)

    def with_metadata(self, offsets: Mapping[Partition, int], producer: TransactionalProducer) -> list[TopicPartition]:
        """Return the offsets with the metadata of a new commit, by which `outcome_of` later recognises it."""
        self._number += 1
        self._stamp, commits = self._owner_info.metadata(producer) | {"n": self._number}, list[TopicPartition]()
        for partition, offset in offsets.items():
            metadata = dict(self._stamp)
            for participant in self._participants:
                metadata |= participant.offset_metadata(partition)
            commits.append(TopicPartition(*partition, offset, _encode(metadata).decode()))
        return commits

    def outcome_of(self, offsets: Mapping[Partition, int], stable: Mapping[Partition, Committed]) -> Outcome:
        """Return the outcome of the last started commit from the group's committed offsets now.

        An offset alone is not enough: another member may have handled the same records after the broker aborted our
        transaction. The metadata of the offset names the commit."""
        if not offsets or any(stable[partition].offset < offset for partition, offset in offsets.items()):
            return Outcome.ABORTED
        return Outcome.COMMITTED if any(self._is_ours(at) for at in stable.values()) else Outcome.UNKNOWN

    def _is_ours(self, at: Committed) -> bool:
        return bool(self._stamp) and parse_metadata(read_metadata(at)).items() >= self._stamp.items()

    def committed(self, commit: Commit) -> None:
        if commit.defers_offsets:
            self._deferred |= commit.offsets.keys()
            return
        self._deferred, self._defer_until = frozenset(), commit.started_at + _MOST_DEFERRED_S
        self._history.add_committed(commit.offsets)
        if (
            commit.started_at >= self._refresh_at
            and commit.offsets.keys() >= self._positions.committed_offsets().keys()
        ):
            self._refresh_at = commit.started_at + _REFRESH_S

    def close(self) -> None:
        self._history.close()
