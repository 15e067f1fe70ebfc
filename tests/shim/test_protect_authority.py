"""Send requests of unauthorised clients for an owner's transactional.id: none has an effect.

The broker has logins and rights. The clients know the id and its identity. One has no login, one has a login without
any right.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka.protocol import producer as protocol
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest
from kafka.record.memory_records import MemoryRecordsBuilder

from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from tests.shim.protected_clients import send, texts
from tests.shim.shims import RunningShim, running
from tests.support.proxy import error_codes
from tests.support.reading import create_topic, transaction_of
from tests.support.secure import ALICE, SecureKafka, make_pki, secure_kafka
from tests.support.wire import Wire
from tests.support.wire import answer as decoded

Names = Callable[[str], str]
Identity = tuple[int, int]
LOGIN = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "alice"}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    more = {
        "super.users": "User:ANONYMOUS;User:alice",
        "listener.name.sasl.plain.sasl.jaas.config": f'{module} user_alice="{ALICE}" user_mallory="m";',
    }
    with secure_kafka(make_pki(tmp_path_factory.mktemp("pki")), more) as secure:
        yield secure


@pytest.fixture
def shim(secure: SecureKafka) -> Iterator[RunningShim]:
    with running(secure.servers["SASL"], "--log-level", "debug") as shim:
        yield shim


def records(identity: Identity, sequence: int, transactional: bool = True) -> bytes:
    builder = MemoryRecordsBuilder(2, 0, 1 << 20)
    builder.set_producer_state(*identity, sequence, transactional)
    builder.append(timestamp=1, key=None, value=b"a stranger's")
    builder.close()
    return bytes(builder.buffer())


def produce(name: str, topic: str, batch: bytes) -> Any:
    data = protocol.ProduceRequest.TopicProduceData
    partition = data.PartitionProduceData(version=9, index=0, records=batch)
    topics = [data(version=9, name=topic, partition_data=[partition])]
    return protocol.ProduceRequest(version=9, transactional_id=name, acks=-1, timeout_ms=1_000, topic_data=topics)


def requests(name: str, identity: Identity, topic: str) -> list[Any]:
    """Return one request of each class, as the owner would send it."""
    whose = {"transactional_id": name, "producer_id": identity[0], "producer_epoch": identity[1]}
    added = protocol.AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(version=0, name=topic, partitions=[0])
    committed = protocol.TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    offset = committed.TxnOffsetCommitRequestPartition(
        version=2, partition_index=0, committed_offset=5, committed_metadata="", committed_leader_epoch=-1
    )
    offsets = [committed(version=2, name=topic, partitions=[offset])]
    init = {"version": 4, "transactional_id": name, "transaction_timeout_ms": 9_000}
    return [
        protocol.AddPartitionsToTxnRequest(
            version=2,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=identity[0],
            v3_and_below_producer_epoch=identity[1],
            v3_and_below_topics=[added],
        ),
        protocol.AddOffsetsToTxnRequest(version=2, group_id="strangers", **whose),
        protocol.TxnOffsetCommitRequest(version=2, group_id="strangers", topics=offsets, **whose),
        *(produce(name, topic, records(identity, sequence)) for sequence in (0, 1, 3, 1_000)),
        produce(name, topic, records(identity, 7, transactional=False)),
        protocol.EndTxnRequest(version=2, committed=True, **whose),
        protocol.EndTxnRequest(version=2, committed=False, **whose),
        protocol.InitProducerIdRequest(producer_id=-1, producer_epoch=-1, **init),
        protocol.InitProducerIdRequest(producer_id=identity[0], producer_epoch=identity[1], **init),
    ]


def login(wire: Wire) -> None:
    assert wire.ask(SaslHandshakeRequest(version=1, mechanism="PLAIN")).error_code == 0
    assert wire.ask(SaslAuthenticateRequest(version=1, auth_bytes=b"\0mallory\0m")).error_code == 0


def attack(shim: RunningShim, name: str, identity: Identity, topic: str) -> None:
    """Send every request three times on a connection, so that a challenged request is repeated."""
    examined = 0
    with Wire(shim.bootstrap_servers) as known:
        login(known)
        for request in [each for each in requests(name, identity, topic) for _ in range(3)]:
            answered = set(error_codes(known.ask(request).to_dict()))
            assert answered, request
            assert 0 not in answered, (request, answered)
            examined += 1
    for request in requests(name, identity, topic):
        # Send all copies at once: the broker closes the connection at the first one that it reads, and none may reach
        # it.
        with Wire(shim.bootstrap_servers) as unknown:
            unknown.send(request, request, request)
            unknown.socket.shutdown(socket.SHUT_WR)
            answered = set[int]()
            with suppress(EOFError, ConnectionError):
                while True:
                    answered |= set(error_codes(decoded(request, unknown.receive()).to_dict()))
            assert 0 not in answered, (request, answered)
            examined += 1
    assert examined == 4 * len(requests(name, identity, topic))


def test_unauthorised_clients_do_not_change_transactions(secure: SecureKafka, shim: RunningShim, names: Names) -> None:
    plain = secure.servers["PLAINTEXT"]
    topic, name = create_topic(plain, names("out")), names("id")
    settings = LOGIN | {"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name, "linger.ms": 0}
    settings |= {"sasl.password": ALICE, "log_level": 0, "message.timeout.ms": 9_000}
    owner = Producer(settings)
    owner.init_transactions(30)
    first = transaction_of(plain, name)
    virtual = (first.producer_id, first.producer_epoch)
    attack(shim, name, virtual, topic)
    wanted = list[str]()
    for number, commits in enumerate((True, True, False, True)):
        owner.begin_transaction()
        assert send(owner, topic, f"{number}-a", f"{number}-b") == []
        attack(shim, name, virtual, topic)
        assert send(owner, topic, f"{number}-c") == []
        if commits:
            owner.commit_transaction(30)
            wanted += [f"{number}-{each}" for each in "abc"]
        else:
            owner.abort_transaction(30)
        found = transaction_of(plain, name)
        if not commits:  # At an abort, librdkafka takes its next identity.
            virtual = (found.producer_id, found.producer_epoch)
        assert (found.producer_id, found.producer_epoch) == (first.producer_id, first.producer_epoch + number + 1)
        with ClusterAdmin(Settings(settings)) as admin:
            seen = admin.describe(name)
            assert seen is not None
            assert (seen.producer_id, seen.epoch) == virtual
        attack(shim, name, virtual, topic)
    owner.close()
    assert texts(plain, topic) == wanted
