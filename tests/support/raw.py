"""Wrap a bare confluent-kafka transactional producer with its delivery errors and statistics for fault tests.

It has none of the product's rules, because it shows what happens without them. It must never import `eos`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from tests.support.reading import TooSlow

STATISTICS_MS = 200


class RawProducer:
    """Wrap a `Producer` after `init_transactions`; nothing is retried and no error is hidden.

    `statistics` holds every (time, JSON) that arrived: they arrive in `poll`, `flush` and `settle`. `durations_s` holds
    the duration of each transactional call, by its name.
    """

    def __init__(self, servers: str, transactional_id: str, **settings: Any) -> None:
        self.transactional_id = transactional_id
        self.statistics: list[tuple[float, dict[str, Any]]] = []
        self.delivery_errors: list[KafkaError] = []
        self.durations_s: dict[str, list[float]] = {}
        defaults = {
            "bootstrap.servers": servers,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": 30_000,
            "message.timeout.ms": 20_000,
            "linger.ms": 0,
            "statistics.interval.ms": STATISTICS_MS,
            "stats_cb": lambda text: self.statistics.append((time.monotonic(), json.loads(text))),
            # Log nothing, because log lines about our own cuts would hide a failure.
            "log_level": 0,
        }
        named = {name.replace("_", "."): value for name, value in settings.items()}
        self.producer = Producer(defaults | named)
        self.call("init_transactions", 30)

    def call(self, name: str, *arguments: Any) -> None:
        start = time.monotonic()
        try:
            getattr(self.producer, name)(*arguments)
        finally:
            self.durations_s.setdefault(name, []).append(time.monotonic() - start)

    def begin(self) -> None:
        self.call("begin_transaction")

    def commit(self, timeout: float = 30) -> None:
        self.call("commit_transaction", timeout)

    def abort(self, timeout: float = 30) -> None:
        self.call("abort_transaction", timeout)

    def send(self, topic: str, value: str, partition: int = 0) -> None:
        """Produce and wait until the broker acknowledged it."""
        self.producer.produce(topic, value.encode(), partition=partition, on_delivery=self._delivered)
        left = self.producer.flush(30)
        assert left == 0, f"{left} records not delivered in 30 s"
        assert not self.delivery_errors, f"delivery failed: {self.delivery_errors}"

    def commit_one(self, topic: str, value: str) -> None:
        """Commit a transaction of one record."""
        self.begin()
        self.send(topic, value)
        self.commit()

    def send_offset(self, group: str, topic: str, offset: int, partition: int = 0) -> None:
        self.call("send_offsets_to_transaction", [TopicPartition(topic, partition, offset)], metadata_of(group), 30)

    def settle(self, count: int = 1) -> dict[str, Any]:
        """Poll until `count` more statistics have arrived, and return the last ones."""
        wanted, deadline = len(self.statistics) + count, time.monotonic() + 10
        while len(self.statistics) < wanted:
            if time.monotonic() >= deadline:
                raise TooSlow("no statistics within 10 s")
            self.producer.poll(0.05)
        return self.statistics[-1][1]

    def coordinator(self) -> dict[str, Any]:
        """Return the `TxnCoordinator` entry of new statistics, with the counts since the client was created."""
        brokers = self.settle(2)["brokers"]
        (entry,) = [entry for name, entry in brokers.items() if "TxnCoordinator" in name]
        return dict(entry)

    def _delivered(self, error: KafkaError | None, _message: object) -> None:
        if error is not None:
            self.delivery_errors.append(error)


def metadata_of(group: str) -> Any:
    """Return the metadata of a group without members, whose offset commits the broker does not check."""
    with closing(Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": group, "log_level": 0})) as consumer:
        return consumer.consumer_group_metadata()


@contextmanager
def raw_producer(servers: str, transactional_id: str, **settings: Any) -> Iterator[RawProducer]:
    """Create a RawProducer, and close it at the end.

    A close aborts the open transaction and then waits for every record without a limit. A failing test during a network
    cut would hang there, so the records are purged first.
    """
    raw = RawProducer(servers, transactional_id, **settings)
    try:
        yield raw
    finally:
        raw.producer.purge()
        raw.producer.close()


class Background:
    """Run one blocking call in its own thread, and return its value or raise its exception."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._ended: Future[Any] = Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._ended.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._ended.set_exception(error)

    @property
    def running(self) -> bool:
        return not self._ended.done()

    def result(self, timeout_s: float = 60.0) -> Any:
        if not wait([self._ended], timeout_s).done:
            raise TooSlow(f"the call did not return within {timeout_s:g} s")
        return self._ended.result()
