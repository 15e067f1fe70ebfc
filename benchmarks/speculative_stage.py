"""A prototype of a speculative stage, and the same stage without speculation, both by hand over confluent-kafka.

A speculative stage reads records of open transactions and sends its outputs at once. It holds its own commit until a
read_committed consumer of the same partitions has passed all that it read, and aborts if one of the records was never
delivered there. Without speculation the stage reads as read_committed, and commits after the interval or when its
input is dry, as a worker does. Neither has recovery or rebalances: each reads all partitions of its source from
their beginning.

Run as a process: `python -m benchmarks.speculative_stage BOOTSTRAP SOURCE TARGET GROUP INTERVAL_MS ISOLATION`;
read_uncommitted speculates. SIGTERM ends it; it then prints what its transactions took.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from benchmarks.worker_speed import PARTITIONS

MOST, POLL_S = 500, 0.001
DRY_S = 0.005  # the time without a record after which a transaction ends early; the worker's
STEPS = ("open", "offsets", "flush", "commit")
Place = tuple[int, int]  # partition and offset of a record


def consumer_of(bootstrap: str, group: str, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 50,  # a fetch that finds nothing reports that aborted records at the end were passed
        }
    )


def assign(consumer: Consumer, topic: str, offsets: dict[int, int]) -> None:
    """Read every partition of the topic, from its beginning if it has no offset here."""
    consumer.assign([TopicPartition(topic, partition, offsets.get(partition, 0)) for partition in range(PARTITIONS)])


class Verifier:
    """A read_committed consumer that says which records were committed."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._passed: dict[int, int] = defaultdict(int)
        self._delivered: dict[int, set[int]] = defaultdict(set)

    def poll(self) -> None:
        for message in self._consumer.consume(MOST, POLL_S):
            partition, offset = message.partition(), message.offset()
            if message.error() is None:
                self._delivered[partition].add(offset)
                self._passed[partition] = offset + 1
            elif message.error().code() == KafkaError._PARTITION_EOF:
                self._passed[partition] = offset

    def verdict(self, place: Place) -> bool | None:
        """Return True if the record was committed, False if it was aborted, and None if that is not known yet."""
        partition, offset = place
        return None if offset >= self._passed[partition] else offset in self._delivered[partition]

    def forget(self, positions: dict[int, int]) -> None:
        """Forget the offsets below these positions, which are not read again."""
        for partition, position in positions.items():
            self._delivered[partition] = {offset for offset in self._delivered[partition] if offset >= position}


class Stage:
    """A stage that reads committed records. It commits after the interval, or when its input is dry."""

    def __init__(self, reader: Consumer, producer: Producer, topics: tuple[str, str]) -> None:
        self._reader, self._producer = reader, producer
        self._source, self._target = topics
        self._began = self._last_read = 0.0
        self._positions: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        self.outcomes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def turn(self, interval_s: float) -> None:
        self._read()
        if self._began and (self._is_over(interval_s) or time.monotonic() - self._last_read >= DRY_S):
            self._send_offsets()
            self._commit()

    def _is_over(self, interval_s: float) -> bool:
        return bool(self._began) and time.monotonic() - self._began >= interval_s

    def _read(self) -> None:
        for message in self._reader.consume(MOST, POLL_S):
            if message.error() is None and self._accept((message.partition(), message.offset())):
                self._send(message)
        self._producer.poll(0)

    def _accept(self, place: Place) -> bool:
        return True

    def _send(self, message: Message) -> None:
        self._last_read = time.monotonic()
        if not self._began:
            self._producer.begin_transaction()
            self._began = self._last_read
        self._producer.produce(self._target, message.value().upper(), message.key())
        self._positions[message.partition()] = message.offset() + 1

    def _send_offsets(self) -> None:
        with self._timed("offsets"):
            positions = [TopicPartition(self._source, *place) for place in self._positions.items()]
            self._producer.send_offsets_to_transaction(positions, self._reader.consumer_group_metadata())

    def _commit(self) -> None:
        with self._timed("flush"):
            self._producer.flush()
        with self._timed("commit"):
            self._producer.commit_transaction()
        self._committed |= self._positions
        self._end("committed")

    def _end(self, outcome: str) -> None:
        self.seconds["open"] += time.monotonic() - self._began
        self.outcomes[outcome] += 1
        self._began, self._positions = 0.0, {}

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[step] += time.monotonic() - began


class SpeculativeStage(Stage):
    """A stage that reads uncommitted records, and commits as soon as all of them are committed."""

    def __init__(self, verifier: Verifier, *stage: Any) -> None:
        super().__init__(*stage)
        self._verifier = verifier
        self._unverified: list[Place] = []
        self._has_sent_offsets = False

    def turn(self, interval_s: float) -> None:
        is_over = self._is_over(interval_s)
        if not is_over:
            self._read()
        self._verifier.poll()
        verdicts = {place: self._verifier.verdict(place) for place in self._unverified}
        self._unverified = [place for place, verdict in verdicts.items() if verdict is None]
        is_verified = bool(self._began) and not self._unverified
        if False in verdicts.values():
            self._abort()
            return
        if not self._has_sent_offsets and (is_over or is_verified):
            self._send_offsets()
            self._has_sent_offsets = True
        if is_verified:
            self._verifier.forget(self._positions)
            self._commit()

    def _accept(self, place: Place) -> bool:
        return self._verifier.verdict(place) is not False

    def _send(self, message: Message) -> None:
        super()._send(message)
        self._unverified.append((message.partition(), message.offset()))

    def _abort(self) -> None:
        """Abort, and read again from the committed offsets; `_accept` leaves out the aborted records then."""
        self._producer.flush()  # an abort that drops records of its queue leaves a gap in the sequence numbers
        self._producer.abort_transaction()
        assign(self._reader, self._source, self._committed)
        self._end("aborted")

    def _end(self, outcome: str) -> None:
        super()._end(outcome)
        self._unverified, self._has_sent_offsets = [], False


def stage_of(bootstrap: str, topics: tuple[str, str], group: str, isolation: str) -> Stage:
    def reading(isolation: str) -> Consumer:
        consumer = consumer_of(bootstrap, group, isolation)
        assign(consumer, topics[0], {})
        return consumer

    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": group, "linger.ms": 1})
    producer.init_transactions()
    if isolation == "read_committed":
        return Stage(reading(isolation), producer, topics)
    return SpeculativeStage(Verifier(reading("read_committed")), reading(isolation), producer, topics)


def main(bootstrap: str, source: str, target: str, group: str, interval_ms: str, isolation: str) -> None:
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    stage = stage_of(bootstrap, (source, target), group, isolation)
    while not stopping:
        stage.turn(float(interval_ms) / 1000)
    ended = stage.outcomes.total() or 1
    steps = ", ".join(f"{step} {1000 * stage.seconds[step] / ended:.1f}" for step in STEPS)
    print(f"    {isolation}: {dict(stage.outcomes)}, ms of a transaction: {steps}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
