"""Read the actual contents of Kafka: committed values, stable group offsets, transactions as the coordinator sees them.

Fault tests judge by this and never by the reports of a client. Reads use the broker's own listener, so that a fault
injected on the proxied one cannot affect them. Nothing here writes, except `create_topic`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka import KafkaAdminClient
from kafka.errors import RetriableError
from kafka.protocol.metadata import MetadataRequest

from eos.broker.queries import TRANSACTION, find_coordinator
from eos.testing.history import end_offsets
from tests.support.wire import Wire

T = TypeVar("T")


class TooSlow(AssertionError):
    """Signal a wait that took too long, as on a machine under load.

    `make` runs only such tests a second time. A violation, however late, never raises this.
    """


def wait_until(what: str, probe: Callable[[], T | None], timeout: float = 15.0) -> T:
    """Return the first truthy result of `probe`; raise TooSlow that names `what` after the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        if answer := probe():
            return answer
        if time.monotonic() >= deadline:
            raise TooSlow(f"{what}: not within {timeout} s (last answer: {answer!r})")
        time.sleep(0.02)


def wait_known(servers: str, topics: Mapping[str, int]) -> None:
    """Wait until every one of `servers` names leaders for all partitions (name -> count) of the topics.

    Each broker learns of a new topic at its own time, and a client may query any of them. A librdkafka client with one
    server may query another one that it discovered, so these queries use bare connections.
    """
    asked = [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]

    def known(server: str) -> bool:
        with Wire(server) as wire:
            told = wire.ask(MetadataRequest(version=12, topics=asked, allow_auto_topic_creation=False)).topics
        return all(
            len(topic.partitions) == topics[topic.name] and all(p.leader_id >= 0 for p in topic.partitions)
            for topic in told
        )

    for server in servers.split(","):
        wait_until(f"leaders of {', '.join(topics)} at {server}", lambda server=server: known(server))  # type: ignore[misc]


def create_topics(servers: str, topics: Sequence[NewTopic]) -> None:
    """Create the topics and wait until every server knows them."""
    admin = AdminClient({"bootstrap.servers": servers})  # must live until it has answered
    for made in admin.create_topics(list(topics)).values():
        made.result(30)
    wait_known(servers, {topic.topic: topic.num_partitions for topic in topics})


def configure(servers: str, name: str, setting: str, value: str, kind: ResourceType = ResourceType.TOPIC) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(kind, name, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(30)


def set_group_session_timeout(servers: str, group: str, timeout_ms: int) -> None:
    """Set the session timeout of the group, which brokers decide for the consumer protocol (KIP-848)."""
    configure(servers, group, "consumer.heartbeat.interval.ms", "500", ResourceType.GROUP)
    configure(servers, group, "consumer.session.timeout.ms", str(timeout_ms), ResourceType.GROUP)


def create_topic(servers: str, topic: str, partitions: int = 1, copies: int = 1) -> str:
    """Create the topic, wait until every server names leaders for its partitions, and return its name."""
    create_topics(servers, [NewTopic(topic, partitions, copies)])
    asked = [TopicPartition(topic, partition) for partition in range(partitions)]

    def leaders_answer() -> bool:
        # Metadata names the leader a moment before its replica accepts requests. A Produce in this gap is retried, and
        # a fault test that counts requests would count the retry. A worker that waits for this topic may write first,
        # so any end offset is accepted.
        try:
            return len(ends_of(servers, asked, IsolationLevel.READ_UNCOMMITTED)) == partitions
        except KafkaException:
            return False

    wait_until(f"leaders of {topic}", leaders_answer, 60)
    return topic


def partitions_of(servers: str, topic: str) -> list[TopicPartition]:
    admin = AdminClient({"bootstrap.servers": servers})
    found = sorted(admin.list_topics(topic, timeout=10).topics[topic].partitions)
    assert found, f"{topic} has no partitions"
    return [TopicPartition(topic, partition) for partition in found]


def leader_of(servers: str, topic: str) -> int:
    """Return the node that leads the topic's first partition."""
    admin = AdminClient({"bootstrap.servers": servers})
    return int(admin.list_topics(topic, timeout=30).topics[topic].partitions[0].leader)


def coordinator_of(servers: str, transactional_id: str) -> int:
    """Return the node that coordinates the transactions of this id."""

    def found() -> tuple[int] | None:
        node = find_coordinator(servers.split(",")[0], transactional_id, TRANSACTION)
        return None if node is None else (node,)

    return wait_until(f"the coordinator of {transactional_id}", found, 30)[0]


def ends_of(servers: str, partitions: list[TopicPartition], isolation: IsolationLevel) -> list[int]:
    """Return the last stable offsets (READ_COMMITTED) or high watermarks (READ_UNCOMMITTED), in the given order."""
    admin = AdminClient({"bootstrap.servers": servers})
    latest = {TopicPartition(p.topic, p.partition): OffsetSpec.latest() for p in partitions}  # type: ignore[no-untyped-call]
    answers = admin.list_offsets(latest, isolation_level=isolation, request_timeout=10)
    return [answers[TopicPartition(p.topic, p.partition)].result(10).offset for p in partitions]


def settled_ends(servers: str, topics: Sequence[str], timeout_s: float = 15.0) -> dict[tuple[str, int], int]:
    """Return the end of each partition, (topic, partition) -> offset, once no transaction is open on the topics.

    EndTxn is answered before its markers are written. A reader must wait until the last stable offset reaches the high
    watermark, or it misses a commit in progress.
    """

    def settled() -> dict[tuple[str, int], int] | None:
        ends = end_offsets(servers, topics)
        return ends.stable if ends.stable == ends.log_end else None

    return wait_until(f"the end of every transaction on {', '.join(topics)}", settled, timeout_s)


def settled_records(servers: str, topic: str) -> dict[int, list[Message]]:
    """Return the committed records of each partition in offset order, once no transaction is open on the topic."""
    settled_ends(servers, [topic])
    return visible_records(servers, topic)


def settled_values(servers: str, topic: str) -> dict[int, list[bytes | None]]:
    """Return the values of `settled_records`."""
    return {p: [message.value() for message in found] for p, found in settled_records(servers, topic).items()}


def visible_values(servers: str, topic: str) -> dict[int, list[bytes | None]]:
    """Return the values that a read_committed consumer sees now, up to each last stable offset; [] if there are
    none."""
    return {p: [message.value() for message in found] for p, found in visible_records(servers, topic).items()}


def visible_records(servers: str, topic: str) -> dict[int, list[Message]]:
    """Return the records of `visible_values`, with key, headers, offset and timestamp."""
    partitions = partitions_of(servers, topic)
    settings = {
        "bootstrap.servers": servers,
        "group.id": "reading-without-a-group",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
    }
    records: dict[int, list[Message]] = {p.partition: [] for p in partitions}
    open_partitions = set(records)
    deadline = time.monotonic() + 30
    consumer = Consumer(settings)
    try:
        consumer.assign([TopicPartition(p.topic, p.partition, 0) for p in partitions])
        while open_partitions:
            if time.monotonic() >= deadline:
                raise TooSlow(f"{topic} {open_partitions} had no end within 30 s")
            message = consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is None:
                partition = message.partition()
                assert partition is not None
                records[partition].append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                open_partitions.discard(message.partition())
            else:
                raise KafkaException(error)
    finally:
        consumer.close()
    return records


def stable_offset(servers: str, group: str, topic: str, partition: int = 0) -> int:
    """Return the group's committed offset; read_committed makes the request wait for a pending one (KIP-447)."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "isolation.level": "read_committed"})
    try:
        (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=15)
    finally:
        consumer.close()
    return int(found.offset)


@dataclasses.dataclass(frozen=True)
class TransactionState:
    """Hold a described transaction: `state` is one of Kafka's (Empty, Ongoing, PrepareCommit, CompleteCommit, ...)."""

    state: str
    producer_id: int
    producer_epoch: int
    partitions: list[tuple[str, int]]


def transaction_of(servers: str, transactional_id: str) -> TransactionState:
    admin = KafkaAdminClient(bootstrap_servers=servers)

    def described() -> Any:
        try:
            return admin.describe_transactions([transactional_id])[transactional_id]
        except RetriableError:
            return None  # The first query to a new broker waits for the transaction log.

    try:
        found = wait_until(f"the state of {transactional_id}", described)
    finally:
        admin.close()
    return TransactionState(
        str(getattr(found.state, "value", found.state)),
        found.producer_id,
        found.producer_epoch,
        sorted((p.topic, p.partition) for p in found.topic_partitions),
    )


def took_under(limit_s: float, began: float, what: str) -> None:
    """Raise TooSlow if more than `limit_s` have passed since `began` (monotonic).

    A machine under load takes longer and gets a second try; a real hang fails the second time too.
    """
    took_s = time.monotonic() - began
    if took_s > limit_s:
        raise TooSlow(f"{what}: {took_s:.1f} s, not under {limit_s} s")
