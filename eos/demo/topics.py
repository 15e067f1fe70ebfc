"""Creates, loads and follows the demo's topics, and deletes them on an external cluster.

Owns the names. It must never write to or delete a topic that existed before.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.demo import data
from eos.errors import ConfigurationError, Unavailable

FLIGHTS, DELAYS, LATE, CONTRAST = "flights", "flight-delays", "late-flights", "flight-delays-at-least-once"
OUTPUTS = (DELAYS, LATE)
TOPICS = (FLIGHTS, *OUTPUTS, CONTRAST)
PARTITIONS = 8
GROUP, CONTRAST_GROUP = "late-flights", "at-least-once"  # the first is the App's id
_TIMEOUT_S, _CONNECT_TIMEOUT_S = 30.0, 10.0

# librdkafka writes the errors that it retries to stderr, in the middle of the screen.
QUIET: dict[str, str | int] = {"log_level": 0}


@contextlib.contextmanager
def created_topics(
    servers: str,
    delete: bool,
    wanted: Sequence[NewTopic] | None = None,
    groups: Sequence[str] = (),
) -> Iterator[None]:
    """Create all topics (`wanted`, by default those of `eos demo`) for the block.

    With `delete` they and the groups that read them are deleted at the end. Raises ConfigurationError if one of them
    exists, Unavailable if the cluster does not answer.
    """
    admin = AdminClient({"bootstrap.servers": servers, **QUIET})
    if wanted is None:
        wanted, groups = [NewTopic(name, PARTITIONS) for name in TOPICS], (GROUP, CONTRAST_GROUP)
    try:
        existing = sorted(set(admin.list_topics(timeout=_CONNECT_TIMEOUT_S).topics) & {new.topic for new in wanted})
    except KafkaException as error:
        raise Unavailable(f"{servers} cannot be reached: {error.args[0].str()}") from error
    if existing:
        raise ConfigurationError(f"the demo creates its own topics, but {servers} has {', '.join(existing)} already")
    created: list[str] = []
    try:
        for name, future in admin.create_topics(list(wanted)).items():
            try:
                future.result(_TIMEOUT_S)
            except KafkaException as error:
                raise Unavailable(f"topic {name} cannot be created: {error.args[0].str()}") from error
            created.append(name)
        yield
    finally:
        if delete and created:
            _delete(admin, created, groups)


def _delete(admin: AdminClient, created: list[str], groups: Sequence[str]) -> None:
    futures = [*admin.delete_topics(created).values()]
    futures += admin.delete_consumer_groups(list(groups)).values()
    for future in futures:
        with contextlib.suppress(KafkaException, TimeoutError):  # already deleted, or the cluster has ended
            future.result(5.0)


class Flights:
    """Loads the first `total` flights into FLIGHTS in parts; `loaded` counts the flights that are there."""

    def __init__(self, servers: str, total: int, by_day: bool = False) -> None:
        """Create the loader. `by_day`: load the flights by their day, with their scheduled hours as timestamps."""
        self.loaded, self._by_day = 0, by_day
        self._records = data.records(total, by_day)
        self._failed: list[KafkaError] = []
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "linger.ms": 20,
                "compression.type": "lz4",
                "partitioner": "murmur2_random",
                "delivery.report.only.error": True,
                "on_delivery": lambda error, _: self._failed.append(error),
                **QUIET,
            }
        )

    def load(self, count: int, progress: Callable[[int], object] = lambda done: None) -> None:
        """Load the next `count` flights, or all that are left, and wait for their acknowledgement.

        `progress` is called with the number of flights produced.
        """
        for done, (key, value, hour_ms) in enumerate(itertools.islice(self._records, count), self.loaded + 1):
            self._produce(key, value, hour_ms if self._by_day else 0)
            self.loaded = done
            if done % 1_000 == 0:
                self._producer.poll(0)
                progress(done)
        left = self._producer.flush(_TIMEOUT_S)
        if left or self._failed:
            reason = self._failed[0].str() if self._failed else f"{left} not acknowledged in {_TIMEOUT_S:.0f} s"
            raise Unavailable(f"the flights could not be loaded: {reason}")
        progress(self.loaded)

    def _produce(self, key: bytes, value: bytes, timestamp_ms: int) -> None:
        while True:
            try:
                return self._producer.produce(FLIGHTS, value, key, timestamp=timestamp_ms)
            except BufferError:
                self._producer.poll(0.1)


def load(servers: str, flights: int, progress: Callable[[int], None], by_day: bool = False) -> int:
    """Load all flights at once, and return how many there were. `by_day`: see Flights."""
    everything = Flights(servers, flights, by_day)
    everything.load(flights, progress)
    return everything.loaded


class Follower:
    """Counts the records of a topic that an App's group has committed, without joining the group; markers count too."""

    def __init__(self, servers: str, group: str = GROUP, topic: str = FLIGHTS) -> None:
        # read_uncommitted: return the last committed offsets instead of waiting for an open transaction's.
        settings = {"bootstrap.servers": servers, "group.id": group, "isolation.level": "read_uncommitted"}
        self._consumer = Consumer(settings | QUIET)
        self._partitions = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        self._asked_at, self._answer = 0.0, 0

    def committed(self) -> int:
        """Return the count, at most a fifth of a second old."""
        if time.monotonic() - self._asked_at > 0.2:
            with contextlib.suppress(KafkaException):  # there is no coordinator yet: the old count stays
                found = self._consumer.committed(self._partitions, timeout=5.0)
                self._answer = max(self._answer, sum(max(0, one.offset) for one in found))
            self._asked_at = time.monotonic()
        return self._answer

    def close(self) -> None:
        self._consumer.close()
