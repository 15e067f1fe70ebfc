"""Send queries to one chosen node, which client libraries do not support.

A client sends a query to any known node, even a paused one, and waits: a client with a single bootstrap server got two
of three responses from other nodes. The module uses one version each of Metadata, FindCoordinator (KIP-98) and
DescribeQuorum (KIP-595) that every broker from 3.9 on supports. Functions raise OSError without a response.
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
RESPONSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Replicas:
    leader: int
    """The node id of the leader, or -1 without one."""
    all: frozenset[int]
    in_sync: frozenset[int]


@dataclass(frozen=True)
class Metadata:
    """Hold one node's view of the cluster. The view of another node may lag by half a second."""

    nodes: frozenset[int]
    partitions: dict[tuple[str, int], Replicas]
    """The partitions of all topics, including internal ones."""

    def not_in_sync(self) -> list[tuple[str, int]]:
        """Return the partitions without a leader or with replicas that are not in sync."""
        return [partition for partition, one in self.partitions.items() if one.leader < 0 or one.in_sync != one.all]


def fetch_metadata(server: str, timeout_s: float = RESPONSE_TIMEOUT_S) -> Metadata:
    answer = _send_request(server, MetadataRequest(version=4, topics=None), MetadataResponse, timeout_s)
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


def find_coordinator(server: str, name: str, kind: int, timeout_s: float = RESPONSE_TIMEOUT_S) -> int | None:
    """Return the coordinator's node id for the group or transactional.id `name`, or None while it has none.

    The broker creates the internal topic if necessary.
    """
    request = FindCoordinatorRequest(version=1, key=name, key_type=kind)
    answer = _send_request(server, request, FindCoordinatorResponse, timeout_s)
    return None if answer.error_code else int(answer.node_id)


def find_controller(server: str, timeout_s: float = RESPONSE_TIMEOUT_S) -> int | None:
    """Return the node id of the active controller, or None while there is none."""
    topic = DescribeQuorumRequest.TopicData
    partition = topic.PartitionData(partition_index=0)
    request = DescribeQuorumRequest(version=0, topics=[topic(topic_name="__cluster_metadata", partitions=[partition])])
    answer = _send_request(server, request, DescribeQuorumResponse, timeout_s)
    if answer.error_code:
        return None
    quorum = answer.topics[0].partitions[0]
    return int(quorum.leader_id) if not quorum.error_code and quorum.leader_id >= 0 else None


def _send_request(server: str, request: Any, response: Any, timeout_s: float) -> Any:
    host, _, port = server.rpartition(":")
    request.with_header(correlation_id=1, client_id="eos-testing")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(request.encode(header=True, framed=True))
        with connection.makefile("rb") as answers:
            size = _require_length(answers.read(4), 4)
            frame = size + _require_length(answers.read(length := int.from_bytes(size)), length)
    return response.decode(frame, version=request.version, header=True, framed=True)


def _require_length(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ConnectionError("the broker closed the connection instead of answering")
    return data
