"""Handles input that the client cannot read: offsets that the broker does not have, and damaged batches.

Decides when the session ends because of them, and owns the error message. It never touches the consumer.
"""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import KafkaError

from eos.errors import InputGone
from eos.records import Record, format_position
from eos.session.consumer.positions import Positions
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.consumer.queries import ClusterQueries, NotNow


class UnreadableInput:
    def __init__(self, positions: Positions[Record], queries: ClusterQueries) -> None:
        self._positions, self._queries = positions, queries
        self._reported: tuple[Partition, int] | None = None  # damaged batch that the client reads again
        self._damaged: tuple[Partition, int, KafkaError] | None = None  # damaged batch that was reported twice

    def explain_gone(self, partition: Partition, error: KafkaError) -> InputGone:
        """Return the error for a partition whose next offset the broker does not have.

        Its records were removed, or an unclean leader election cut off the log. A consumer that waited until the log
        reaches that offset again would silently skip the records written in the meantime."""
        try:
            low, high = self._queries.watermarks(partition)
            holds = f"{low} to {high}"
        except NotNow:
            holds = "other offsets"
        at = self._positions.committed.get(partition)
        return InputGone(
            f"the input is gone: {format_position(*partition)} is committed at offset {at}, but the topic now holds "
            f"{holds}; to continue, reset the group's offset ({error.str()})"
        )

    def note_damaged(self, partition: Partition, offset: int, error: KafkaError) -> None:
        """Record a batch that does not match its checksum. The client reads the batch again by itself, and may
        succeed."""
        if self._reported == (partition, offset):
            self._damaged = partition, offset, error
        self._reported = partition, offset

    def check(self, owned: Collection[Partition]) -> None:
        """Raise InputGone for a damaged batch, once all records before it are committed."""
        if self._damaged is None:
            return
        partition, offset, error = self._damaged
        if partition not in owned or self._positions.has_passed(partition, offset):
            self._damaged = None
        elif not self._positions.holds(partition):
            raise InputGone(
                f"the input is damaged: {format_position(*partition, offset)} cannot be read, and all records "
                f"before it are committed ({error.str()})",
                remedy="make another replica its leader and start again, or skip the batch with "
                f"`eos reset --from '{partition[0]}[{partition[1]}]@OFFSET'` and an offset after it",
            )
