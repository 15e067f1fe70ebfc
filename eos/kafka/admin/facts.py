"""Gathers the facts about a cluster that preflight checks, within a deadline.

Uses the same kind of client as the worker, so that it sees the cluster exactly as the worker sees it. It judges nothing
(eos/kafka/admin/preflight.py does). It changes nothing, except by the functions that create, delete or extend topics. A
fact that we are not authorised to see is None, not an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import ConfigResource, ConfigSource, NewPartitions, NewTopic

from eos import log
from eos.errors import (
    Action,
    CallFailed,
    ConfigurationError,
    EosError,
    NotAuthorised,
    Unavailable,
    describe_error,
    no_broker,
    stop_error,
)
from eos.kafka.client.cluster import OFFSETS_LOG, TRANSACTION_LOG, ClusterAdmin
from eos.kafka.client.failures import classify
from eos.kafka.client.security import login_refused, require_reachable, tls_failed, unreachable
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

T = TypeVar("T")
Config = Mapping[str, str]
NEW_TOPIC_S = 2.0  # brokers learn of a new topic at different moments, and any of them may answer
_REQUEST_TIMEOUT_S = 5.0
OFFSETS_RETENTION, _DEFAULT_RETENTION_MINUTES = "offsets.retention.minutes", 10_080
_RESULT_TIMEOUT_S = _REQUEST_TIMEOUT_S + 5.0
_DELETE_TIMEOUT_S = 30.0
_KEEP_FOREVER = {"retention.ms": "-1", "retention.bytes": "-1"}
_UNKNOWN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
_DENIED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)


@dataclass(frozen=True)
class Topic:
    """Describes a topic; `exists` is None if we are not authorised to see it.

    `operations`: Kafka's names of what we may do, None if the broker does not say. `leaderless`: partitions without a
    leader. `replicas` and `in_sync`: the smallest number of any partition."""

    exists: bool | None
    partitions: int = 0
    replicas: int = 0
    leaderless: tuple[int, ...] = ()
    in_sync: int = 0
    operations: frozenset[str] | None = None
    config: Config | None = None


@dataclass(frozen=True)
class Facts:
    """Holds the facts about a cluster at one moment; None for those that we are not authorised to see."""

    servers: str
    brokers: int
    controller_version: int | None  # finalized transaction.version
    apis: frozenset[str]  # Kafka's names of the requests the brokers understand
    broker_config: Config | None
    topics: Mapping[str, Topic]
    group_operations: frozenset[str] | None = None
    group_denied: bool = False
    denied_ids: frozenset[str] = field(default_factory=frozenset)


def query_facts(
    settings: Settings,
    topics: Collection[str],
    group: str | None,
    transactional_ids: Iterable[str],
    timeout_s: float,
    world: World = REAL,
) -> Facts:
    """Query the facts about these topics, this group and these ids.

    Raise Unavailable if no broker answers within `timeout_s`, and NotAuthorised as soon as one refuses the login."""
    client = connect(settings, timeout_s, world)
    internal = (TRANSACTION_LOG, OFFSETS_LOG)
    seen = describe_topics(client, dict.fromkeys([*topics, *internal]))
    brokers = cluster_metadata(client, settings.bootstrap_servers, _REQUEST_TIMEOUT_S).brokers
    asked = describe_configs(client, [name for name, topic in seen.items() if topic.exists], min(brokers), world)
    found = {name: replace(topic, config=asked.get(("topic", name))) for name, topic in seen.items()}
    with world.admin(settings, timeout_ms=round(_REQUEST_TIMEOUT_S * 1000)) as admin:
        apis = admin.apis()
        version = admin.transaction_version()
        operations, denied = _group_rights(admin, group) if group else (None, False)
        denied_ids = frozenset(name for name in transactional_ids if _is_denied(admin, name))
    return Facts(
        settings.bootstrap_servers,
        len(brokers),
        version,
        apis,
        asked.get(("broker", str(min(brokers)))),
        found,
        operations,
        denied,
        denied_ids,
    )


def check_clients(settings: Settings, world: World = REAL) -> None:
    """Raise ConfigurationError for values that librdkafka refuses, by creating each client once without a
    connection."""
    quiet = {"logger": log.client_logger}
    clients: dict[str, Callable[[], object]] = {
        "consumer": lambda: world.consumer({"group.id": "-"} | settings.consumer() | quiet).close(),
        "producer": lambda: world.producer(settings.producer("-") | quiet).close(),
    }
    for name, make in clients.items():
        try:
            make()
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the {name}'s settings were refused: {describe_error(error)}") from error


def connect(settings: Settings, timeout_s: float, world: World = REAL) -> Any:
    """Return an AdminClient that has reached a broker; raise Unavailable after `timeout_s` seconds.

    Raise at once, not at the deadline, for a refused login or handshake, or unreachable advertised addresses."""
    errors: list[KafkaError] = []
    values = settings.admin() | {"error_cb": errors.append, "logger": log.client_logger}
    client = world.client(values)
    deadline = world.now() + timeout_s
    logged = world.now()
    while True:
        left = deadline - world.now()
        try:
            require_reachable(settings.bootstrap_servers, client.list_topics(timeout=max(0.1, min(1.0, left))))
            return client
        except KafkaException as raised:
            client.poll(0.1)  # serves error_cb, whose errors are more specific
            error = _most_specific(errors) or raised.args[0]
        if error.code() == KafkaError._AUTHENTICATION:
            raise login_refused(settings, error.str())
        if error.code() == KafkaError._SSL:
            raise tls_failed(settings, error.str())
        if left <= 0:
            raise unreachable(settings, describe_error(error))
        if world.now() - logged > _REQUEST_TIMEOUT_S:
            logged = world.now()
            log.info("waiting for the cluster", servers=settings.bootstrap_servers, error=error.str())


def cluster_metadata(client: Any, servers: str, timeout_s: float) -> Any:
    """Return the cluster's metadata. Raise Unavailable if the client, connected before, reaches no broker now."""
    try:
        return client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        raise Unavailable(f"{servers} can no longer be reached: {describe_error(error)}") from error


def check_topics(client: Any, servers: str, topics: Iterable[str], deadline: float, world: World = REAL) -> None:
    """Raise Unavailable unless the cluster is reachable and has every topic; a new topic gets a moment to appear.

    `client` is any client of confluent-kafka with `list_topics`. `deadline` is a World.now()."""
    patience = world.now() + NEW_TOPIC_S
    while (
        missing := _describe_missing_topic(client, servers, topics, max(1.0, deadline - world.now()))
    ) and world.now() < patience:
        world.sleep(0.1)
    if missing:
        raise Unavailable(missing)


def _describe_missing_topic(client: Any, servers: str, topics: Iterable[str], timeout_s: float) -> str:
    """Return a sentence about the first topic that the queried broker does not know; "" if it knows all."""
    try:
        found = client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        action = classify("consume", error.args[0])
        if action is Action.UNAUTHORISED:
            raise stop_error(CallFailed("consume", action, error)) from error
        sentence = f"{servers} cannot be reached: {describe_error(error)}"
        raise Unavailable(sentence, remedy=no_broker(servers)) from error
    require_reachable(servers, found)
    known = found.topics
    for topic in topics:
        if topic not in known or known[topic].error is not None:
            detail = f" ({known[topic].error.str()})" if topic in known and known[topic].error else ""
            return f"topic {topic} does not exist at {servers}{detail}"
    return ""


def find_leaderless(client: Any, topic: str, timeout_s: float) -> frozenset[int]:
    """Return the topic's partitions without a leader. Raise Unavailable.

    Any broker may answer, whereas `describe_topic` asks one particular broker, which may be down."""
    found = cluster_metadata(client, "the cluster", timeout_s).topics.get(topic)
    return frozenset() if found is None else frozenset(p.id for p in found.partitions.values() if p.leader < 0)


def _most_specific(errors: list[KafkaError]) -> KafkaError | None:
    """Return the most specific of the client's errors: `_ALL_BROKERS_DOWN` and timeouts only follow from others."""
    first = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._TRANSPORT, KafkaError._RESOLVE)
    ranked = sorted((e for e in errors if e.code() in first), key=lambda e: first.index(e.code()))
    return ranked[0] if ranked else None


def _result_of(future: Future[T]) -> T:
    try:
        failure = future.exception(_RESULT_TIMEOUT_S)
    except TimeoutError as error:  # the client's own timeout should have come first
        raise Unavailable(f"the cluster did not answer an admin request within {_RESULT_TIMEOUT_S:.0f} s") from error
    if failure is not None:
        # Raise a copy. The future's own error would get a traceback with the caller's frame, which has the future and
        # the client. That reference cycle keeps the client's threads and connections, because a worker rarely collects
        # garbage.
        raise copy.copy(failure)
    return future.result()


def describe_topic(client: Any, name: str) -> Topic:
    """Return a description of the topic, which says whether the topic exists. Raise Unavailable."""
    return describe_topics(client, [name])[name]


def describe_topics(client: Any, names: Iterable[str]) -> dict[str, Topic]:
    """Return descriptions of the topics, which say whether each exists. Raise Unavailable."""
    asked = client.describe_topics(
        TopicCollection(list(names)), include_authorized_operations=True, request_timeout=_REQUEST_TIMEOUT_S
    )
    return {name: _description(name, future) for name, future in asked.items()}


def _description(name: str, future: Future[Any]) -> Topic:
    try:
        found = _result_of(future)
    except KafkaException as error:
        if error.args[0].code() in _UNKNOWN:
            return Topic(exists=False)
        if error.args[0].code() in _DENIED:
            return Topic(exists=None)
        raise Unavailable(f"topic {name} cannot be described: {describe_error(error)}") from error
    return Topic(
        True,
        len(found.partitions),
        min((len(p.replicas) for p in found.partitions), default=0),
        tuple(p.id for p in found.partitions if p.leader is None or p.leader.id < 0),
        min((len(p.isr) for p in found.partitions), default=0),
        _operation_names(found.authorized_operations),
    )


def _operation_names(found: Any) -> frozenset[str] | None:
    return None if found is None else frozenset(operation.name for operation in found)


def describe_configs(
    client: Any, topics: Collection[str], broker: int | None = None, world: World = REAL
) -> dict[tuple[str, str], Config]:
    """Return the configs of existing topics and of one broker, keyed by ("topic" or "broker", name).

    Omits those that we are not authorised to read."""
    # A broker refuses the whole request if it names a topic twice.
    asked = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in dict.fromkeys(topics)]
    if broker is not None:
        asked.append(ConfigResource(ConfigResource.Type.BROKER, str(broker)))
    found: dict[tuple[str, str], Config] = {}
    deadline = world.now() + NEW_TOPIC_S
    while asked:
        late = []
        for resource, future in client.describe_configs(asked, request_timeout=_REQUEST_TIMEOUT_S).items():
            kind = "topic" if resource.restype == ConfigResource.Type.TOPIC else "broker"
            try:
                found[kind, resource.name] = {name: entry.value for name, entry in _result_of(future).items()}
            except KafkaException as error:
                if error.args[0].code() in _UNKNOWN and world.now() < deadline:
                    late.append(resource)  # a new topic, which the answering broker does not know yet
                    continue
                log.debug("configuration unavailable", resource=resource.name, error=describe_error(error))
        if asked := late:
            world.sleep(0.05)
    return found


def topic_overrides(client: Any, topic: str) -> Config:
    """Return the settings made on the topic itself; empty if we are not authorised to read them."""
    (future,) = client.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)]).values()
    try:
        found = _result_of(future)
    except KafkaException as error:
        log.debug("configuration unavailable", resource=topic, error=describe_error(error))
        return {}
    of_topic = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    return {name: entry.value for name, entry in found.items() if entry.source == of_topic}


def offsets_retention_minutes(client: Any, servers: str, world: World = REAL) -> int:
    """Return how many minutes the brokers keep the committed offsets of a group without members.

    Returns Kafka's default if we are not authorised to read their setting."""
    broker = min(cluster_metadata(client, servers, _REQUEST_TIMEOUT_S).brokers)
    config = describe_configs(client, [], broker, world).get(("broker", str(broker)), {})
    return int(config.get(OFFSETS_RETENTION, _DEFAULT_RETENTION_MINUTES))


def _group_rights(admin: ClusterAdmin, group: str) -> tuple[frozenset[str] | None, bool]:
    try:
        return admin.group_operations(group), False
    except NotAuthorised:
        return None, True
    except EosError as error:
        log.debug("group description unavailable", group=group, error=str(error))
        return None, False


def _is_denied(admin: ClusterAdmin, transactional_id: str) -> bool:
    try:
        admin.describe(transactional_id)
    except NotAuthorised:
        return True
    except EosError as error:
        log.debug("transactional.id description unavailable", error=str(error))
    return False


def create_topics(
    settings: Settings,
    wanted: Mapping[str, int],
    brokers: int,
    timeout_s: float = 30.0,
    config: Config = MappingProxyType({}),
    between: Collection[str] = (),
    world: World = REAL,
) -> set[str]:
    """Create topics with this config and up to 3 replicas. Return the names of those that did not exist.

    `wanted`: name -> partitions, -1 for the broker's default. `between`: topics that one function writes and another
    reads; they keep all records, because those have timestamps of an input that may be older than any retention."""
    client = connect(settings, timeout_s, world)
    replicas = min(3, brokers)
    safe = {"min.insync.replicas": "2"} if replicas >= 3 else {}
    new = [
        NewTopic(name, count, replicas, config={**config, **safe, **(_KEEP_FOREVER if name in between else {})})
        for name, count in wanted.items()
    ]
    asked = client.create_topics(new, request_timeout=timeout_s)
    created = {name for name, future in asked.items() if _is_created(name, future.result)}
    deadline = world.now() + timeout_s
    while missing := [name for name in wanted if not describe_topic(client, name).exists]:
        if world.now() > deadline:
            raise Unavailable(f"topic {missing[0]} was created but does not exist after {timeout_s:.0f} s")
        world.sleep(0.05)
    return created


def delete_topic(client: Any, name: str, world: World = REAL) -> None:
    """Delete a topic, and wait until the answering brokers no longer know it. Raise Unavailable or NotAuthorised."""
    _raise_if_refused(
        client.delete_topics([name], operation_timeout=_DELETE_TIMEOUT_S)[name],
        f"topic {name} cannot be deleted",
        "DELETE",
    )
    deadline = world.now() + _DELETE_TIMEOUT_S
    while describe_topic(client, name).exists:
        if world.now() > deadline:
            raise Unavailable(f"topic {name} was deleted but still exists after {_DELETE_TIMEOUT_S:.0f} s")
        world.sleep(0.05)


def add_partitions(client: Any, name: str, partitions: int, world: World = REAL) -> None:
    """Increase a topic's partitions to this number. Raise Unavailable or NotAuthorised."""
    asked = client.create_partitions([NewPartitions(name, partitions)], request_timeout=_RESULT_TIMEOUT_S)
    _raise_if_refused(asked[name], f"topic {name} cannot have {partitions} partitions", "ALTER")
    deadline = world.now() + _RESULT_TIMEOUT_S
    while describe_topic(client, name).partitions != partitions:
        if world.now() > deadline:
            raise Unavailable(f"topic {name} does not have {partitions} partitions after {_RESULT_TIMEOUT_S:.0f} s")
        world.sleep(0.05)


def _raise_if_refused(future: Any, failure: str, operation: str) -> None:
    try:
        future.result()
    except KafkaException as error:
        if error.args[0].code() in _DENIED:
            raise NotAuthorised(f"{failure}: not authorised to {operation} it") from error
        raise Unavailable(f"{failure}: {describe_error(error)}") from error


def _is_created(name: str, result: Callable[[], object]) -> bool:
    try:
        result()
        log.info("topic created", topic=name)
        return True
    except KafkaException as error:
        code = error.args[0].code()
        if code == KafkaError.TOPIC_ALREADY_EXISTS:
            return False  # another member of the group created it
        if code in _DENIED:
            raise NotAuthorised(f"topic {name} cannot be created: not authorised to CREATE it") from error
        raise Unavailable(f"topic {name} cannot be created: {describe_error(error)}") from error
