"""Reads the targets of a sink: the topics' partitions, and the settings of the cluster that a batch must respect.

Owns the checks before the first record, each explained in one sentence, and the creation of the marker's topic. It
must never change an existing topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka import errors as kafka_errors
from kafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from eos.codes import error_name
from eos.errors import ConfigurationError, NotAuthorised, Unavailable
from spark_connector import marker
from spark_connector.answers import Answer, judge
from spark_connector.wire import Partition, Unreachable, Wire

_TOPIC, _BROKER = 2, 4  # ConfigResource.Type
_DESCRIBE_CONFIGS_MAX_VERSION = 4
_CREATE_TOPICS_MAX_VERSION = 6
_TOPIC_ALREADY_EXISTS = 36
_TRANSACTION_TIMEOUT_DEFAULT_MS = 900_000  # Kafka's transaction.max.timeout.ms
_ISR_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Target:
    """Describes one partition that a batch may write; its index in the list of targets is its number."""

    topic: str
    partition: int
    max_bytes: int  # max.message.bytes


@dataclass(frozen=True)
class TopicLimits:
    """Holds the settings of a topic that a batch must respect."""

    max_bytes: int
    min_in_sync: int


class Targets:
    """Reads the topics of one sink: topic settings once, partitions and their replicas for each batch."""

    def __init__(self, wire: Wire, topics: Sequence[str], timeout_s: float) -> None:
        self._wire, self._topics, self._timeout_s = wire, tuple(topics), timeout_s
        self._limits: dict[str, TopicLimits] = {}

    def read(self) -> list[Target]:
        """Return all partitions of all topics, in the topics' order. Raise Unavailable, NotAuthorised."""
        partitions = self._wire.retry_until_answered(
            "Metadata", lambda: self._wire.partitions(self._topics), self._timeout_s
        )
        missing = [topic for topic in self._topics if topic not in partitions]
        if missing:
            raise Unavailable(f"topic {', '.join(missing)} does not exist: create it before the query starts")
        for topic in self._topics:
            if topic not in self._limits:
                self._limits[topic] = self._read_limits(topic)
            self._check_in_sync(topic, partitions[topic])
        return [
            Target(topic, index, self._limits[topic].max_bytes)
            for topic in self._topics
            for index in sorted(partitions[topic])
        ]

    def _read_limits(self, topic: str) -> TopicLimits:
        found = describe(self._wire, _TOPIC, topic, ["max.message.bytes", "min.insync.replicas"], self._timeout_s)
        return TopicLimits(int(found["max.message.bytes"]), int(found["min.insync.replicas"]))

    def _check_in_sync(self, topic: str, partitions: Mapping[int, Partition]) -> None:
        wanted = self._limits[topic].min_in_sync
        for index, partition in sorted(partitions.items()):
            if partition.replicas < wanted:
                raise ConfigurationError(
                    f"{topic} has {partition.replicas} replicas and min.insync.replicas={wanted}: no record can be "
                    "acknowledged by enough of them; add replicas or lower the setting"
                )
            if partition.in_sync < wanted:
                self._wait_in_sync(topic, index, wanted)

    def _wait_in_sync(self, topic: str, index: int, wanted: int) -> None:
        def has_enough_replicas() -> bool | None:
            found = self._wire.partitions([topic]).get(topic, {}).get(index)
            return True if found is not None and found.in_sync >= wanted else None

        try:
            self._wire.retry_until_answered("replicas", has_enough_replicas, _ISR_PATIENCE_S)
        except Unreachable as error:
            raise Unavailable(
                f"{topic}-{index} has had fewer than min.insync.replicas={wanted} replicas in sync for "
                f"{_ISR_PATIENCE_S:.0f} s: start the brokers that are down"
            ) from error


def describe(wire: Wire, kind: int, resource: str, keys: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Return settings of a topic or a broker. Raise NotAuthorised."""
    wanted: Any = DescribeConfigsRequest.DescribeConfigsResource

    def attempt() -> Any:
        request = DescribeConfigsRequest(
            resources=[wanted(resource_type=kind, resource_name=resource, configuration_keys=list(keys))],
            include_synonyms=False,
            include_documentation=False,
            max_version=_DESCRIBE_CONFIGS_MAX_VERSION,
        )
        answer = wire.ask(request, int(resource)) if kind == _BROKER else wire.ask_any(request)
        (result,) = answer.results
        return None if judge(result.error_code) is Answer.RETRY else result

    result = wire.retry_until_answered(f"settings of {resource}", attempt, timeout_s)
    if result.error_code:
        raise NotAuthorised(
            f"DescribeConfigs of {resource} was answered with {error_name(result.error_code)}: the principal needs the "
            "permission DESCRIBE_CONFIGS"
        )
    return {config.name: config.value for config in result.configs}


def longest_transaction_ms(wire: Wire, timeout_s: float) -> int:
    """Return the broker's transaction.max.timeout.ms, or Kafka's default if the principal may not read it."""
    try:
        found = describe(wire, _BROKER, str(wire.any_node()), ["transaction.max.timeout.ms"], timeout_s)
    except NotAuthorised:
        return _TRANSACTION_TIMEOUT_DEFAULT_MS
    return int(found.get("transaction.max.timeout.ms", _TRANSACTION_TIMEOUT_DEFAULT_MS))


def ensure_marker_topic(wire: Wire, topics: Sequence[str], timeout_s: float) -> int:
    """Return the number of partitions of `__eos_sinks`; create it if it is missing, with the replicas of the target
    topics."""
    found = wire.retry_until_answered("Metadata", lambda: wire.partitions([marker.TOPIC, *topics]), timeout_s)
    if marker.TOPIC not in found:
        replicas = max(p.replicas for topic in topics for p in found[topic].values())
        _create(wire, replicas, timeout_s)
        found = wire.retry_until_answered(f"{marker.TOPIC} has leaders", lambda: _with_leaders(wire), timeout_s)
    return len(found[marker.TOPIC])


def _with_leaders(wire: Wire) -> dict[str, dict[int, Partition]] | None:
    found = wire.partitions([marker.TOPIC])
    partitions = found.get(marker.TOPIC, {}).values()
    return found if partitions and all(p.leader >= 0 for p in partitions) else None


def _create(wire: Wire, replicas: int, timeout_s: float) -> None:
    # Two of three replicas must have a record, so that one broker may be down and a marker is never on one broker
    # alone.
    configs = marker.CONFIG | {"min.insync.replicas": str(min(2, replicas))}
    topic = CreateTopicsRequest.CreatableTopic

    def attempt() -> Any:
        answer = wire.ask_any(
            CreateTopicsRequest(
                topics=[
                    topic(
                        name=marker.TOPIC,
                        num_partitions=marker.PARTITIONS,
                        replication_factor=replicas,
                        assignments=[],
                        configs=[topic.CreatableTopicConfig(name=key, value=value) for key, value in configs.items()],
                    )
                ],
                timeout_ms=10_000,
                validate_only=False,
                max_version=_CREATE_TOPICS_MAX_VERSION,
            )
        )
        (result,) = answer.topics
        return None if judge(result.error_code) is Answer.RETRY else result

    result = wire.retry_until_answered(f"creating {marker.TOPIC}", attempt, timeout_s)
    if result.error_code not in (0, _TOPIC_ALREADY_EXISTS):
        kind = NotAuthorised if judge(result.error_code) is Answer.UNAUTHORISED else Unavailable
        raise kind(
            f"{marker.TOPIC} could not be created ({error_name(result.error_code)}: {result.error_message}): create it "
            f"yourself with cleanup.policy=compact"
        )


AUTHORIZATION_ERRORS = (
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
    kafka_errors.TransactionalIdAuthorizationFailedError,
    kafka_errors.SaslAuthenticationFailedError,
)
