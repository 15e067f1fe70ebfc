"""Errors for missing rights name the resource and the operation; tested without Kafka."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from kafka import errors as kafka_errors

from eos.errors import Action, CallFailed, NotAuthorised, stop_error
from eos.kafka.admin import fence as fencing
from eos.kafka.admin import reset
from eos.kafka.admin.facts import Topic
from eos.kafka.admin.reset import GroupOffsets, parse_target
from eos.kafka.client.cluster import ClusterAdmin, OpenProducer
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.session.producer.producer import TransactionalProducer
from eos.session.producer.states import Event


def said(resource: str, operation: str) -> str:
    return f"{resource}: not authorised to {operation} it: add an ACL that allows {operation} on {resource}"


# ---- eos txn ------------------------------------------------------------------------------------------------------


class Denying:
    """kafka-python's admin on a cluster that denies requests about `denied`, and names it as little as a broker
    does."""

    def __init__(self, denied: str) -> None:
        self._denied = denied

    def describe_transactions(self, names: list[str]) -> dict[str, Any]:
        if self._denied in names:
            raise kafka_errors.TransactionalIdAuthorizationFailedError
        state = SimpleNamespace(
            producer_id=1,
            producer_epoch=0,
            state=SimpleNamespace(value="Empty"),
            coordinator_id=0,
            transaction_start_time_ms=-1,
            transaction_timeout_ms=10_000,
            topic_partitions=(),
        )
        return dict.fromkeys(names, state)

    def describe_producers(self, partitions: list[Any], broker_id: int) -> dict[Any, Any]:
        if self._denied in {tp.topic for tp in partitions}:
            raise kafka_errors.TopicAuthorizationFailedError
        return {}

    def abort_transaction(self, _: object) -> None:
        raise kafka_errors.ClusterAuthorizationFailedError

    def describe_groups(self, groups: list[str]) -> dict[str, Any]:
        raise kafka_errors.GroupAuthorizationFailedError


def admin_denying(denied: str = "") -> ClusterAdmin:
    admin = ClusterAdmin.__new__(ClusterAdmin)
    admin._client = Denying(denied)
    return admin


def test_denied_transaction_query_reports_its_transactional_id() -> None:
    admin = admin_denying("b")
    assert [row.transactional_id for row in admin.describe_transactions(["a", "c"])] == ["a", "c"]
    for ask in (lambda: admin.describe("b"), lambda: admin.describe_transactions(["a", "b", "c"])):
        with pytest.raises(NotAuthorised) as raised:
            ask()
        assert str(raised.value) == said("transactional.id b", "DESCRIBE")


def test_denied_producer_query_reports_its_topic() -> None:
    admin = admin_denying("u")
    assert admin.open_producers({("t", 0): 1, ("v", 0): 1}) == []
    with pytest.raises(NotAuthorised) as raised:
        admin.open_producers({("t", 0): 1, ("u", 0): 1, ("u", 1): 1, ("v", 0): 1})
    assert str(raised.value) == said("topic u", "READ")


def test_denied_marker_and_denied_group_query_report_their_right() -> None:
    with pytest.raises(NotAuthorised) as raised:
        admin_denying().write_abort_marker(OpenProducer(("t", 0), 7, 3, 100, 1_372_939_200_000, 0))
    assert str(raised.value) == said("the cluster", "CLUSTER_ACTION")
    with pytest.raises(NotAuthorised) as raised:
        admin_denying().members("g")
    assert str(raised.value) == said("group g", "DESCRIBE")


def test_denied_init_reports_its_transactional_id() -> None:
    def init_transactions(_: float) -> None:
        raise KafkaException(KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))

    producer: Any = SimpleNamespace(init_transactions=init_transactions)
    with pytest.raises(NotAuthorised) as raised:
        fencing.fence(Settings(), "app-one", world=World(producer=lambda _: producer))
    assert str(raised.value).startswith(said("transactional.id app-one", "WRITE"))


# ---- a worker -----------------------------------------------------------------------------------------------------


def test_denied_offset_commit_reports_its_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """READ on the input may be withdrawn between a fetch and the commit of its records."""
    transactional = TransactionalProducer(Settings({"group.id": "g"}), "t")
    transactional._client = SimpleNamespace(producer=SimpleNamespace(send_offsets_to_transaction=None))  # type: ignore[assignment]
    transactional._machine.fire(Event.INITIALISED)
    transactional._machine.fire(Event.BEGIN)

    def refused(*_: object, **__: object) -> None:
        raise transactional._classify_failure(
            "send_offsets", KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
        )

    monkeypatch.setattr(transactional, "_call_timed", refused)
    with pytest.raises(CallFailed) as raised:
        transactional.send_offsets([TopicPartition("in", 0, 5)], None)
    stopped = stop_error(raised.value)
    assert isinstance(stopped, NotAuthorised)
    assert str(stopped).startswith(said("topic in", "READ"))


def test_denied_output_reports_its_topic() -> None:
    """The client's metadata may show it before a send: then `produce` itself raises, and not the delivery."""
    transactional = TransactionalProducer(Settings(), "t")

    def produce(*_: object) -> None:
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))

    transactional._client = SimpleNamespace(producer=SimpleNamespace(produce=produce))  # type: ignore[assignment]
    transactional._machine.fire(Event.INITIALISED)
    transactional._machine.fire(Event.BEGIN)
    with pytest.raises(CallFailed) as raised:
        transactional.send("out", b"value")
    stopped = stop_error(raised.value)
    assert isinstance(stopped, NotAuthorised)
    assert str(stopped).startswith(said("topic out", "WRITE"))


@pytest.mark.parametrize(
    ("code", "action", "sentence"),
    [
        (KafkaError._UNKNOWN_PARTITION, Action.CHECK_TOPICS, "the changelog log cannot be written"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, Action.CHECK_TOPICS, "the changelog log cannot be written"),
        (KafkaError.INVALID_RECORD, Action.MISCONFIGURED, "the changelog log cannot be written"),
        (KafkaError.POLICY_VIOLATION, Action.MISCONFIGURED, "the changelog log cannot be written"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, Action.UNAUTHORISED, said("topic log", "WRITE")),
        (KafkaError.MSG_SIZE_TOO_LARGE, Action.POISON, "the changelog log cannot be written"),
    ],
)
@pytest.mark.parametrize("call", ["produce", "delivery"])
def test_changelog_error_is_not_blamed_on_an_input_record(call: str, code: int, action: Action, sentence: str) -> None:
    """Only a too large value is blamed on the record. An error about an output stays unchanged."""
    transactional = TransactionalProducer(Settings(), "t", changelogs={"log"})
    raised = KafkaException(KafkaError(code)) if call == "produce" else None

    def produce(*_: object) -> None:
        if raised is not None:
            raise raised

    client: Any = SimpleNamespace(
        producer=SimpleNamespace(produce=produce, flush=lambda _: 0),
        raise_callback_error=lambda: None,
        delivery_error=None if raised else (KafkaError(code), "log[1]", 5),
    )
    transactional._client = client
    transactional._machine.fire(Event.INITIALISED)
    transactional._machine.fire(Event.BEGIN)
    with pytest.raises(CallFailed) as failed:
        transactional.send("log", b"value")
        transactional.flush()
    assert (failed.value.call, failed.value.action) == (call, action)
    assert str(failed.value).startswith(sentence)


# ---- eos reset ------------------------------------------------------------------------------------------------------


class Offsets:
    """confluent-kafka's admin; topics a and b. `denied`: the call and the topic that are refused."""

    def __init__(self, *denied: str) -> None:
        self._denied = denied

    def list_topics(self, timeout: float) -> Any:
        known = {"a", "b"} - ({self._denied[1]} if self._denied[0] == "list_topics" else set())
        return SimpleNamespace(brokers={}, topics={name: SimpleNamespace(error=None, partitions=[0]) for name in known})

    def _error(self, call: str, topic: str) -> KafkaError | None:
        denied = self._denied == (call, topic)
        return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED) if denied else None

    def _answered(self, call: str, asked: list[Any]) -> dict[str, Any]:
        found = [
            SimpleNamespace(topic=tp.topic, partition=0, offset=1, error=self._error(call, tp.topic))
            for tp in asked[0].topic_partitions
        ]
        answer: Future[Any] = Future()
        answer.set_result(SimpleNamespace(topic_partitions=found))
        return {"g": answer}

    def list_consumer_group_offsets(self, asked: list[Any], **_: object) -> dict[str, Any]:
        return self._answered("list_consumer_group_offsets", asked)

    def alter_consumer_group_offsets(self, asked: list[Any], **_: object) -> dict[str, Any]:
        return self._answered("alter_consumer_group_offsets", asked)

    def list_offsets(self, asked: dict[Any, Any], **_: object) -> dict[Any, Any]:
        answers = {}
        for tp in asked:
            answers[tp] = Future()
            error = self._error("list_offsets", tp.topic)
            if error is None:
                answers[tp].set_result(SimpleNamespace(offset=1))
            else:
                answers[tp].set_exception(KafkaException(error))
        return answers


@pytest.mark.parametrize(
    "call", ["list_topics", "list_consumer_group_offsets", "list_offsets", "alter_consumer_group_offsets"]
)
def test_denied_offset_reset_reports_its_topic(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset, "connect", lambda *_: Offsets(call, "b"))
    monkeypatch.setattr(reset, "describe_topic", lambda *_: Topic(exists=None))
    admin = SimpleNamespace(metadata_by_partition=lambda _: {})
    world = World(admin=lambda _: contextlib.nullcontext(admin))  # type: ignore[arg-type, return-value]
    offsets = GroupOffsets(Settings(), "g", ["a", "b"], world=world)
    with pytest.raises(NotAuthorised) as raised:
        offsets.commit(offsets.plan(parse_target(["earliest"])))
    assert str(raised.value) == said("topic b", "READ")
