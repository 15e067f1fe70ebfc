"""Provide clients for tests of protection, and brokers with a fault on one side of a shim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Producer, TopicPartition
from kafka import KafkaProducer
from kafka import TopicPartition as PythonPartition
from kafka.structs import OffsetAndMetadata

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from tests.shim.shims import RunningShim, eventually, running
from tests.support.proxy import HoldingProxy
from tests.support.raw import Background, metadata_of
from tests.support.reading import TooSlow, settled_values


def producer_of(servers: str, name: str, **more: Any) -> Producer:
    settings = {"bootstrap.servers": servers, "transactional.id": name, "linger.ms": 0, "log_level": 0}
    # The first Produce after an abort is challenged, and the second one comes after this backoff.
    producer = Producer(settings | {"retry.backoff.ms": 20} | more)
    producer.init_transactions(30)
    return producer


def flush(producer: Producer) -> None:
    """Wait for all responses, good or bad. After a restart of the shim, the client waits before it reconnects."""
    if left := producer.flush(30):
        raise TooSlow(f"{left} records had no response within 30 s")


def send(producer: Producer, topic: str, *values: str, partition: int = 0) -> list[Any]:
    """Produce records, wait for their acknowledgements, and return the delivery errors."""
    errors: list[Any] = []
    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=lambda error, _: errors.append(error))
    flush(producer)
    assert len(errors) == len(values)
    return [error for error in errors if error is not None]


def texts(servers: str, topic: str) -> list[str]:
    values = settled_values(servers, topic)
    return [(value or b"").decode() for partition in sorted(values) for value in values[partition]]


class Faulty:
    """Run a shim with a HoldingProxy on one side; clients connect to `servers`."""

    def __init__(self, kafka: LocalKafka, proxy: HoldingProxy, shim: RunningShim, servers: str, name: str) -> None:
        self.kafka, self.proxy, self.shim, self.servers, self.name = kafka, proxy, shim, servers, name


@contextmanager
def faulty(kafka: LocalKafka, side: str, option: str, name: str) -> Iterator[Faulty]:
    """Start a Faulty; `side`: "client" puts the proxy between client and shim, "broker" between shim and broker."""
    if side == "broker":
        with (
            HoldingProxy.before(kafka) as proxy,
            running(kafka.proxied_servers, option, "--log-level", "debug") as shim,
        ):
            yield Faulty(kafka, proxy, shim, shim.bootstrap_servers, name)
        return
    # Addresses contain the proxy's port, so the proxy gets the shim's first port, and the shim another one.
    advertised, own = free_ports(2)
    options = (option, "--log-level", "debug", "--listen", f"127.0.0.1:{own}", "--advertise", f"127.0.0.1:{advertised}")
    with running(kafka.bootstrap_servers, *options) as shim, HoldingProxy(advertised, ("127.0.0.1", own)) as proxy:
        yield Faulty(kafka, proxy, shim, f"127.0.0.1:{advertised}", name)


def python_producer(servers: str, name: str, **more: Any) -> Any:
    settings = {"linger_ms": 20, "compression_type": "gzip", "retry_backoff_ms": 20} | more
    producer = KafkaProducer(bootstrap_servers=servers, transactional_id=name, **settings)
    producer.init_transactions()
    return producer


_HANGS_S = 45.0  # kafka-python times a request out after 30 s and sends it again.


class _Lines(logging.Handler):
    def __init__(self, lines: list[str], about: str = "") -> None:
        super().__init__()
        self._lines, self._about = lines, about

    def emit(self, record: logging.LogRecord) -> None:
        if self._about in record.getMessage():
            self._lines.append(record.getMessage())


class _Hanging:
    """Run calls of a client that may never return."""

    hung = False

    def _bounded(self, call: Callable[[], object], timeout_s: float) -> None:
        try:
            Background(call).result(timeout_s)
        except TooSlow:
            self.hung = True
            raise TimeoutError(f"the client's call did not return within {timeout_s:g} s") from None


class Confluent(_Hanging):
    """Wrap a transactional client; each library has the same methods, so that one test judges both."""

    # The error of a late request of an aborted transaction, whose identity ended with it.
    late_after_abort: Mapping[str, int] = {"EndTxn": 47, "Produce": 47}
    reuses_sequences = True  # whether sequences of records that an abort purged are used again

    def __init__(self, servers: str, name: str, backoff_ms: int = 20, debug: str = "") -> None:
        self.disconnects: list[str] = []
        self.lines: list[str] = []  # librdkafka's log, with `debug`
        more: dict[str, Any] = {"retry.backoff.ms": backoff_ms, "retry.backoff.max.ms": max(backoff_ms, 1_000)}
        more["metadata.recovery.strategy"] = (
            "none"  # With rebootstrap, the hang described below happens at every kill of the shim.
        )
        if debug:
            logger = logging.Logger(name)
            logger.addHandler(_Lines(self.lines))
            more |= {"debug": debug, "log_level": 7, "logger": logger}
        self.producer = producer_of(servers, name, error_cb=lambda error: self.disconnects.append(error.name()), **more)

    def wait_for_log(self, what: str, since: int = 0) -> None:
        eventually(lambda: (self.producer.poll(0.05), [line for line in self.lines[since:] if what in line])[1])

    def begin(self) -> None:
        self.producer.begin_transaction()

    def send(self, topic: str, value: str, partition: int = 0) -> None:
        """Send a record and wait until it is acknowledged."""
        assert not send(self.producer, topic, value, partition=partition)

    def offer(self, topic: str, value: str) -> None:
        self.producer.produce(topic, value, partition=0)

    def flush(self) -> None:
        flush(self.producer)

    def notices_the_cut(self) -> None:
        """Wait until the client notices the cut, because an earlier abort would first send the record again or wait
        for it.

        docs/explanation/protect.md describes it under limits.
        """
        eventually(lambda: (self.producer.poll(0.05), self.disconnects)[1])

    def send_offset(self, group: str, source: str, offset: int) -> None:
        metadata = metadata_of(group)
        positions = [TopicPartition(source, 0, offset)]
        # librdkafka waits past its timeout for a coordinator that was down (librdkafka issues 5456 and 5511), and a
        # producer inside a call cannot be closed.
        self._bounded(lambda: self.producer.send_offsets_to_transaction(positions, metadata, 10), 25)

    def end(self, committed: bool) -> None:
        (self.producer.commit_transaction if committed else self.producer.abort_transaction)(30)

    def close(self, timeout_s: float | None = None) -> None:
        if self.hung:
            return
        if timeout_s is None:
            self.producer.close()
        else:
            self.producer.purge()
            self.producer.close(timeout_s)  # type: ignore[call-arg]  # the stubs know no timeout


class Python(_Hanging):
    """Wrap kafka-python."""

    late_after_abort: Mapping[str, int] = {"EndTxn": 51, "Produce": 19}
    reuses_sequences = False

    def __init__(self, servers: str, name: str, backoff_ms: int = 20) -> None:
        self.producer = python_producer(servers, name, retry_backoff_ms=backoff_ms, linger_ms=0)
        self.offered: list[Any] = []
        self._lines: list[str] = []
        self._handler = _Lines(self._lines, name)
        logging.getLogger("kafka.producer.sender").addHandler(self._handler)

    def begin(self) -> None:
        self.producer.begin_transaction()

    def send(self, topic: str, value: str, partition: int = 0) -> None:
        self.producer.send(topic, value.encode(), partition=partition).get(30)

    def offer(self, topic: str, value: str) -> None:
        self.offered.append(self.producer.send(topic, value.encode(), partition=0))

    def flush(self) -> None:
        self.offered[-1].get(30)

    def notices_the_cut(self) -> None:
        """Wait until the log reports that the record is queued again."""
        eventually(lambda: any("retrying" in line for line in self._lines))

    def send_offset(self, group: str, source: str, offset: int) -> None:
        offsets = {PythonPartition(source, 0): OffsetAndMetadata(offset, "", -1)}
        # kafka-python waits for ever for a group coordinator that died during the call (3.0.12, with and without a
        # shim).
        self._bounded(lambda: self.producer.send_offsets_to_transaction(offsets, group), _HANGS_S)

    def end(self, committed: bool) -> None:
        self._bounded(self.producer.commit_transaction if committed else self.producer.abort_transaction, _HANGS_S)

    def close(self, timeout_s: float | None = None) -> None:
        logging.getLogger("kafka.producer.sender").removeHandler(self._handler)
        self.producer.close(timeout=0 if self.hung else timeout_s)


Client = Confluent | Python
CLIENTS: dict[str, type[Confluent] | type[Python]] = {"confluent-kafka": Confluent, "kafka-python": Python}
