"""Settings: their sources, refused settings with reasons, and the configuration of each client."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from eos.errors import ConfigurationError
from eos.kafka.client.settings import OPTIONS, REFUSALS, RESERVED, Settings, instance_id_for, load, parse_flag
from eos.plain import Transactions
from eos.session.session import TransactSession


def refused(values: dict[str, Any]) -> str:
    """Return the error message, and check that the exit code is 78."""
    with pytest.raises(ConfigurationError) as raised:
        Settings(values)
    assert raised.value.exit_code == 78
    return str(raised.value)


# ---- refusals ----------------------------------------------------------------------------------------------

CONTRADICTIONS = [
    ("isolation.level", "read_uncommitted", "aborted"),
    ("enable.auto.commit", "true", "inside the transaction"),
    ("enable.auto.offset.store", True, "inside the transaction"),
    ("enable.idempotence", False, "idempotent producer"),
    ("acks", 1, "lost with the leader"),
    ("acks", "0", "lost with the leader"),
    ("auto.offset.reset", "none", "without a committed offset begins"),
    ("enable.partition.eof", "perhaps", "when it is needed"),
    ("delivery.report.only.error", "false", "counts records itself"),
    ("group.protocol", "share", "no other group protocol"),
    ("partition.assignment.strategy", "cooperative-sticky,mine", "tested"),
    ("partition.assignment.strategy", "sticky", "tested"),
    ("enable.gapless.guarantee", "true", "that an abort could resolve"),
]


@pytest.mark.parametrize(("name", "value", "reason"), CONTRADICTIONS)
def test_setting_that_breaks_exactly_once_is_refused_with_reason(name: str, value: Any, reason: str) -> None:
    sentence = refused({name: value})
    assert sentence.startswith(f"{name}={value} would break exactly-once (allowed: ")
    assert reason in sentence


def test_every_refusal_is_tested() -> None:
    assert {name for name, _, _ in CONTRADICTIONS} == set(REFUSALS)


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_allowed_values_are_accepted_in_any_case(name: str) -> None:
    for value in REFUSALS[name].allowed:
        assert Settings({name: value.upper()})[name] == value


def test_booleans_and_numbers_are_read_like_text() -> None:
    Settings({"enable.auto.commit": False, "enable.idempotence": True, "acks": -1})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("max.in.flight", "keeps order"),
        ("max.in.flight.requests.per.connection", "keeps order"),
        ("retries", "same sequence number"),
        ("message.send.max.retries", "same sequence number"),
        ("on_delivery", "delivery errors"),
        ("dr_cb", "delivery errors"),
        ("dr_msg_cb", "delivery errors"),
        ("on_commit", "never commits"),
        ("offset_commit_cb", "never commits"),
    ],
)
def test_reserved_setting_is_refused_at_any_value(name: str, reason: str) -> None:
    assert name in RESERVED
    assert refused({name: 1}).startswith(f"{name} cannot be set: ")
    assert reason in refused({name: None})


def test_every_reserved_name_is_tested() -> None:
    assert len(RESERVED) == 9


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("linger.msec", "linger.msec is not a Kafka client setting; did you mean linger.ms?"),
        ("bootstrap.server", "bootstrap.server is not a Kafka client setting; did you mean bootstrap.servers?"),
        ("zzz", "zzz is not a Kafka client setting"),
        ("eos.instanse", "eos.instanse is not a setting; did you mean eos.instance?"),
        (
            "eos.transaction.intervall.ms",
            "eos.transaction.intervall.ms is not a setting; did you mean eos.transaction.interval.ms?",
        ),
        ("eos.commit.interval", "eos.commit.interval is not a setting; did you mean eos.transaction.interval.ms?"),
        ("eos.strict.mode", "eos.strict.mode is not a setting; did you mean eos.strict?"),
        ("eos.zzz", "eos.zzz is not a setting; did you mean eos.strict?"),
    ],
)
def test_unknown_name_is_refused_with_suggestion(name: str, sentence: str) -> None:
    assert refused({name: 1}) == sentence


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("eos.transaction.interval.ms", "soon", "is not a number"),
        ("eos.transaction.interval.ms", 0, "must be at least 1"),
        ("eos.transaction.max.records", "0", "must be at least 1"),
        ("eos.batch.max.records", -1, "must be at least 1"),
        ("eos.state.engine", "paper", "must be one of lmdb, rocksdb"),
        ("eos.startup.timeout.ms", 999, "must be at least 1000"),
        ("eos.shutdown.timeout.ms", -1, "must be at least 0"),
        ("eos.call.timeout.ms", 99, "must be at least 100"),
        ("eos.call.timeout.ms", None, "is not a number"),
    ],
)
def test_invalid_option_value_is_refused(name: str, value: Any, reason: str) -> None:
    assert refused({name: value}) == f"{name}={value} {reason}"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"transaction.timeout.ms": "ten"}, "transaction.timeout.ms=ten is not a number"),
        ({"transaction.timeout.ms": 999}, "below 1000"),
        ({"message.timeout.ms": 10_001}, "a record must not be sent after the broker ended its transaction"),
        ({"message.timeout.ms": 0}, "must be between 1 and transaction.timeout.ms=10000"),
        ({"message.timeout.ms": "x"}, "message.timeout.ms=x is not a number"),
        ({"delivery.timeout.ms": 10_001}, "message.timeout.ms=10001 must be between"),
        ({"transaction.timeout.ms": 5_000, "message.timeout.ms": 5_001}, "must be between 1"),
        ({"eos.transaction.interval.ms": 5_001}, "at most half of transaction.timeout.ms=10000"),
        ({"retry.backoff.ms": 49}, "retry.backoff.ms=49 is below 50"),
        ({"retry.backoff.max.ms": 49}, "retry.backoff.max.ms=49 is below 50"),
        ({"max.poll.interval.ms": "long"}, "max.poll.interval.ms=long is not a number"),
        ({"session.timeout.ms": "long"}, "session.timeout.ms=long is not a number"),
        ({"topic.metadata.refresh.interval.ms": "soon"}, "topic.metadata.refresh.interval.ms=soon is not a number"),
        ({"bootstrap.servers": " ,"}, "bootstrap.servers is empty: expected HOST:PORT"),
        ({"bootstrap.servers": "a:1,http://b:2"}, "a:1,http://b:2: expected HOST:PORT[,HOST:PORT...], without http://"),
        ({"statistics.interval.ms": 0}, "must be between 1 and 1000"),
        ({"statistics.interval.ms": 1_001}, "must be between 1 and 1000"),
        ({"group.protocol": "consumer", "group.instance.id": "a"}, "locks the restarted member out"),
    ],
    ids=str,
)
def test_contradicting_timeouts_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in refused(values)


@pytest.mark.parametrize(
    "values",
    [
        {"message.timeout.ms": 10_000},
        {"transaction.timeout.ms": 1_000},
        {"eos.transaction.interval.ms": 5_000},
        {"retry.backoff.ms": 50},
        {"statistics.interval.ms": 1_000},
        {"group.instance.id": "a"},
    ],
    ids=str,
)
def test_settings_at_their_limits_are_accepted(values: dict[str, Any]) -> None:
    Settings(values)


# ---- sources -----------------------------------------------------------------------------------------------


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "eos.toml"
    file.write_text(text)
    return file


def test_flags_override_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, '"bootstrap.servers" = "file:1"\n"eos.instance" = "file"\n"eos.call.timeout.ms" = 1000\n')
    environment = {"KAFKA_BOOTSTRAP_SERVERS": "env:1", "EOS_INSTANCE": "env"}
    by_file = load({}, {}, file)
    by_environment = load({}, environment, file)
    by_flags = load({"eos.instance": "flag"}, environment, file)
    assert (by_file.bootstrap_servers, by_file.instance) == ("file:1", "file")
    assert (by_environment.bootstrap_servers, by_environment.instance) == ("env:1", "env")
    assert (by_flags.bootstrap_servers, by_flags.instance) == ("env:1", "flag")
    assert {s["eos.call.timeout.ms"] for s in (by_file, by_environment, by_flags)} == {1000}


def test_dotted_toml_names_may_be_quoted_or_tables(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        """
        linger.ms = 20
        "compression.type" = "lz4"
        [eos.transaction]
        interval.ms = 250
        [fetch]
        min.bytes = 10
        "wait.max.ms" = 30
        """,
    )
    settings = load({}, {}, file)
    assert settings.values == {
        "linger.ms": 20,
        "compression.type": "lz4",
        "eos.transaction.interval.ms": 250,
        "fetch.min.bytes": 10,
        "fetch.wait.max.ms": 30,
    }


def test_toml_list_becomes_comma_separated(tmp_path: Path) -> None:
    settings = load({}, {}, toml(tmp_path, 'bootstrap.servers = ["a:1", "b:2"]\neos.input.topics = ["x", "y"]\n'))
    assert (settings.bootstrap_servers, settings["eos.input.topics"]) == ("a:1,b:2", "x,y")


def test_error_for_invalid_toml_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"eos\.toml cannot be read: .*line 1"):
        load({}, {}, toml(tmp_path, "linger.ms 20"))


def test_named_file_must_exist_but_the_default_file_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load({}, {}).values == {}
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load({}, {}, tmp_path / "other.toml")
    toml(tmp_path, "linger.ms = 7")
    assert load({}, {})["linger.ms"] == 7


def own_loop(given: Any) -> Settings:
    return TransactSession(given, ["in"]).settings


def without_input(given: Any) -> Settings:
    return Transactions(given).settings


@pytest.mark.parametrize("made", [own_loop, without_input])
def test_code_settings_override_environment_and_file(
    made: Callable[[Any], Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toml(tmp_path, '"bootstrap.servers" = "file:1"\n"linger.ms" = 7\n"metadata.broker.list" = "file:2"\n')
    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    given = {"group.id": "g", "transactional.id": "t"}
    assert made(given).bootstrap_servers == "file:2"
    assert made(given)["linger.ms"] == 7
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "env:1")
    monkeypatch.setenv("EOS_TRANSACTION_INTERVAL_MS", "250")
    assert made(given).bootstrap_servers == "env:1"
    assert made(given)["eos.transaction.interval.ms"] == 250
    assert made(given | {"bootstrap.servers": "code:1"}).bootstrap_servers == "code:1"
    assert made(given | {"metadata.broker.list": "code:2"}).bootstrap_servers == "code:2"
    settings = Settings(given | {"bootstrap.servers": "mine:1"})
    assert made(settings) is settings


def test_setting_is_refused_whatever_its_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"isolation\.level"):
        load({}, {}, toml(tmp_path, 'isolation.level = "read_uncommitted"'))
    with pytest.raises(ConfigurationError, match=r"isolation\.level"):
        load({"isolation.level": "read_uncommitted"}, {})
    with pytest.raises(ConfigurationError, match="must be one of"):
        load({}, {"EOS_STATE_ENGINE": "paper"})


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_has_default_and_environment_name(name: str) -> None:
    assert Settings()[name] == OPTIONS[name].default
    others = {"eos.state.engine": "rocksdb"}
    text = others.get(name, "3000000" if name.endswith(".bytes") else "3000")
    if OPTIONS[name].default is False:
        text = "true"
    settings = load({}, {name.upper().replace(".", "_"): text})
    assert settings[name] == OPTIONS[name].read(text) != OPTIONS[name].default


def test_misspelt_variable_is_refused_with_suggestion() -> None:
    with pytest.raises(ConfigurationError, match="EOS_INSTANCES is not a setting; did you mean EOS_INSTANCE\\?"):
        load({}, {"EOS_INSTANCES": "a"})
    assert load({}, {"EOS_APP": "hello:app", "EOS_INSTANCE_SERVICE_HOST": "10.0.0.1"}).values == {}


def test_other_variables_are_ignored() -> None:
    assert load({}, {"KAFKA_HEAP_OPTS": "-Xmx1G", "KAFKA_BOOTSTRAP_SERVERS": "", "PATH": "/bin"}).values == {}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [("linger.ms=20", "linger.ms", "20"), (" a = b=c ", "a", "b=c"), ("sasl.password=", "sasl.password", "")],
)
def test_flag_is_split_at_first_equals_sign(text: str, name: str, value: str) -> None:
    assert parse_flag(text) == (name, value)


@pytest.mark.parametrize("text", ["linger.ms", "=20", " =20", ""])
def test_malformed_flag_is_refused_with_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected name=value, for example -X linger\.ms=20"):
        parse_flag(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sasl.password hunter2", "sasl.password"),
        ("sasl.password:hunter2", "sasl.password"),
        (" sasl.password, hunter2", "sasl.password"),
        ("sasl.password>hunter2", "sasl.password"),
        ("=hunter2", ""),
    ],
)
def test_malformed_flag_does_not_repeat_a_password(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^-X {re.escape(named)}: expected name=value") as raised:
        parse_flag(text)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("request.required.acks", "acks"),
        ("auto.commit.enable", "enable.auto.commit"),
        ("delivery.timeout.ms", "message.timeout.ms"),
        ("queue.buffering.max.ms", "linger.ms"),
        ("metadata.broker.list", "bootstrap.servers"),
    ],
)
def test_librdkafka_aliases_are_resolved(alias: str, name: str) -> None:
    value = {"acks": "all", "enable.auto.commit": "false"}.get(name, "5")
    assert Settings({alias: value}).values == {name: value}


def test_alias_is_refused_like_its_setting() -> None:
    assert refused({"request.required.acks": 1}).startswith("acks=1 would break exactly-once")
    assert refused({"auto.commit.enable": "true"}).startswith("enable.auto.commit=true would break")


# ---- reading -----------------------------------------------------------------------------------------------


def test_instance_defaults_to_host_name() -> None:
    assert Settings().instance == socket.gethostname()
    assert Settings({"eos.instance": "a"}).instance == "a"


def test_value_is_found_by_name_then_by_default() -> None:
    settings = Settings({"linger.ms": 3})
    assert (settings["linger.ms"], settings["transaction.timeout.ms"]) == (3, 10_000)
    assert settings.get("client.id", "none") == "none"
    with pytest.raises(KeyError):
        settings["client.id"]


def test_copy_with_more_values_is_checked_and_independent() -> None:
    first = Settings({"linger.ms": 3})
    second = first.with_values(**{"group.id": "g", "linger.ms": 4})
    assert (first.values, second.values) == ({"linger.ms": 3}, {"linger.ms": 4, "group.id": "g"})
    with pytest.raises(ConfigurationError):
        first.with_values(acks=1)


@pytest.mark.parametrize(
    ("values", "backoff_ms"),
    [
        ({}, 250),
        ({"retry.backoff.ms": "100"}, 100),
        ({"retry.backoff.ms": 5_000}, 1_000),
        ({"retry.backoff.ms": 5_000, "retry.backoff.max.ms": 4_000}, 4_000),
        ({"retry.backoff.max.ms": 60}, 60),
    ],
    ids=str,
)
def test_retry_backoff_is_capped_as_in_librdkafka(values: dict[str, Any], backoff_ms: int) -> None:
    assert Settings(values).retry_backoff_ms == backoff_ms


# ---- what each client is given -----------------------------------------------------------------------------


def test_consumer_reads_committed_and_never_commits_or_resets() -> None:
    given = Settings({"isolation.level": "read_committed", "auto.offset.reset": "latest"}).consumer()
    assert given["isolation.level"] == "read_committed"
    assert given["enable.auto.commit"] is False
    assert given["enable.auto.offset.store"] is False
    assert given["auto.offset.reset"] == "error", "the session decides where a partition starts"


def test_classic_member_is_static_with_a_session_timeout_of_10_s() -> None:
    given = Settings({"transactional.id": "app-i-1"}).consumer()
    assert given["group.instance.id"] == "app-i-1"
    assert given["session.timeout.ms"] == 10_000
    assert given["partition.assignment.strategy"] == "cooperative-sticky"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "roundrobin"),
        ({"partition.assignment.strategy": "range"}, "range"),
        ({"group.protocol": "consumer"}, None),
    ],
)
def test_members_share_each_of_several_topics_by_default(given: dict[str, str], expected: str | None) -> None:
    consumer = Settings(given).with_multi_topic_assignment().consumer()
    assert consumer.get("partition.assignment.strategy") == expected


def test_group_instance_id_is_valid_and_unique() -> None:
    """Kafka validates it like a topic name, while a transactional.id can be any text."""
    names = ["a", "a.b-c_d", "orders/eu", "orders:eu", "orders_eu", "ü", "..", ".", "x" * 249, "x" * 250, "x" * 251]
    members = [instance_id_for(name) for name in names]
    assert members[:2] == names[:2]
    assert members[8] == names[8]
    assert len(set(members)) == len(names)
    for member in members:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,249}", member), member
        assert member.strip(".")


@pytest.mark.parametrize("protocol", ["consumer", "CONSUMER"])
def test_consumer_protocol_member_is_dynamic(protocol: str) -> None:
    settings = Settings({"group.protocol": protocol, "eos.instance": "i-1"})
    given = settings.consumer()
    assert not settings.classic_group
    assert not {"group.instance.id", "session.timeout.ms", "partition.assignment.strategy"} & given.keys()
    assert given["group.protocol"] == "consumer"


def test_classic_protocol_is_recognised_in_any_spelling() -> None:
    assert all(Settings({"group.protocol": text}).classic_group for text in ("classic", "Classic", " classic "))
    assert Settings().classic_group


def test_user_value_overrides_default() -> None:
    mine = {
        "group.instance.id": "mine",
        "session.timeout.ms": 6_000,
        "partition.assignment.strategy": "range",
        "fetch.queue.backoff.ms": 9,
        "reconnect.backoff.max.ms": 500,
    }
    assert mine.items() <= Settings(mine).consumer().items()
    theirs = {"partitioner": "random", "transaction.timeout.ms": 20_000, "message.timeout.ms": 15_000}
    assert theirs.items() <= Settings(theirs).producer("t").items()


def test_producer_is_transactional_with_java_partitioner() -> None:
    given = Settings({"transactional.id": "other"}).producer("app-1")
    assert given["transactional.id"] == "app-1"
    assert (given["enable.idempotence"], given["acks"]) == (True, "all")
    assert given["partitioner"] == "murmur2_random"
    assert (given["transaction.timeout.ms"], given["retry.backoff.ms"]) == (10_000, 250)


@pytest.mark.parametrize("timeout_ms", [1_000, 10_000, 60_000])
def test_message_timeout_is_within_transaction_timeout(timeout_ms: int) -> None:
    given = Settings({"transaction.timeout.ms": timeout_ms}).producer("t")
    assert 0 < given["message.timeout.ms"] <= given["transaction.timeout.ms"] == timeout_ms


def test_clients_get_only_their_own_settings() -> None:
    settings = Settings({"linger.ms": 3, "fetch.min.bytes": 5, "client.id": "c", "eos.instance": "i"})
    consumer, producer = settings.consumer(), settings.producer("t")
    assert "linger.ms" not in consumer
    assert "fetch.min.bytes" not in producer
    assert consumer["client.id"] == producer["client.id"] == "c"
    assert not [name for name in (*consumer, *producer) if name.startswith("eos.")]


def test_clients_have_address_and_short_reconnect_backoff() -> None:
    for given in (Settings().consumer(), Settings().producer("t")):
        assert given["bootstrap.servers"] == "127.0.0.1:9092"
        assert given["reconnect.backoff.max.ms"] == 1_000


def test_admin_client_gets_only_addresses_and_credentials() -> None:
    settings = Settings(
        {
            "bootstrap.servers": "b:9093",
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "PLAIN",
            "sasl.username": "u",
            "sasl.password": "p",
            "ssl.ca.location": "/ca",
            "linger.ms": 3,
            "fetch.min.bytes": 5,
            "group.id": "g",
        }
    )
    expected = {
        "bootstrap.servers",
        "security.protocol",
        "sasl.mechanism",
        "sasl.username",
        "sasl.password",
        "ssl.ca.location",
    }
    assert settings.connection().keys() - {"reconnect.backoff.ms", "reconnect.backoff.max.ms"} == expected


# ---- librdkafka has the last word --------------------------------------------------------------------------

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"group.protocol": "classic"},
    {"group.protocol": "Consumer"},
    {"group.protocol": "consumer", "group.remote.assignor": "uniform"},
    {"partition.assignment.strategy": "range"},
    {"partition.assignment.strategy": "range,roundrobin"},
    {"auto.offset.reset": "latest", "enable.partition.eof": True, "delivery.report.only.error": True},
    {"isolation.level": "read_committed", "enable.auto.commit": "false", "enable.auto.offset.store": "false"},
    {"enable.idempotence": "true", "acks": -1, "enable.gapless.guarantee": "false"},
    {"request.required.acks": "all", "auto.commit.enable": "false", "compression.codec": "lz4"},
    {"transaction.timeout.ms": 1_000, "eos.transaction.interval.ms": 500},
    {"transaction.timeout.ms": 900_000, "delivery.timeout.ms": 900_000},
    {"retry.backoff.ms": 50, "retry.backoff.max.ms": 50, "statistics.interval.ms": 1_000},
    {"queue.buffering.max.ms": 3, "batch.size": 100_000, "fetch.min.bytes": 5, "max.poll.interval.ms": 60_000},
    {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN", "sasl.username": "u", "sasl.password": "p"},
    {"stats_cb": print, "error_cb": print, "client.id": "c", "debug": "eos"},
    # Values from flags are text.
    dict(map(parse_flag, ["linger.ms=20", "compression.type=zstd"])),
    dict(map(parse_flag, ["enable.partition.eof=true", "transaction.timeout.ms=20000"])),
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_librdkafka_accepts_client_configurations(values: dict[str, Any]) -> None:
    quiet = logging.getLogger("test.quiet")
    quiet.disabled = True
    settings = Settings({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", **values})
    consumer = Consumer(settings.consumer() | {"logger": quiet})
    consumer.close()
    assert Producer(settings.producer("t") | {"logger": quiet}) is not None
