"""Recognises the partitioner that wrote an input topic, and says what follows if the App writes with another one.

Owns the recognition from keys and their partitions, and the findings that a worker logs and `eos doctor` shows. It must
never stop a worker. A worker looks at the first keys of each topic only.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Collection, Mapping

from kafka.partitioner.default import murmur2

from eos import log
from eos.app.definition import App
from eos.errors import ConfigurationError
from eos.kafka.admin import facts, tail
from eos.kafka.admin.facts import Topic
from eos.kafka.admin.preflight import Finding, Level
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import Record

Place = tuple[bytes, int]
"""A key, and a partition in which a record has it."""
_CERTAIN_BITS = 30  # a partitioner explains keys of an unrelated rule with a probability of at most 2 ** -30
_EARLY_KEYS, _MAX_KEYS, _MAX_RECORDS = 20, 100, 1_000
_SLICE_RECORDS = 100  # at most this many records of a slice are examined
_SAMPLE_RECORDS, _SAMPLE_PARTITIONS, _PARTITION_RECORDS = 400, 100, 4
_REQUEST_TIMEOUT_S = 5.0


def fnv1a(key: bytes) -> int:
    """Return the absolute value of the signed 32-bit FNV-1a hash, as librdkafka and Sarama compute it."""
    found = 0x811C9DC5
    for byte in key:
        found = (found ^ byte) * 0x01000193 & 0xFFFFFFFF
    return min(found, 0x1_0000_0000 - found)


HASHES: Mapping[str, Callable[[bytes], int]] = {
    "murmur2_random": lambda key: murmur2(key) & 0x7FFFFFFF,
    "consistent_random": zlib.crc32,
    "fnv1a_random": fnv1a,
}
"""The hash of a key by librdkafka's name of the partitioner; modulo the number of partitions it is the partition."""
_NAMES = {
    "murmur2_random": "murmur2 (the default of Java and eos)",
    "consistent_random": "CRC32 (the default of librdkafka)",
    "fnv1a_random": "FNV-1a (the default of Sarama)",
}


def recognise(places: Collection[Place], partitions: int) -> tuple[str, ...] | None:
    """Return the partitioner that put these keys into their partitions, by its name in HASHES.

    Two names: producers with different partitioners write the topic. No name: another rule chose the partitions. None:
    these are too few keys or partitions to decide. `places`: without repetitions, and without null or empty keys.
    """

    def is_certain(keys: int) -> bool:
        return keys * math.log2(partitions) >= _CERTAIN_BITS

    if partitions < 2 or not is_certain(len(places)):
        return None
    others = {
        name: {(key, partition) for key, partition in places if hashed(key) % partitions != partition}
        for name, hashed in HASHES.items()
    }
    if fitting := tuple(name for name, unexplained in others.items() if not unexplained):
        return fitting if len(fitting) == 1 else None
    for one, other in itertools.combinations(others, 2):
        # Each of the two must explain all keys that the other one does not.
        if others[one].isdisjoint(others[other]) and all(is_certain(len(others[name])) for name in (one, other)):
            return one, other
    return ()


def judge(app: App, settings: Settings, topics: Mapping[str, Topic], topic: str, found: tuple[str, ...]) -> Finding:
    """Return what follows from the recognised partitioners of an input topic. `topics` come from the preflight."""
    route, between = app.routes[topic], topic in app.chained
    names = " and ".join(_NAMES[name] for name in found)
    own = next((name for name in HASHES if str(settings["partitioner"]) in (name, name.removesuffix("_random"))), None)
    if len(found) > 1:
        states = f", and {route.name} has two states of the key" if route.has_state else ""
        return Finding(
            "partitioner",
            Level.FAILED if route.has_state and not between else Level.WARNING,
            f"{topic} was written with two partitioners, {names}, so records of one key are in two partitions without "
            f"a common order{states}",
            "give all producers of the topic the same partitioner (docs/howto/partitioners.md)",
            ConfigurationError,
        )
    sentence = f"{topic} was written with {names}"
    if not found:
        sentence = f"{topic} was written with an unknown partitioner, or its number of partitions has changed"
    if not found or own is None or found[0] == own:
        return Finding("partitioner", Level.OK, sentence)
    if between and route.has_state:
        return Finding(
            "partitioner",
            Level.WARNING,
            f"{sentence}, and this App now writes it with {_NAMES[own]}, so keys move to other partitions, where "
            f"{route.name} has no state of them",
            f"set partitioner={found[0]} as before, or restart with empty state (docs/howto/partitioners.md)",
        )
    # If the numbers of partitions have no common divisor, keys of one partition spread with any partitioner.
    count = topics[topic].partitions
    spread = [name for name in sorted(route.destinations) if math.gcd(count, topics[name].partitions) > 1]
    if between or not spread or "partitioner" in settings.values:
        return Finding("partitioner", Level.OK, sentence)
    moving = " (with empty state, because keys move in topics between functions)" if _has_state_between(app) else ""
    return Finding(
        "partitioner",
        Level.WARNING,
        f"{sentence}, and {', '.join(spread)} will be written with {_NAMES[own]}, so outputs with the keys of one "
        "input partition go to many partitions, which takes more requests and time",
        f"-X partitioner={found[0]} keeps the partitions{moving}, but programs that join the outputs with topics of "
        f"Java clients need murmur2_random; -X partitioner={own} turns off this warning (docs/howto/partitioners.md)",
    )


def _has_state_between(app: App) -> bool:
    return any(app.routes[topic].has_state for topic in app.chained)


def sample_places(settings: Settings, topic: str, partitions: int, deadline: float, world: World = REAL) -> set[Place]:
    """Return the keys and partitions of a few hundred of the last committed records, as many as are read in time.

    `deadline`: a World.now(). Raises Unavailable, NotAuthorised and other subclasses of EosError.
    """
    client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
    spans = tail.partition_offsets(client, topic, range(min(partitions, _SAMPLE_PARTITIONS)))
    ends = {partition: span.stable for partition, span in spans.items() if span.low < span.stable}
    if not ends:
        return set()
    most = max(_PARTITION_RECORDS, _SAMPLE_RECORDS // len(ends))
    starts = {partition: max(spans[partition].low, end - most) for partition, end in ends.items()}
    found: set[Place] = set()
    with tail.TopicReader(settings, topic, starts, uncommitted=False, world=world) as reader:
        for batch in tail.read_batches_until(reader, ends):
            found |= {(seen.record.key, seen.record.partition) for seen in batch if seen.record.key}
            if world.now() > deadline:
                break
    return found


class InputPartitioners:
    """Looks at the first keys of an App's input topics, and logs one warning per topic; `topics`: of the preflight."""

    def __init__(self, app: App, settings: Settings, topics: Mapping[str, Topic]) -> None:
        self._app, self._settings, self._topics = app, settings, topics
        known = [topic for topic in app.topics if topic in topics and topics[topic].partitions > 1]
        self._places: dict[str, set[Place]] = {topic: set() for topic in known if topic not in app.sources}
        self._examined = dict.fromkeys(self._places, 0)

    def note(self, records: list[Record]) -> bool:
        """Examine the topic of the first record. Return True once every topic has been examined."""
        topic = records[0].topic
        places = self._places.get(topic)
        if places is not None and self._is_done(topic, places, records[:_SLICE_RECORDS]):
            del self._places[topic]
        return not self._places

    def _is_done(self, topic: str, places: set[Place], records: list[Record]) -> bool:
        before = len(places)
        places.update((record.key, record.partition) for record in records if record.key and record.topic == topic)
        self._examined[topic] += len(records)
        is_last = len(places) >= _MAX_KEYS or self._examined[topic] >= _MAX_RECORDS
        if not is_last and (len(places) == before or len(places) < _EARLY_KEYS):
            return False
        found = recognise(places, self._topics[topic].partitions)
        if not found:
            return is_last
        finding = judge(self._app, self._settings, self._topics, topic, found)
        if finding.level is Level.OK:
            return is_last
        log.warning("input has another partitioner", topic=topic, keys=len(places), why=str(finding))
        return True
