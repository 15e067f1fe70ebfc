"""Computes a session's lag, and finds partitions whose records do not arrive, from its consumer's statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from eos import log
from eos.kafka.client.world import World
from eos.session.consumer.positions import Positions, names_of
from eos.session.consumer.positions import TopicPartition as Partition

_STALLED_S = 30.0


class _PartitionStatistics(msgspec.Struct):
    """Holds librdkafka's statistics of a partition; -1001 means unknown."""

    ls_offset: int = -1001  # last stable offset; get_watermark_offsets(cached=True) returns the high watermark instead
    next_offset: int = -1001  # next offset to fetch: after markers and aborted records
    fetchq_cnt: int = 0  # records that were fetched and not polled yet


class _TopicStatistics(msgspec.Struct):
    partitions: dict[str, _PartitionStatistics] = {}


class _BrokerStatistics(msgspec.Struct):
    req_timeouts: int = 0


class Statistics(msgspec.Struct):
    """Holds the part of a consumer's statistics that a session reads."""

    topics: dict[str, _TopicStatistics] = {}
    brokers: dict[str, _BrokerStatistics] = {}

    @property
    def timed_out_requests(self) -> int:
        """Return the number of heartbeats and offset fetches that timed out so far.

        They go to the group coordinator, which is a logical broker in librdkafka."""
        return self.brokers.get("GroupCoordinator", _BrokerStatistics()).req_timeouts

    def partitions(self) -> Iterator[tuple[Partition, _PartitionStatistics]]:
        for name, topic in self.topics.items():
            for number, statistics in topic.partitions.items():
                yield (name, int(number)), statistics


decode_statistics = msgspec.json.Decoder(Statistics).decode


class Lag:
    def __init__(self, positions: Positions[Any], group: str, world: World) -> None:
        self._positions, self._group, self._world = positions, group, world
        self._newest_statistics: Statistics | None = None  # statistics that were not read yet
        self._lags: dict[Partition, int] = {}
        # The next offset, and the time of its last change or log line.
        self._stalled: dict[Partition, tuple[int, float]] = {}

    def note(self, statistics: Statistics) -> None:
        self._newest_statistics = statistics

    def update(self, owned: Collection[Partition]) -> None:
        """Compute lags from the newest statistics as soon as they arrive. A later commit must not be compared with the
        older ends in them.
        """
        if self._newest_statistics is not None:
            statistics, self._newest_statistics = self._newest_statistics, None
            self._lags = self._lags_by(statistics)
            self._warn_of_stalled(statistics, owned)

    def of(self, owned: Collection[Partition]) -> dict[Partition, int | None]:
        """Return the lag of each of these partitions, or None where it is unknown.

        The lag is the last stable offset of the last statistics minus the committed offset.

        Control markers take offsets too. So the lag is 0 if nothing is left to fetch, no record waits and the open
        transaction took none.
        """
        return {partition: self._lags.get(partition) for partition in owned}

    def _lags_by(self, statistics: Statistics) -> dict[Partition, int]:
        positions, lags = self._positions, {}
        nothing_in_hand = not len(positions) and not positions.taken
        for partition, seen in statistics.partitions():
            if seen.ls_offset < 0:
                continue
            fetched_all = seen.next_offset >= seen.ls_offset and not seen.fetchq_cnt
            lag = max(0, seen.ls_offset - max(positions.committed.get(partition, 0), 0))
            lags[partition] = 0 if fetched_all and nothing_in_hand else lag
        return lags

    def _warn_of_stalled(self, statistics: Statistics, owned: Collection[Partition]) -> None:
        """Log a warning for partitions that have more records which do not arrive. Otherwise only their lag would show
        this.
        """
        now, before, self._stalled = self._world.now(), self._stalled, {}
        for partition, seen in statistics.partitions():
            if partition not in owned or seen.fetchq_cnt or not 0 <= seen.next_offset < seen.ls_offset:
                continue
            offset, since = before.get(partition, (-1, now))
            if offset != seen.next_offset:
                offset, since = seen.next_offset, now
            elif now - since >= _STALLED_S:
                where = {"partition": names_of([partition]), "offset": offset, "stable_end": seen.ls_offset}
                log.warning("partition stalled", **where, group=self._group)
                since = now
            self._stalled[partition] = offset, since
