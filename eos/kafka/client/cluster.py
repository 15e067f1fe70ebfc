"""Sends the admin requests that confluent-kafka cannot send: about transactions, features and members.

Uses kafka-python's admin client, configured by eos/kafka/client/security.py. It only reads, except `remove_member`,
`abort_if_ongoing` and `write_abort_marker`; the caller decides whether those may be called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import kafka.errors as kafka_errors
from kafka.admin import AbortTransactionSpec, ACLOperation, KafkaAdminClient, MemberToRemove, OffsetSpec
from kafka.net.compat import KafkaNetClient
from kafka.protocol.admin import DescribeGroupsRequest
from kafka.protocol.api_key import ApiKey
from kafka.protocol.consumer import IsolationLevel
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest
from kafka.structs import TopicPartition

from eos.errors import ConfigurationError, NotAuthorised, Unavailable, not_authorised
from eos.kafka.client.security import admin_configuration, login_refused, unreachable
from eos.kafka.client.settings import Settings

T = TypeVar("T")
Partition = tuple[str, int]
TRANSACTION_LOG, OFFSETS_LOG = "__transaction_state", "__consumer_offsets"
_EPOCH_COUNT, _EPOCH_DISTANCE = 32_767, 16_384  # to choose an epoch as far as possible from the current epoch
_CHUNK_SIZE = 500  # partitions or transactional.ids in one request


@dataclass(frozen=True)
class TransactionalIdState:
    """Holds one answer of DescribeTransactions.

    `start_ms`: the start of the current transaction in Unix milliseconds, or -1."""

    state: str
    producer_id: int
    epoch: int
    start_ms: int = -1


@dataclass(frozen=True)
class ListedTransaction:
    """Holds the coordinator's full view of one transactional.id.

    `start_ms` is in Unix milliseconds, `timeout_ms` a duration in milliseconds."""

    transactional_id: str
    producer_id: int
    epoch: int
    state: str
    coordinator: int
    start_ms: int
    timeout_ms: int
    partitions: frozenset[Partition]


@dataclass(frozen=True)
class OpenProducer:
    """Describes a producer with an open transaction on a partition, as the partition's leader sees it."""

    partition: Partition
    producer_id: int
    epoch: int
    start_offset: int
    last_timestamp_ms: int  # timestamp of the producer's last batch
    coordinator_epoch: int

    @property
    def key(self) -> tuple[Partition, int, int]:
        """Return the values that identify this open transaction in two answers."""
        return self.partition, self.producer_id, self.start_offset


class ClusterAdmin:
    """Connects to the cluster as an admin client; use it as a context manager."""

    def __init__(self, settings: Settings, timeout_ms: int = 10_000) -> None:
        unfinished: list[KafkaNetClient] = []

        def network(**given: Any) -> KafkaNetClient:
            unfinished.append(KafkaNetClient(**given))
            return unfinished[0]

        try:
            self._client = KafkaAdminClient(**admin_configuration(settings, timeout_ms), kafka_client=network)
            unfinished.clear()
        except kafka_errors.SaslAuthenticationFailedError as error:
            raise login_refused(settings, str(error)) from error
        except (kafka_errors.KafkaError, OSError) as error:
            raise unreachable(settings, str(error)) from error
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the admin client does not accept these settings: {error}") from error
        finally:
            for client in unfinished:
                # A KafkaAdminClient that found no broker in time leaves its thread and sockets open. close() raises
                # RuntimeError if an interruption came before that thread started; the thread then ends by itself.
                with contextlib.suppress(RuntimeError):
                    client.close()
                    client._net.stop()

    def __enter__(self) -> ClusterAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def describe(self, transactional_id: str) -> TransactionalIdState | None:
        """Return the state of one transactional.id, or None if its coordinator does not know it (unused or expired)."""
        with _translate_errors("DescribeTransactions", f"transactional.id {transactional_id}", "DESCRIBE"):
            try:
                found = self._client.describe_transactions([transactional_id])[transactional_id]
            except kafka_errors.TransactionalIdNotFoundError:
                return None
        return TransactionalIdState(
            str(found.state.value), found.producer_id, found.producer_epoch, found.transaction_start_time_ms
        )

    def transactions(self, producer_ids: Collection[int] = (), states: Collection[str] = ()) -> list[ListedTransaction]:
        """Return every transactional.id that the coordinators know and that we may see.

        `producer_ids` and `states` select some of them; empty: all."""
        with _translate_errors("ListTransactions"):
            listings = self._client.list_transactions(
                producer_id_filters=sorted(producer_ids), state_filters=sorted(states)
            )
        names = sorted({row.transactional_id for rows in listings.values() for row in rows})
        return self.describe_transactions(names)

    def ongoing(self, prefix: str) -> list[str]:
        """Return the transactional.ids with this prefix that have an open transaction."""
        with _translate_errors("ListTransactions"):
            listings = self._client.list_transactions(state_filters=["Ongoing"])
        return sorted({n for rows in listings.values() for r in rows if (n := r.transactional_id).startswith(prefix)})

    def describe_transactions(self, transactional_ids: Sequence[str]) -> list[ListedTransaction]:
        """Return the coordinators' view of these transactional.ids, without those that no coordinator knows."""
        return [row for chunk in _chunks(transactional_ids) for row in self._describe_chunk(chunk)]

    def _describe_chunk(self, names: Sequence[str]) -> list[ListedTransaction]:
        with _translate_errors("DescribeTransactions", f"transactional.id {names[0]}", "DESCRIBE"):
            try:
                found = self._client.describe_transactions(names)
            except (kafka_errors.TransactionalIdNotFoundError, kafka_errors.AuthorizationError) as error:
                if len(names) > 1:
                    return [row for name in names for row in self._describe_chunk([name])]
                if isinstance(error, kafka_errors.AuthorizationError):
                    raise
                return []  # expired after it was listed
        return [
            ListedTransaction(
                name,
                row.producer_id,
                row.producer_epoch,
                str(row.state.value),
                row.coordinator_id,
                row.transaction_start_time_ms,
                row.transaction_timeout_ms,
                frozenset((tp.topic, tp.partition) for tp in row.topic_partitions),
            )
            for name, row in sorted(found.items())
        ]

    def is_overdue(self, transaction: ListedTransaction) -> bool:
        """Return True if the transaction is open past its timeout, by its coordinator's clock. Needs Kafka 3.8."""
        with _translate_errors("ListTransactions"):
            found = self._client.list_transactions(
                [transaction.coordinator],
                producer_id_filters=[transaction.producer_id],
                state_filters=["Ongoing"],
                duration_filter_ms=transaction.timeout_ms,
            )
        return any(row.transactional_id == transaction.transactional_id for rows in found.values() for row in rows)

    def abort_if_ongoing(self, transaction: ListedTransaction) -> str:
        """Send one InitProducerId that aborts the transaction if it is open. Return the name of the answer's error.

        The coordinator aborts an open transaction at epoch + 1 for any epoch in the request, and answers
        CONCURRENT_TRANSACTIONS. In every other state it compares the epoch (prepareInitProducerIdTransit of
        TransactionCoordinator), and refuses the epoch of this request, which no producer has. It refuses a second
        request too.
        """
        request = InitProducerIdRequest(
            transactional_id=transaction.transactional_id,
            transaction_timeout_ms=transaction.timeout_ms,
            producer_id=transaction.producer_id,
            producer_epoch=(transaction.epoch + _EPOCH_DISTANCE) % _EPOCH_COUNT,
            min_version=3,
            max_version=4,
        )
        with _translate_errors("InitProducerId", f"transactional.id {transaction.transactional_id}", "WRITE"):
            answer = self._client._manager.run(self._send, request, transaction.coordinator)
        return str(kafka_errors.for_code(answer.error_code).__name__.removesuffix("Error"))

    async def _send(self, request: Any, node: int) -> Any:
        return await self._client._manager.send(request, node_id=node)

    def partitions(self, topics: Iterable[str] | None = None) -> dict[Partition, int]:
        """Return the leader (-1: none) of each partition of these topics, or of all topics.

        Raise Unavailable for a topic that does not exist."""
        with _translate_errors("Metadata"):
            described = self._client.describe_topics(None if topics is None else sorted(set(topics)))
        found: dict[Partition, int] = {}
        for topic in described:
            error = kafka_errors.for_code(topic["error_code"])
            if issubclass(error, kafka_errors.AuthorizationError):
                raise not_authorised(f"topic {topic['name']}", "DESCRIBE")
            if error is not kafka_errors.NoError and topics is not None:
                raise Unavailable(f"topic {topic['name']}: {error.__name__.removesuffix('Error')}")
            for partition in topic["partitions"]:
                found[topic["name"], partition["partition_index"]] = partition["leader_id"]
        return found

    def topics(self) -> set[str]:
        """Return the names of all topics that the answering broker knows and that we may see."""
        with _translate_errors("Metadata"):
            described = self._client.describe_topics(None)
        return {topic["name"] for topic in described if not topic["error_code"]}

    def known_to_all_brokers(self, topics: Iterable[str]) -> set[str]:
        """Return the topics that every broker knows, with a leader for every partition.

        A broker that does not answer is ignored: clients cannot use it either, and it learns of all topics before it
        serves again."""
        known = set(topics)
        asked = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(known)]
        request = MetadataRequest(topics=asked, allow_auto_topic_creation=False)
        answers = []
        for broker in self._client._manager.cluster.brokers():
            with contextlib.suppress(kafka_errors.KafkaError):
                answers.append(self._client._manager.run(self._send, request, broker.node_id))
        for answer in answers:
            known &= {t.name for t in answer.topics if not t.error_code and all(p.leader_id >= 0 for p in t.partitions)}
        return known if answers else set()

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the ids (KIP-516) of those topics that exist and that we may see."""
        with _translate_errors("Metadata"):
            described = self._client.describe_topics(sorted(set(topics)))
        return {topic["name"]: str(topic["topic_id"]) for topic in described if not topic["error_code"]}

    def missing_topics(self, topics: Iterable[str]) -> set[str]:
        """Return those topics that the answering broker does not know."""
        with _translate_errors("Metadata"):
            described = self._client.describe_topics(sorted(set(topics)))
        unknown = kafka_errors.UnknownTopicOrPartitionError.errno
        return {topic["name"] for topic in described if topic["error_code"] == unknown}

    def open_producers(self, partitions: Mapping[Partition, int] | Iterable[Partition]) -> list[OpenProducer]:
        """Return the producers with an open transaction on these partitions, skipping those without a leader."""
        if not isinstance(partitions, Mapping):
            wanted = set(partitions)
            known = self.partitions({topic for topic, _ in wanted}) if wanted else {}
            partitions = {p: leader for p, leader in known.items() if p in wanted}
        by_leader: dict[int, list[Partition]] = {}
        for partition, leader in sorted(partitions.items()):
            by_leader.setdefault(leader, []).append(partition)
        by_leader.pop(-1, None)
        return [
            row
            for leader, owned in by_leader.items()
            for chunk in _chunks(owned)
            for row in self._open_producers(leader, chunk)
        ]

    def _open_producers(self, leader: int, partitions: Sequence[Partition]) -> list[OpenProducer]:
        asked = [TopicPartition(*p) for p in partitions]
        topics = sorted({topic for topic, _ in partitions})
        with _translate_errors("DescribeProducers", f"topic {topics[0]}", "READ"):
            try:
                answers = self._client.describe_producers(asked, broker_id=leader)
            except kafka_errors.AuthorizationError:
                if len(topics) == 1:
                    raise
                each = ([p for p in partitions if p[0] == topic] for topic in topics)
                return [row for those in each for row in self._open_producers(leader, those)]
        return [
            OpenProducer(
                (tp.topic, tp.partition),
                row.producer_id,
                row.producer_epoch,
                row.current_transaction_start_offset,
                row.last_timestamp,
                row.coordinator_epoch,
            )
            for tp, state in answers.items()
            for row in state.active_producers
            if row.current_transaction_start_offset >= 0
        ]

    def count_unstable_offsets(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """Return the number of offsets between the last stable offset and the high watermark of each partition."""
        asked = {TopicPartition(*p): OffsetSpec.LATEST for p in partitions}
        topics = ", ".join(sorted({topic for topic, _ in partitions}))
        with _translate_errors("ListOffsets", f"topic {topics}", "DESCRIBE"):
            high = self._client.list_partition_offsets(asked)
            stable = self._client.list_partition_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
        return {(tp.topic, tp.partition): high[tp].offset - stable[tp].offset for tp in asked}

    def has_all_coordinators(self) -> bool:
        """Return True if every partition of the transaction log has a leader, so that no transactional.id is missed."""
        log_partitions = self.partitions([TRANSACTION_LOG])
        return bool(log_partitions) and all(leader >= 0 for leader in log_partitions.values())

    def write_abort_marker(self, producer: OpenProducer) -> None:
        """Send WriteTxnMarkers to the partition's leader, bypassing the coordinator.

        Needs CLUSTER_ACTION (or ALTER) on the cluster. Only eos.kafka.admin.transactions may decide to call it."""
        spec = AbortTransactionSpec(
            TopicPartition(*producer.partition),
            producer.producer_id,
            producer.epoch,
            max(producer.coordinator_epoch, 0),
        )
        with _translate_errors("WriteTxnMarkers", "the cluster", "CLUSTER_ACTION"):
            self._client.abort_transaction(spec)

    def apis(self) -> frozenset[str]:
        """Return Kafka's names of the requests that a broker understands, as far as kafka-python knows them.

        Its own `api_versions` raises ValueError for a broker with a newer request, such as 4.4.0."""
        with _translate_errors("ApiVersions"):
            offered = self._client._manager.broker_version_data.api_versions
        return frozenset(api.name for api in ApiKey if api in offered)

    def transaction_version(self) -> int:
        """Return the finalized transaction.version: 2 from 4.0 on (KIP-890), 0 if the feature is unknown."""
        with _translate_errors("DescribeFeatures"):
            features = self._client.describe_features()
        return int(features.get("transaction.version", {}).get("finalized", (0, 0))[1])

    def members(self, group: str) -> list[dict[str, Any]]:
        """Return the members of a classic group. Their subscriptions are known only while the group is stable."""
        return list(self.classic_group(group)["members"])

    def classic_group(self, group: str) -> dict[str, Any]:
        """Return the answer of DescribeGroups, with `members` and `protocol_data`.

        `protocol_data` is the assignment strategy, or "" unless the group is stable."""
        with _translate_errors("DescribeGroups", f"group {group}", "DESCRIBE"):
            described: dict[str, Any] = self._client.describe_groups([group])[group]
        return described

    def assigned_partitions(self, group: str, member_id: str) -> frozenset[Partition]:
        """Return the partitions that a group with group.protocol=consumer assigned to this member.

        The result is empty if the group does not know the member."""
        # Imported here, because it parses message schemas.
        from eos.kafka.client.consumer_groups import ConsumerGroupDescribeRequest

        request = ConsumerGroupDescribeRequest(group_ids=[group], include_authorized_operations=False)
        described = self._described_group(group, request)
        return frozenset(
            (topic.topic_name, partition)
            for member in described.members
            if member.member_id == member_id
            for topic in member.assignment.topic_partitions
            for partition in topic.partitions
        )

    def group_operations(self, group: str) -> frozenset[str] | None:
        """Return the names of the operations that ACLs allow us on a group, or None if its coordinator does not say.

        librdkafka's DescribeConsumerGroups is not an alternative. If the coordinator answers after the request's
        timeout, a failed assertion (`rd_kafka_enq_once_del_source`) ends the process (2.16.1, with a paused broker).
        """
        # Use version 5: for a group that does not exist yet, version 6 answers with an error and without the
        # operations.
        request = DescribeGroupsRequest(groups=[group], include_authorized_operations=True, max_version=5)
        described = self._described_group(group, request)
        codes = described.authorized_operations or ()  # None if the broker does not say
        found = {ACLOperation(code).name for code in codes if code >= ACLOperation.READ}
        return frozenset(found) or None

    def _described_group(self, group: str, request: Any) -> Any:
        """Send the request to the group's coordinator, and return its answer about the group."""

        async def ask() -> Any:
            coordinators = await self._client._find_coordinator_ids([group])
            return (await self._send(request, coordinators[group])).groups[0]

        with _translate_errors(request.name.removesuffix("Request"), f"group {group}", "DESCRIBE"):
            described = self._client._manager.run(ask)
            if described.error_code:
                raise kafka_errors.for_code(described.error_code)()
        return described

    def committed_metadata(self, group: str) -> list[str]:
        """Return the metadata of the group's committed offsets."""
        return list(filter(None, self.metadata_by_partition(group).values()))

    def metadata_by_partition(self, group: str) -> dict[Partition, str]:
        """Return the metadata of each committed offset of the group ("": none), without confluent-kafka's final NUL."""
        return {place: metadata for place, (_, metadata) in self.committed_offsets(group).items()}

    def committed_offsets(self, group: str) -> dict[Partition, tuple[int, str]]:
        """Return each committed offset of the group with its metadata ("": none), without confluent-kafka's final NUL.

        Offsets pending in a transaction do not count.
        """
        found = self._committed(group).items()
        return {(at.topic, at.partition): (one.offset, str(one.metadata or "").rstrip("\0")) for at, one in found}

    def committed_topics(self, group: str) -> set[str]:
        """Return the topics with committed offsets of the group. Offsets pending in a transaction do not count."""
        return {partition.topic for partition in self._committed(group)}

    def _committed(self, group: str) -> Mapping[Any, Any]:
        with _translate_errors("OffsetFetch", f"group {group}", "DESCRIBE"):
            found: Mapping[Any, Any] = self._client.list_group_offsets(group)[group]
            return found

    def remove_member(self, group: str, group_instance_id: str) -> None:
        """Remove a static member from the group; after its close() it would remain until the session timeout."""
        with _translate_errors("LeaveGroup", f"group {group}", "READ"):
            self._client.remove_group_members(group, [MemberToRemove(group_instance_id=group_instance_id)])


@contextlib.contextmanager
def _translate_errors(request: str, resource: str = "", operation: str = "") -> Iterator[None]:
    """Translate kafka-python's errors, which do not name the right that the request needs.

    `resource` and `operation` describe that right."""
    try:
        yield
    except kafka_errors.AuthorizationError as error:
        if resource:
            raise not_authorised(resource, operation) from error
        raise NotAuthorised(f"{request} was refused: {error}") from error
    except kafka_errors.KafkaError as error:
        raise Unavailable(f"{request} failed: {error}") from error


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _CHUNK_SIZE):
        yield items[start : start + _CHUNK_SIZE]
