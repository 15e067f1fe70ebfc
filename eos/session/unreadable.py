"""What the client says it cannot read: what the broker does not have, and what is stored there damaged.

Owns when the session ends for it, and the sentence. Never touches the consumer.
"""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import KafkaError

from eos.errors import InputGone
from eos.records import Record, format_position
from eos.session.asking import Asking, NotNow
from eos.session.positions import Positions
from eos.session.positions import TopicPartition as Partition


class Unreadable:
    def __init__(self, positions: Positions[Record], asking: Asking) -> None:
        self._positions, self._asking = positions, asking
        self._once: tuple[Partition, int] | None = None  # could not be read, and is tried again
        self._damaged: tuple[Partition, int, KafkaError] | None = None  # the same, a second time

    def gone(self, partition: Partition, error: KafkaError) -> InputGone:
        """Nothing is where this partition is read on. It was removed; or an unclean election cut off the log, and who
        waits until it is as long again skips in silence what is written there meanwhile."""
        try:
            low, high = self._asking.watermarks(partition)
            holds = f"{low} to {high}"
        except NotNow:
            holds = "other ones"
        at = self._positions.committed.get(partition)
        return InputGone(
            f"the input is gone: {format_position(*partition)} is committed at offset {at}, but the topic now holds "
            f"{holds}; reset the group's offset on purpose to go on ({error.str()})"
        )

    def damaged(self, partition: Partition, offset: int, error: KafkaError) -> None:
        """What is stored there does not fit its checksum. The client tries again by itself, and may succeed."""
        if self._once == (partition, offset):
            self._damaged = partition, offset, error
        self._once = partition, offset

    def check(self, owned: Collection[Partition]) -> None:
        """Raise InputGone for a damaged batch, once all before it is committed."""
        if self._damaged is None:
            return
        partition, offset, error = self._damaged
        if partition not in owned or self._positions.passed(partition, offset):
            self._damaged = None
        elif not self._positions.holds(partition):
            raise InputGone(
                f"the input is damaged: {format_position(*partition, offset)} cannot be read, and all before it is "
                f"committed ({error.str()})",
                remedy="make another replica its leader and start again, or give up what the batch holds: "
                f"`eos reset --from '{partition[0]}[{partition[1]}]@OFFSET'` with an offset behind it",
            )
