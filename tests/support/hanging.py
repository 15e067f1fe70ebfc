"""Create hanging transactions with late requests, which a broker without partition verification accepts.

A kill during the end of a transaction can leave a lone broker in the same state: the coordinator reports Complete (or
nothing), and the partition is open. The broker must run with `transaction.partition.verification.enable=false`. This
module must never import `eos`.
"""

from __future__ import annotations

from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.protocol.producer import ProduceRequest, TxnOffsetCommitRequest
from kafka.record.default_records import DefaultRecordBatchBuilder

from tests.support.reading import wait_until

NO_VERIFICATION = {"transaction.partition.verification.enable": "false"}
_NOT_READY = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}


def produce_late(
    servers: str,
    topic: str,
    partition: int,
    transactional_id: str,
    producer: tuple[int, int],
    sequence: int,
    leader: int = 0,
) -> None:
    """Write one transactional record whose partition was not added to a transaction (no AddPartitionsToTxn)."""
    producer_id, epoch = producer
    batch = DefaultRecordBatchBuilder(2, 0, True, producer_id, epoch, sequence, 10_000)
    batch.append(0, timestamp=1, key=None, value=b"late", headers=[])
    data = ProduceRequest.TopicProduceData
    request = ProduceRequest(
        transactional_id=transactional_id,
        acks=-1,
        timeout_ms=10_000,
        topic_data=[
            data(name=topic, partition_data=[data.PartitionProduceData(index=partition, records=bytes(batch.build()))])
        ],
        max_version=9,
    )
    answer = _send(servers, request, leader)
    code = answer.responses[0].partition_responses[0].error_code
    assert code == 0, kafka_errors.for_code(code)


def commit_offset_late(
    servers: str,
    group: str,
    topic: str,
    offset: int,
    transactional_id: str,
    producer: tuple[int, int],
    coordinator: int = 0,
) -> None:
    """Write a pending offset of a group that was not added to a transaction (no AddOffsetsToTxn)."""
    producer_id, epoch = producer
    topics = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    request = TxnOffsetCommitRequest(
        transactional_id=transactional_id,
        group_id=group,
        producer_id=producer_id,
        producer_epoch=epoch,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=[
            topics(
                name=topic,
                partitions=[
                    topics.TxnOffsetCommitRequestPartition(
                        partition_index=0, committed_offset=offset, committed_leader_epoch=-1, committed_metadata=""
                    )
                ],
            )
        ],
        max_version=3,
    )
    _wait_for_coordinator(servers, group, topic)
    code = _send(servers, request, coordinator).topics[0].partitions[0].error_code
    assert code == 0, kafka_errors.for_code(code)


def _wait_for_coordinator(servers: str, group: str, topic: str) -> None:
    """Wait for the group's coordinator: a fresh cluster creates its offsets topic at the first query."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group})

    def answers() -> bool:
        try:
            consumer.committed([TopicPartition(topic, 0)], timeout=30)
        except KafkaException as error:
            if error.args[0].code() not in _NOT_READY:
                raise
            return False
        return True

    try:
        wait_until("the group's coordinator answers", answers, 30)
    finally:
        consumer.close()


def _send(servers: str, request: Any, node: int) -> Any:
    admin = KafkaAdminClient(bootstrap_servers=servers)
    try:
        return admin._manager.run(_sent, admin, request, node)
    finally:
        admin.close()


async def _sent(admin: KafkaAdminClient, request: Any, node: int) -> Any:
    return await admin._manager.send(request, node_id=node)
