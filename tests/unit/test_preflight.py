"""Preflight checks: the facts that make each check fail, and a fit cluster without findings."""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from eos.errors import ConfigurationError, EosError, NotAuthorised, Unavailable
from eos.kafka.admin import facts as asking
from eos.kafka.admin.facts import Facts, Topic
from eos.kafka.admin.preflight import (
    REQUIRED_APIS,
    Finding,
    Level,
    Requirements,
    judge,
    raise_first_failure,
    requirements_of,
)
from eos.kafka.client.cluster import OFFSETS_LOG, TRANSACTION_LOG
from eos.kafka.client.security import unreachable
from eos.kafka.client.settings import Settings

SAFE = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}
BROKER = {
    "transaction.max.timeout.ms": "900000",
    "group.min.session.timeout.ms": "6000",
    "group.max.session.timeout.ms": "1800000",
    "transactional.id.expiration.ms": "604800000",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "offsets.topic.replication.factor": "3",
    "offsets.retention.minutes": "10080",
}
RIGHTS = frozenset({"READ", "WRITE", "DESCRIBE"})


def topic(**changes: Any) -> Topic:
    fit = Topic(True, partitions=8, replicas=3, in_sync=3, operations=RIGHTS, config=SAFE)
    return dataclasses.replace(fit, **changes)


GONE = Topic(exists=False)
NEED = Requirements(
    inputs=("in",),
    outputs=("out",),
    group="app",
    transactional_ids=("app-one", "app-one-alternate"),
    session_timeout_ms=10_000,
)


def facts(**changes: Any) -> Facts:
    """Return three correct brokers with `changes`; `in_`, `out`, `ids` and `offsets` replace a topic."""
    names = {"in_": "in", "out": "out", "ids": TRANSACTION_LOG, "offsets": OFFSETS_LOG}
    topics = {name: topic() for name in names.values()}
    topics |= {names[key]: changes.pop(key) for key in list(changes) if key in names}
    broker = {**BROKER, **changes.pop("broker", {})}
    values: dict[str, Any] = {
        "servers": "b:9092",
        "brokers": 3,
        "controller_version": 2,
        "apis": frozenset(REQUIRED_APIS),
        "broker_config": broker,
        "topics": topics,
        "group_operations": RIGHTS,
    }
    return Facts(**(values | changes))


def spoken(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.level is not Level.OK]


def test_suitable_cluster_passes_every_check() -> None:
    found = judge(NEED, facts())
    assert spoken(found) == []
    logs = ["transaction log"] * 2
    assert [f.check for f in found] == [
        "brokers",
        "authorised",
        "topics",
        "topics",
        *logs,
        "timeouts",
        "offsets",
        "durability",
    ]
    raise_first_failure(found)


def allowed(*operations: str) -> Topic:
    return topic(operations=frozenset(operations))


# For each check and its error: the wrong fact, and words of the message and its remedy.
FAILURES: dict[tuple[str, type[EosError]], list[tuple[str, dict[str, Any], str]]] = {
    ("brokers", Unavailable): [
        ("a broker too old", {"apis": frozenset({"InitProducerId"})}, "upgrade them to Kafka 3.0"),
    ],
    ("topics", Unavailable): [
        ("a missing input", {"in_": GONE}, "topic in does not exist at b:9092: `eos topic create in` creates it"),
        ("a missing output", {"out": GONE}, "topic out does not exist"),
    ],
    ("authorised", NotAuthorised): [
        ("an input not to be seen", {"in_": Topic(None)}, "READ on topic in"),
        (
            "an input not to be read",
            {"in_": allowed("DESCRIBE", "WRITE")},
            "topic in: not authorised to READ it: add an ACL that allows READ on topic in",
        ),
        ("an output not to be written", {"out": allowed("DESCRIBE", "READ")}, "WRITE on topic out"),
        ("a group not to be seen", {"group_denied": True, "group_operations": None}, "group app"),
        ("a group not to be used", {"group_operations": frozenset({"DESCRIBE"})}, "group app"),
        (
            "an id not to be used",
            {"denied_ids": frozenset({"app-one-alternate"})},
            "WRITE on transactional.id app-one-alternate",
        ),
    ],
    ("transaction log", ConfigurationError): [
        (
            "a transaction log of more copies than brokers (K4)",
            {"brokers": 1, "ids": GONE},
            "transaction.state.log.replication.factor=3 with 1 broker, so no transaction can begin",
        ),
        (
            "an offsets log of more copies than brokers",
            {"brokers": 2, "offsets": GONE},
            "offsets.topic.replication.factor=3 with 2 brokers, so no group can commit",
        ),
        (
            "a transaction log that asks for more in sync than it will have",
            {"ids": GONE, "broker": {"transaction.state.log.min.isr": "4"}},
            "transaction.state.log.min.isr=4",
        ),
        (
            "a transaction log that asks for more in sync than it has",
            {"ids": topic(replicas=1, in_sync=1)},
            "min.insync.replicas=2 with 1 replica of each partition",
        ),
    ],
    ("timeouts", ConfigurationError): [
        (
            "a transaction timeout above the brokers'",
            {"broker": {"transaction.max.timeout.ms": "5000"}},
            "transaction.max.timeout.ms=5000: set transaction.timeout.ms to at most 5000",
        ),
        (
            "a session timeout that the brokers do not take",
            {"broker": {"group.min.session.timeout.ms": "20000"}},
            "session.timeout.ms=10000 is not between the brokers' 20000 and 1800000",
        ),
    ],
}


@pytest.mark.parametrize(
    ("check", "error", "changes", "words"),
    [
        pytest.param(check, error, changes, words, id=what)
        for (check, error), failures in FAILURES.items()
        for what, changes, words in failures
    ],
)
def test_failure_has_sentence_remedy_and_exit_code(
    check: str, error: type[EosError], changes: dict[str, Any], words: str
) -> None:
    failed = [f for f in judge(NEED, facts(**changes)) if f.level is Level.FAILED]
    assert failed
    assert {f.check for f in failed} == {check}
    assert failed[0].remedy
    with pytest.raises(error) as raised:
        raise_first_failure(failed)
    assert type(raised.value) is error
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


WEAK: list[tuple[str, dict[str, Any], str]] = [
    (
        "an output with one replica",
        {"out": topic(replicas=1)},
        "topic out can lose acknowledged records: it has 1 replica",
    ),
    ("offsets of two copies", {"offsets": topic(replicas=2)}, f"topic {OFFSETS_LOG} can lose acknowledged records"),
    ("ids with one in sync", {"ids": topic(config=SAFE | {"min.insync.replicas": "1"})}, "min.insync.replicas=1"),
    (
        "an output with unclean elections",
        {"out": topic(config=SAFE | {"unclean.leader.election.enable": "true"})},
        "set unclean.leader.election.enable=false",
    ),
]


@pytest.mark.parametrize(("changes", "words"), [w[1:] for w in WEAK], ids=[w[0] for w in WEAK])
def test_unsafe_cluster_warns_and_fails_only_with_strict(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = spoken(judge(NEED, facts(**changes)))
    assert [f.level for f in found] == [Level.WARNING]
    with caplog.at_level(logging.WARNING, logger="eos"):
        raise_first_failure(found)
    assert words in caplog.text
    strict = dataclasses.replace(NEED, strict=True)
    with pytest.raises(ConfigurationError, match="can lose acknowledged records"):
        raise_first_failure(judge(strict, facts(**changes)))


def test_single_broker_fails_only_with_strict() -> None:
    single = topic(replicas=1, in_sync=1, config={"min.insync.replicas": "1"})
    alone = facts(brokers=1, in_=single, out=single, ids=single, offsets=single)
    assert spoken(judge(NEED, alone)) == []
    with pytest.raises(EosError, match="lost with its disk"):
        raise_first_failure(judge(dataclasses.replace(NEED, strict=True), alone))


def test_input_with_one_replica_is_not_a_finding() -> None:
    assert spoken(judge(NEED, facts(in_=topic(replicas=1)))) == []


def test_unauthorised_facts_are_not_a_failure() -> None:
    blind = topic(operations=None, config=None)
    hidden = Topic(exists=None)
    found = judge(
        NEED, facts(in_=blind, out=blind, ids=hidden, offsets=hidden, broker_config=None, group_operations=None)
    )
    assert {f.level for f in found} == {Level.OK, Level.UNKNOWN}
    unseen = ["authorised", "transaction log", "transaction log", "timeouts", "offsets", *["durability"] * 3]
    assert [f.check for f in spoken(found)] == unseen
    raise_first_failure(found)


# A hidden fact, the resource that the message names, and the missing right.
HIDDEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("an output's settings", {"out": topic(config=None)}, "topic out", "DESCRIBE_CONFIGS on topic out"),
    (
        "the transaction log",
        {"ids": Topic(exists=None)},
        f"topic {TRANSACTION_LOG}",
        f"DESCRIBE and DESCRIBE_CONFIGS on topic {TRANSACTION_LOG}",
    ),
    (
        "how the offsets log will be made",
        {"offsets": GONE, "broker_config": None},
        f"topic {OFFSETS_LOG}",
        "DESCRIBE_CONFIGS on the cluster",
    ),
]


@pytest.mark.parametrize(("changes", "whose", "right"), [h[1:] for h in HIDDEN], ids=[h[0] for h in HIDDEN])
def test_unauthorised_durability_query_fails_only_with_strict(changes: dict[str, Any], whose: str, right: str) -> None:
    found = [f for f in judge(NEED, facts(**changes)) if f.check == "durability"]
    assert [(f.level, f.remedy) for f in found] == [(Level.UNKNOWN, f"add an ACL that allows {right}")]
    assert f"whether {whose} can lose acknowledged records" in found[0].sentence
    strict = judge(dataclasses.replace(NEED, strict=True), facts(**changes))
    with pytest.raises(NotAuthorised, match=f"{right}$"):
        raise_first_failure([f for f in strict if f.check == "durability"])


# The log that a fresh cluster has not created yet, the broker settings for it, and the setting to change.
UNMADE: list[tuple[str, str, dict[str, str], dict[str, str]]] = [
    (
        "ids of one copy",
        TRANSACTION_LOG,
        {"transaction.state.log.replication.factor": "1", "transaction.state.log.min.isr": "1"},
        {"transaction.state.log.replication.factor": "3", "transaction.state.log.min.isr": "2"},
    ),
    (
        "ids with one in sync",
        TRANSACTION_LOG,
        {"transaction.state.log.min.isr": "1"},
        {"transaction.state.log.min.isr": "2"},
    ),
    (
        "offsets of two copies",
        OFFSETS_LOG,
        {"offsets.topic.replication.factor": "2"},
        {"offsets.topic.replication.factor": "3"},
    ),
    ("offsets with one in sync", OFFSETS_LOG, {"min.insync.replicas": "1"}, {"min.insync.replicas": "2"}),
    (
        "offsets with unclean elections",
        OFFSETS_LOG,
        {"unclean.leader.election.enable": "true"},
        {"unclean.leader.election.enable": "false"},
    ),
]


@pytest.mark.parametrize(("name", "broker", "better"), [u[1:] for u in UNMADE], ids=[u[0] for u in UNMADE])
def test_unsafe_log_of_new_cluster_warns_and_fails_only_with_strict(
    name: str, broker: dict[str, str], better: dict[str, str]
) -> None:
    changes: dict[str, Any] = {{TRANSACTION_LOG: "ids", OFFSETS_LOG: "offsets"}[name]: GONE, "broker": broker}
    found = spoken(judge(NEED, facts(**changes)))
    assert [(f.check, f.level, f.remedy) for f in found] == [
        ("durability", Level.WARNING, f"set {setting}={value} on the brokers") for setting, value in better.items()
    ]
    for finding, (setting, value) in zip(found, broker.items(), strict=True):
        assert finding.sentence.startswith(f"topic {name} can lose acknowledged records: ")
        assert finding.sentence.endswith(f"{setting}={value}")
    with pytest.raises(ConfigurationError, match="can lose acknowledged records"):
        raise_first_failure(judge(dataclasses.replace(NEED, strict=True), facts(**changes)))


def test_preflight_accepts_missing_internal_topics_with_safe_defaults() -> None:
    strict = dataclasses.replace(NEED, strict=True)
    assert spoken(judge(strict, facts(ids=GONE, offsets=GONE, broker={"min.insync.replicas": "2"}))) == []


def test_missing_leader_or_replicas_are_a_warning() -> None:
    for changes in ({"out": topic(leaderless=(3,))}, {"ids": topic(leaderless=(1,))}, {"ids": topic(in_sync=1)}):
        assert [f.level for f in spoken(judge(NEED, facts(**changes)))] == [Level.WARNING]


def test_expiration_within_transaction_timeout_is_a_warning() -> None:
    found = spoken(judge(NEED, facts(broker={"transactional.id.expiration.ms": "5000"})))
    assert [(f.check, f.level) for f in found] == [("timeouts", Level.WARNING)]


def test_short_offsets_retention_is_a_warning() -> None:
    (short,) = spoken(judge(NEED, facts(broker={"offsets.retention.minutes": "60"})))
    assert (short.check, short.level) == ("offsets", Level.WARNING)
    assert (
        "the offsets of group app for 60 minutes while it has no members; a worker that starts later" in short.sentence
    )
    (long,) = (f for f in judge(NEED, facts(broker={"offsets.retention.minutes": "10080"})) if f.check == "offsets")
    assert (long.level, long.sentence.partition(" for 7 days")[1]) == (Level.OK, " for 7 days")


def test_error_names_all_missing_topics_together() -> None:
    found = [f for f in judge(NEED, facts(in_=GONE, out=GONE)) if f.check == "topics"]
    assert [str(f) for f in found] == [
        "topics in, out do not exist at b:9092: `eos topic create in out` creates them, as does "
        "eos.create.topics=true (eos run: --create-topics)"
    ]


def test_first_failure_gives_exit_code_and_others_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = judge(NEED, facts(in_=GONE, out=allowed("DESCRIBE")))
    with caplog.at_level(logging.WARNING, logger="eos"), pytest.raises(NotAuthorised, match="topic out"):
        raise_first_failure(found)
    assert "topic in does not exist" in caplog.text


def test_requirements_come_from_settings() -> None:
    need = requirements_of(
        Settings({"group.id": "g", "transactional.id": "g-1", "transaction.timeout.ms": 7000, "eos.strict": True}),
        ["in"],
        {"b", "a"},
    )
    assert need == Requirements(("in",), ("a", "b"), "g", ("g-1", "g-1-alternate"), 7000, 10_000, True)
    assert need.topics == ("in", "a", "b")
    assert requirements_of(Settings({"group.protocol": "consumer"}), [], []).session_timeout_ms is None


def test_unanswering_cluster_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_RESULT_TIMEOUT_S", 0.01)
    with pytest.raises(Unavailable, match="did not answer"):
        asking._result_of(Future[int]())


def test_description_of_a_missing_topic_releases_the_client() -> None:
    """A client in a reference cycle keeps its threads and connections, because a worker rarely collects garbage."""

    class Client:
        def describe_topics(self, *_: object, **__: object) -> dict[str, Future[Any]]:
            failed = Future[Any]()
            failed.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
            return {"in": failed}

    client = Client()
    released = weakref.ref(client)
    gc.disable()
    try:
        assert asking.describe_topic(client, "in") == Topic(exists=False)
        del client
        assert released() is None
    finally:
        gc.enable()


def test_broker_lost_between_queries_is_unavailable() -> None:
    def list_topics(timeout: float) -> object:
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    with pytest.raises(Unavailable, match=r"^b:9092 can no longer be reached: _TRANSPORT"):
        asking.cluster_metadata(SimpleNamespace(list_topics=list_topics), "b:9092", 1.0)


class Configured:
    """An AdminClient whose brokers learn of a topic one after the other: the first `late` answers lack it."""

    def __init__(self, late: int, code: int = KafkaError.UNKNOWN_TOPIC_OR_PART) -> None:
        self.late, self.code, self.asked = late, code, 0

    def describe_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        self.asked += 1
        return {resource: self._answer(resource.name) for resource in resources}

    def _answer(self, name: str) -> Future[Any]:
        answer: Future[Any] = Future()
        if name == "new" and self.asked <= self.late:
            answer.set_exception(KafkaException(KafkaError(self.code)))
        else:
            answer.set_result({"min.insync.replicas": SimpleNamespace(value="2")})
        return answer


def test_topic_unknown_to_one_broker_is_queried_again() -> None:
    client = Configured(late=2)
    read = {"min.insync.replicas": "2"}
    assert asking.describe_configs(client, ["old", "new"], 1) == {
        ("topic", "old"): read,
        ("broker", "1"): read,
        ("topic", "new"): read,
    }
    assert client.asked == 3


def test_topic_listed_twice_is_described_once() -> None:
    asked: list[str] = []

    class Client(Configured):
        def describe_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, Future[Any]]:
            asked.extend(resource.name for resource in resources)
            return super().describe_configs(resources, request_timeout)

    assert set(asking.describe_configs(Client(late=0), ["a", "b", "a"])) == {("topic", "a"), ("topic", "b")}
    assert asked == ["a", "b"]


def test_unreadable_configuration_is_omitted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denied = Configured(late=9, code=KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert asking.describe_configs(denied, ["new"]) == {}
    assert denied.asked == 1
    monkeypatch.setattr(asking, "NEW_TOPIC_S", 0.1)
    never = Configured(late=1_000)
    assert asking.describe_configs(never, ["old", "new"]) == {("topic", "old"): {"min.insync.replicas": "2"}}
    assert never.asked > 1


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        ("kafka:9092/bootstrap: Connect to ipv4#10.0.0.1:9092 failed", "kafka:9092 cannot be reached: _TRANSPORT"),
        ("kafka:9092/1: Connect to ipv4#10.0.0.1:9092 failed", "kafka:9092 cannot be reached: _TRANSPORT"),
        ("localhost:9092/1: Connect to ipv4#127.0.0.1:9092 failed", "that they advertise: localhost:9092 (_TRANSPORT"),
        ("ssl://10.0.0.7:9092/1: Connect to ipv4#10.0.0.7:9092 failed", "that they advertise: 10.0.0.7:9092 ("),
    ],
)
def test_error_names_the_unreachable_advertised_address(failed: str, said: str) -> None:
    settings = Settings({"bootstrap.servers": "PLAINTEXT://kafka:9092"})
    assert said in str(unreachable(settings, f"_TRANSPORT ({failed})"))
