"""Restores tasks: reads what of their changelog they do not have yet, a moment at a time. In between the session polls
its group and works on the partitions that are ready.

Owns what a folder is still good for, and the order: a folder that nobody else has, the predecessor's transaction
decided in the changelog too, then all that is committed there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from eos import log
from eos.app.ageing import stamped
from eos.app.cells import store_of
from eos.app.routes import Route
from eos.errors import Unavailable
from eos.kafka import tail
from eos.kafka.settings import Settings
from eos.kafka.tail import Seen, Span
from eos.kafka.world import World
from eos.state import changelog
from eos.state.values import Value, Values

_MOMENT_S = 0.1
_PATIENCE_S = 2.0  # for a folder that another process is about to give back
_PAUSE_S = 0.02
_TELL_S = 5.0
_AT_ONCE = 10_000  # values that are written together


class Restoring:
    """Some partitions of one function. `partitions`: up to where the changelog of each goes at least. `open_values`: a
    partition's, None while its folder is another process's; told whether any folder will do."""

    def __init__(
        self,
        settings: Settings,
        topic: str,
        route: Route,
        partitions: Mapping[int, int],
        open_values: Callable[[int, bool], Values | None],
        tombstones_s: float,
        world: World,
    ) -> None:
        self._settings, self._topic, self._function, self._world = settings, topic, route.name, world
        self._ageing = route.ttls
        self._open_values, self._tombstones_s = open_values, tombstones_s
        self._left, self._at_least = list(partitions), partitions
        self._values: dict[int, Values] = {}
        self._news: dict[int, dict[bytes, Value]] = {partition: {} for partition in partitions}
        self._ends: dict[int, int] = {}
        self._at: dict[int, int] = {}  # how far each partition is read
        self._ready: dict[int, Values] = {}
        self._began = self._told = world.now()
        self._read = self._keys = 0
        self.done = False
        self._steps = self._run()

    @property
    def partitions(self) -> Sequence[int]:
        """Those that are not ready."""
        return self._left

    @property
    def left(self) -> int:
        """Changes that are still to be read, as far as it is known; markers count too."""
        return sum(max(0, end - self._at.get(partition, end)) for partition, end in self._ends.items())

    def go_on(self) -> dict[int, Values]:
        """Restores for a moment; returns what is ready since. Raises Temporary, InputGone."""
        until = self._world.now() + _MOMENT_S
        for _ in self._steps:
            if self._world.now() >= until:
                break
        ready, self._ready = self._ready, {}
        return ready

    def forget(self, partition: int) -> None:
        """It is not ours any more."""
        self._left.remove(partition)
        self._ends.pop(partition, None)
        if (values := self._values.pop(partition, None)) is not None:
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
        yield from self._open()
        while self._left:
            at_least = {p: max(values.position, self._at_least[p]) for p, values in self._values.items()}
            held = yield from changelog.settled(self._settings, self._topic, self._left, self._world, at_least)
            for partition in self._left:
                self._ends[partition] = held[partition].end
                if partition not in self._at:
                    self._at[partition] = self._start(self._values[partition], held[partition])
            for partition in [p for p in self._left if self._at[p] >= self._ends[p]]:
                self._finish(partition)
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

    def _open(self) -> Generator[None]:
        for partition in list(self._left):
            while partition in self._left:
                patient = self._world.now() < self._began + _PATIENCE_S
                values = self._open_values(partition, not patient)
                if values is not None:
                    self._values[partition] = values
                    break
                self._world.sleep(_PAUSE_S)
                yield

    def _start(self, values: Values, held: Span) -> int:
        """Where the changelog is read from. A folder that stands before or behind all of it is of no use, and one that
        was away for longer than tombstones are kept may have missed some; a transaction's marker is nothing new."""
        away_s = self._world.unix() - values.written_at
        missed = held.end - values.position > 1 and away_s > self._tombstones_s
        if missed or not held.low <= values.position <= held.end:
            values.clear()
            return held.low
        return values.position

    def _read_on(self) -> Generator[None]:
        if not self._left:
            return
        starts = {partition: self._at[partition] for partition in self._left}
        with tail.TopicReader(self._settings, self._topic, starts, uncommitted=False, world=self._world) as reader:
            reads = tail.reads_until(reader, self._ends)
            while True:
                self._take(next(reads))
                for partition in list(self._left):
                    if reader.at(partition) >= self._ends[partition]:
                        self._finish(partition)
                    elif len(self._news[partition]) >= _AT_ONCE:
                        self._apply(partition, reader.at(partition))
                if not self._left:
                    return
                self._at = {partition: reader.at(partition) for partition in self._left}
                self._tell()
                yield

    def _take(self, read: list[Seen]) -> None:
        ours, news, ageing = self._values, self._news, self._ageing
        for seen in read:
            record = seen.record
            cell, value = record.key or b"", record.value
            if ageing and value is not None and store_of(cell) in ageing:
                value = stamped(max(0, record.timestamp), value)
            if record.partition in ours:
                news[record.partition][cell] = value
        self._read += len(read)

    def _apply(self, partition: int, position: int) -> None:
        self._values[partition].apply(self._news[partition], position, self._world.unix())
        self._news[partition] = {}

    def _finish(self, partition: int) -> None:
        self._apply(partition, self._ends.pop(partition))
        self._left.remove(partition)
        self._ready[partition] = values = self._values.pop(partition)
        self._keys += len(values)

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
