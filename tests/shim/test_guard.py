"""Guard real Kafka from three clients: each refusal is an error as brokers send it, and a log line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPartition
from kafka.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError
from kafka.structs import OffsetAndMetadata

from eos.broker import LocalKafka
from tests.shim import java
from tests.shim.protected_clients import texts
from tests.shim.shims import RunningShim, eventually, refused, running
from tests.support.reading import create_topic

Names = Callable[[str], str]


class Guarded:
    """Run a shim with this module's policy: `topic` and `group` are guarded, `free` and all other groups are not."""

    def __init__(self, kafka: LocalKafka, shim: RunningShim, names: Names) -> None:
        self.kafka, self.shim, self.servers = kafka, shim, shim.bootstrap_servers
        self.topic = create_topic(kafka.bootstrap_servers, names("guarded"))
        self.free = create_topic(kafka.bootstrap_servers, names("free"))
        self.group, self.name = names("guarded"), names("allowed")

    def refusals(self, api: str) -> list[dict[str, Any]]:
        """Return the refusals logged so far; a line may come after the response to the client."""
        return [event for event in self.shim.named("request refused by policy") if event["api"] == api]

    def values(self, topic: str) -> list[str]:
        return texts(self.kafka.bootstrap_servers, topic)


@pytest.fixture
def guarded(kafka: LocalKafka, names: Names, tmp_path: Path) -> Iterator[Guarded]:
    prefix = names("")
    policy = f"""
    [[topic]]
    name = "{prefix}guarded"
    transactional_only = true
    read_committed_only = true
    [[group]]
    name = "{prefix}guarded"
    transactional_offsets_only = true
    [transactions]
    max_timeout_ms = 20000
    [[principal]]
    name = "ANONYMOUS"
    transactional_id_prefixes = ["{prefix}allowed"]
    """
    path = tmp_path / "policy.toml"
    path.write_text(policy)
    with running(kafka.bootstrap_servers, "--policy", str(path)) as shim:
        yield Guarded(kafka, shim, names)


def transactional(servers: str, name: str, **more: Any) -> Producer:
    settings = {"bootstrap.servers": servers, "transactional.id": name, "transaction.timeout.ms": 10_000}
    return Producer(settings | {"log_level": 0} | more)


def commit_one(servers: str, name: str, topic: str, value: str) -> None:
    producer = transactional(servers, name)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value, partition=0)
    producer.commit_transaction(30)
    producer.close()


def test_confluent_kafka_writes_guarded_topic_transactionally(guarded: Guarded) -> None:
    errors: list[Any] = []
    plain = Producer({"bootstrap.servers": guarded.servers, "log_level": 0})
    for topic in (guarded.topic, guarded.free):
        plain.produce(topic, "plain", partition=0, on_delivery=lambda error, _: errors.append(error))
        assert plain.flush(30) == 0
    assert [error and error.code() for error in errors] == [KafkaError.TOPIC_AUTHORIZATION_FAILED, None]
    commit_one(guarded.servers, guarded.name, guarded.topic, "transactional")
    assert guarded.values(guarded.topic) == ["transactional"]
    assert guarded.values(guarded.free) == ["plain"]
    (refusal,) = eventually(lambda: guarded.refusals("Produce"))
    assert refusal["error"] == "TOPIC_AUTHORIZATION_FAILED"
    assert guarded.topic in refusal["reason"]


def test_kafka_python_is_refused_by_the_policy(guarded: Guarded) -> None:
    producer = KafkaProducer(bootstrap_servers=guarded.servers, retries=2)
    with pytest.raises(TopicAuthorizationFailedError):
        producer.send(guarded.topic, b"plain", partition=0).get(30)
    producer.close()
    # An idempotent producer of this client cannot continue after such an error.
    producer = KafkaProducer(bootstrap_servers=guarded.servers, retries=2)
    producer.send(guarded.free, b"plain", partition=0).get(30)
    producer.close()
    commit_one(guarded.servers, guarded.name, guarded.topic, "transactional")

    def consumer(topic: str, isolation: str) -> Any:
        made = KafkaConsumer(
            bootstrap_servers=guarded.servers,
            group_id=guarded.group,
            enable_auto_commit=False,
            isolation_level=isolation,
            auto_offset_reset="earliest",
        )
        made.assign([PythonPartition(topic, 0)])
        return made

    uncommitted = consumer(guarded.topic, "read_uncommitted")
    with pytest.raises(TopicAuthorizationFailedError):
        eventually(lambda: uncommitted.poll(200))
    uncommitted.close()
    committed = consumer(guarded.topic, "read_committed")
    records = eventually(lambda: committed.poll(200))
    assert [record.value for batch in records.values() for record in batch] == [b"transactional"]
    with pytest.raises(GroupAuthorizationFailedError):
        committed.commit({PythonPartition(guarded.topic, 0): OffsetAndMetadata(1, "", -1)})
    committed.close()
    eventually(lambda: guarded.refusals("OffsetCommit"))
    assert {event["api"] for event in guarded.shim.named("request refused by policy")} == {
        "Produce",
        "Fetch",
        "OffsetCommit",
    }


def test_confluent_kafka_reads_guarded_topic_only_as_read_committed(
    guarded: Guarded,
) -> None:
    commit_one(guarded.servers, guarded.name, guarded.topic, "transactional")
    settings = {"bootstrap.servers": guarded.servers, "group.id": guarded.group, "enable.auto.commit": False}
    uncommitted = Consumer(settings | {"isolation.level": "read_uncommitted"})
    uncommitted.assign([TopicPartition(guarded.topic, 0, 0)])
    message = eventually(lambda: uncommitted.poll(0.2))
    assert message.error().code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    uncommitted.close()
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(guarded.topic, 0, 0)])
    message = eventually(lambda: consumer.poll(0.2))
    assert message.value() == b"transactional"
    with pytest.raises(KafkaException) as error:
        consumer.commit(offsets=[TopicPartition(guarded.topic, 0, 1)], asynchronous=False)
    assert error.value.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    producer = transactional(guarded.servers, guarded.name)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.send_offsets_to_transaction([TopicPartition(guarded.topic, 0, 1)], consumer.consumer_group_metadata(), 30)
    producer.commit_transaction(30)
    assert consumer.committed([TopicPartition(guarded.topic, 0)], 30)[0].offset == 1
    consumer.close()
    producer.close()


def test_long_timeout_and_foreign_id_are_refused_at_init(
    guarded: Guarded,
) -> None:
    for name, timeout_ms, code in (
        (guarded.name, 20_001, KafkaError.INVALID_TRANSACTION_TIMEOUT),
        ("somebody-elses", 10_000, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    ):
        producer = transactional(guarded.servers, name, **{"transaction.timeout.ms": timeout_ms})
        with pytest.raises(KafkaException) as error:
            producer.init_transactions(30)
        assert error.value.args[0].code() == code
    refusals = eventually(lambda: len(found := guarded.refusals("InitProducerId")) >= 2 and found)
    assert [event["error"] for event in refusals] == [
        "INVALID_TRANSACTION_TIMEOUT",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    ]


def test_java_console_clients_are_refused(guarded: Guarded) -> None:
    """Run the newest Java clients, which send topic ids in Produce and Fetch; the guard learns names from Metadata."""
    commit_one(guarded.servers, guarded.name, guarded.topic, "transactional")
    produce = ["--bootstrap-server", guarded.servers, "--topic", guarded.topic]
    _, output, errors = java.ended(java.CONSOLE_PRODUCER, *produce, input="plain\n")
    assert "TopicAuthorizationException" in output + errors
    eventually(lambda: guarded.refusals("Produce"))
    consume = ["--bootstrap-server", guarded.servers, "--topic", guarded.topic, "--from-beginning"]
    # The consumer's timeout is longer than the test waits, so the test decides when to give up.
    consume += ["--max-messages", "1", "--timeout-ms", "120000"]
    _, output, errors = java.ended(java.CONSOLE_CONSUMER, *consume)
    assert "TopicAuthorizationException" in output + errors
    eventually(lambda: guarded.refusals("Fetch"))
    output = java.run(java.CONSOLE_CONSUMER, *consume, "--isolation-level", "read_committed")
    assert output.split() == ["transactional"]
    assert guarded.values(guarded.topic) == ["transactional"]


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("[[topics]]\nname = 'a'", "topics is unknown"),
        ("[[topic]]\ntransactional_only = true", "topic no. 1: name is missing"),
        ("[[topic]]\nname = 'a'", "it has no rule for a"),
        ("[[topic]]\nname = 'a'\ntransactional_only = 'yes'", "expected bool"),
        ("[transactions]\nmax_timeout_ms = 0", "must be at least 1"),
        ("[[principal]]\nname = 'a'\ntransactional_id_prefixes = [1]", "expected list"),
    ],
)
def test_invalid_policy_is_one_sentence_and_exit_code_78(tmp_path: Path, policy: str, sentence: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(policy)
    refused(78, sentence, "--upstream", "127.0.0.1:1", "--policy", str(path))
