"""The questions that must be put to one chosen node, which no client library lets a caller choose.

A client would ask any node it knows, a paused one too, and wait for it: one that was given a single server had two of
three answers from the other nodes. Owns that exchange, in one version of Metadata, FindCoordinator (KIP-98) and
DescribeQuorum (KIP-595) each that every broker from 3.9 on serves. Raises OSError for no answer.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from kafka.protocol.admin import DescribeQuorumRequest, DescribeQuorumResponse
from kafka.protocol.metadata import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)

GROUP, TRANSACTION = 0, 1
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Replicas:
    leader: int
    """-1 when there is none."""
    all: frozenset[int]
    in_sync: frozenset[int]


@dataclass(frozen=True)
class Metadata:
    """The cluster as one node sees it: another one may be half a second behind."""

    nodes: frozenset[int]
    partitions: dict[tuple[str, int], Replicas]
    """Of every topic, Kafka's internal ones too."""

    def not_in_sync(self) -> list[tuple[str, int]]:
        """The partitions without a leader, or with replicas that are not in sync."""
        return [place for place, one in self.partitions.items() if one.leader < 0 or one.in_sync != one.all]


def metadata(server: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Metadata:
    answer = _ask(server, MetadataRequest(version=4, topics=None), MetadataResponse, timeout_s)
    return Metadata(
        frozenset(int(broker.node_id) for broker in answer.brokers),
        {
            (topic.name, int(p.partition_index)): Replicas(
                int(p.leader_id), frozenset(p.replica_nodes), frozenset(p.isr_nodes)
            )
            for topic in answer.topics
            for p in topic.partitions
        },
    )


def coordinator(server: str, name: str, kind: int, timeout_s: float = ANSWER_TIMEOUT_S) -> int | None:
    """The node that coordinates the group or transactional.id `name`; None while there is none.

    The broker makes the internal topic if it has to.
    """
    request = FindCoordinatorRequest(version=1, key=name, key_type=kind)
    answer = _ask(server, request, FindCoordinatorResponse, timeout_s)
    return None if answer.error_code else int(answer.node_id)


def quorum_leader(server: str, timeout_s: float = ANSWER_TIMEOUT_S) -> int | None:
    """The active controller; None while there is none."""
    topic = DescribeQuorumRequest.TopicData
    partition = topic.PartitionData(partition_index=0)
    request = DescribeQuorumRequest(version=0, topics=[topic(topic_name="__cluster_metadata", partitions=[partition])])
    answer = _ask(server, request, DescribeQuorumResponse, timeout_s)
    if answer.error_code:
        return None
    told = answer.topics[0].partitions[0]
    return int(told.leader_id) if not told.error_code and told.leader_id >= 0 else None


def _ask(server: str, request: Any, response: Any, timeout_s: float) -> Any:
    host, _, port = server.rpartition(":")
    request.with_header(correlation_id=1, client_id="eos-testing")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(request.encode(header=True, framed=True))
        with connection.makefile("rb") as answers:
            size = _exactly(answers.read(4), 4)
            frame = size + _exactly(answers.read(length := int.from_bytes(size)), length)
    return response.decode(frame, version=request.version, header=True, framed=True)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ConnectionError("the broker closed the connection instead of answering")
    return data
