"""Reads dead letters from their topic, and stores which of them are done, that is, replayed or dropped.

The group `{app}-dlq-replay`, which has no members, stores this in its committed offsets. All dead letters before an
offset are done. The metadata of the offset names those that are done after it (`Done`). Brokers delete the offsets some
days after the last commit, so each run commits them again for all partitions. If dead letters are so old that their
offset may have been deleted, the user must confirm that they are read again.
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
from eos.encoding.dead_letters import DEAD_LETTER_SUFFIX, PREFIX, split_headers
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
from eos.records import Header, Record, Send, format_position, parse_metadata, readable_headers

_REPLAYS = "replays"
_CONNECT_S = 10.0
_ASK_S = 5.0
_COMMITTED_S = 30.0  # a killed predecessor may have pending offsets
_FORMAT = 1  # version of the offset metadata, its field `v`: docs/reference/formats.md
_METADATA_BYTES = 4_096  # offset.metadata.max.bytes


def group_of(app_id: str) -> str:
    return f"{app_id}-dlq-replay"


# ---- a dead letter --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeadLetter:
    """Describes a dead letter: its position, the record as its function got it, and its worker's notes by name."""

    position: str
    partition: int
    offset: int
    record: Record
    notes: Mapping[str, str]

    @property
    def source(self) -> str:
        """Return the record's position in its source topic, or the dead letter's own position if no worker noted the
        record's.
        """
        record = self.record
        return (
            format_position(record.topic, record.partition, record.offset) if "topic" in self.notes else self.position
        )

    @property
    def app(self) -> str:
        """Return the id of the App that wrote the dead letter; "" if the headers do not name it."""
        return self.notes.get("app", "")

    @property
    def exception(self) -> str:
        return self.notes.get("exception", "-")

    @property
    def message(self) -> str:
        return self.notes.get("message", "-")

    @property
    def replays(self) -> int:
        """Return how often the dead letter was replayed and failed again."""
        return _number(self.notes, _REPLAYS, 0)

    def is_of(self, app_id: str) -> bool:
        return self.app in ("", app_id)


def letter_of(read: Record) -> DeadLetter:
    """Return the dead letter in a record of a dead-letter topic. A record that no worker wrote counts as a dead letter
    without notes.

    The topic comes from the name of the dead-letter topic, never from headers, which the writer of the original record
    chose.
    """
    headers, notes = split_headers(readable_headers(read.headers))
    record = Record(
        read.topic.removesuffix(DEAD_LETTER_SUFFIX),
        _number(notes, "partition", read.partition),
        _number(notes, "offset", read.offset),
        _number(notes, "timestamp", read.timestamp),
        read.key,
        read.value,
        headers or (),
    )
    where = format_position(read.topic, read.partition, read.offset)
    return DeadLetter(where, read.partition, read.offset, record, notes)


def _number(notes: Mapping[str, str], name: str, default: int) -> int:
    text = notes.get(name, "")
    number = int(text) if len(text) < 20 and text.isascii() and text.removeprefix("-").isdecimal() else default
    return number if -1 <= number < 1 << 63 else default


def failed_again(letter: DeadLetter, send: Send) -> Send:
    """Return the dead letter of a record that failed again, with its number of replays."""
    topic, value, key, partition, timestamp, headers = send
    count: Header = (PREFIX + _REPLAYS, str(letter.replays + 1).encode())
    return topic, value, key, partition, timestamp, [*(headers or []), count]


# ---- which dead letters are settled ---------------------------------------------------------------------------


Run = tuple[int, int]
"""The first and last offset of a range of settled dead letters; no dead letter between them waits."""


@dataclass(frozen=True)
class Done:
    """Holds the settled dead letters of one partition: all before `offset` (-1: nothing is known), and the `runs` after
    it."""

    offset: int = -1
    runs: tuple[Run, ...] = ()

    def contains(self, offset: int) -> bool:
        if offset < self.offset:
            return True
        # Use a binary search, because this runs for every dead letter, and there may be many.
        after = bisect.bisect(self.runs, offset, key=itemgetter(0))
        return after > 0 and offset <= self.runs[after - 1][1]

    def add(self, *more: Run) -> Done:
        """Return these settled dead letters and `more` runs, merged so that no two runs touch each other or
        `offset`."""
        offset, runs = self.offset, list[Run]()
        for first, last in sorted((*self.runs, *more)):
            if first <= offset:
                offset = max(offset, last + 1)
            elif runs and first <= runs[-1][1] + 1:
                runs[-1] = runs[-1][0], max(runs[-1][1], last)
            else:
                runs.append((first, last))
        return Done(offset, tuple(runs))

    def starting_at(self, low: int) -> Done:
        """Return a copy for a partition that now begins at offset `low`: all offsets before it count as settled."""
        return Done(max(self.offset, low), self.runs).add()

    def metadata(self) -> str:
        """Return the runs as offset metadata.

        They are encoded as distances to save space: from the end of one run to the start of the next, and from start to
        end.
        """
        ends = [self.offset, *(edge for first, last in self.runs for edge in (first, last + 1))]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        return json.dumps({"v": _FORMAT, "done": steps}, separators=(",", ":")) if self.runs else ""

    @staticmethod
    def read(offset: int, metadata: str | None) -> Done:
        """Read the settled dead letters from a committed offset's metadata. Raise ConfigurationError for a newer
        format."""
        found = parse_metadata(metadata)
        try:
            known = found["v"] <= _FORMAT
            edges = list(itertools.accumulate(map(operator.index, found["done"] if known else ()), initial=offset))
            runs = [(first, end - 1) for first, end in zip(edges[1::2], edges[2::2], strict=True)]
        except (ValueError, KeyError, TypeError):
            return Done(offset)  # another program wrote it
        if not known:
            raise ConfigurationError(
                f"the progress of replays is stored in format {found['v']}, this version reads {_FORMAT}",
                remedy="use the newer eos",
            )
        return Done(offset).add(*runs)

    def __str__(self) -> str:
        later = f" and {len(self.runs)} ranges after it" if self.runs else ""
        return "no offset" if self.offset < 0 else f"{self.offset}{later}"


def offsets_of(topic: str, after: Mapping[int, Done]) -> list[TopicPartition]:
    """Return the offsets to commit. Raise UsageError if their metadata is longer than brokers allow."""
    offsets = [TopicPartition(topic, partition, done.offset, done.metadata()) for partition, done in after.items()]
    for at in offsets:
        if len(at.metadata or "") > _METADATA_BYTES:
            raise UsageError(
                f"{format_position(topic, at.partition)}: the settled dead letters form "
                f"{len(after[at.partition].runs)} "
                "separate ranges, more than offset metadata can hold; earlier commits stand",
                remedy="start with the first ones: `eos dlq replay` or `drop --all` with --limit",
            )
    return offsets


class ReplayProgress:
    """Keeps the settled dead letters of a topic as a group's committed offsets, without joining the group."""

    def __init__(self, settings: Settings, group: str, world: World = REAL) -> None:
        self._group, self._world = group, world
        self._settings = settings
        self._committed_progress: dict[str, dict[int, Done]] = {}  # topic -> partition -> the state of our last commit
        self.settled: dict[str, dict[int, Done]] = {}
        """The settled dead letters by topic and partition."""
        self._consumer = world.consumer(
            {
                **settings.admin(),
                "logger": log.client_logger,
                "group.id": group,
                "isolation.level": "read_committed",  # wait for pending offsets (KIP-447)
                "enable.auto.commit": False,
                "allow.auto.create.topics": False,
            }
        )

    def close(self) -> None:
        self._consumer.close()

    def metadata(self) -> Any:
        return self._consumer.consumer_group_metadata()

    def load(self, topic: str, partitions: Iterable[int]) -> dict[int, Done]:
        """Return the settled dead letters of the partitions that have a committed offset."""
        found = self.committed(topic, partitions)
        self._committed_progress[topic] = dict.fromkeys(partitions, Done()) | found
        return found

    def note_committed(self, topic: str, after: Mapping[int, Done]) -> None:
        """Record that the transaction that settled these dead letters was committed."""
        self._committed_progress[topic].update(after)
        self.settled[topic].update(after)

    def find_expired(self, topic: str, low: Mapping[int, int]) -> tuple[list[int], float]:
        """Return the partitions whose committed offset may have expired, and the days for which brokers keep one.

        `low`: partitions without a committed offset, with the offset of their first dead letter. Their offset may have
        expired if the first dead letters are older than these days.
        """
        client = facts.connect(self._settings, _CONNECT_S, self._world)
        days = facts.offsets_retention_minutes(client, self._settings.bootstrap_servers, self._world) / (24 * 60)
        before_ms = round((self._world.unix() - days * 86_400) * 1000)
        return sorted(tail.partitions_older_than(client, topic, low, before_ms)), days

    def confirm(self, topic: str) -> None:
        """Raise Fenced if another process has committed since our last commit."""
        left = self._committed_progress[topic]
        found = dict.fromkeys(left, Done()) | self.committed(topic, left)
        if changed := {partition for partition in left if found[partition] != left[partition]}:
            at = min(changed)
            raise Fenced(
                f"another `eos dlq replay` or `drop` has moved group {self._group} on {format_position(topic, at)} "
                f"from {left[at]} to {found[at]}: this one stops, and its own commits stand"
            )

    def committed(self, topic: str, partitions: Iterable[int]) -> dict[int, Done]:
        """Return the settled dead letters of the partitions that have a stable committed offset."""
        topic_partitions = [TopicPartition(topic, partition) for partition in partitions]
        deadline = self._world.now() + _COMMITTED_S
        while True:
            try:
                found = self._consumer.committed(topic_partitions, timeout=_ASK_S)
                error = next((at.error for at in found if at.error is not None), None)
                if error is None:
                    return {at.partition: Done.read(at.offset, at.metadata) for at in found if at.offset >= 0}
            except KafkaException as raised:
                error = raised.args[0]
            action = classify("committed", error)
            if action is not Action.RETRY:
                raise stop_error(CallFailed("committed", action, error))
            if self._world.now() > deadline:
                raise Unavailable(f"the offsets of group {self._group} are unavailable: {describe_error(error)}")
            self._world.sleep(0.05)


def read_dead_letters(
    settings: Settings,
    topic: str,
    progress: ReplayProgress | None,
    on_expired: Callable[[str], None] = lambda sentence: None,
) -> Iterator[DeadLetter]:
    """Yield the dead letters of a topic up to its current end; with `progress` only those that are not done.

    `on_expired` is called with a sentence if committed offsets may have expired.
    """
    held = tail.topic_offsets(settings, topic, _CONNECT_S)
    at = {} if progress is None else progress.load(topic, held)
    done = {partition: at.get(partition, Done()).starting_at(span.low) for partition, span in held.items()}
    if progress is not None:
        progress.settled[topic] = done.copy()
        without = {p: span.low for p, span in held.items() if p not in at and span.low < span.stable}
        expired, days = progress.find_expired(topic, without) if without else ([], 0.0)
        if expired:
            where = ", ".join(f"[{partition}]" for partition in expired)
            on_expired(
                f"the committed offsets of replays of {topic} {where} may have expired: "
                f"dead letters there are older than the {days:g} days for which brokers keep offsets "
                "(offsets.retention.minutes), and may have been replayed before"
            )
    starts = {partition: each.offset for partition, each in done.items()}
    with tail.TopicReader(settings, topic, starts, uncommitted=False) as reader:
        for seen in tail.read_until(reader, tail.end_offsets(held, uncommitted=False)):
            if not done[seen.record.partition].contains(seen.record.offset):
                yield letter_of(seen.record)
