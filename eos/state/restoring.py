"""Restores tasks from their changelogs in short steps.

Between the steps the session polls its group and works on the partitions that are ready. Each partition goes through
these steps: lock a folder, wait until the predecessor's transaction in the changelog is decided, then read all
committed changes. A waiting partition does not delay the others. Changes are written in batches by size, each with its
position, so a restart continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eos import log
from eos.app.ageing import stamped
from eos.app.cells import check_cell, store_of
from eos.app.routes import Route
from eos.errors import ConfigurationError, EosError, InputGone, Unavailable
from eos.kafka.admin import facts, tail
from eos.kafka.admin.tail import MarkedRecord, TopicReader
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import place_of
from eos.state import changelog
from eos.state.values import Value, Values, own_entries

_MOMENT_S = 0.1
_PATIENCE_S = 2.0  # for a folder that another process is about to release
_PAUSE_S = 0.05
_ASK_S = 10.0
_LOOK_S = 1.0  # how often waiting partitions are checked while others are read
_TELL_S = 5.0
# The markers of a decided transaction take a moment to arrive; no other transaction is open in a changelog.
_SETTLED_S = 30.0
_MOST_BYTES = 8 << 20  # read and not yet written, over all partitions
_FIRST_READ = 16  # records: their size is not known yet
_MOST_READ = 1_000


@dataclass
class _Partition:
    """The progress of one partition."""

    at_least: int | None
    """The lowest acceptable end of its changelog; None: its contents count as complete even if records are missing."""
    values: Values | None = None
    """None while another process owns its folder."""
    end: int | None = None
    """The end of its changelog; None until it is known."""
    at: int = 0
    """The offset up to which it is read."""
    as_of: float = 0.0
    """See Values.as_of: the time of the changes read so far."""
    end_as_of: float = 0.0
    """The same time once the partition is read to its end."""
    news: dict[bytes, Value] = field(default_factory=dict)
    waits_for: type[EosError] | None = None
    since: float = 0.0


class Restoring:
    """The restore of some partitions of one function.

    `partitions`: the lowest acceptable end of each partition's changelog; None: its contents count as complete.
    `open_values`: opens the values of a partition, and returns None while another process owns the folder; its second
    argument allows any folder of the task.
    """

    def __init__(
        self,
        settings: Settings,
        topic: str,
        route: Route,
        partitions: Mapping[int, int | None],
        open_values: Callable[[int, bool], Values | None],
        tombstones_s: float,
        world: World,
    ) -> None:
        self._settings, self._topic, self._function, self._world = settings, topic, route.name, world
        self._ageing = route.ttls
        self._open_values, self._tombstones_s = open_values, tombstones_s
        self._left = {partition: _Partition(at_least) for partition, at_least in partitions.items()}
        self._ends: dict[int, int] = {}  # of the partitions that are being read
        self._ready: dict[int, Values] = {}
        self._client: Any = None
        self._began = self._told = world.now()
        self._told_waiting = world.now()
        self._next_look = 0.0
        self._bytes = 0  # read and not yet written
        self._read = self._keys = 0
        self.done = False
        self._steps = self._run()

    @property
    def partitions(self) -> Collection[int]:
        """Return the partitions that are not ready."""
        return self._left.keys()

    @property
    def left(self) -> int:
        """Return how many changes are still to be read, as far as known; transaction markers count too."""
        return sum(max(0, one.end - one.at) for one in self._left.values() if one.end is not None)

    def go_on(self) -> dict[int, Values]:
        """Restore for a moment, and return the values of the partitions that became ready.

        Raises Temporary, InputGone, ConfigurationError.
        """
        until = self._world.now() + _MOMENT_S
        for _ in self._steps:
            if self._world.now() >= until:
                break
        ready, self._ready = self._ready, {}
        return ready

    def forget(self, partition: int) -> None:
        """Stop restoring a partition that is no longer assigned."""
        values = self._left.pop(partition).values
        self._ends.pop(partition, None)
        if values is not None:
            values.close()
        if not self._left:
            self._steps.close()
            self.done = True

    def close(self) -> None:
        for partition in list(self._left):
            self.forget(partition)
        self._steps.close()

    # ---- the steps in order; each of them is short ------------------------------------------------------------

    def _run(self) -> Generator[None]:
        names = ",".join(map(str, self._left))
        while self._left:
            self._look()
            if not self._left:
                break
            if not self._ends:
                self._world.sleep(_PAUSE_S)
                yield
                continue
            try:
                yield from self._read_on()
            except Unavailable as error:
                log.warning("restoring state waits", function=self._function, because=error)
                self._world.sleep(_PAUSE_S)
                yield
        self.done = True
        log.info(
            "state restored",
            function=self._function,
            partitions=names,
            keys=self._keys,
            read=self._read,
            seconds=round(self._world.now() - self._began, 2),
        )

    def _look(self) -> None:
        """Open folders and query the ends of changelogs for the partitions that wait for them."""
        self._next_look = self._world.now() + _LOOK_S
        patient = self._world.now() < self._began + _PATIENCE_S
        for partition, one in self._left.items():
            if one.values is None:
                one.values = self._open_values(partition, not patient)
        asked = {p: one for p, one in self._left.items() if one.values is not None and one.end is None}
        if not asked:
            return
        now = self._world.unix()
        for partition, answer in self._held(asked).items():
            self._settle(partition, asked[partition], answer, now)

    def _settle(self, partition: int, one: _Partition, held: tail.OffsetRange | Unavailable, now: float) -> None:
        """Begin to read a partition, given the offsets that its changelog had at `now`, or wait for it."""
        assert one.values is not None
        values, accepts = one.values, one.at_least is None
        where = place_of(self._topic, partition)
        at_least = 0 if one.at_least is None else max(values.position, one.at_least)
        if isinstance(held, Unavailable):
            self._waits(partition, one, held)
            return
        if (why := changelog.unsettled(where, held, at_least)) is not None:
            self._waits(partition, one, why)
            return
        start = changelog.start_of(values.position, values.as_of, held, self._tombstones_s, now, accepts)
        if start is None:
            raise changelog.beginning_removed(where, held.low)
        if not start.keeps:
            values.clear()
        one.at, one.end, one.end_as_of = start.offset, held.end, now
        # Tombstones of changes read from the beginning stay for long enough from now on (KIP-534).
        one.as_of = values.as_of if start.keeps and start.offset else now
        if one.at < one.end:
            self._ends[partition] = one.end
        else:
            self._finish(partition, one)

    def _held(self, partitions: Collection[int]) -> Mapping[int, tail.OffsetRange | Unavailable]:
        try:
            self._client = self._client or facts.connect(self._settings, _ASK_S, self._world)
            leaderless = facts.find_leaderless(self._client, self._topic, _ASK_S)
            led = [partition for partition in partitions if partition not in leaderless]
            held = tail.partition_offsets_or_errors(self._client, self._topic, led) if led else {}
            why = Unavailable("it has no leader")
            return {partition: held.get(partition, why) for partition in partitions}
        except Unavailable as error:
            return dict.fromkeys(partitions, error)

    def _waits(self, partition: int, one: _Partition, why: EosError) -> None:
        """Raise `why` after the partition has waited for long enough.

        A partition without a leader waits for as long as it takes, like an input partition.
        """
        now = self._world.now()
        if type(why) is not one.waits_for:
            one.waits_for, one.since = type(why), now
        # Missing records are waited for only until a new leader knows its end.
        more_s = 0 if isinstance(why, InputGone) else self._settings.transaction_timeout_ms / 1000
        if not isinstance(why, Unavailable) and now > one.since + _SETTLED_S + more_s:
            raise why
        log.debug("changelog waited for", topic=self._topic, partition=partition, because=why)
        if now - self._told_waiting >= 2 * _TELL_S:
            self._told_waiting = now
            log.warning("restoring state waits", function=self._function, partition=partition, because=why)

    def _read_on(self) -> Generator[None]:
        """Read until every readable partition is read, or until another partition becomes readable."""
        starts = {partition: self._left[partition].at for partition in self._ends}
        with tail.TopicReader(self._settings, self._topic, starts, uncommitted=False, world=self._world) as reader:
            reader.most = _FIRST_READ
            for read in tail.read_batches_until(reader, self._ends):
                self._take(read, reader)
                if self._bytes >= _MOST_BYTES:
                    self._write()
                for partition, end in list(self._ends.items()):
                    if reader.at(partition) >= end:
                        self._finish(partition, self._left[partition])
                if not self._left:
                    return
                self._tell()
                yield
                if self._left.keys() - self._ends and self._world.now() >= self._next_look:
                    self._look()
                    if self._ends.keys() - starts:
                        return

    def _take(self, read: list[MarkedRecord], reader: TopicReader) -> None:
        ours, ageing, size = self._left, self._ageing, 0
        for seen in read:
            record = seen.record
            cell, value = record.key or b"", record.value
            try:
                check_cell(cell)
            except ValueError as error:
                where = place_of(self._topic, record.partition, record.offset)
                raise ConfigurationError(
                    f"the changelog record {where} was written by another program: {error}",
                    remedy=f"stop the program that writes to {self._topic}; a tombstone of the same key and a "
                    "compaction remove the record",
                ) from error
            size += len(cell) + len(value or b"")
            if ageing and value is not None and store_of(cell) in ageing:
                value = stamped(max(0, record.timestamp), value)
            if record.partition in ours:
                ours[record.partition].news[cell] = value
        for partition in self._ends:
            ours[partition].at = reader.at(partition)
        self._read += len(read)
        self._bytes += size
        if read:
            reader.most = max(1, min(_MOST_READ, _MOST_BYTES // 2 * len(read) // max(1, size)))

    def _write(self) -> None:
        for one in self._left.values():
            if one.news and one.values is not None:
                one.values.apply(one.news, one.at, one.as_of)
                one.news = {}
        self._bytes = 0

    def _finish(self, partition: int, one: _Partition) -> None:
        assert one.values is not None
        assert one.end is not None
        one.values.apply(one.news, one.end, one.end_as_of)
        self._ends.pop(partition, None)
        del self._left[partition]
        self._ready[partition] = one.values
        self._keys += len(one.values) - own_entries(one.values)

    def _tell(self) -> None:
        now = self._world.now()
        if now - self._told < _TELL_S:
            return
        self._told = now
        log.info(
            "restoring state",
            function=self._function,
            read=self._read,
            left=self.left,
            per_second=round(self._read / (now - self._began)),
        )
