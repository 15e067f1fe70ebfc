"""Restores tasks: reads what of their changelog they do not have yet, a moment at a time. In between the session polls
its group and works on the partitions that are ready.

Owns the steps of each partition: lock a folder, wait until the predecessor's transaction is decided in the changelog,
then read all that is committed there. A partition that waits keeps no other one waiting. What is read is written by
bytes, each time with the position that it stands for: a restart goes on there.
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
from eos.kafka.admin.tail import Seen, TopicReader
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import place_of
from eos.state import changelog
from eos.state.values import Value, Values, own_entries

_MOMENT_S = 0.1
_PATIENCE_S = 2.0  # for a folder that another process is about to give back
_PAUSE_S = 0.05
_ASK_S = 10.0
_LOOK_S = 1.0  # how often partitions that wait are looked at while others are read
_TELL_S = 5.0
# After a transaction is decided its markers take a moment to arrive; nothing else is open in a changelog.
_SETTLED_S = 30.0
_MOST_BYTES = 8 << 20  # that were read and not written, of all partitions
_FIRST_READ = 16  # records: how large they are is not known yet
_MOST_READ = 1_000


@dataclass
class _Partition:
    """How far one partition is."""

    at_least: int | None
    """Up to where its changelog goes at least; None: what it holds is taken as complete, whatever is missing."""
    values: Values | None = None
    """None while its folder is another process's."""
    end: int | None = None
    """Where its changelog ends; None while that is not settled."""
    at: int = 0
    """How far it is read."""
    as_of: float = 0.0
    """See Values.as_of: of what is read."""
    end_as_of: float = 0.0
    """The same, once all of it is read."""
    news: dict[bytes, Value] = field(default_factory=dict)
    waits_for: type[EosError] | None = None
    since: float = 0.0


class Restoring:
    """Some partitions of one function. `partitions`: up to where the changelog of each goes at least; None: what it
    holds is taken as complete. `open_values`: a partition's, None while its folder is another process's; told whether
    any folder will do."""

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
        self._ends: dict[int, int] = {}  # of those that are being read
        self._ready: dict[int, Values] = {}
        self._client: Any = None
        self._began = self._told = world.now()
        self._told_waiting = world.now()
        self._next_look = 0.0
        self._bytes = 0  # that were read and not written
        self._read = self._keys = 0
        self.done = False
        self._steps = self._run()

    @property
    def partitions(self) -> Collection[int]:
        """Those that are not ready."""
        return self._left.keys()

    @property
    def left(self) -> int:
        """Changes that are still to be read, as far as it is known; markers count too."""
        return sum(max(0, one.end - one.at) for one in self._left.values() if one.end is not None)

    def go_on(self) -> dict[int, Values]:
        """Restores for a moment; returns what is ready since. Raises Temporary, InputGone, ConfigurationError."""
        until = self._world.now() + _MOMENT_S
        for _ in self._steps:
            if self._world.now() >= until:
                break
        ready, self._ready = self._ready, {}
        return ready

    def forget(self, partition: int) -> None:
        """It is not ours any more."""
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

    # ---- its steps, one after the other; each of them is short ------------------------------------------------

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
        """Open folders and ask where changelogs end, of those partitions that wait for it."""
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

    def _settle(self, partition: int, one: _Partition, held: tail.Span | Unavailable, now: float) -> None:
        """Begin to read a partition, given what its changelog held at `now`, or wait for it."""
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
        # What is read from the beginning has its tombstones for long enough from now on (KIP-534).
        one.as_of = values.as_of if start.keeps and start.offset else now
        if one.at < one.end:
            self._ends[partition] = one.end
        else:
            self._finish(partition, one)

    def _held(self, partitions: Collection[int]) -> Mapping[int, tail.Span | Unavailable]:
        try:
            self._client = self._client or facts.connect(self._settings, _ASK_S, self._world)
            leaderless = facts.leaderless(self._client, self._topic, _ASK_S)
            led = [partition for partition in partitions if partition not in leaderless]
            held = tail.each_held(self._client, self._topic, led) if led else {}
            why = Unavailable("it has no leader")
            return {partition: held.get(partition, why) for partition in partitions}
        except Unavailable as error:
            return dict.fromkeys(partitions, error)

    def _waits(self, partition: int, one: _Partition, why: EosError) -> None:
        """Raise `why` once it was waited for long enough. A partition without a leader waits for as long as it takes,
        as one of the input does."""
        now = self._world.now()
        if type(why) is not one.waits_for:
            one.waits_for, one.since = type(why), now
        # What is missing is not waited for as long: only a new leader does not know it yet.
        more_s = 0 if isinstance(why, InputGone) else self._settings.transaction_timeout_ms / 1000
        if not isinstance(why, Unavailable) and now > one.since + _SETTLED_S + more_s:
            raise why
        log.debug("changelog waited for", topic=self._topic, partition=partition, because=why)
        if now - self._told_waiting >= 2 * _TELL_S:
            self._told_waiting = now
            log.warning("restoring state waits", function=self._function, partition=partition, because=why)

    def _read_on(self) -> Generator[None]:
        """Read until all is read of those partitions that can be, or until another one can be."""
        starts = {partition: self._left[partition].at for partition in self._ends}
        with tail.TopicReader(self._settings, self._topic, starts, uncommitted=False, world=self._world) as reader:
            reader.most = _FIRST_READ
            for read in tail.reads_until(reader, self._ends):
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

    def _take(self, read: list[Seen], reader: TopicReader) -> None:
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
