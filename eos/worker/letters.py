"""Dead letters as they lie in their topic, and which of them are done: replayed or dropped.

What is done is the committed offset of the group `{app}-dlq-replay`, of which nobody is a member: all letters before
it, and behind it those that its metadata names (`Done`). The brokers forget it some days after its last commit, so each
run commits it for all partitions, and where letters are old enough that it may have been forgotten nobody takes them
unasked.
"""

from __future__ import annotations

import bisect
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from eos import log
from eos.encoding.dead_letters import DEAD_LETTER_SUFFIX, PREFIX, parts_of
from eos.errors import (
    Action,
    CallFailed,
    ConfigurationError,
    Fenced,
    Unavailable,
    UsageError,
    describe_error,
    stop_error,
)
from eos.kafka.admin import facts, tail
from eos.kafka.client.failures import classify
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import Header, Record, Send, noted, place_of, readable

_REPLAYS = "replays"
_CONNECT_S = 10.0
_ASK_S = 5.0
_COMMITTED_S = 30.0  # a predecessor that was killed may have offsets pending
_FORMAT = 1  # of the metadata, `v` in it: docs/reference/formats.md
_METADATA_BYTES = 4_096  # offset.metadata.max.bytes


def group_of(app_id: str) -> str:
    return f"{app_id}-dlq-replay"


# ---- a letter -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Letter:
    """A dead letter: where it lies, the record as its function got it, and what its worker said of it by name."""

    place: str
    partition: int
    offset: int
    record: Record
    told: Mapping[str, str]

    @property
    def source(self) -> str:
        """Where the record was; where no worker said that, where the letter is."""
        record = self.record
        return place_of(record.topic, record.partition, record.offset) if "topic" in self.told else self.place

    @property
    def app(self) -> str:
        """Whose it is; "": not told."""
        return self.told.get("app", "")

    @property
    def exception(self) -> str:
        return self.told.get("exception", "-")

    @property
    def message(self) -> str:
        return self.told.get("message", "-")

    @property
    def replays(self) -> int:
        """How often it was replayed and failed."""
        return _number(self.told, _REPLAYS, 0)

    def is_of(self, app_id: str) -> bool:
        return self.app in ("", app_id)


def letter_of(read: Record) -> Letter:
    """What a worker wrote there, undone. A record that no worker wrote is taken as it is.

    It goes back to the topic that it was dead-lettered from, whatever its headers say: they are who wrote the record's.
    """
    headers, told = parts_of(readable(read.headers))
    record = Record(
        read.topic.removesuffix(DEAD_LETTER_SUFFIX),
        _number(told, "partition", read.partition),
        _number(told, "offset", read.offset),
        _number(told, "timestamp", read.timestamp),
        read.key,
        read.value,
        headers or (),
    )
    where = place_of(read.topic, read.partition, read.offset)
    return Letter(where, read.partition, read.offset, record, told)


def _number(told: Mapping[str, str], name: str, default: int) -> int:
    text = told.get(name, "")
    number = int(text) if len(text) < 20 and text.isascii() and text.removeprefix("-").isdecimal() else default
    return number if -1 <= number < 1 << 63 else default


def again(letter: Letter, send: Send) -> Send:
    """The dead letter of one that failed again: it says how often."""
    topic, value, key, partition, timestamp, headers = send
    count: Header = (PREFIX + _REPLAYS, str(letter.replays + 1).encode())
    return topic, value, key, partition, timestamp, [*(headers or []), count]


# ---- which are done -------------------------------------------------------------------------------------------


Run = tuple[int, int]
"""The first and the last offset of letters that are done; between them lies none that waits."""


@dataclass(frozen=True)
class Done:
    """Of one partition: all letters before `offset` (-1: nothing is known), and `runs` behind it."""

    offset: int = -1
    runs: tuple[Run, ...] = ()

    def has(self, offset: int) -> bool:
        if offset < self.offset:
            return True
        behind = bisect.bisect(self.runs, offset, key=itemgetter(0))  # asked of every letter, and there may be many
        return behind > 0 and offset <= self.runs[behind - 1][1]

    def plus(self, *more: Run) -> Done:
        """With these too; each run is as long as can be, and none touches `offset`."""
        offset, runs = self.offset, list[Run]()
        for first, last in sorted((*self.runs, *more)):
            if first <= offset:
                offset = max(offset, last + 1)
            elif runs and first <= runs[-1][1] + 1:
                runs[-1] = runs[-1][0], max(runs[-1][1], last)
            else:
                runs.append((first, last))
        return Done(offset, tuple(runs))

    def since(self, low: int) -> Done:
        """Where the partition begins at `low` now."""
        return Done(max(self.offset, low), self.runs).plus()

    def metadata(self) -> str:
        """The runs as distances, for there is not much room: from the end of the one before to the first, and from the
        first to the end."""
        ends = [self.offset, *(edge for first, last in self.runs for edge in (first, last + 1))]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        return json.dumps({"v": _FORMAT, "done": steps}, separators=(",", ":")) if self.runs else ""

    @staticmethod
    def read(offset: int, metadata: str | None) -> Done:
        """Of a committed offset. ConfigurationError for what a newer version wrote."""
        found = noted(metadata)
        try:
            known = found["v"] <= _FORMAT
            edges = list(itertools.accumulate(map(operator.index, found["done"] if known else ()), initial=offset))
            runs = [(first, end - 1) for first, end in zip(edges[1::2], edges[2::2], strict=True)]
        except (ValueError, KeyError, TypeError):
            return Done(offset)  # written by something else
        if not known:
            raise ConfigurationError(
                f"which dead letters are done is noted in format {found['v']}, this version reads {_FORMAT}",
                remedy="use the newer eos",
            )
        return Done(offset).plus(*runs)

    def __str__(self) -> str:
        behind = f" and {len(self.runs)} pieces behind it" if self.runs else ""
        return "no offset" if self.offset < 0 else f"{self.offset}{behind}"


def offsets_of(topic: str, after: Mapping[int, Done]) -> list[TopicPartition]:
    """What is to be committed. UsageError where it is more than the brokers take."""
    offsets = [TopicPartition(topic, partition, done.offset, done.metadata()) for partition, done in after.items()]
    for at in offsets:
        if len(at.metadata or "") > _METADATA_BYTES:
            raise UsageError(
                f"{place_of(topic, at.partition)}: the letters that are done lie in {len(after[at.partition].runs)} "
                "pieces, more than can be noted; what was settled before stands",
                remedy="take the first ones first: `eos dlq replay` or `drop --all` with --limit",
            )
    return offsets


class Place:
    """Which dead letters are done: a group's committed offsets, without being in the group."""

    def __init__(self, settings: Settings, group: str, world: World = REAL) -> None:
        self._group, self._world = group, world
        self._settings = settings
        self._left: dict[str, dict[int, Done]] = {}  # topic -> partition -> as we left it
        self.done: dict[str, dict[int, Done]] = {}
        """By topic and partition."""
        self._consumer = world.consumer(
            {
                **settings.admin(),
                "logger": log.client_logger,
                "group.id": group,
                "isolation.level": "read_committed",  # so that pending offsets are waited for (KIP-447)
                "enable.auto.commit": False,
                "allow.auto.create.topics": False,
            }
        )

    def close(self) -> None:
        self._consumer.close()

    def metadata(self) -> Any:
        return self._consumer.consumer_group_metadata()

    def of(self, topic: str, partitions: Iterable[int]) -> dict[int, Done]:
        """Of those partitions of which something is known."""
        found = self.committed(topic, partitions)
        self._left[topic] = dict.fromkeys(partitions, Done()) | found
        return found

    def moved(self, topic: str, after: Mapping[int, Done]) -> None:
        """It is committed now."""
        self._left[topic].update(after)
        self.done[topic].update(after)

    def forgotten(self, topic: str, low: Mapping[int, int]) -> tuple[list[int], float]:
        """Those of these partitions, which have letters from `low` on and no place, that may have had one: the brokers
        forget it so many days after its last commit, and the first letters are older."""
        client = facts.connect(self._settings, _CONNECT_S, self._world)
        days = facts.offsets_kept_minutes(client, self._settings.bootstrap_servers, self._world) / (24 * 60)
        before_ms = round((self._world.unix() - days * 86_400) * 1000)
        return sorted(tail.older(client, topic, low, before_ms)), days

    def confirm(self, topic: str) -> None:
        """Raises Fenced where somebody else has moved it since."""
        left = self._left[topic]
        found = dict.fromkeys(left, Done()) | self.committed(topic, left)
        if moved := {partition for partition in left if found[partition] != left[partition]}:
            at = min(moved)
            raise Fenced(
                f"another `eos dlq replay` or `drop` has moved group {self._group} on {place_of(topic, at)} from "
                f"{left[at]} to {found[at]}: this one stops, what it has committed stands"
            )

    def committed(self, topic: str, partitions: Iterable[int]) -> dict[int, Done]:
        """The stable offsets, of those partitions that have one."""
        places = [TopicPartition(topic, partition) for partition in partitions]
        deadline = self._world.now() + _COMMITTED_S
        while True:
            try:
                found = self._consumer.committed(places, timeout=_ASK_S)
                error = next((at.error for at in found if at.error is not None), None)
                if error is None:
                    return {at.partition: Done.read(at.offset, at.metadata) for at in found if at.offset >= 0}
            except KafkaException as raised:
                error = raised.args[0]
            action = classify("committed", error)
            if action is not Action.RETRY:
                raise stop_error(CallFailed("committed", action, error))
            if self._world.now() > deadline:
                raise Unavailable(f"the offsets of group {self._group} cannot be had: {describe_error(error)}")
            self._world.sleep(0.05)


def letters(
    settings: Settings, topic: str, place: Place | None, on_forgotten: Callable[[str], None] = lambda sentence: None
) -> Iterator[Letter]:
    """The dead letters in this topic up to its end of now; with a `place` those that are not done. `on_forgotten` is
    told where it may have been forgotten."""
    held = tail.spans(settings, topic, _CONNECT_S)
    at = {} if place is None else place.of(topic, held)
    done = {partition: at.get(partition, Done()).since(span.low) for partition, span in held.items()}
    if place is not None:
        place.done[topic] = done.copy()
        without = {p: span.low for p, span in held.items() if p not in at and span.low < span.stable}
        forgotten, days = place.forgotten(topic, without) if without else ([], 0.0)
        if forgotten:
            where = ", ".join(f"[{partition}]" for partition in forgotten)
            on_forgotten(
                f"no replay's place is known of {topic} {where}, and letters there are older than the {days:g} days "
                "that the brokers keep one (offsets.retention.minutes): they may have been replayed before"
            )
    starts = {partition: each.offset for partition, each in done.items()}
    with tail.TopicReader(settings, topic, starts, uncommitted=False) as reader:
        for seen in tail.read_until(reader, tail.ends_of(held, uncommitted=False)):
            if not done[seen.record.partition].has(seen.record.offset):
                yield letter_of(seen.record)
