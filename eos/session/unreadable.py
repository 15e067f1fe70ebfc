"""What the client says it cannot read: what a broker does not have, and what is stored there damaged.

Owns how long such a place is asked for again, and the sentence when it is given up. Never touches the consumer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from confluent_kafka import KafkaError

from eos import log
from eos.errors import InputGone, describe_error
from eos.kafka.world import World
from eos.records import Record, place_of
from eos.session.asking import Asking, NotNow
from eos.session.positions import Positions
from eos.session.positions import TopicPartition as Partition

_COMES_BACK_S = 30.0  # a broker that has just come back may not have it all yet, or not know that it leads no more
_SILENT_S = 10.0  # who was not told of a place for so long has read it meanwhile


@dataclass
class _Absent:
    """A broker has nothing at this offset."""

    offset: int
    since: float
    told: float


class Unreadable:
    def __init__(self, positions: Positions[Record], asking: Asking, world: World) -> None:
        self._positions, self._asking, self._world = positions, asking, world
        self._absent: dict[Partition, _Absent] = {}
        self._once: tuple[Partition, int] | None = None  # could not be read, and is tried again
        self._damaged: tuple[Partition, int, KafkaError] | None = None  # the same, a second time

    def absent(self, partition: Partition, error: KafkaError) -> None:
        """A broker says that nothing is where this partition is read on. InputGone if that was removed, or does not
        come back; else it is to be asked for again."""
        now, offset = self._world.now(), self._positions.expected()[partition]
        found = self._absent.get(partition)
        if found is None or found.offset != offset or now > found.told + _SILENT_S:
            log.warning("what is to be read is not there; it is asked for again", place=place_of(*partition, offset))
            found = self._absent[partition] = _Absent(offset, now, now)
        found.told = now
        try:
            low, high = self._asking.watermarks(partition)
            holds = f"{low} to {high}"
        except NotNow:
            low, holds = 0, "other ones"
        if low > offset or now > found.since + _COMES_BACK_S:
            at = self._positions.committed[partition]
            raise InputGone(
                f"the input is gone: {place_of(*partition)} is committed at offset {at}, but the topic now holds "
                f"{holds}; reset the group's offset on purpose to go on ({error.str()})"
            )

    def damaged(self, partition: Partition, offset: int, error: KafkaError) -> None:
        """What is stored there does not fit its checksum. The client tries again by itself, and may succeed."""
        if self._once == (partition, offset):
            self._damaged = partition, offset, error
        self._once = partition, offset
        log.warning("the consumer reports", error=describe_error(error))

    def check(self, owned: Collection[Partition]) -> None:
        """InputGone at damage, once all before it is committed or on its way."""
        if self._damaged is None:
            return
        partition, offset, error = self._damaged
        if partition not in owned or self._positions.passed(partition, offset):
            self._damaged = None
        elif not self._positions.holds(partition):
            raise InputGone(
                f"the input is damaged: {place_of(*partition, offset)} cannot be read, and all before it is "
                f"committed ({error.str()})",
                remedy="make another replica its leader and start again, or give up what the batch holds: "
                f"`eos reset --from '{partition[0]}[{partition[1]}]@OFFSET'` with an offset behind it",
            )
