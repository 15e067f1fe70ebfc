"""Questions to the cluster that confluent-kafka cannot ask: transactions, features, members (kafka-python's admin).

It only reads, but for `remove_member` and `write_abort_marker`; whether those may be called is for others to decide.
How kafka-python is configured is eos/kafka/client/security.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kafka import IsolationLevel, TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import AbortTransactionSpec, ACLOperation, KafkaAdminClient, MemberToRemove, OffsetSpec
from kafka.net.compat import KafkaNetClient
from kafka.protocol.admin import DescribeGroupsRequest
from kafka.protocol.api_key import ApiKey
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest

from eos.errors import ConfigurationError, NotAuthorised, Unavailable, not_authorised
from eos.kafka.client.security import configuration, login_refused, unreachable
from eos.kafka.client.settings import Settings

T = TypeVar("T")
Partition = tuple[str, int]
TRANSACTION_LOG, OFFSETS_LOG = "__transaction_state", "__consumer_offsets"
_EPOCHS, _FAR = 32_767, 16_384  # an epoch as far as can be from any that is in use
_CHUNK = 500  # partitions or transactional.ids of one request


@dataclass(frozen=True)
class Described:
    """One answer of DescribeTransactions; `start_ms`: the present transaction's start, Unix milliseconds (-1: none)."""

    state: str
    producer_id: int
    epoch: int
    start_ms: int = -1


@dataclass(frozen=True)
class Listed:
    """A coordinator's view of one transactional.id; `start_ms` and `timeout_ms` in Unix and plain milliseconds."""

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
    """A producer that has a transaction open on a partition, as the partition's leader sees it."""

    partition: Partition
    producer_id: int
    epoch: int
    start_offset: int
    last_timestamp_ms: int  # of its last batch
    coordinator_epoch: int

    @property
    def key(self) -> tuple[Partition, int, int]:
        """What makes it the same open transaction in two answers."""
        return self.partition, self.producer_id, self.start_offset


class ClusterAdmin:
    """An admin connection; use as a context manager."""

    def __init__(self, settings: Settings, timeout_ms: int = 10_000) -> None:
        unfinished: list[KafkaNetClient] = []

        def network(**given: Any) -> KafkaNetClient:
            unfinished.append(KafkaNetClient(**given))
            return unfinished[0]

        try:
            self._client = KafkaAdminClient(**configuration(settings, timeout_ms), kafka_client=network)
            unfinished.clear()
        except kafka_errors.SaslAuthenticationFailedError as error:
            raise login_refused(settings, str(error)) from error
        except (kafka_errors.KafkaError, OSError) as error:
            raise unreachable(settings, str(error)) from error
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the admin client does not accept these settings: {error}") from error
        finally:
            for client in unfinished:
                # Its thread and sockets would outlive a KafkaAdminClient that found no broker in time. RuntimeError:
                # who was interrupted before that thread began is told so, and the thread ends by itself.
                with contextlib.suppress(RuntimeError):
                    client.close()
                    client._net.stop()

    def __enter__(self) -> ClusterAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def describe(self, transactional_id: str) -> Described | None:
        """The coordinator's view of one transactional.id, None when it knows none (never used, or expired)."""
        with _translated("DescribeTransactions", f"transactional.id {transactional_id}", "DESCRIBE"):
            try:
                found = self._client.describe_transactions([transactional_id])[transactional_id]
            except kafka_errors.TransactionalIdNotFoundError:
                return None
        return Described(
            str(found.state.value), found.producer_id, found.producer_epoch, found.transaction_start_time_ms
        )

    def transactions(self, producer_ids: Collection[int] = (), states: Collection[str] = ()) -> list[Listed]:
        """Every transactional.id that the coordinators know (and that we may see), or those of these producer ids, in
        these states."""
        with _translated("ListTransactions"):
            listings = self._client.list_transactions(
                producer_id_filters=sorted(producer_ids), state_filters=sorted(states)
            )
        names = sorted({row.transactional_id for rows in listings.values() for row in rows})
        return self.describe_all(names)

    def ongoing(self, prefix: str) -> list[str]:
        """The transactional.ids with this prefix that have a transaction open."""
        with _translated("ListTransactions"):
            listings = self._client.list_transactions(state_filters=["Ongoing"])
        return sorted({n for rows in listings.values() for r in rows if (n := r.transactional_id).startswith(prefix)})

    def describe_all(self, transactional_ids: Sequence[str]) -> list[Listed]:
        """The coordinators' view of these; one that none knows is left out."""
        return [row for chunk in _chunks(transactional_ids) for row in self._described(chunk)]

    def _described(self, names: Sequence[str]) -> list[Listed]:
        with _translated("DescribeTransactions", f"transactional.id {names[0]}", "DESCRIBE"):
            try:
                found = self._client.describe_transactions(names)
            except (kafka_errors.TransactionalIdNotFoundError, kafka_errors.AuthorizationError) as error:
                if len(names) > 1:
                    return [row for name in names for row in self._described([name])]
                if isinstance(error, kafka_errors.AuthorizationError):
                    raise
                return []  # expired since it was listed
        return [
            Listed(
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

    def overdue(self, transaction: Listed) -> bool:
        """Whether its coordinator, by its own clock, has it open for longer than its timeout. Kafka 3.8 and later."""
        with _translated("ListTransactions"):
            found = self._client.list_transactions(
                [transaction.coordinator],
                producer_id_filters=[transaction.producer_id],
                state_filters=["Ongoing"],
                duration_filter_ms=transaction.timeout_ms,
            )
        return any(row.transactional_id == transaction.transactional_id for rows in found.values() for row in rows)

    def abort_if_ongoing(self, transaction: Listed) -> str:
        """One InitProducerId that changes something only while the transaction is open; the answer's code by its name.

        An open transaction is aborted at epoch + 1 whatever epoch the request names, and the answer is
        CONCURRENT_TRANSACTIONS; in every other state the epoch is compared (TransactionCoordinator.
        prepareInitProducerIdTransit), and the one named here is nobody's. Asked a second time it would be refused too.
        """
        request = InitProducerIdRequest(
            transactional_id=transaction.transactional_id,
            transaction_timeout_ms=transaction.timeout_ms,
            producer_id=transaction.producer_id,
            producer_epoch=(transaction.epoch + _FAR) % _EPOCHS,
            min_version=3,
            max_version=4,
        )
        with _translated("InitProducerId", f"transactional.id {transaction.transactional_id}", "WRITE"):
            answer = self._client._manager.run(self._send, request, transaction.coordinator)
        return str(kafka_errors.for_code(answer.error_code).__name__.removesuffix("Error"))

    async def _send(self, request: Any, node: int) -> Any:
        return await self._client._manager.send(request, node_id=node)

    def partitions(self, topics: Iterable[str] | None = None) -> dict[Partition, int]:
        """Partitions and their leaders (-1: none) of these topics, or of all; Unavailable for a topic that is not."""
        with _translated("Metadata"):
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
        """Names of all topics that the broker that is asked knows and that we may see."""
        with _translated("Metadata"):
            described = self._client.describe_topics(None)
        return {topic["name"] for topic in described if not topic["error_code"]}

    def known_everywhere(self, topics: Iterable[str]) -> set[str]:
        """Those of the topics that each broker knows, with a leader for every partition. One that does not answer is
        left out: a client cannot ask it either, and it hears of all topics before it serves again."""
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
        """The ids (KIP-516) of those topics that there are and that we may see."""
        with _translated("Metadata"):
            described = self._client.describe_topics(sorted(set(topics)))
        return {topic["name"]: str(topic["topic_id"]) for topic in described if not topic["error_code"]}

    def missing_topics(self, topics: Iterable[str]) -> set[str]:
        """Return those of the topics that the broker that is asked does not know."""
        with _translated("Metadata"):
            described = self._client.describe_topics(sorted(set(topics)))
        unknown = kafka_errors.UnknownTopicOrPartitionError.errno
        return {topic["name"] for topic in described if topic["error_code"] == unknown}

    def open_producers(self, partitions: Mapping[Partition, int] | Iterable[Partition]) -> list[OpenProducer]:
        """Producers with an open transaction on these partitions; one without a leader is left out."""
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
        with _translated("DescribeProducers", f"topic {topics[0]}", "READ"):
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

    def held_back(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """Offsets between the last stable offset and the high watermark of each partition."""
        asked = {TopicPartition(*p): OffsetSpec.LATEST for p in partitions}
        topics = ", ".join(sorted({topic for topic, _ in partitions}))
        with _translated("ListOffsets", f"topic {topics}", "DESCRIBE"):
            high = self._client.list_partition_offsets(asked)
            stable = self._client.list_partition_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
        return {(tp.topic, tp.partition): high[tp].offset - stable[tp].offset for tp in asked}

    def all_coordinators_there(self) -> bool:
        """Whether each partition of the transaction log has a leader, so that no transactional.id is out of sight."""
        log_partitions = self.partitions([TRANSACTION_LOG])
        return bool(log_partitions) and all(leader >= 0 for leader in log_partitions.values())

    def write_abort_marker(self, producer: OpenProducer) -> None:
        """WriteTxnMarkers to the partition's leader, past the coordinator. Needs CLUSTER_ACTION (or ALTER) on the
        cluster. Only eos.kafka.admin.transactions may decide that nobody else will write one."""
        spec = AbortTransactionSpec(
            TopicPartition(*producer.partition),
            producer.producer_id,
            producer.epoch,
            max(producer.coordinator_epoch, 0),
        )
        with _translated("WriteTxnMarkers", "the cluster", "CLUSTER_ACTION"):
            self._client.abort_transaction(spec)

    def apis(self) -> frozenset[str]:
        """Names of the requests that a broker understands, as Kafka writes them; newer ones than kafka-python knows are
        left out (its own `api_versions` raises ValueError for a broker that has one: 4.4.0 does)."""
        with _translated("ApiVersions"):
            offered = self._client._manager.broker_version_data.api_versions
        return frozenset(api.name for api in ApiKey if api in offered)

    def transaction_version(self) -> int:
        """The finalized transaction.version: 2 from 4.0 on (KIP-890), 0 where the feature is unknown."""
        with _translated("DescribeFeatures"):
            features = self._client.describe_features()
        return int(features.get("transaction.version", {}).get("finalized", (0, 0))[1])

    def members(self, group: str) -> list[dict[str, Any]]:
        """Return the members of a classic group; they have subscriptions only while the group is stable."""
        return list(self.classic_group(group)["members"])

    def classic_group(self, group: str) -> dict[str, Any]:
        """Return what DescribeGroups says: `members`, and the assignment strategy as `protocol_data` ("" unless the
        group is stable)."""
        with _translated("DescribeGroups", f"group {group}", "DESCRIBE"):
            described: dict[str, Any] = self._client.describe_groups([group])[group]
        return described

    def given(self, group: str, member_id: str) -> frozenset[Partition]:
        """What a group with group.protocol=consumer gave to this member, if it knows it."""
        from eos.kafka.client.consumer_groups import ConsumerGroupDescribeRequest  # schemas of its own, for this alone

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
        """What we may do with a group by its ACLs, by name; None when its coordinator does not say. Not asked through
        librdkafka: its DescribeConsumerGroups ends the process with a failed assertion (`rd_kafka_enq_once_del_source`)
        when the coordinator answers after the request's timeout (2.16.1, seen with one that stood still)."""
        # In version 6 a group that is not there yet is an error, and has no rights.
        request = DescribeGroupsRequest(groups=[group], include_authorized_operations=True, max_version=5)
        described = self._described_group(group, request)
        codes = described.authorized_operations or ()  # None: a broker that does not say
        found = {ACLOperation(code).name for code in codes if code >= ACLOperation.READ}
        return frozenset(found) or None

    def _described_group(self, group: str, request: Any) -> Any:
        """What the group's coordinator answers of it."""

        async def ask() -> Any:
            coordinators = await self._client._find_coordinator_ids([group])
            return (await self._send(request, coordinators[group])).groups[0]

        with _translated(request.name.removesuffix("Request"), f"group {group}", "DESCRIBE"):
            described = self._client._manager.run(ask)
            if described.error_code:
                raise kafka_errors.for_code(described.error_code)()
        return described

    def committed_metadata(self, group: str) -> list[str]:
        """Return the metadata of the group's committed offsets."""
        return list(filter(None, self.metadata_by_partition(group).values()))

    def metadata_by_partition(self, group: str) -> dict[Partition, str]:
        """Return the metadata of each of the group's committed offsets ("": it has none), without the NUL that
        confluent-kafka adds."""
        found = self._committed(group).items()
        return {(at.topic, at.partition): str(one.metadata or "").rstrip("\0") for at, one in found}

    def committed_topics(self, group: str) -> set[str]:
        """Of which the group has committed offsets; those that pend in an open transaction do not count."""
        return {place.topic for place in self._committed(group)}

    def _committed(self, group: str) -> Mapping[Any, Any]:
        with _translated("OffsetFetch", f"group {group}", "DESCRIBE"):
            found: Mapping[Any, Any] = self._client.list_group_offsets(group)[group]
            return found

    def remove_member(self, group: str, group_instance_id: str) -> None:
        """A static member leaves for good (its close() alone leaves it in the group until the session timeout)."""
        with _translated("LeaveGroup", f"group {group}", "READ"):
            self._client.remove_group_members(group, [MemberToRemove(group_instance_id=group_instance_id)])


@contextlib.contextmanager
def _translated(request: str, resource: str = "", operation: str = "") -> Iterator[None]:
    """`resource`, `operation`: the right without which brokers refuse this request; kafka-python does not name it."""
    try:
        yield
    except kafka_errors.AuthorizationError as error:
        if resource:
            raise not_authorised(resource, operation) from error
        raise NotAuthorised(f"{request} was refused: {error}") from error
    except kafka_errors.KafkaError as error:
        raise Unavailable(f"{request} failed: {error}") from error


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _CHUNK):
        yield items[start : start + _CHUNK]
