"""Use TLS on either side and forwarded SASL, in front of one real broker with listeners for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.protocol.metadata import ApiVersionsRequest

from tests.shim.shims import eventually, read_group, refused, running
from tests.support.reading import transaction_of
from tests.support.secure import ALICE, SecureKafka, make_pki, secure_kafka
from tests.support.wire import Wire

pytestmark = pytest.mark.takes(175)

Names = Callable[[str], str]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a CA (ca.pem) and a certificate for 127.0.0.1 (server.pem, server.key; server.p12 for Java)."""
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def secure(pki: Path) -> Iterator[SecureKafka]:
    """Start a broker that grants every right to every authenticated client."""
    more = {
        "super.users": "User:ANONYMOUS;User:alice",
        "listener.name.tls.ssl.client.auth": "none",
        # Clients must log in again within this time, and these requests are forwarded too.
        "connections.max.reauth.ms": 4000,
    }
    with secure_kafka(pki, more) as secure:
        yield secure


PLAIN = {"sasl.mechanism": "PLAIN", "sasl.username": "alice", "sasl.password": ALICE}


def transactions_work(
    secure: SecureKafka, servers: str, names: Names, settings: dict[str, Any], protected: bool = True
) -> None:
    """Create a topic, commit, abort, and read all back in a group; with protection, each transaction has its own
    epoch."""
    common = {"bootstrap.servers": servers} | settings
    topic, name = names("t"), names("id")
    admin = AdminClient(common)
    for made in admin.create_topics([NewTopic(topic, 2, 1)]).values():
        made.result(30)
    producer = Producer(common | {"transactional.id": name})
    producer.init_transactions(30)
    epoch = transaction_of(secure.servers["PLAINTEXT"], name).producer_epoch
    expected = set[str]()
    for number, ended in enumerate([producer.commit_transaction, producer.abort_transaction] * 2):
        producer.begin_transaction()
        values = {f"{number}-{i}" for i in range(50)}
        for value in values:
            producer.produce(topic, value)
        producer.flush(30)
        ended(30)
        expected |= values if number % 2 == 0 else set()
    epochs = transaction_of(secure.servers["PLAINTEXT"], name).producer_epoch - epoch
    assert epochs == (4 if protected else 0)
    assert sorted(read_group(servers, names("g"), topic, count=len(expected), **settings)) == sorted(expected)
    producer.close()


def test_login_is_forwarded(secure: SecureKafka, names: Names) -> None:
    with running(secure.servers["SASL"]) as shim:
        assert shim.named("brokers require login")
        transactions_work(secure, shim.bootstrap_servers, names, PLAIN | {"security.protocol": "sasl_plaintext"})


def test_clients_without_login_do_not_block_other_clients(secure: SecureKafka, names: Names) -> None:
    """Use all places for unauthenticated clients that the broker answered: they are closed for others or at their
    timeout."""
    options = ("--max-connections", "24", "--max-connections-per-address", "24", "--login-timeout", "8")
    with running(secure.servers["SASL"], *options) as shim, ExitStack() as stack:
        clients = [stack.enter_context(Wire(shim.bootstrap_servers)) for _ in range(24)]
        for unauthenticated in clients:
            assert unauthenticated.ask(ApiVersionsRequest(version=0)).api_keys
        transactions_work(secure, shim.bootstrap_servers, names, PLAIN | {"security.protocol": "sasl_plaintext"})
        eventually(lambda: all(unauthenticated.ended() for unauthenticated in clients))
        reasons = {event["reason"].partition(" (")[0] for event in shim.named("connection closed")}
        assert reasons == {"the client did not complete its login"}


def test_wrong_password_is_refused_by_the_broker(secure: SecureKafka) -> None:
    with running(secure.servers["SASL"]) as shim:
        errors: list[str] = []
        wrong = PLAIN | {"sasl.password": "wrong", "security.protocol": "sasl_plaintext", "log_level": 0}
        producer = Producer(
            {"bootstrap.servers": shim.bootstrap_servers, "error_cb": lambda error: errors.append(error.name())} | wrong
        )
        eventually(lambda: producer.poll(0.1) or "_AUTHENTICATION" in errors)


def test_scram_and_reauthentication_are_forwarded(secure: SecureKafka, names: Names) -> None:
    login = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
        "sasl.password": ALICE,
    }
    with running(secure.servers["SASL"], "--log-level", "debug") as shim:
        transactions_work(secure, shim.bootstrap_servers, names, login)


@pytest.mark.deep_for("PLAINTEXT-plain", "TLS-tls", "BOTH-plain")
@pytest.mark.parametrize("client_side", ["plain", "tls"])
@pytest.mark.parametrize("listener", ["PLAINTEXT", "TLS", "BOTH"])
def test_tls_works_on_either_side(
    secure: SecureKafka, pki: Path, names: Names, client_side: str, listener: str
) -> None:
    options: list[str] = []
    protocol = "sasl_" if listener == "BOTH" else ""
    settings: dict[str, Any] = dict(PLAIN) if protocol else {}
    if client_side == "tls":
        options += ["--tls-cert", str(pki / "server.pem"), "--tls-key", str(pki / "server.key")]
        settings |= {"security.protocol": f"{protocol}ssl", "ssl.ca.location": str(pki / "ca.pem")}
    else:
        settings |= {"security.protocol": f"{protocol}plaintext"}
    if listener != "PLAINTEXT":
        options += ["--upstream-ca", str(pki / "ca.pem")]
    with running(secure.servers[listener], *options) as shim:
        transactions_work(secure, shim.bootstrap_servers, names, settings)
        assert not shim.closed_for_cause()


def test_only_clients_with_certificate_use_upstream_certificate(secure: SecureKafka, pki: Path, names: Names) -> None:
    mine = ("--upstream-cert", str(pki / "client.pem"), "--upstream-key", str(pki / "client.key"))
    options = ("--tls-cert", str(pki / "server.pem"), "--tls-key", str(pki / "server.key"))
    options += ("--client-ca", str(pki / "ca.pem"), "--upstream-ca", str(pki / "ca.pem"), *mine)
    with running(secure.servers["TLS"], *options) as shim:
        tls = {"security.protocol": "ssl", "ssl.ca.location": str(pki / "ca.pem")}
        own = {"ssl.certificate.location": str(pki / "client.pem"), "ssl.key.location": str(pki / "client.key")}
        transactions_work(secure, shim.bootstrap_servers, names, tls | own)
        unauthenticated = AdminClient({"bootstrap.servers": shim.bootstrap_servers, "log_level": 0} | tls)
        with pytest.raises(KafkaException):
            unauthenticated.list_topics(timeout=3)
        told = eventually(lambda: shim.named("connection closed"))
        assert {event["by"] for event in told} == {"client"}
        assert all("TLS handshake failed: PEER_DID_NOT_RETURN_A_CERTIFICATE" in event["reason"] for event in told), told


def test_unknown_upstream_certificate_ends_the_start_with_69(secure: SecureKafka) -> None:
    sentence = "TLS failed: unable to get local issuer certificate"
    refused(69, sentence, "--upstream", secure.servers["TLS"], "--listen", "127.0.0.1:0", "--upstream-tls")


def test_missing_upstream_tls_ends_the_start_with_69(secure: SecureKafka) -> None:
    refused(69, "the broker requires TLS", "--upstream", secure.servers["TLS"], "--listen", "127.0.0.1:0")


def test_policy_sees_the_principal_and_injected_duplicates_use_tls(
    secure: SecureKafka, pki: Path, names: Names, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[[principal]]\nname = "alice"\ntransactional_id_prefixes = ["{names("alices")}"]\n')
    login = PLAIN | {"security.protocol": "sasl_plaintext", "log_level": 0}
    with running(secure.servers["SASL"], "--policy", str(policy)) as shim:
        login |= {"bootstrap.servers": shim.bootstrap_servers}
        Producer(login | {"transactional.id": names("alices-own")}).init_transactions(30)
        with pytest.raises(KafkaException) as error:
            Producer(login | {"transactional.id": names("bobs")}).init_transactions(30)
        assert error.value.args[0].code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        (refusal,) = eventually(lambda: shim.named("request refused by policy"))
        assert refusal["principal"] == "alice"
    plan = tmp_path / "plan.toml"
    plan.write_text('[[rule]]\napi = "Produce"\naction = "duplicate"\nphase = "after_apply"\n')
    options = ("--upstream-ca", str(pki / "ca.pem"), "--faults", str(plan), "--no-protect")
    with running(secure.servers["TLS"], *options) as shim:
        transactions_work(secure, shim.bootstrap_servers, names, {"retry.backoff.ms": 20}, protected=False)
        eventually(lambda: shim.named("duplicate delivered"))
