"""Connects to a Kafka cluster for requests that no client library offers, with kafka-python's connection driven by
hand.

Owns the connection (TLS and SASL are kafka-python's), the lookup of leaders and coordinators, and the retry loop. It
must never decide the meaning of a broker's error code for a transaction, and never start a thread: kafka-python's loop
runs only while a call here waits, so that a process may be forked before the first call.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from kafka import errors as kafka_errors
from kafka.future import Future
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest

from eos.kafka.client.security import admin_configuration
from eos.kafka.client.settings import Settings

T = TypeVar("T")

_REQUEST_TIMEOUT_MS = 15_000
MOST_IN_FLIGHT = 100
"""The maximum number of requests in flight on one connection; at this limit it accepts no further one."""
BACKOFF_S = 0.02
_BACKOFF_MAX_S = 0.5
_METADATA_MAX_VERSION = 9  # by topic name, without topic ids
_FIND_COORDINATOR_MAX_VERSION = 3  # one key per request


class Unreachable(Exception):
    """Reports that no answer came within the deadline; `args[0]` is a sentence."""


class Broken(Exception):
    """Reports that the connection broke or did not exist; the request may or may not have been carried out."""


class Partition(NamedTuple):
    """Holds one partition as Metadata describes it; `leader` -1: it has no leader."""

    leader: int
    replicas: int
    in_sync: int


class Wire:
    """Connects to a cluster. `connection`: the settings needed to connect, by Kafka's names (Settings.connection).
    These settings can be sent to executors, unlike kafka-python's TLS context. `request_timeout_ms`: the time limit of
    one request.
    """

    def __init__(
        self,
        connection: Mapping[str, Any],
        timeout_s: float = 30.0,
        request_timeout_ms: int = _REQUEST_TIMEOUT_MS,
    ) -> None:
        config = admin_configuration(Settings(dict(connection)), request_timeout_ms)
        # The sink has at most five requests per partition in flight, and task.py bounds those of many partitions.
        # Metadata requests must not wait for them.
        config["max_in_flight_requests_per_connection"] = MOST_IN_FLIGHT
        self._selector = NetworkSelector(**config)
        self._manager = KafkaConnectionManager(self._selector, receive_message_max_bytes=100_000_000, **config)
        try:
            self._manager.bootstrap(timeout_s * 1000)
        except kafka_errors.KafkaTimeoutError as error:
            refused = next(iter(self._manager._auth_failures.values()), None)
            self.close()
            if refused is not None:
                raise refused from error
            servers = ",".join(config["bootstrap_servers"])
            raise Unreachable(f"{servers} cannot be reached within {timeout_s:.0f} s") from error
        self._leaders: dict[tuple[str, int], int] = {}
        self._coordinators: dict[str, int] = {}

    def close(self) -> None:
        self._manager.close()
        self._selector.close()

    # Requests

    def ask(self, request: Any, node: int) -> Any:
        """Return the answer of `node`. Raise Broken if none came; AuthenticationError and the like pass unchanged."""
        with _translate_errors():
            return self._selector.run(self._manager.send, request, node)

    def ask_any(self, request: Any) -> Any:
        with _translate_errors():
            return self._selector.run(self._manager.send, request)

    def start(self, request: Any, node: int) -> Any:
        """Send without waiting, and return kafka-python's Future, which `wait` drives; it may have failed already."""
        if node < 0:
            return Future().failure(kafka_errors.LeaderNotAvailableError("there is no leader"))
        try:
            return self._manager.send(request, node)
        except (kafka_errors.KafkaError, OSError) as error:
            return Future().failure(error)

    def wait(self, future: Any, timeout_s: float) -> None:
        """Wait until the future is done, at most `timeout_s` seconds."""
        if not future.is_done:
            self._selector.poll(timeout_ms=timeout_s * 1000, future=future)

    def is_paused(self, node: int) -> bool:
        """Return whether kafka-python would refuse a request to this node now, because earlier ones are unwritten."""
        connection = self._manager._conns.get(node)
        return connection is not None and bool(connection.paused)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Let the loop read and write, and wait at most `timeout_s` seconds for something to be ready."""
        self._selector.poll(timeout_ms=timeout_s * 1000)

    def sleep(self, seconds: float) -> None:
        """Sleep while the loop continues to read and write."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._selector.poll(timeout_ms=left * 1000)

    # Leaders and coordinators

    def any_node(self) -> int:
        """Return the id of any broker."""
        return int(next(iter(self._manager.cluster.brokers())).node_id)

    def partitions(self, topics: Iterable[str]) -> dict[str, dict[int, Partition]]:
        """Return the partitions of each topic, without topics that do not exist or may not be seen."""
        wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]
        request = MetadataRequest(
            topics=wanted,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
            max_version=_METADATA_MAX_VERSION,
        )
        answer = self.ask_any(request)
        self._manager.cluster.update_metadata(answer)
        found: dict[str, dict[int, Partition]] = {}
        for topic in answer.topics:
            if topic.error_code:
                error = kafka_errors.for_code(topic.error_code)
                if error is kafka_errors.TopicAuthorizationFailedError:
                    raise error(topic.name)
                continue
            found[topic.name] = {
                p.partition_index: Partition(p.leader_id, len(p.replica_nodes), len(p.isr_nodes))
                for p in topic.partitions
            }
            for index, partition in found[topic.name].items():
                self._leaders[topic.name, index] = partition.leader
        return found

    def leader(self, topic: str, partition: int) -> int:
        """Return the leader's node id, from the cache if possible; -1 if there is none or no broker answers."""
        if (topic, partition) not in self._leaders:
            self.refresh_leader(topic, partition)
        return self._leaders.get((topic, partition), -1)

    def refresh_leader(self, topic: str, partition: int) -> None:
        """Look up the leader again; without an answer the leader stays unknown."""
        self._leaders.pop((topic, partition), None)
        with contextlib.suppress(Broken):
            self.partitions([topic])

    def coordinator(self, transactional_id: str) -> int:
        """Return the node of the transaction coordinator. Raise Broken while there is none."""
        if transactional_id in self._coordinators:
            return self._coordinators[transactional_id]
        request = FindCoordinatorRequest(
            key=transactional_id,
            key_type=CoordinatorType.TRANSACTION.value,
            max_version=_FIND_COORDINATOR_MAX_VERSION,
        )
        answer = self.ask_any(request)
        if answer.error_code:
            error = kafka_errors.for_code(answer.error_code)
            if error.retriable:
                raise Broken(f"no coordinator: {error.__name__}")
            raise error(transactional_id)
        node = int(
            self._manager.cluster.add_coordinator(
                answer, CoordinatorType.TRANSACTION, transactional_id, synthesize_node_id=False
            )
        )
        self._coordinators[transactional_id] = node
        return node

    def forget_coordinator(self, transactional_id: str) -> None:
        self._coordinators.pop(transactional_id, None)

    # Retries

    def retry_until_answered(self, what: str, attempt: Callable[[], T | None], timeout_s: float) -> T:
        """Call `attempt` until it returns an answer, and return that answer.

        If `attempt` returns None or raises Broken, it is called again until the deadline. Raises Unreachable with
        `what` and the last reason.
        """
        deadline = time.monotonic() + timeout_s
        backoff, reason = BACKOFF_S, "no answer"
        while True:
            try:
                if (answer := attempt()) is not None:
                    return answer
                reason = "the broker asked to try again"
            except Broken as error:
                reason = str(error)
            if time.monotonic() + backoff > deadline:
                raise Unreachable(f"{what}: not within {timeout_s:.0f} s ({reason})")
            self.sleep(backoff)
            backoff = min(backoff * 1.5, _BACKOFF_MAX_S)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (
        kafka_errors.KafkaConnectionError,
        kafka_errors.NodeNotReadyError,
        kafka_errors.RequestTimedOutError,
        kafka_errors.KafkaTimeoutError,
        kafka_errors.UnknownBrokerIdError,
        kafka_errors.Cancelled,
        OSError,
    ) as error:
        raise Broken(f"{type(error).__name__}: {error}") from error


_wires: dict[tuple[int, str], Wire] = {}


def shared(connection: Mapping[str, Any]) -> Wire:
    """Return this process's connection for a configuration; a Python worker of Spark runs many tasks in sequence."""
    key = (os.getpid(), repr(sorted(connection.items())))
    if key not in _wires:
        _wires[key] = Wire(connection)
    return _wires[key]


def discard(connection: Mapping[str, Any]) -> None:
    """Close the shared connection, whose knowledge of the cluster may be wrong; the next `shared` connects again."""
    wire = _wires.pop((os.getpid(), repr(sorted(connection.items()))), None)
    if wire is not None:
        wire.close()
