"""How far a session is behind, and where nothing comes though there is more: from its consumer's statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from eos import log
from eos.kafka.client.world import World
from eos.session.positions import Positions, names_of
from eos.session.positions import TopicPartition as Partition

_STANDING_S = 30.0


class _PartitionStatistics(msgspec.Struct):
    """What librdkafka's statistics say of a partition; -1001 where it knows nothing yet."""

    ls_offset: int = -1001  # the last stable offset; get_watermark_offsets(cached=True) answers the high watermark
    next_offset: int = -1001  # fetched next: behind markers and aborted records
    fetchq_cnt: int = 0  # records that were fetched and not handed to us yet


class _TopicStatistics(msgspec.Struct):
    partitions: dict[str, _PartitionStatistics] = {}


class _BrokerStatistics(msgspec.Struct):
    req_timeouts: int = 0


class Statistics(msgspec.Struct):
    """Of a consumer, as far as a session looks at them."""

    topics: dict[str, _TopicStatistics] = {}
    brokers: dict[str, _BrokerStatistics] = {}

    @property
    def late_answers(self) -> int:
        """Requests to the group's coordinator that had no answer in time so far: heartbeats and questions for offsets.
        It is a logical broker of librdkafka's."""
        return self.brokers.get("GroupCoordinator", _BrokerStatistics()).req_timeouts

    def partitions(self) -> Iterator[tuple[Partition, _PartitionStatistics]]:
        for name, topic in self.topics.items():
            for number, seen in topic.partitions.items():
                yield (name, int(number)), seen


decode_statistics = msgspec.json.Decoder(Statistics).decode


class Lag:
    def __init__(self, positions: Positions[Any], group: str, world: World) -> None:
        self._positions, self._group, self._world = positions, group, world
        self._statistics: Statistics | None = None  # not looked at yet
        self._lags: dict[Partition, int] = {}
        self._standing: dict[Partition, tuple[int, float]] = {}  # where nothing comes, since when or told when

    def note(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def look(self, owned: Collection[Partition]) -> None:
        """At the newest statistics, when they came and not when one asks: what is committed later belongs to later
        ends."""
        if self._statistics is not None:
            statistics, self._statistics = self._statistics, None
            self._lags = self._lags_by(statistics)
            self._tell_standing(statistics, owned)

    def of(self, owned: Collection[Partition]) -> dict[Partition, int | None]:
        """Offsets between what is committed and the last stable offset of each of these partitions, as of the
        consumer's last statistics; None: not known yet.

        Control markers take offsets too: with nothing left to fetch and nothing in hand, the lag is 0, whatever lies
        between.
        """
        return {partition: self._lags.get(partition) for partition in owned}

    def _lags_by(self, statistics: Statistics) -> dict[Partition, int]:
        positions, lags = self._positions, {}
        nothing_in_hand = not len(positions) and not positions.taken
        for partition, seen in statistics.partitions():
            if seen.ls_offset < 0:
                continue
            fetched = seen.next_offset >= seen.ls_offset and not seen.fetchq_cnt
            behind = max(0, seen.ls_offset - max(positions.committed.get(partition, 0), 0))
            lags[partition] = 0 if fetched and nothing_in_hand else behind
        return lags

    def _tell_standing(self, statistics: Statistics, owned: Collection[Partition]) -> None:
        """A warning where there is more to fetch and nothing comes: else only the lag would tell."""
        now, before, self._standing = self._world.now(), self._standing, {}
        for partition, seen in statistics.partitions():
            if partition not in owned or seen.fetchq_cnt or not 0 <= seen.next_offset < seen.ls_offset:
                continue
            at, since = before.get(partition, (-1, now))
            if at != seen.next_offset:
                at, since = seen.next_offset, now
            elif now - since >= _STANDING_S:
                where = {"partitions": names_of([partition]), "at": at, "stable_end": seen.ls_offset}
                log.warning("a partition has more, and nothing comes of it", **where, group=self._group)
                since = now
            self._standing[partition] = at, since
