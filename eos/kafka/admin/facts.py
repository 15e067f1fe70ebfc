"""What a preflight has to know of a cluster, asked within a deadline; the judgement is eos/kafka/admin/preflight.py's.

Owns the asking, with the worker's own kind of client, so that what it cannot reach or may not see the worker cannot
either. It never judges and changes nothing, but for `create_topics`. What may not be asked is None, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import ConfigResource, ConfigSource, NewPartitions, NewTopic

from eos import log
from eos.errors import ConfigurationError, EosError, NotAuthorised, Unavailable, describe_error
from eos.kafka.client.cluster import OFFSETS_LOG, TRANSACTION_LOG, ClusterAdmin
from eos.kafka.client.security import login_refused, no_tls, require_reachable, unreachable
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

T = TypeVar("T")
Config = Mapping[str, str]
NEW_TOPIC_S = 2.0  # each broker learns of a new topic at a moment of its own, and any of them is asked
_ASK_S = 5.0
OFFSETS_KEPT, _KEPT_MINUTES = "offsets.retention.minutes", 10_080
_ANSWER_S = _ASK_S + 5.0
_DELETED_S = 30.0
_KEPT = {"retention.ms": "-1", "retention.bytes": "-1"}
_UNKNOWN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
_DENIED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)


@dataclass(frozen=True)
class Topic:
    """`exists` None: we may not see it. `operations`: what we may do (None: the broker does not say), in Kafka's words.
    `short`: partitions with fewer replicas in sync than min.insync.replicas asks, or without a leader."""

    exists: bool | None
    partitions: int = 0
    replicas: int = 0
    leaderless: tuple[int, ...] = ()
    in_sync: int = 0
    operations: frozenset[str] | None = None
    config: Config | None = None


@dataclass(frozen=True)
class Facts:
    """One look at a cluster. Configs are None where they may not be read; `operations` likewise."""

    servers: str
    brokers: int
    controller_version: int | None  # finalized transaction.version
    apis: frozenset[str]  # Kafka's names of the requests the brokers understand
    broker_config: Config | None
    topics: Mapping[str, Topic]
    group_operations: frozenset[str] | None = None
    group_denied: bool = False
    denied_ids: frozenset[str] = field(default_factory=frozenset)


def ask(
    settings: Settings,
    topics: Collection[str],
    group: str | None,
    transactional_ids: Iterable[str],
    timeout_s: float,
    world: World = REAL,
) -> Facts:
    """Unavailable when no broker answers within `timeout_s`; NotAuthorised as soon as one refuses the login."""
    client = connect(settings, timeout_s, world)
    internal = (TRANSACTION_LOG, OFFSETS_LOG)
    seen = {name: describe_topic(client, name) for name in dict.fromkeys([*topics, *internal])}
    brokers = metadata(client, settings.bootstrap_servers, _ASK_S).brokers
    asked = configs(client, [name for name, topic in seen.items() if topic.exists], min(brokers), world)
    found = {name: replace(topic, config=asked.get(("topic", name))) for name, topic in seen.items()}
    with world.admin(settings, timeout_ms=round(_ASK_S * 1000)) as admin:
        apis = admin.apis()
        version = admin.transaction_version()
        operations, denied = _group(admin, group) if group else (None, False)
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
    """ConfigurationError for a value that only librdkafka can judge, before anything is waited for."""
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
    """Return an AdminClient that has reached a broker. A refused login or handshake, and brokers whose own addresses
    cannot be reached, are reported at once, not at the deadline."""
    errors: list[KafkaError] = []
    values = settings.admin() | {"error_cb": errors.append, "logger": log.client_logger}
    client = world.client(values)
    deadline = world.now() + timeout_s
    told = world.now()
    while True:
        left = deadline - world.now()
        try:
            require_reachable(settings.bootstrap_servers, client.list_topics(timeout=max(0.1, min(1.0, left))))
            return client
        except KafkaException as raised:
            client.poll(0.1)  # serves error_cb, which is told more than the caller
            error = _telling(errors) or raised.args[0]
        if error.code() == KafkaError._AUTHENTICATION:
            raise login_refused(settings, error.str())
        if error.code() == KafkaError._SSL:
            raise no_tls(settings, error.str())
        if left <= 0:
            raise unreachable(settings, describe_error(error))
        if world.now() - told > _ASK_S:
            told = world.now()
            log.info("waiting for the cluster", servers=settings.bootstrap_servers, error=error.str())


def metadata(client: Any, servers: str, timeout_s: float) -> Any:
    """What an AdminClient that has reached a broker knows of the cluster now; Unavailable when it reaches none more."""
    try:
        return client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        raise Unavailable(f"{servers} cannot be reached any more: {describe_error(error)}") from error


def leaderless(client: Any, topic: str, timeout_s: float) -> frozenset[int]:
    """Return the topic's partitions without a leader, as any broker says: `describe_topic` asks one that may be away.
    Raises Unavailable."""
    found = metadata(client, "the cluster", timeout_s).topics.get(topic)
    return frozenset() if found is None else frozenset(p.id for p in found.partitions.values() if p.leader < 0)


def _telling(errors: list[KafkaError]) -> KafkaError | None:
    """Of what the client reported the error that says most: `_ALL_BROKERS_DOWN` and timeouts are only its echo."""
    first = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._TRANSPORT, KafkaError._RESOLVE)
    ranked = sorted((e for e in errors if e.code() in first), key=lambda e: first.index(e.code()))
    return ranked[0] if ranked else None


def _answer(future: Future[T]) -> T:
    try:
        return future.result(_ANSWER_S)
    except TimeoutError as error:  # the client's own timeout should have come first
        raise Unavailable(f"the cluster did not answer within {_ANSWER_S:.0f} s what a preflight asks") from error


def describe_topic(client: Any, name: str) -> Topic:
    asked = client.describe_topics(TopicCollection([name]), include_authorized_operations=True, request_timeout=_ASK_S)
    try:
        found: Any = _answer(asked[name])
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
        _operations(found.authorized_operations),
    )


def _operations(found: Any) -> frozenset[str] | None:
    return None if found is None else frozenset(operation.name for operation in found)


def configs(
    client: Any, topics: Collection[str], broker: int | None = None, world: World = REAL
) -> dict[tuple[str, str], Config]:
    """Of topics that are there and of one broker, by ("topic" or "broker", name); what may not be read is left out."""
    # A broker refuses the whole request where a topic is named twice.
    asked = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in dict.fromkeys(topics)]
    if broker is not None:
        asked.append(ConfigResource(ConfigResource.Type.BROKER, str(broker)))
    found: dict[tuple[str, str], Config] = {}
    deadline = world.now() + NEW_TOPIC_S
    while asked:
        late = []
        for resource, future in client.describe_configs(asked, request_timeout=_ASK_S).items():
            kind = "topic" if resource.restype == ConfigResource.Type.TOPIC else "broker"
            try:
                found[kind, resource.name] = {name: entry.value for name, entry in _answer(future).items()}
            except KafkaException as error:
                if error.args[0].code() in _UNKNOWN and world.now() < deadline:
                    late.append(resource)  # just created: one broker knows of it, the one that answered not yet
                    continue
                log.debug("a configuration cannot be read", resource=resource.name, error=describe_error(error))
        if asked := late:
            world.sleep(0.05)
    return found


def set_on_topic(client: Any, topic: str) -> Config:
    """Return what was configured of the topic itself; nothing where that may not be read."""
    (future,) = client.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)]).values()
    try:
        found = _answer(future)
    except KafkaException as error:
        log.debug("a configuration cannot be read", resource=topic, error=describe_error(error))
        return {}
    of_topic = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    return {name: entry.value for name, entry in found.items() if entry.source == of_topic}


def offsets_kept_minutes(client: Any, servers: str, world: World = REAL) -> int:
    """For how long the brokers keep a committed offset of a group without members; Kafka's default where they may not
    be asked."""
    broker = min(metadata(client, servers, _ASK_S).brokers)
    config = configs(client, [], broker, world).get(("broker", str(broker)), {})
    return int(config.get(OFFSETS_KEPT, _KEPT_MINUTES))


def _group(admin: ClusterAdmin, group: str) -> tuple[frozenset[str] | None, bool]:
    try:
        return admin.group_operations(group), False
    except NotAuthorised:
        return None, True
    except EosError as error:
        log.debug("the group cannot be described", group=group, error=str(error))
        return None, False


def _is_denied(admin: ClusterAdmin, transactional_id: str) -> bool:
    try:
        admin.describe(transactional_id)
    except NotAuthorised:
        return True
    except EosError as error:
        log.debug("a transactional.id cannot be described", error=str(error))
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
    """Creates topics (name -> partitions, -1 the broker's default) with this config, and as many copies as losing a
    broker asks for; returns those that were not there. `between`: those of them that one function writes and another
    one reads. They keep their records, which have the timestamps of an input that may be older than any retention."""
    client = connect(settings, timeout_s, world)
    replicas = min(3, brokers)
    safe = {"min.insync.replicas": "2"} if replicas >= 3 else {}
    new = [
        NewTopic(name, count, replicas, config={**config, **safe, **(_KEPT if name in between else {})})
        for name, count in wanted.items()
    ]
    asked = client.create_topics(new, request_timeout=timeout_s)
    created = {name for name, future in asked.items() if _created(name, future.result)}
    deadline = world.now() + timeout_s
    while missing := [name for name in wanted if not describe_topic(client, name).exists]:
        if world.now() > deadline:
            raise Unavailable(f"topic {missing[0]} was created and is not there after {timeout_s:.0f} s")
        world.sleep(0.05)
    return created


def delete_topic(client: Any, name: str, world: World = REAL) -> None:
    """Delete a topic, and wait until no broker that is asked knows of it. Raises Unavailable, NotAuthorised."""
    _changed(
        client.delete_topics([name], operation_timeout=_DELETED_S)[name], f"topic {name} cannot be deleted", "DELETE"
    )
    deadline = world.now() + _DELETED_S
    while describe_topic(client, name).exists:
        if world.now() > deadline:
            raise Unavailable(f"topic {name} was deleted, and is still there after {_DELETED_S:.0f} s")
        world.sleep(0.05)


def add_partitions(client: Any, name: str, partitions: int, world: World = REAL) -> None:
    """Give a topic this many partitions, more than it has. Raises Unavailable, NotAuthorised."""
    asked = client.create_partitions([NewPartitions(name, partitions)], request_timeout=_ANSWER_S)
    _changed(asked[name], f"topic {name} cannot have {partitions} partitions", "ALTER")
    deadline = world.now() + _ANSWER_S
    while describe_topic(client, name).partitions != partitions:
        if world.now() > deadline:
            raise Unavailable(f"topic {name} has no {partitions} partitions after {_ANSWER_S:.0f} s")
        world.sleep(0.05)


def _changed(future: Any, failure: str, operation: str) -> None:
    try:
        future.result()
    except KafkaException as error:
        if error.args[0].code() in _DENIED:
            raise NotAuthorised(f"{failure}: not authorised to {operation} it") from error
        raise Unavailable(f"{failure}: {describe_error(error)}") from error


def _created(name: str, result: Callable[[], object]) -> bool:
    try:
        result()
        log.info("topic created", topic=name)
        return True
    except KafkaException as error:
        code = error.args[0].code()
        if code == KafkaError.TOPIC_ALREADY_EXISTS:
            return False  # another member of the group was faster
        if code in _DENIED:
            raise NotAuthorised(f"topic {name} cannot be created: not authorised to CREATE it") from error
        raise Unavailable(f"topic {name} cannot be created: {describe_error(error)}") from error
